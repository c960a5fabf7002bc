"""Strategies by which each rank steps alone, and ranks meet every so many steps.

At a meeting the ranks average how far each has come since the last one:

    anchor  --- steps of rank 0 --->  weights of rank 0      change 0 = anchor - weights
            --- steps of rank 1 --->  weights of rank 1      change 1

    anchor := what `outer` makes of the mean change;  weights := anchor

With overlap the mean arrives K steps after the meeting began; what a rank has learned meanwhile
stays: weights := weights + new anchor - weights at the meeting's begin.

Sources: McMahan et al., "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017; Stich, "Local SGD converges fast and communicates little", ICLR 2019; Douillard
et al., "DiLoCo", 2023, and "Streaming DiLoCo with overlapping communication", 2025.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import engine_of, note_blocked
from ringreduce.keras.optimizers_in import all_within
from ringreduce.keras.strategies.base import Running, Step, Strategy, Use, wide
from ringreduce.keras.weighting import Averaging, weighted
from ringreduce.pure.encodings import Coding, encoding_of
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow.control_flow import vouch_for_branch
from ringreduce.tensorflow.low_rank import PowerSGD
from ringreduce.tensorflow.python_calls import call
from ringreduce.tensorflow.variables import lasting
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp

# Elements reduced at a time: the engine may do other work in between.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Let each rank step alone, and average weights every `every` steps.

    Args:
        every: steps between meetings; 1 or more. An epoch's end, validation and the end of training
            are meetings too.
        overlap: steps for which training goes on while a meeting is under way; less than `every`.

    The wrapped optimizer's state is each rank's own. In unequal batches ranks count by samples.
    """

    every: int
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"every is {self.every}; accepted: 1 and more")
        most = self.every - 1
        if not 0 <= self.overlap <= most:
            raise ConfigError(f"overlap is {self.overlap}; accepted: 0 to every - 1, {most}")

    def check(self, inner: keras.Optimizer) -> None:
        """Refuse what needs equal gradients on all ranks."""
        name = type(self).__name__
        for part in all_within(inner):
            if isinstance(part, keras.optimizers.LossScaleOptimizer):
                text = f"got {part.name} with strategy={name}, whose ranks would skip other steps"
                raise ConfigError(text, remedy="Use mixed_bfloat16, which needs no loss scale.")
            if getattr(part, "use_ema", False):
                raise ConfigError(
                    f"got {part.name} with use_ema and strategy={name}: averages of weights would "
                    "differ between ranks",
                    remedy="Leave use_ema out.",
                )

    def begin(self, use: Use) -> Running:
        """See `Strategy`."""
        return _Alone(self, use)

    def made_outer(self) -> Any:
        """An optimizer that gets mean changes as gradients; None: they are subtracted."""
        return None


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """`LocalSGD` whose mean change is a gradient for an optimizer of its own.

    Args:
        outer: a Keras optimizer, which is copied; by default SGD(0.7, momentum=0.9, nesterov=True).
    """

    outer: Any = None

    def made_outer(self) -> Any:
        """A copy of `outer`."""
        if self.outer is None:
            return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        return type(self.outer).from_config(self.outer.get_config())


