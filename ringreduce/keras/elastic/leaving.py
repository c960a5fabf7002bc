r"""Ranks told to go leave a training in order, at a point where all are; or all stop there.

    step 409   step 410 -- look: rank 3 was told to go     step 411
    rank 3                  \- leaves, SystemExit
    ranks 0 to 2             \- form the ring anew ------- go on; too few: all back up, and stop

A look is one exchange of a few numbers, about once a second: who was told to go, and at which step
to look next, the least of what ranks want. The first that finds somebody sets another soon, at
which all that were told at about the same time go together. Between looks nothing travels.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import keras
import numpy as np

from ringreduce.commands.launch import conclusion, handover
from ringreduce.commands.launch.worker_records import Goes
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.reforming import leave
from ringreduce.effects.notice import CALL, EndsInOrder, Notice, hearing, reason_of
from ringreduce.keras.repeating import repeated
from ringreduce.vocabulary.config import TIMES, leave_code, leave_signal
from ringreduce.vocabulary.types import ReduceOp

_log = logging.getLogger(__name__)

_STOPPED = 143  # As a shell has it for SIGTERM: schedulers start such a job again.
_GROWTH = 8  # of the steps from one look to the next, until it is known how long a step takes


class Stopped(EndsInOrder):
    """The training stops on all ranks, since some were told to go: a SystemExit with code 143.

    `rr.fit` has backed up. In a loop of `rr.elastic.run` all ranks have the newest commit: catch it
    to save that.
    """


class Looks:
    """When the ranks of `ring` look which of them were told to go, and what they do then.

    In an elastic job at least `minimum` ranks go on without the others; None: all stop. `back_up`
    says, on all ranks, how the job goes on after that. `part` is called on those that go on, and
    `hand_over` on all before; both with the ranks that go. All three are collective. The first rank
    tells the others with `count_newcomers` how many could come in.
    """

    def __init__(
        self,
        ring: Communicator,
        notice: Notice,
        back_up: Callable[[], str],
        minimum: int | None = None,
        part: Callable[[Mapping[int, str]], None] | None = None,
        hand_over: Callable[[Mapping[int, str]], None] = lambda going: None,
        count_newcomers: Callable[[], int] = lambda: 0,
    ) -> None:
        self._ring, self._notice, self._back_up = ring, notice, back_up
        self._minimum, self._part, self._hand_over = minimum, part, hand_over
        self._count_newcomers = count_newcomers
        self.newcomers = 0  # that could come in now, as the latest look has found
        self._due, self._most = 1, 1  # the count of the next look; how many there are between two
        self._has_seen = False  # whether the look before has found somebody
        self._latest, self._latest_s = 0, time.monotonic()  # the count at it, and when it was

    def left(self, count: int) -> int:
        """How many steps may be made after `count` of them until the next look, at least one."""
        return max(1, self._due - count)

    def is_due(self, count: int) -> bool:
        """Whether ranks look now that `count` steps were made, equally many on all."""
        return count >= self._due

    def look(self, count: int, *, is_last: bool = False) -> dict[int, str]:
        """The ranks that go now, and what has told them to. Collective.

        `is_last`: there may be no look after this one.
        """
        ring = self._ring
        told = np.zeros(3 + ring.config.size, np.int64)
        told[:2] = [-(count + steps) for steps in self._wishes(count)]
        if ring.rank == 0:
            told[2] = self._count_newcomers()
        if reason := reason_of(self._notice):
            told[3 + ring.config.rank] = 1 + (reason == CALL)
        found = told.tolist()
        if ring.size > 1:
            found = repeated(ring, lambda: ring.all_reduce(told.copy(), ReduceOp.MAX).tolist())
        regular, soon, self.newcomers, *reasons = found
        names = {1: leave_signal(), 2: CALL}
        going = {rank: names[reasons[rank]] for rank in ring.members if reasons[rank]}
        is_first, self._has_seen = not self._has_seen, bool(going)
        self._due = -(soon if going else regular)
        return going if is_last or not is_first else {}

    def _wishes(self, count: int) -> tuple[int, int]:
        """After how many steps this rank wants the next look, and one that has to come soon."""
        now = time.monotonic()
        rate = (count - self._latest) / max(now - self._latest_s, 1e-9)
        self._latest, self._latest_s = count, now
        self._most = max(1, min(int(rate * TIMES.look_s), _GROWTH * self._most))
        return self._most, max(1, min(int(rate * TIMES.look_again_s), self._most))

    def goes_on(self, going: Mapping[int, str]) -> bool:
        """Whether the job goes on without them."""
        stays = {*self._ring.members} - {*going}
        return self._minimum is not None and len(stays) >= self._minimum

    def begin_anew(self) -> None:
        """Look next as soon as all can: ranks may know of other looks since a loss."""
        self._due, self._most, self._has_seen = 1, 1, False

    def join(self, count: int) -> None:
        """Look next one step after `count` of them, as all ranks do when newcomers have joined."""
        self._due, self._most, self._has_seen = count + 1, 1, False
        self._latest, self._latest_s = count, time.monotonic()

    def again(self, count: int) -> None:
        """Act one step later on what the look after `count` of them has found."""
        self._due, self._has_seen = count + 1, True

    def act(self, going: Mapping[int, str], where: str) -> None:
        """Leave, go on without those that leave, or stop with all others. Collective.

        Raises:
            EndsInOrder: this rank leaves, with ``RINGREDUCE_LEAVE_CODE``.
            Stopped: all stop.
        """
        ring, own = self._ring, self._ring.config.rank
        if self.goes_on(going):
            self._notice.is_met |= own in going
            self._hand_over(going)  # In which one more may be lost.
            going = {rank: reason for rank, reason in going.items() if rank in ring.members}
            if not going:
                return
        if not self.goes_on(going):
            self._notice.is_met = True
            said = self._back_up()
            goes = Goes(dict(going), where, _STOPPED, stops=True, said=said)
            if not handover.tell(goes):
                _log.warning("[%d/%d] %s", own, ring.config.size, conclusion.stopped({own: goes}))
            raise Stopped(_STOPPED)
        if own in going:
            goes = Goes({own: going[own]}, where, leave_code())
            if not handover.tell(goes):
                _log.warning("[%d/%d] %s", own, ring.config.size, conclusion.left({own: goes}))
            leave(ring, going[own])
            raise EndsInOrder(goes.code)
        assert self._part is not None
        self._part(going)


@contextmanager
def heard(ring: Communicator, *, is_elastic: bool) -> Iterator[Notice]:
    """Within the block this rank hears what tells it to go, in a training of this thread."""
    who = f"[{ring.config.rank}/{ring.config.size}]"
    notice = Notice(who, _doing_here(), lambda: not is_elastic and ring.failure is not None)
    with hearing(notice):
        yield notice


def _doing_here() -> Callable[[], str]:
    """A function that says, in any thread, what holds up the training in this one."""
    thread = threading.get_ident()

    def doing() -> str:
        innermost = sys._current_frames().get(thread)
        for frame, _ in traceback.walk_stack(innermost):
            owner, name = frame.f_locals.get("self"), frame.f_code.co_name
            if isinstance(owner, keras.Model) and name == "evaluate":
                return "it is in validation"
            is_hook = isinstance(owner, keras.callbacks.Callback) and name.startswith("on_")
            if is_hook and not type(owner).__module__.startswith("ringreduce."):
                return f"it is in {type(owner).__name__}.{name}"
        return "it is in a step, or at the begin of training"

    return doing
