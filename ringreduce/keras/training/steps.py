"""A model's training steps as TensorFlow runs them: as many in one call as is asked for.

    several(iterator, most, seconds):
        while done < most, the time is not over and there is an element:  logs = one(element)

Each call of TensorFlow costs more than a step of a small model. What ends a pass is asked before a
step, not found out in it, so no step is lost or half made, and none is read that is not made. So is
the time, since data may become slow within a call, and Python hears of signals after it alone. The
step is a function of its own: collectives in it stand outside of any branch, and XLA compiles it
alone. A batch with fewer rows than ranks ends a call, since some have none of it: its step is
another function, which puts back what it changes there.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import keras
import tensorflow as tf

from ringreduce.keras import weighting
from ringreduce.keras.model.weighted import weighed
from ringreduce.keras.private import is_of_keras
from ringreduce.keras.rows import rows_in
from ringreduce.keras.step import WEIGHTED, own_step, step_without
from ringreduce.keras.training.elements import Reader, read_next
from ringreduce.tensorflow import ops, rounds
from ringreduce.tensorflow.private import traced_for


class MakesSteps(Protocol):
    """What makes the steps of a training, call by call, on the elements that `Loop` reads."""

    # Whether the latest logs are surely what metrics would give now.
    logs_are_results: bool

    def begin_epoch(self, epoch: int, length: int | None) -> None:
        """Epoch `epoch` begins, counted from 0, of `length` steps if that is known."""

    def skip(self, count: int) -> None:
        """So many steps of the epoch count as made, as a backup has them."""

    def end(self) -> None:
        """Training has ended: nothing of its data is kept."""

    def run(self, iterator: Any, most: int, limit_s: float | None) -> tuple[int, Any, float]:
        """Make at most `most` steps; return how many, the latest logs, and seconds of reading.

        The logs are None if `iterator` has no further element. No step begins when `limit_s`
        seconds have passed, but for the first; None: each step is a call of its own.
        """


class Steps:
    """The training steps of `model`, of which it is the `train_function`; Keras's is behind it.

    Keras makes that None where the step must be traced anew. `ranks`: how many have a part of every
    batch; an element is then a pair, this rank's part, which with `may_be_empty` may have no rows,
    and the number of rows of the whole, by which a step is weighted. 0: steps are not weighted.
    None: as the model's step does it, with an exchange.
    """

    def __init__(self, model: keras.Model, ranks: int | None, may_be_empty: bool) -> None:
        before = model.train_function
        self._of_keras: Any = before._of_keras if isinstance(before, Steps) else before
        self._model, self._ranks = model, ranks
        self._may_be_empty = bool(ranks) and may_be_empty
        # As it is when they are made: a change later counts where they are made anew, as in Keras.
        self._is_eager = model.run_eagerly
        self._step = model.train_step if ranks is None else step_without(model, WEIGHTED)
        self._one: Any = tf.autograph.experimental.do_not_convert(self._on)
        of_metrics = model.compute_metrics, model.get_metrics_result
        self._is_of_keras = own_step(model) is None and all(map(is_of_keras, of_metrics))
        self.logs_are_results = False
        # Keyed by the elements' specs. None: eagerly, and where the logs' shapes are not known
        # before, steps are made one by one.
        self._several: dict[str, Callable[..., tuple[Any, Any, Any, Any, Any]] | None] = {}
        self._singly: dict[str, Callable[[Any], Any]] = {}  # of an element that was read
        self._readers: dict[str, Reader] = {}
        self._latest: tuple[Any, str] = (None, "")  # an iterator, and its key
        self._short: Any = tf.autograph.experimental.do_not_convert(self._on_short)
        if not self._is_eager:
            how = {"reduce_retracing": True, "jit_compile": model.jit_compile}
            self._short = tf.function(self._short, **how)
            if _may_leave_weights(model):
                one = tf.autograph.experimental.do_not_convert(self._with_what_it_leaves)
                self._one = tf.function(one, reduce_retracing=True)
            else:
                self._one = tf.function(self._one, **how)

    def are_for(self, ranks: int | None, may_be_empty: bool) -> bool:
        """Whether they are those of such elements."""
        return (self._ranks, self._may_be_empty) == (ranks, bool(ranks) and may_be_empty)

    def __call__(self, iterator: Any) -> Any:
        """One execution as Keras's own function makes it, of batches without a count."""
        if self._of_keras is None:
            model = self._model
            model.train_function = None
            model.make_train_function()
            self._of_keras, model.train_function = model.train_function, self
        return self._of_keras(iterator)

    def begin_epoch(self, epoch: int, length: int | None) -> None:
        """See `MakesSteps`."""

    def skip(self, count: int) -> None:
        """See `MakesSteps`."""

    def end(self) -> None:
        """See `MakesSteps`."""
        self._latest = None, ""
        for reader in self._readers.values():
            reader.forget()

    def run(self, iterator: Any, most: int, limit_s: float | None) -> tuple[int, Any, float]:
        """See `MakesSteps`."""
        key = self._key_of(iterator)
        several = None if limit_s is None else self._several_for(iterator, key)
        made, logs, reading_s, left_s, began = 0, None, 0.0, limit_s, time.perf_counter()
        self.logs_are_results = several is not None and self._is_of_keras
        while made < most and (made == 0 or left_s is None or left_s > 0.0):
            if several is None:
                try:
                    logs, waited_s = self._single(iterator, key)
                except (StopIteration, tf.errors.OutOfRangeError):
                    break
                made, reading_s = made + 1, reading_s + float(waited_s)
            else:
                limits = tf.constant(most - made, tf.int64), tf.constant(left_s, tf.float64)
                done, latest, has_short, short, waited_s = several(iterator, *limits)
                reading_s += float(waited_s)
                if int(done):
                    made, logs = made + int(done), latest
                if not has_short:
                    break
                made, logs = made + 1, self._short(short.get_value())
                # Of one without rows here it has other logs, and puts back what metrics hold.
                self.logs_are_results = False
            if limit_s is not None:
                left_s = limit_s - (time.perf_counter() - began)
        return made, logs, reading_s

    def _several_for(self, iterator: Any, key: str) -> Any:
        if key not in self._several:
            self._several[key] = None if self._is_eager else self._traced(iterator)
        return self._several[key]

    def _key_of(self, iterator: Any) -> str:
        before, key = self._latest
        if before is not iterator:
            key = repr(iterator.element_spec)
            self._latest = iterator, key
        return key

    def _single(self, iterator: Any, key: str) -> tuple[Any, Any]:
        """A step by itself, and seconds of reading; an error of tf.data's at the end of the data.

        What reads in a graph costs as much as a small model's step.
        """
        if key not in self._readers:
            self._readers[key] = Reader(iterator.element_spec)
        element, waited_s = self._readers[key].next(iterator)
        # A number of Python's: to compare tensors takes thirty times as long.
        if self._may_be_empty and int(element[1]) < (self._ranks or 0):
            return self._short(element), waited_s
        if key not in self._singly:
            one = self._one
            self._singly[key] = one if self._is_eager else traced_for(one, iterator.element_spec)
        return self._singly[key](element), waited_s

    def _on(self, element: Any) -> Any:
        """A step on one element of the data."""
        if not self._ranks:
            return self._step(element)
        with weighting.using(self._weight(element)):
            return self._step(element[0])

    def _with_what_it_leaves(self, element: Any) -> Any:
        """A step that XLA compiles, after which weights of all ranks are taken as they come."""
        left: list[Callable[[], None]] = []

        @tf.autograph.experimental.do_not_convert
        def compiled(element: Any) -> Any:
            with rounds.collecting(left):
                return self._on(element)

        logs = tf.function(compiled, jit_compile=True)(element)
        with tf.control_dependencies(tf.nest.flatten(logs)):
            for work in left:
                work()
        return logs

    def _on_short(self, element: Any) -> Any:
        """The same where this rank may have no row of it."""
        return weighed(self._model, self._step, element[0], self._weight(element))

    def _weight(self, element: Any) -> weighting.Weight:
        batch, rows = element
        rows_here = tf.cast(rows_in(batch), tf.float32)
        return weighting.Weight(rows_here, tf.cast(rows, tf.float32) / self._ranks)

    def _traced(self, iterator: Any) -> Any:
        """`several`, traced; None: it cannot be, since results of a loop have fixed shapes."""
        spec = iterator.element_spec
        # First by itself: what is traced within a loop cannot number its collectives.
        logs = self._one.get_concrete_function(spec).structured_outputs
        kinds = tf.TensorSpec | tf.Tensor
        if not all(
            isinstance(part, kinds) and part.shape.is_fully_defined()
            for part in tf.nest.flatten(logs)
        ):
            return None

        @tf.autograph.experimental.do_not_convert
        def several(iterator: Any, most: Any, limit_s: Any) -> Any:
            def more(done: Any, _: Any, element: Any, __: Any) -> Any:
                return tf.logical_and(done < most, due(element))

            def step(done: Any, _: Any, element: Any, reading_s: Any) -> Any:
                logs = self._one(element.get_value())
                done += 1
                with tf.control_dependencies(tf.nest.flatten(logs)):
                    now = tf.timestamp()
                # Somebody may set this clock, also back.
                goes_on = tf.logical_and(done < most, tf.abs(now - began) < limit_s)
                read = partial(read_next, iterator, now)
                after, waited_s = tf.cond(goes_on, read, lambda: (nothing, zero_s))
                return done, logs, after, reading_s + waited_s

            nothing, zero_s = tf.experimental.Optional.empty(spec), tf.constant(0.0, tf.float64)
            began = tf.timestamp()
            first, waited_s = read_next(iterator, began)
            zeros = tf.nest.map_structure(lambda part: tf.zeros(part.shape, part.dtype), logs)
            state = tf.constant(0, tf.int64), zeros, first, waited_s
            done, last, short, seconds = tf.while_loop(more, step, state, parallel_iterations=1)
            is_short = tf.logical_and(done < most, short.has_value())
            return done, last, is_short, short if self._may_be_empty else (), seconds

        def due(element: Any) -> Any:
            def has_rows() -> Any:
                return element.get_value()[1] >= self._ranks

            is_there = element.has_value()
            return tf.cond(is_there, has_rows, lambda: False) if self._may_be_empty else is_there

        limits = tf.constant(1, tf.int64), tf.constant(0.0, tf.float64)
        return traced_for(tf.function(several), iterator, *limits)


def _may_leave_weights(model: keras.Model) -> bool:
    """Whether nothing in a step of XLA's looks at the weights after their update."""
    is_keras_s = getattr(model.compute_metrics, "__func__", None) is keras.Model.compute_metrics
    return bool(
        model.jit_compile
        and ops.are_available()
        and own_step(model) is None
        and is_keras_s
        and getattr(model, "_compile_metrics", None) is None  # Which may look at anything.
        and getattr(model.optimizer, "may_leave_weights", False)
    )
