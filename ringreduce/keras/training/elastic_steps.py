"""Training that goes on when ranks are lost: what a loss has broken is made again.

    rank 0   step 6   step 7 -- fails -- ring anew -- step 7 again, of the same global batch
    rank 1   step 6   step 7 -- fails -- ring anew -- step 7 again, with more of its rows
    rank 2   step 6   dies

From its first step on, what ranks do together in training is a row of units: steps of the model,
and meetings of callbacks (`repeated`). A unit needs all ranks, so those that are left are at most
one apart. A rank that is behind takes from one ahead what that unit has led to: weights and the
optimizer's state, or a meeting's result.

A rank keeps the batch of a step until that is made. Where another step follows in a call, the
function that makes a step reads the next batch after it; a step that fails reads none.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import newcomers_of
from ringreduce.communicator.journal import compared
from ringreduce.keras import private
from ringreduce.keras.callbacks.replicas import shared_state
from ringreduce.keras.checks.elastic_refusals import differing, facts_of, refuse
from ringreduce.keras.elastic.backup import back_up
from ringreduce.keras.elastic.recovery import REPEATS_MAX, go_on
from ringreduce.keras.model.weighted import changed_by_steps, weigh_steps
from ringreduce.keras.optimizers_in import wrappers_in
from ringreduce.keras.repeating import Repeating, is_repeating
from ringreduce.keras.rows import map_arrays, of_any_rows, slice_rows
from ringreduce.keras.training.elements import Element, Reader, read_in_graph
from ringreduce.pure.epochs import own_rows
from ringreduce.pure.views import Row
from ringreduce.tensorflow.commit import CommitPoint
from ringreduce.tensorflow.kept import kept
from ringreduce.tensorflow.private import traced_for
from ringreduce.tensorflow.variables import broadcast_variables, verify_replicas
from ringreduce.vocabulary.errors import PeerError, RingReduceError


class Elastic:
    """Makes the units of a call of `rr.fit`, as long as `minimum` ranks are left.

    A context, and within it the model's `train_function`. It reads whole global batches, whose
    `element_spec` is `batches`, and makes a step of this rank's rows of each (`MakesSteps`). The
    model and its optimizer are built. Where fewer than `minimum` ranks are left, one backs up with
    those of `callbacks` that can, and training ends. Raises ConfigError for what
    `elastic_refusals` has. Collective.
    """

    # Batches of the present epoch that have been made, or read and skipped.
    made = 0
    logs_are_results = False  # Those of a step that another rank has told of may be a rank's.

    def __init__(
        self,
        model: keras.Model,
        ring: Communicator,
        minimum: int,
        batches: Any,
        callbacks: Sequence[Any] = (),
    ) -> None:
        wrappers = wrappers_in(model)
        is_own = type(model).train_step is not keras.Model.train_step
        facts = {
            "distributed optimizers": len(wrappers),
            "steps_per_execution": model.steps_per_execution,
            # Its code after the update would see the weights before it.
            "own train_step in XLA": bool(model.jit_compile) and is_own,
            "callbacks": differing(ring, callbacks),
            "rr.elastic.run around it": is_repeating(ring),
            "fit of another package": not private.has_plain_fit(model),
        }
        refuse(ring, facts | facts_of(model), *(wrapper.options for wrapper in wrappers))
        self._model, self._ring, self._minimum = model, ring, minimum
        self._callbacks, [self._optimizer] = callbacks, wrappers
        self._at_end = False  # Nothing is left but to leave together.
        self._commit = CommitPoint()
        # This rank's count when the latest step had ended; steps of the training; units, and what
        # the latest has led to.
        self._passed = self._steps = self._units = 0
        self._result: Any = None
        # Rows of the global batch by ranks.
        self._mean, self._mean_now = tf.Variable(1.0, trainable=False), 1.0
        self._reader, self._batches = Reader(batches), map_arrays(of_any_rows, batches)
        # Where newcomers may come: around what prepares the first step, and whether that was done;
        # and what gives them all that they need.
        self.preparing: Callable[[], AbstractContextManager[None]] | None = None
        self._is_prepared = False
        # The variables that the first step which was traced reads or changes, in its order.
        self.captured: list[Any] = []
        self.bring_in: Callable[[], None] | None = None
        # Called when the ring was formed anew.
        self.formed: Callable[[], None] = lambda: None

    def __enter__(self) -> "Elastic":
        model = self._model
        self._plain = model.train_step
        weigh_steps(model, self._ring, mean=self._mean)
        self._optimizer.commit_point = self._commit
        scalars = [variable for variable in self._optimizer.variables if not variable.shape]
        self._changed = [*changed_by_steps(model), *scalars]
        values = map(tf.convert_to_tensor, self._changed)
        self._begun = [tf.Variable(value, trainable=False) for value in values]
        # With equally many rows on each rank, gradients need no weights.
        self._even, self._uneven = map(self._keeping, (self._plain, model.train_step))
        model.train_function = self
        kept(self._ring, Repeating).by = self._meeting
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._at_end = True
                self._meeting(self._ring.barrier)
        finally:
            self._restore()

    def _restore(self) -> None:
        kept(self._ring, Repeating).by = None
        self._model.train_step = self._plain
        self._optimizer.commit_point = self._model.train_function = None

    def _keeping(self, step: Any) -> "_Step":
        """`step`, compiled as the model is; first it keeps what it changes besides weights."""
        model = self._model
        if model.jit_compile and not model.run_eagerly:
            step = self._commit.compiled(step)

        def keeping(batch: Any, first: Any, end: Any) -> Any:
            pairs = zip(self._begun, self._changed, strict=True)
            kept = [begun.assign(tf.convert_to_tensor(changed)) for begun, changed in pairs]
            with tf.control_dependencies([] if tf.executing_eagerly() else kept):
                return step(slice_rows(batch, first, end))

        return _Step(keeping, None if model.run_eagerly else self._batches)

    def begin_epoch(self, epoch: int, length: int | None) -> None:
        """See `MakesSteps`."""
        self._epoch, self._length, self.made = epoch, length, 0

    def skip(self, count: int) -> None:
        """See `MakesSteps`."""
        self.made += count

    def end(self) -> None:
        """See `MakesSteps`."""
        self._reader.forget()

    def run(self, iterator: Any, most: int, limit_s: float | None) -> tuple[int, Any, float]:
        """Make steps on this rank's rows of the next global batches, as in `MakesSteps`."""
        if self._model.train_function is not self:
            refuse(self._ring, {"compile in training": True})
        began, logs = time.perf_counter(), None
        element = self._reader.read(iterator)
        if self.preparing is not None and not self._is_prepared and int(element.rows) >= 0:
            self.prepare(int(element.rows))
        made, reading_s = 0, element.waited_s
        while (rows := int(element.rows)) >= 0:
            is_late = limit_s is None or time.perf_counter() - began >= limit_s
            further = None if is_late or made + 1 >= most else iterator
            step = partial(self._made, element.batch, rows, further)
            logs, after = self._unit(step, is_step=True) or (None, None)
            made += 1
            if further is None:
                break
            # A step that another rank has told of, or that failed after its end, has read nothing.
            element = after or self._reader.read(further)
            reading_s += float(element.waited_s)
        if made and logs is None:
            logs = self._model.get_metrics_result()
        return made, logs, reading_s

    def prepare(self, rows: int = 0) -> None:
        """Have what a first step compares, and gives to all ranks, done before it. Collective.

        The step is one of so many `rows`. At a newcomer, which does not know them, no other rank
        takes part (`ringreduce.communicator.journal`).
        """
        assert self.preparing is not None
        self._is_prepared = True
        with self.preparing():
            rows = compared(self._ring, rows)
            if self._model.run_eagerly:
                self._optimizer.prepare_now()
            else:
                first = self._uneven if rows % self._ring.config.size else self._even
                first.trace()
                own = {id(each) for each in (self._mean, *self._begun, *self._commit.variables)}
                self.captured = [each for each in first.variables if id(each) not in own]

    def trace(self, iterator: Any) -> None:
        """Trace all that steps need, which read from `iterator`, so that none waits for it."""
        for step in (self._even, self._uneven):
            step.trace()
            step.trace_with(iterator)

    def _made(self, batch: Any, rows: int, further: Any) -> tuple[Any, Element | None]:
        """Make a step; its logs, and the next element of `further`, if that is given."""
        ring = self._ring
        if (mean := rows / ring.size) != self._mean_now:
            self._mean_now = mean
            self._mean.assign(mean)
        run = self._uneven if rows % ring.size else self._even
        return run(further, batch, *own_rows(rows, ring.rank, ring.size))

    def _meeting(self, make: Callable[[], Any]) -> Any:
        return self._unit(make, is_step=False) if self._steps else make()

    def _unit(self, make: Callable[[], Any], *, is_step: bool) -> Any:
        """Run one step or meeting; after a loss, run it again, or take another rank's result."""
        ring, units = self._ring, self._units
        for repeats_left in reversed(range(REPEATS_MAX)):
            try:
                result = make()
            except RingReduceError as error:
                if not (self._steps and isinstance(ring.failure, PeerError) and repeats_left):
                    raise
                if is_step and self._commit.count > self._passed:
                    self._end(None)  # It was committed, and failed afterwards.
                elif is_step:
                    # Undo the part of a step that comes before its commit point.
                    for variable, begun in zip(self._changed, self._begun, strict=True):
                        variable.assign(begun.value())
                where = f"in step {self._steps + 1}" if is_step else f"after step {self._steps}"
                self._go_on(error, where)
                if self._units > units:
                    return self._result
                continue
            self._end(None if is_step else result, is_step=is_step)
            return result

    def _end(self, result: Any, *, is_step: bool = True) -> None:
        self._units, self._result = self._units + 1, result
        if is_step:
            self._steps, self._passed = self._steps + 1, self._passed + 1
            self.made += 1
            if self._steps == 1:
                refuse(self._ring, {"updates in a step": self._commit.count})

    def part(self, leaving: Mapping[int, str]) -> None:
        """Go on without ranks that leave after this step, as all have told each other."""
        self._go_on(None, f"after step {self._steps}", leaving)

    def grow(self, rows: Collection[Row]) -> None:
        """Take newcomers in after this step: on the first rank those of `rows`. Collective."""
        self._go_on(None, f"after step {self._steps}", newcomers=rows)

    @property
    def has_left(self) -> bool:
        """Whether steps of this epoch are left, as far as that is known."""
        return self.made != self._length

    @property
    def ended(self) -> tuple[int, int]:
        """How many units have ended, and how many steps."""
        return self._units, self._steps

    def join(self, units: int, steps: int, epoch: int, made: int) -> None:
        """Go on, as a newcomer, where all others are. Collective, with their `grow`."""
        self._units, self._steps, self._epoch, self.made = units, steps, epoch, made
        self._is_prepared = True
        self._ring.all_gather_object([units, steps])

    def _go_on(
        self,
        error: RingReduceError | None,
        where: str,
        leaving: Mapping[int, str] = MappingProxyType({}),
        newcomers: Collection[Row] = (),
    ) -> None:
        """Form the ring anew of the ranks that are left, and bring all to the same unit."""
        go_on(
            *(self._ring, error, self._minimum, where, self._catch_up),
            lambda: back_up(self._callbacks, self._model, *self._place()),
            at_end=lambda: self._at_end,
            leaving=leaving,
            newcomers=newcomers,
        )
        self._model._eval_epoch_iterator = None
        self.formed()

    def _place(self) -> tuple[int, int]:
        """The epoch that training goes on with, and the number of its steps that were made."""
        is_over = self.made == self._length
        return (self._epoch + 1, 0) if is_over else (self._epoch, self.made)

    def _catch_up(self) -> None:
        """Bring those that are behind to the end of the unit that others have ended."""
        ring = self._ring
        if ring.size == 1:
            return
        has_newcomers = self.bring_in is not None and bool(newcomers_of(ring))
        if has_newcomers and self.bring_in is not None:
            self.bring_in()
        ended = ring.all_gather_object([self._units, self._steps])
        newest = max(ended)
        # Not the rates, which callbacks set on each rank.
        state = shared_state(self._model, self._model.trainable_variables)
        state = [variable for variable in state if variable.name != "learning_rate"]
        if min(ended) == newest:
            if not has_newcomers:  # Which have compared theirs.
                verify_replicas(state, ring)
            return
        ahead = ended.index(newest)
        result = ring.broadcast_object(self._result, ahead)
        # A meeting changes no weights; callbacks may have changed them after it on one ahead.
        if any(steps < newest[1] for _, steps in ended):
            broadcast_variables(state, ring, ahead)
        if self._units < newest[0]:
            self.made += newest[1] - self._steps
            (self._units, self._steps), self._result = newest, result


