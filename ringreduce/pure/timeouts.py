"""How long a call may wait: longer for a rank that is alive and in user code. Pure: no clock."""

from typing import NamedTuple


class Limit(NamedTuple):
    """A limit that a wait has reached: the variable that sets it, and its value."""

    variable: str
    seconds: float


class Timeouts:
    """The limits of one rank's waits without progress.

    `busy_timeout_s` holds while the rank that is waited for is busy, if it is larger.
    """

    def __init__(self, timeout_s: float, busy_timeout_s: float) -> None:
        self.timeout_s, self.busy_timeout_s = timeout_s, busy_timeout_s
        self._longest = Limit("RINGREDUCE_TIMEOUT_S", timeout_s)
        if busy_timeout_s > timeout_s:
            self._longest = Limit("RINGREDUCE_BUSY_TIMEOUT_S", busy_timeout_s)
        # That rank is alive and in user code. The watcher sets it for collectives, the thread that
        # waits for a message.
        self.is_busy = False

    def reached(self, waited_s: float, idle_s: float) -> Limit | None:
        """The limit that a wait has reached; None: it goes on.

        There has been no progress for `waited_s`, and at their end, for `idle_s`, the rank that is
        waited for was not known to be busy.
        """
        if idle_s >= self.timeout_s:
            return Limit("RINGREDUCE_TIMEOUT_S", self.timeout_s)
        return self._longest if waited_s >= self._longest.seconds else None
