"""Decides when a lost rank is started again, and when it is not. Pure: the caller has the clock.

A rank that the others have gone on without is started again at its place, as another process with
the next number: its life. That is only while workers say that it can come back (`Grows`), and not
once they have said why it cannot. The first time it is at once, since most losses are of a process
or come from outside, such as a kernel that lacked memory. A place whose processes fail again and
again waits longer each time, so that forming the ring anew does not take the others' time; but
never for ever, since what is wrong may pass. Only where the same exception ends two processes of a
place, at the same line, nothing will come of a third.

A newcomer runs with the cores that the lost rank had, and at the same priority as the others: an
unprivileged process that has been made `nice` can never be made less so, and neither can one with
SCHED_IDLE, so it would stay slow, and all others with it, once it is in the ring.
"""

import re
from typing import NamedTuple

from ringreduce.commands.launch.failure import Failure
from ringreduce.vocabulary.config import TIMES

ON = "a lost rank is started again (--no-comeback: it is not)"
OFF = "a lost rank is not started again: {reason}"
ELSEWHERE = "a lost rank is not started again, as it is without -H, --hostfile and --nnodes"


class Place(NamedTuple):
    """The processes that a rank of the job has had, one after another."""

    life: int = 0  # the number of the last one
    ends: int = 0  # how many have ended, since there is reason to count
    endings: frozenset[str] = frozenset()  # what has ended these, where that may repeat itself
    joined_s: float | None = None  # when the last one joined the ring; None: it did not, or began
    due_s: float | None = None  # when the next one is to be started; None: none is

    def ended(self, now_s: float, ending: str = "") -> "Place":
        """Its process has ended, while the others go on; `ending` says by what (`ending_of`).

        If that has ended one before, none follows.
        """
        before = self
        if self.joined_s is not None and now_s - self.joined_s >= TIMES.comeback_worked_s:
            before = Place(self.life)
        if ending and ending in before.endings:
            return before._replace(joined_s=None, due_s=None)
        wait_s = TIMES.comeback_wait_s * 2.0 ** min(before.ends - 1, 32) if before.ends else 0.0
        return before._replace(
            ends=before.ends + 1,
            endings=before.endings | {ending} - {""},
            joined_s=None,
            due_s=now_s + min(wait_s, TIMES.comeback_wait_max_s),
        )

    def is_due(self, now_s: float) -> bool:
        return self.due_s is not None and self.due_s <= now_s

    def started(self) -> "Place":
        """Its next process runs."""
        return self._replace(life=self.life + 1, due_s=None)

    def joined(self, now_s: float) -> "Place":
        """Its process has been taken into the ring."""
        return self._replace(joined_s=now_s)


def ending_of(failure: Failure) -> str:
    """What has ended a process, in words that are the same when it happens again.

    An exception, with the line that raised it, or an exit of the program. Empty for a signal, which
    comes from outside.
    """
    if failure.raised is not None:
        frames = [line for line in failure.traceback if line.lstrip().startswith('File "')]
        where = f" in {frames[-1].strip()}" if frames else ""
        # A step's number in it, or a file's, is another one each time.
        return re.sub(r"\d+", "N", failure.exception or failure.describe()) + where
    return failure.describe() if failure.returncode >= 0 else ""