class _Alone(Running):
    keeps_state_equal = False
    is_alone = True

    def __init__(self, strategy: LocalSGD, use: Use) -> None:
        self._strategy, self._use = strategy, use
        if isinstance(use.compression, PowerSGD):
            text = f"got PowerSGD with strategy={type(strategy).__name__}"
            raise ConfigError(text, remedy="Use compression='int8' or 'bf16' for meetings.")
        # One optimizer may be applied to several sets of variables, each with its own meetings.
        self._rounds: dict[tuple[int, ...], _Round] = {}
        # State of rounds that have not begun.
        self._loaded: dict[str, np.ndarray] = {}

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        return all(bool(state.is_settled.numpy()) for state in self._rounds.values())

    @property
    def has_met(self) -> bool:  # type: ignore[override]
        every, overlap = self._strategy.every, self._strategy.overlap
        counts = [int(state.count.numpy()) for state in self._rounds.values()]
        return all(count >= every and count % every == overlap for count in counts)

    def take(self, step: Step) -> None:
        mine = self._round_of(step)
        tf.cond(mine.is_settled, mine.begin, lambda: None)
        gradients, weight = step.gradients, tf.constant(1.0)
        if step.weight is not None:
            weight = step.weight.own
            gradients = [weighted(gradient, tf.math.sign(weight)) for gradient in gradients]
        step.apply([step.reducer.bridge.own(gradient) for gradient in gradients], step.variables)
        mine.own.assign_add(weight)
        number, overlap = mine.count.assign_add(1), self._strategy.overlap
        place = number % self._strategy.every
        if overlap:
            is_due = tf.logical_and(tf.equal(place, overlap), number > self._strategy.every)
            tf.cond(is_due, mine.merge, lambda: None)
        tf.cond(tf.equal(place, 0), mine.meet if overlap else mine.meet_and_merge, lambda: None)

    def settle(self) -> None:
        for mine in self._rounds.values():
            if not bool(mine.is_settled.numpy()):
                mine.settle()

    def state(self) -> dict[str, np.ndarray]:
        begun = {
            f"outer.{place}.{number}": np.asarray(variable)
            for place, state in enumerate(self._rounds.values())
            for number, variable in enumerate(state.outer_state)
        }
        return {**self._loaded, **begun}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self._loaded = dict(state)
        for place, entry in enumerate(self._rounds.values()):
            self._load_round(place, entry)

    def _load_round(self, place: int, mine: _Round) -> None:
        for number, variable in enumerate(mine.outer_state):
            if (value := self._loaded.pop(f"outer.{place}.{number}", None)) is not None:
                variable.assign(value)

    def _round_of(self, step: Step) -> _Round:
        for variable, kind in zip(step.variables, step.kinds, strict=True):
            if kind is Averaging.PART:
                raise ConfigError(
                    f"got {variable.name} with strategy={type(self._strategy).__name__}: a piece "
                    "of a table or layer is of all ranks in each step",
                    remedy="Train such models without a strategy.",
                )
        key = tuple(map(id, step.variables))
        if key not in self._rounds:
            pairs = zip(step.variables, step.kinds, strict=True)
            shared = [variable for variable, kind in pairs if kind is Averaging.MEAN]
            # Outside of the function that is being traced, since it outlives that.
            with tf.init_scope():
                self._rounds[key] = _Round(shared, self._strategy, self._use)
                self._load_round(len(self._rounds) - 1, self._rounds[key])
        return self._rounds[key]


