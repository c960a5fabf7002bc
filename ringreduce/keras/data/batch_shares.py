"""Shares of global batches for ranks of different speeds: given, or measured in the first steps.

    step       0   1   2  ...  9      10 ...
    shares     equal                  measured        all ranks change at the same batch
               compiles    measures

Batches are made ahead of the step that uses them. So ranks change at the first batch that none of
them has divided yet.
"""

import math
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.checks.settings import Settings, digest_of, refuse_unlike
from ringreduce.keras.rows import rows_in, slice_rows
from ringreduce.pure.epochs import own_rows
from ringreduce.pure.shares import apportion, weights_of, weights_of_times
from ringreduce.vocabulary.errors import ConfigError

ACCEPTED = '"equal", "measured", or a number above 0 for this rank'
# Executions of the training function: in the first it is traced, and compiled; others warm up.
_WARM_UP, _MEASURED = 2, 8


class Shares:
    """Which rows of each batch are this rank's; from any thread.

    Batches are divided pass after pass, in each from index 0 on. All ranks make the same passes.
    With `is_equal` every rank has as many rows of each batch, to one, now and later; with
    `is_measured` ranks are to measure their speeds.
    """

    def __init__(
        self, ring: Communicator, weights: Sequence[int] = (), is_measured: bool = False
    ) -> None:
        self._ring, self.is_measured = ring, is_measured
        self.is_equal = not is_measured and len(set(weights)) <= 1
        self._lock = threading.Lock()
        # Weights from a position on: the number of a pass, and an index in it.
        self._weights, self._from = tuple(weights), (0, 0)
        self._next, self._largest = (-1, 0), 0

    def rows(self, index: int, count: int) -> tuple[int, int]:
        """First and end of this rank's rows of batch `index` of its pass, which has `count`."""
        ring = self._ring
        if self.is_equal:
            return own_rows(count, ring.rank, ring.size)
        with self._lock:
            place = self._next[0] + (index == 0), index
            self._next, self._largest = (place[0], index + 1), max(count, self._largest)
            if not self._weights or place < self._from:
                return own_rows(count, ring.rank, ring.size)
            parts = apportion(count, self._weights)
        first = sum(parts[: ring.rank])
        return first, first + parts[ring.rank]

    def own(self, index: Any, batch: Any, counts: bool = False) -> Any:
        """This rank's rows of batch `index`, in a graph; with `counts` and the number of all."""
        count = rows_in(batch)
        if self.is_equal:
            first, end = self.rows(index, count)
        else:
            first, end = tf.numpy_function(
                lambda *numbers: self.rows(*map(int, numbers)), [index, count], [tf.int64] * 2
            )
        rows = slice_rows(batch, first, end)
        return (rows, tf.cast(count, tf.int64)) if counts else rows

    def settle(self, seconds: float) -> list[int]:
        """Divide later batches by speed; return each rank's rows in the largest. Collective."""
        ring = self._ring
        # Nothing is divided meanwhile, so that the ranks agree on where to begin.
        with self._lock:
            first, end = own_rows(self._largest, ring.rank, ring.size)
            gathered = ring.all_gather_object([seconds / max(1, end - first), *self._next])
            self._weights = weights_of_times([row[0] for row in gathered])
            self._from = max((int(number), int(index)) for _, number, index in gathered)
            return apportion(self._largest, self._weights)


def told_share(given: Any) -> list[Any]:
    """What a rank tells others of its ``batch_share``, here `given`: a kind and a number."""
    kind, number = "equal" if given is None else given, 1.0
    if not isinstance(given, bool) and _is_share(given):
        kind, number = "a number", float(given)
    elif not isinstance(kind, str) or kind not in ("equal", "measured"):
        kind, number = f"bad: {given!r:.80}", 0.0
    return [kind, number]


def agreed_shares(told: Sequence[list[Any]], ring: Communicator) -> Shares:
    """The shares of the ranks of `ring`, which have `told` each other. Errors come on all ranks."""
    kind, _ = told[ring.rank]
    for rank, (their_kind, _) in zip(ring.members, told, strict=True):
        if their_kind.startswith("bad"):
            text = f"got batch_share={their_kind[5:]} on rank {rank}; accepted: {ACCEPTED}"
            raise ConfigError(text, **ring.config.who)
    remedy = 'Pass "measured" or "equal" on every rank, or a number on every rank.'
    every = [[Settings("arguments of rr.fit", {"batch_share": each}, remedy)] for each, _ in told]
    refuse_unlike(every[ring.rank], list(map(digest_of, every)), ring)
    weights = weights_of([number for _, number in told]) if kind == "a number" else ()
    return Shares(ring, weights, kind == "measured" and ring.size > 1)


def _is_share(given: Any) -> bool:
    try:
        return math.isfinite(given) and given > 0
    except (TypeError, OverflowError):
        return False


class Measure(keras.callbacks.Callback):
    """Measures how long this rank computes in a step, without waiting, and settles `shares`."""

    def __init__(self, shares: Shares, ring: Communicator, verbose: Any) -> None:
        super().__init__()
        self._shares, self._ring = shares, ring
        # In a bar the line that is drawn has not ended.
        self._begins = "" if verbose == 2 else "\n"
        self._prints = bool(verbose) and ring.rank == 0
        self._before = 0.0
        self._seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = self._now()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if len(self._seconds) == _WARM_UP + _MEASURED:
            return
        now = self._now()
        self._seconds.append(now - self._before)
        self._before = now
        if len(self._seconds) == _WARM_UP + _MEASURED:
            steps = getattr(self.model, "steps_per_execution", 1)
            step_s = statistics.median(self._seconds[_WARM_UP:]) / steps
            rows = self._shares.settle(step_s)
            pairs = zip(self._ring.members, rows, strict=True)
            shown = ", ".join(f"rank {rank} {count}" for rank, count in pairs)
            text = f"batch shares measured over {_MEASURED * steps} steps: {shown} of {sum(rows)}"
            self._say(text, self._begins)

    def on_train_end(self, logs: Any = None) -> None:
        if len(self._seconds) < _WARM_UP + _MEASURED:
            self._say("batch shares stayed equal: too few steps to measure", "")

    def _now(self) -> float:
        """A clock in seconds that stands still while this rank waits, or works, in the ring."""
        return time.monotonic() - self._ring.statistics().stopped_s

    def _say(self, text: str, begins: str) -> None:
        if self._prints:
            print(f"{begins}{text}", flush=True)
