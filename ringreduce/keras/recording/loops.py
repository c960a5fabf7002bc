"""Records the steps of a loop of one's own for ``ringreduce verify``, and then ends the program.

    each apply: gradients of this rank -> their reduction -> [noted here] -> the update

Nothing is called when a step of a loop has ended: its weights are noted before the next update. No
rank asks another for anything, since only the loop knows what ranks call next: each writes a file
of its own, and the command adds them up.
"""

import atexit
import ctypes
import gc
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import msgspec
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.checks.users_line import users_frame
from ringreduce.keras.checks.warnings import differences
from ringreduce.keras.layers.part import Part, part_of
from ringreduce.keras.optimizers_in import all_within
from ringreduce.keras.recording.gradients import (
    HALVES,
    OF_LOCAL,
    OF_SUMS,
    facts_of,
    in_whole,
    norms_and_largest,
)
from ringreduce.keras.weighting import Averaging
from ringreduce.pure.sketch import LENGTH, sketch
from ringreduce.pure.verification import GRADIENTS, OUTPUTS, Arrays, Run, Tried
from ringreduce.tensorflow.python_calls import call
from ringreduce.tensorflow.threads import threads_in_use
from ringreduce.tensorflow.variables import path_of, plain_variable, value_of
from ringreduce.vocabulary.config import recording_wanted

_OF_TAPE = 'op="sum" to rr.DistributedGradientTape'


def recorder_of(optimizer: Any, ring: Communicator) -> Any:
    """What notes the steps of a `DistributedOptimizer`; None: nothing is recorded.

    Ends the program where only a part of the job's ranks trains, which is not recorded.
    """

    def facts() -> Facts:
        within = all_within(optimizer)
        skips = any(isinstance(one, keras.optimizers.LossScaleOptimizer) for one in within)
        return Facts(*facts_of(optimizer), optimizer.is_alone, skips)

    loop = _the_loop(ring)
    return None if loop is None else loop.recorder(optimizer.name, facts)


def recorder_of_tapes(ring: Communicator, adds_up: bool, has_local: bool) -> Any:
    """What notes the gradients of all tapes: a loop makes one in each step. As `recorder_of`."""
    texts = [OF_SUMS] * adds_up + [OF_LOCAL] * has_local
    loop = _the_loop(ring)
    return None if loop is None else loop.recorder_of_tapes(lambda: Facts({}, texts))


def given_up() -> tuple[int, str] | None:
    """How many steps of a loop were to be recorded, and where, but were not made; for `rr.fit`."""
    return None if _loop is None else _loop.give_up()


class Facts(NamedTuple):
    """What is known of an optimizer, or a tape, once a step was made."""

    settings: dict[str, str]
    of_gradients: list[str]  # in words: what ranks do differently with them
    is_alone: bool = False  # whether ranks step alone between meetings
    skips: bool = False  # whether a step is skipped whose gradients are not finite


class LoopRecorder:
    """Notes the steps of one optimizer or tape, as `GradientRecord` does in `rr.fit`."""

    def __init__(self, loop: "_Loop", name: str, facts: Callable[[], Facts]) -> None:
        self._loop, self.name, self.facts = loop, name, facts
        self.has_local = False
        self._own: Any = None
        self._sets: dict[tuple[int, ...], _Set] = {}

    def note_own(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Note this rank's gradients, in the step that is computed or traced."""
        self._own = norms_and_largest(gradients)

    def note_means(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        kinds: Sequence[Averaging],
        parts: Sequence[Part | None],
    ) -> list[Any]:
        """Note gradients after their reduction, and weights; return the gradients to apply."""
        loop = self._loop
        shared = [n for n, kind in enumerate(kinds) if kind is not Averaging.LOCAL]
        self.has_local |= len(shared) < len(kinds)
        # Other sources of a tape are new in each step.
        key = tuple(id(v) if _is_variable(v) else 0 for v in variables)
        if key not in self._sets:
            those = [variables[n] for n in shared]
            self._sets[key] = loop.set_of(self, those, [parts[n] for n in shared])
        noted = self._sets[key]
        here = [n for n in shared if gradients[n] is not None and loop.has(parts[n])]
        means = [_floats(gradients[n]) for n in here]
        weights = [_floats(variable) for variable in noted.recorded]
        present = [gradients[n] is not None for n in shared]
        places = [shared.index(n) for n in here]
        is_eager, thread = tf.executing_eagerly(), threading.get_ident()

        def note(own: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
            values = dict(zip(places, arrays[: len(places)], strict=True))
            done = noted.note(own[shared], values, present, arrays[len(places) :])
            if done and not is_eager:
                # In TensorFlow's thread: where the loop goes on, the program ends.
                leave = ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), leave)
            return [np.float32(done)]

        arguments = [self._own, *means, *weights]
        [done] = call(loop.ring, "note a step", note, arguments, [((), tf.float32)])
        if is_eager:
            if float(done):
                sys.exit()
            return list(gradients)
        # The update may use the memory that is read.
        with tf.control_dependencies([done]):
            return tf.nest.map_structure(  # type: ignore[no-any-return]
                lambda part: None if part is None else tf.identity(part),
                list(gradients),
                expand_composites=True,
            )


