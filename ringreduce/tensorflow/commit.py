"""One point in a step that all its updates come after: they happen all, or none.

    mean of bucket 0 --+                   +--> update of weight 0
    mean of bucket 1 --+--> commit point --+--> update of weight 1
                           counts          +--> the optimizer's counters

Without it each variable is updated as soon as its own bucket has come back, and a rank that is lost
in between leaves some of them updated. XLA knows no such order within what it compiles together: it
may use the memory of a variable that it is to update for anything before. So there it compiles what
comes before the point and what comes after it each by itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringreduce.tensorflow import xla

# Updates variables by means, of which some may be None.
_Update = Callable[[Sequence[Any]], None]


class CommitPoint:
    """Counts the steps that have passed it, in this process."""

    def __init__(self) -> None:
        with tf.init_scope():
            self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
        # Where XLA compiles: the updates of the step that is being traced.
        self._later: list[tuple[list[Any], _Update]] = []

    @property
    def variables(self) -> list[Any]:
        """Those that a step changes for it."""
        return [self._count]

    @property
    def count(self) -> int:
        """Steps whose updates have been made, also if the step has failed afterwards."""
        return int(self._count.numpy())

    def passed(self, means: Sequence[Any], update: _Update) -> None:
        """Call `update` with `means` once all have come; later where XLA compiles the step."""
        if xla.is_compiling():
            self._later.append((list(means), update))
            return
        gate = []
        if not tf.executing_eagerly():
            flat = tf.nest.flatten(list(means), expand_composites=True)
            with tf.control_dependencies([mean for mean in flat if mean is not None]):
                gate = [tf.no_op()]
        with tf.control_dependencies(gate):
            self._count.assign_add(1)
            update(means)

    def compiled(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`step`, compiled by XLA up to the point, and from there on."""

        def stepped(data: Any) -> Any:
            updates: list[_Update] = []

            # New ones in each trace of the function around them.
            @tf.function(jit_compile=True, autograph=False)
            def before(data: Any) -> Any:
                self._later = []
                logs = step(data)
                updates[:] = [update for _, update in self._later]
                return logs, [means for means, _ in self._later]

            @tf.function(jit_compile=True, autograph=False)
            def after(every: Any) -> None:
                for means, update in zip(every, updates, strict=True):
                    update(means)

            logs, every = before(data)
            with tf.control_dependencies(tf.nest.flatten([logs, every])):
                self._count.assign_add(len(updates))
                after(every)
            return logs

        return stepped