class _Step:
    """A step on rows of a batch of `spec`, in a graph that is traced once; eagerly without one."""

    def __init__(self, step: Callable[..., Any], spec: Any) -> None:
        self._plain = step
        self._alone: Callable[..., Any] | None = None
        self.variables: Sequence[Any] = ()  # of TensorFlow, which it reads; once it is traced
        self._with_reading: Callable[..., Any] | None = None
        self._spec = spec
        # Which rows it was made on last, most often those of the next too; as integers, as tensors.
        self._rows: tuple[int, ...] = ()
        self._places: tuple[Any, ...] = ()
        if spec is not None:
            place = tf.TensorSpec((), tf.int32)
            self._given = spec, place, place
            self._step: Any = tf.function(self._ending, autograph=False)

    def trace(self) -> None:
        """Trace the step by itself, if that was not done."""
        if self._alone is None and self._spec is not None:
            self._alone = traced_for(self._step, *self._given)
            self.variables = self._step.get_concrete_function(*self._given).graph.variables

    def trace_with(self, iterator: Any) -> None:
        """Trace the step with what reads from `iterator` after it."""
        if self._with_reading is None and self._spec is not None:
            function = tf.function(self._stepping_and_reading, autograph=False)
            self._with_reading = traced_for(function, iterator, *self._given)

    def __call__(
        self, iterator: Any, batch: Any, first: int, end: int
    ) -> tuple[Any, Element | None]:
        """The logs, and what is read from `iterator` after the step unless that is None."""
        if self._spec is None:
            return self._plain(batch, first, end), None
        if (first, end) != self._rows:
            self._rows, self._places = (first, end), (tf.constant(first), tf.constant(end))
        given = batch, *self._places
        if iterator is None:
            self.trace()
            assert self._alone is not None
            return self._alone(*given)[0], None
        self.trace_with(iterator)
        assert self._with_reading is not None
        return self._with_reading(iterator, *given)  # type: ignore[no-any-return]

    def _ending(self, *given: Any) -> tuple[Any, Any]:
        """The logs, and a value that is there when all of the step is done, whatever it logs."""
        return self._plain(*given), tf.constant(0)

    def _stepping_and_reading(self, iterator: Any, *given: Any) -> tuple[Any, Element]:
        logs, ended = self._step(*given)
        with tf.control_dependencies([ended]):
            return logs, read_in_graph(iterator)