class _Round:
    """Keeps one set of variables between meetings of the ranks."""

    def __init__(self, variables: Sequence[Any], strategy: LocalSGD, use: Use) -> None:
        self._variables, self._every, self._ring = variables, strategy.every, use.communicator()
        self.is_settled = lasting(True)
        # Steps since the ranks were settled; this rank's samples since the last meeting.
        self.count, self.own = lasting(np.int64(0)), lasting(0.0)
        # Equal on all ranks.
        self._anchors = list(map(lasting, self._values()))
        # This rank's weights when the meeting under way began.
        self._sent = list(map(lasting, self._values())) if strategy.overlap else []
        shapes = [tuple(anchor.shape) for anchor in self._anchors]
        self._meeting = _Meeting(self._ring, shapes, str(use.compression))
        self._outer = strategy.made_outer()
        if self._outer is not None:
            self._outer.build(self._anchors)
        self.outer_state = [] if self._outer is None else list(self._outer.variables)

    def _values(self) -> list[Any]:
        return [tf.cast(tf.convert_to_tensor(v), wide(v)) for v in self._variables]

    def begin(self) -> None:
        """Take the weights as they are: they may have been loaded."""
        for anchor, value in zip(self._anchors, self._values(), strict=True):
            anchor.assign(value)
        self.is_settled.assign(False)
        self.count.assign(0)
        self.own.assign(0.0)

    def meet(self) -> None:
        vouch_for_branch()
        values = self._values()
        for sent, value in zip(self._sent, values, strict=False):
            sent.assign(value)
        pairs = zip(self._anchors, values, strict=True)
        changes = [tf.cast(anchor - value, tf.float32) for anchor, value in pairs]
        arguments = [*changes, tf.convert_to_tensor(self.own)]
        call(self._ring, "begin a meeting", self._meeting.begin, arguments, [((), tf.int32)])
        self.own.assign(0.0)

    def merge(self) -> None:
        """Wait for its end, and use the mean change; what was learned meanwhile stays."""
        self._move_anchors()
        rows = zip(self._variables, self._values(), self._anchors, self._sent, strict=True)
        for variable, value, anchor, sent in rows:
            variable.assign(tf.cast(value + (anchor - sent), variable.dtype))

    def meet_and_merge(self) -> None:
        """Both at once: weights are equal then."""
        self.meet()
        self._move_anchors()
        self._use_anchors()

    def settle(self) -> None:
        """Make weights equal. Eager; collective."""
        if self._meeting.work is not None:
            self.merge()
        # After no step an outer optimizer with momentum would move weights that nobody has changed.
        if int(self.count.numpy()) % self._every:
            self.meet()
            self._move_anchors()
        self._use_anchors()
        self.is_settled.assign(True)

    def _use_anchors(self) -> None:
        for anchor, variable in zip(self._anchors, self._variables, strict=True):
            variable.assign(tf.cast(anchor, variable.dtype))

    def _move_anchors(self) -> None:
        vouch_for_branch()
        shapes = [(anchor.shape, tf.float32) for anchor in self._anchors]
        merged = call(self._ring, "end a meeting", self._meeting.end, [], shapes)
        pairs = zip(merged, self._anchors, strict=True)
        means = [tf.cast(mean, anchor.dtype) for mean, anchor in pairs]
        if self._outer is not None:
            self._outer.apply(means, self._anchors)
            return
        for anchor, mean in zip(self._anchors, means, strict=True):
            anchor.assign_sub(mean)


class _Meeting:
    """Averages changes, in memory of its own and in the engine's thread; one meeting at a time."""

    def __init__(self, ring: Communicator, shapes: Sequence[Any], compression: str) -> None:
        self._ring, self._shapes = ring, shapes
        sizes = [int(np.prod(shape)) for shape in shapes]
        self._memory = np.zeros(sum(sizes), np.float32)
        self._parts = np.split(self._memory, np.cumsum(sizes)[:-1])
        self._signature = signature_of("meeting", sizes, compression)
        self._coding = None
        if compression != "none" and ring.transport != "shm":
            encoding = encoding_of(compression)
            size = self._memory.size
            kept = np.zeros((2, size), np.float32) if encoding.has_residuals else None
            self._coding = Coding(encoding, kept)
        self.work: Any = None  # of a meeting that is under way
        self._took_s = 0.0

    def begin(self, *arguments: np.ndarray) -> list[Any]:
        *changes, weight_here = arguments
        for part, change in zip(self._parts, changes, strict=True):
            part[:] = change.reshape(-1)
        weight = float(weight_here)
        self.work = engine_of(self._ring).submit(lambda: self._meet(weight))
        return [np.int32(0)]

    def end(self) -> list[np.ndarray]:
        work, self.work = self.work, None
        began = time.perf_counter()
        work.wait()
        note_blocked(self._ring, time.perf_counter() - began, self._took_s)
        pairs = zip(self._parts, self._shapes, strict=True)
        return [part.reshape(shape).copy() for part, shape in pairs]

    def _meet(self, weight: float) -> None:
        began = time.perf_counter()
        ring, memory = self._ring, self._memory
        total = ring.all_reduce(np.array([weight]), signature=self._signature)[0]
        memory *= np.float32(weight * ring.size / total if total else 0.0)
        for start in range(0, memory.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            coding = None if self._coding is None else self._coding.of(part)
            ring.all_reduce(memory[part], ReduceOp.MEAN, signature=self._signature, coding=coding)
        self._took_s = time.perf_counter() - began
