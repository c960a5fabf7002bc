"""Measures where the time of training steps goes, on all ranks, and says what would help."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator, is_initialized
from ringreduce.keras.optimizer.sharded import weights_to_divide
from ringreduce.keras.optimizers_in import wrappers_in
from ringreduce.keras.progress import Progress, progress_of
from ringreduce.keras.repeating import told_by_ranks
from ringreduce.pure.profile import Measurement, step_of, verdict
from ringreduce.pure.watcher_messages import SentToNext
from ringreduce.tensorflow.threads import threads_in_use
from ringreduce.vocabulary.config import profile_wanted
from ringreduce.vocabulary.cores import core_limit
from ringreduce.vocabulary.words import for_rr

_log = logging.getLogger(__name__)
_has_measured = False


class Profile(keras.callbacks.Callback):
    """Measures where the time of steps goes on all ranks; at the end rank 0 says what would help.

    One short exchange at the end of each epoch puts ``rr_step_ms``, ``rr_waiting_ms``,
    ``rr_slowest_rank``, ``rr_hidden`` and ``rr_bytes`` into its logs, equal on all ranks;
    docs/guides/keras.md says what they are. They are means over the epoch's steps but the first
    (of ``steps_per_execution``), which may trace and compile. `Together` and `rr.fit` call it
    before others; elsewhere give it to `fit` before those that read logs.
    """

    looks_at_batches = False

    def __init__(self, communicator: Communicator | None = None) -> None:
        super().__init__()
        self._communicator = communicator
        self._epochs: dict[int, list[Measurement]] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        global _has_measured
        _has_measured = True
        self._epochs, self._is_first, self._has_compiled = {}, True, False
        self._cores = core_limit()
        self._threads = threads_in_use()
        # XLA reduces gradients where they are, which an update in shares does not.
        wrappers = [] if self.model.jit_compile else wrappers_in(self.model)
        self._updated = sum(map(weights_to_divide, wrappers))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._steps, self._began = 0, self._totals(0)
        self._after_first: Measurement | None = None
        self._ended: Measurement | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count steps, of which there may be several at a time."""
        self._steps = batch + 1
        if self._after_first is None:
            self._after_first = self._totals(self._steps)

    def on_test_begin(self, logs: Any = None) -> None:
        """End before validation."""
        self._end()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        ended, first, ring = self._end(), self._after_first, self._ring()
        # None but the first is measured with it.
        is_all = first is None or first.steps >= ended.steps
        measured = ended.since(self._began if first is None or is_all else first)
        ranks = [Measurement(*fields) for fields in told_by_ranks(ring, measured).values()]
        if logs is not None:
            logs.update(step_of(ranks).logs())
        if self._has_compiled:  # In the epoch before, in the only step.
            self._epochs.clear()
        self._has_compiled, self._is_first = is_all and self._is_first, False
        self._epochs[epoch + 1] = ranks

    def on_train_end(self, logs: Any = None) -> None:
        if self._ring().rank == 0 and self._epochs:
            progress = progress_of(self.model) or Progress()
            print(*verdict(self._epochs, progress.looking), sep="\n", flush=True)

    def _ring(self) -> Communicator:
        return self._communicator or default_communicator()

    def _end(self) -> Measurement:
        if self._ended is None:
            # With several steps at a time Keras counts more than there are in the last ones.
            most = (self.params or {}).get("steps") or self._steps
            self._ended = self._totals(min(self._steps, most))
        return self._ended

    def _totals(self, steps: int) -> Measurement:
        ring, progress = self._ring(), progress_of(self.model) or Progress()
        done = ring.statistics()
        link = done.sent_to_next or SentToNext(0, 0, 0.0)
        return Measurement(
            steps=steps,
            seconds=time.monotonic(),
            stopped_s=done.stopped_s,
            hidden_s=done.reducing_s - done.waited_s,
            bytes_sent=done.bytes_sent,
            cpu_s=time.process_time(),
            link_bytes=link.nbytes,
            link_s=link.seconds,
            # Our loop tells it.
            called_s=progress.called_s,
            reading_s=progress.reading_s,
            rank=ring.config.rank,
            next_rank=link.receiver,
            cores=self._cores,
            local_size=ring.local_size,
            threads=self._threads,
            updated=self._updated,
        )


def warn_of_no_profile() -> None:
    """At exit, say on rank 0 if ``--profile`` has measured nothing, unless the program fails."""
    if not profile_wanted() or _has_measured or getattr(sys, "last_value", None) is not None:
        return
    if is_initialized() and default_communicator().rank == 0:
        _log.warning(
            "[%d/%d] --profile has measured nothing: it measures %s.",
            *default_communicator().config.who.values(),
            for_rr(
                "rr.fit, and model.fit with callbacks=[rr.callbacks.Together([...])]", "Model.fit"
            ),
        )
