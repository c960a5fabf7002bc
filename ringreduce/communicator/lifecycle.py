"""The states of a session, and the transitions between them.

    coming, or working ----> broken
               |               |
               +---------------+----> leaving ----> closed

| to | made by | when |
| --- | --- | --- |
| coming | a newcomer, when it is made | until another session has joined the ring in its place |
| broken | a call's thread, the watcher's, the engine's, or a layer above | the first error |
| leaving | the thread that closes, or a signal handler in a call | at once; calls are refused |
| closed | the thread that closes | no call runs any more; then goodbyes are sent, all is freed |

The first error is kept: a session that leaves may still break, and says that instead of goodbye.
"""

import enum
import threading

from ringreduce.vocabulary.errors import RingReduceError


class SessionState(enum.IntEnum):
    """In the order in which they can follow each other; a session begins in the first or second."""

    COMING = 0
    WORKING = 1
    BROKEN = 2
    LEAVING = 3
    CLOSED = 4


class LifeCycle:
    """The state of one session; from any thread, and from signal handlers.

    The `lock` is held for moments only, never while anything waits; a signal handler may take it
    again. Calls may begin where it is working. `failure` is the first error.
    """

    def __init__(self, state: SessionState) -> None:
        self.lock = threading.RLock()
        self.state = state
        self.failure: RingReduceError | None = None

    def advance(self, state: SessionState) -> bool:
        """Go on to `state`; return False, and change nothing, if it is not later than this one."""
        with self.lock:
            if state <= self.state:
                return False
            self.state = state
            return True

    def fail(self, error: RingReduceError) -> bool:
        """Record `error` and break; return False, and change nothing, if another came first."""
        with self.lock:
            if self.failure is not None:
                return False
            self.failure = error
            self.advance(SessionState.BROKEN)
            return True