class _Loop:
    """All steps of this process."""

    def __init__(self, ring: Communicator, steps: int, folder: str) -> None:
        self.ring, self.wanted, self._folder = ring, steps, Path(folder)
        self.noted_steps = max(1, steps // 2)  # of which gradients are noted
        self._recorders: list[LoopRecorder] = []
        self._sets: list[_Set] = []
        self._known: set[int] = set()
        self._models: dict[int, keras.Model] = {}
        self._of_tapes: LoopRecorder | None = None
        self._is_written = self.is_given_up = False
        self._seconds: list[float] = []
        self._last_s, self._computed_s = time.perf_counter(), 0.0
        self._place, self._clips = "", ""
        atexit.register(self.write, ended=True)

    def recorder(self, name: str, facts: Callable[[], Facts]) -> LoopRecorder:
        self._recorders.append(LoopRecorder(self, name, facts))
        return self._recorders[-1]

    def recorder_of_tapes(self, facts: Callable[[], Facts]) -> LoopRecorder:
        if self._of_tapes is None:
            self._of_tapes = self.recorder("tape", facts)
        return self._of_tapes

    def set_of(
        self, recorder: LoopRecorder, variables: Sequence[Any], parts: Sequence[Part | None]
    ) -> "_Set":
        """What notes the steps that train `variables`, whose gradients may be pieces."""
        if not self._place:
            frame = users_frame()
            self._place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            names = frame.f_code.co_names
            self._clips = next((name for name in names if name.startswith("clip_")), "")
        trained = [v for v in variables if _is_variable(v) and id(v) not in self._known]
        self._known |= set(map(id, trained))
        with tf.init_scope():
            others = list(self._untrained(variables))
        self._known |= set(map(id, others))
        noted = _Set(self, recorder, variables, parts, trained, others)
        self._sets.append(noted)
        return noted

    def _untrained(self, variables: Sequence[Any]) -> Iterator[Any]:
        """Floating-point variables beside `variables` in Keras models that have some of these."""
        ids = set(map(id, variables))
        # Keras keeps no list of models; this is done once for each set.
        every = [thing for thing in gc.get_objects() if issubclass(type(thing), keras.Model)]
        for model in every:
            if id(model) not in self._models and ids & set(map(id, model.trainable_variables)):
                self._models[id(model)] = model
                for variable in model.non_trainable_variables:
                    if id(variable) not in self._known and _is_float(variable):
                        self._known.add(id(variable))
                        yield variable

    def has(self, part: Part | None) -> bool:
        """Whether this rank adds its piece of what is `part`; rank 0 alone has what is whole."""
        first = self.ring.members[0]
        return self.ring.rank == 0 if part is None else first in part.communicator.members

    def begin_note(self) -> None:
        self._computed_s += time.perf_counter() - self._last_s

    def end_note(self, noted: "_Set") -> None:
        if noted is self._sets[0]:
            self._seconds.append(self._computed_s)
            self._computed_s = 0.0
        self._last_s = time.perf_counter()

    def give_up(self) -> tuple[int, str] | None:
        """Note nothing from now on; return what was wanted. None: that is written."""
        if self._is_written or self.is_given_up:
            return None
        self.is_given_up = True
        return self.wanted, str(self._folder)

    def write(self, ended: bool = False) -> None:
        """Write this rank's file, once; where the loop has `ended`, with weights as they are."""
        has_steps = any(noted.calls for noted in self._sets)
        if self._is_written or self.is_given_up or not has_steps:
            return
        self._is_written = True
        if ended:
            for noted in self._sets:
                noted.add_changes([value_of(variable) for variable in noted.recorded])
        rank, steps = self.ring.rank, max(len(noted.changes) for noted in self._sets)
        if steps:
            arrays = self._arrays(steps)
            np.savez(self._folder / f"arrays-{rank}.npz", **arrays._asdict())
            (self._folder / f"run-{rank}").write_bytes(msgspec.msgpack.encode(self._run(steps)))

    def _arrays(self, steps: int) -> Arrays:
        parts = [each.arrays(steps, self.noted_steps) for each in self._sets]
        before, changes, gradients, calls, own = zip(*parts, strict=True)
        return Arrays(
            before=np.concatenate(before),
            changes=np.concatenate(changes, 1),
            gradients=np.concatenate(gradients, 1),
            calls=np.concatenate(calls, 1),
            own=np.concatenate(own, 1)[None],
            outputs=np.zeros((0, LENGTH)),
        )

    def _run(self, steps: int) -> Run:
        facts = [recorder.facts() for recorder in self._recorders]
        models = self._outermost()
        notes = (differences(model, knows_losses=True) for model in models)
        layers = [layer for model in models for layer in private.layers_of(model)]
        of_gradients = [text for each in facts for text in each.of_gradients]
        unseen, left_out = (
            {},
            {"losses": "only the loop knows them", OUTPUTS: "only the loop knows for which rows"},
        )
        if any(each.is_alone for each in facts):
            unseen[GRADIENTS] = "each rank applies its own between meetings"
        if any(recorder.has_local for recorder in self._recorders):
            unseen["local variables"] = "each rank has its own"
        if not models:
            left_out["variables that are not trained"] = "no Keras model was found that has any"
        adds_up = {} if self._of_tapes is None else {"adds_up_by": _OF_TAPE}
        return Run(
            ranks=self.ring.size,
            returned={},
            loss="",
            rows=0,
            step_s=statistics.median(self._seconds[1:] or self._seconds),
            threads=threads_in_use(),
            memory=[resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10],
            steps=steps,
            settings={name: text for each in facts for name, text in each.settings.items()},
            names=[name for each in self._sets for name in each.names],
            trained=[flag for each in self._sets for flag in each.is_trained],
            gradient_names=[name for each in self._sets for name in each.gradient_names],
            is_half=any(layer.compute_dtype in HALVES for layer in layers),
            skips=any(each.skips for each in facts),
            own_step=f"The step at {self._place}",
            clips=self._clips,
            of_batches=list(dict.fromkeys(text for each in notes for text in each)),
            of_gradients=list(dict.fromkeys(of_gradients)),
            unseen=unseen,
            left_out=left_out,
            tried=Tried(why="that is known of rr.fit alone"),
            is_loop=True,
            **adds_up,
        )

    def _outermost(self) -> list[keras.Model]:
        models = list(self._models.values())
        held = {id(v) for m in models for v in private.layers_of(m) if v is not m}
        return [model for model in models if id(model) not in held]


class _Set:
    """The steps that train one set of variables."""

    def __init__(
        self,
        loop: _Loop,
        recorder: LoopRecorder,
        variables: Sequence[Any],
        parts: Sequence[Part | None],
        trained: Sequence[Any],
        others: Sequence[Any],
    ) -> None:
        self._loop, self._parts = loop, list(parts)
        self.recorded = [*trained, *others]
        self.is_trained = [True] * len(trained) + [False] * len(others)
        self._wholes = [part_of(variable) for variable in self.recorded]
        self.names = [
            f"{path_of(v)} {tuple(v.shape) if part is None else part.shape}"
            for v, part in zip(self.recorded, self._wholes, strict=True)
        ]
        named = [path_of(v) if _is_variable(v) else f"source {n}" for n, v in enumerate(variables)]
        self.gradient_names = [f"{recorder.name}: {name}" for name in named]
        self.calls = 0
        self.changes: list[np.ndarray] = []  # of each step
        self._start: list[np.ndarray] = []
        self._before = np.zeros((len(self.recorded), LENGTH))
        self._steps: list[_Step] = []

    def note(
        self,
        own: np.ndarray,
        means: dict[int, np.ndarray],
        present: Sequence[bool],
        weights: Sequence[np.ndarray],
    ) -> bool:
        """Note a step that is about to change `weights`; whether it was the last one wanted."""
        loop = self._loop
        if loop.is_given_up:
            return False
        loop.begin_note()
        if self.calls:
            self.add_changes(weights)
        else:
            self._begin(weights)
        if self.calls < loop.noted_steps:
            sketches = np.zeros((len(self._parts), LENGTH))
            for number, mean in means.items():
                whole = in_whole(mean, self._parts[number])
                sketches[number] = sketch(whole, self.gradient_names[number])
            self._steps.append(_Step(sketches, np.array(present, float), np.array(own, float)))
        self.calls += 1
        loop.end_note(self)
        if is_done := self.calls > loop.wanted:
            loop.write()
        return is_done

    def _begin(self, weights: Sequence[np.ndarray]) -> None:
        for number, value in enumerate(weights):
            # An eager step has changed moving averages: of these all counts.
            is_trained = self.is_trained[number]
            self._start.append(np.array(value) if is_trained else np.zeros_like(value))
            if is_trained and self._loop.has(self._wholes[number]):
                whole = in_whole(value, self._wholes[number])
                self._before[number] = sketch(whole, self.names[number])

    def add_changes(self, weights: Sequence[np.ndarray]) -> None:
        """Note what the steps up to the last have changed."""
        changes = np.zeros((len(weights), LENGTH))
        for number, (value, start) in enumerate(zip(weights, self._start, strict=True)):
            if self._loop.has(part := self._wholes[number]):
                with np.errstate(invalid="ignore", over="ignore"):
                    moved = value.astype(np.float32) - start
                changes[number] = sketch(in_whole(moved, part), self.names[number])
        self.changes.append(changes)

    def arrays(self, steps: int, noted_steps: int) -> tuple[np.ndarray, ...]:
        """What was noted, in as many steps as other sets have made; see `Arrays`."""
        count = len(self._parts)
        nothing = _Step(np.zeros((count, LENGTH)), np.zeros(count), np.zeros((count, 2)))
        noted = [*self._steps, *[nothing] * noted_steps][:noted_steps]
        last = self.changes[-1] if self.changes else np.zeros_like(self._before)
        changes = [*self.changes, *[last] * steps][:steps]
        columns = (np.array(column) for column in zip(*noted, strict=True))
        return self._before, np.array(changes), *columns


class _Step(NamedTuple):
    """Of one set; zeros for what this rank does not keep."""

    gradients: np.ndarray
    calls: np.ndarray  # 1 where there is a gradient
    own: np.ndarray  # before the reduction


def _floats(value: Any) -> Any:
    return tf.cast(tf.convert_to_tensor(plain_variable(value)), tf.float32)


def _is_variable(source: Any) -> bool:
    return isinstance(source, (tf.Variable, keras.Variable))


def _is_float(variable: Any) -> bool:
    return bool(tf.as_dtype(variable.dtype).is_floating)


_loop: _Loop | None = None


def _the_loop(ring: Communicator) -> _Loop | None:
    """The loop that is recorded, if ``ringreduce verify`` wants that."""
    global _loop
    if recording_wanted() is not None and ring.parent is not None:
        sys.exit()  # The command says that nothing was recorded.
    if (wanted := recording_wanted(takes=True)) is not None:
        _loop = _Loop(ring, *wanted)
    is_noted = _loop is not None and not _loop.is_given_up and _loop.ring is ring
    return _loop if is_noted else None
