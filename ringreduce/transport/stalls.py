"""How a call waits for another rank, over whatever link: when it stops, and with which error.

A link runs its calls in compiled code or in C, which returns when another rank is late. From then
on `finish` has the call: it continues it, and decides meanwhile whether that rank is slow or lost,
and whether the ring has ended.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ringreduce.effects.events import Events
from ringreduce.pure.liveness import PeerTable, Waits, describe_cycle
from ringreduce.pure.spans import SpanKind
from ringreduce.pure.timeouts import Limit, Timeouts
from ringreduce.pure.watcher_messages import Listening, Pending
from ringreduce.pure.wire import Header, Kind
from ringreduce.transport.channel import Silence
from ringreduce.transport.diagnosis import lost_error, mismatch_error
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import PeerLostError, PeerTimeoutError, RingReduceError


class State(NamedTuple):
    """Where a call stands."""

    progress: object  # changes while it advances
    peer: int  # the rank that it waits for
    due: str  # what it waits for, with the rank's name: ``1.0 MiB from rank 2 (tcp://...)``
    silence: Silence | None = None  # of the connection on which a frame is due


class StalledCall(Protocol):
    """A call that is not done yet."""

    def resume(self) -> bool:
        """Continue it for a while; return whether it is done. Raises what has made it fail."""

    def state(self) -> State:
        """Where it stands."""

    def named(self, peer: int) -> str:
        """A rank's name in errors, with where it is: ``rank 2 on the same host``."""

    def lost(self, waited_s: float) -> int | None:
        """A rank that it still needs and that is lost; None if none is known."""

    def where(self, peer: int) -> dict[str, Any]:
        """The fields of an error about that rank."""


class Waiting:
    """How the calls of a session wait for other ranks, over all of its links; from any thread."""

    # Set by the watcher, before any message begins: what is known of the other ranks, and what
    # notifies one that this one listens for it.
    peers: PeerTable
    listen: Callable[[Listening], None]

    def __init__(self, timeouts: Timeouts, events: Events) -> None:
        # The watcher keeps them up to date. Which ranks calls wait for is recorded.
        self.timeouts, self.events = timeouts, events
        self.is_interrupted = False  # calls end when they next check the clock
        self._cause: RingReduceError | None = None

    def interrupt(self, cause: RingReduceError | None = None) -> None:
        """Make calls in other threads raise `cause` soon; None: that this rank closed."""
        self._cause = cause
        self.is_interrupted = True

    def error(self, **where: Any) -> RingReduceError:
        """The error to raise then; `where` has the fields of this call's errors."""
        return self._cause or PeerLostError(
            "closed its communicator in the middle of a collective", **where
        )

    def await_cause(self, limit_s: float = TIMES.explanation_s) -> RingReduceError | None:
        """Why the ring has ended, if another rank that knows more says it soon."""
        # Polled, since a signal handler may set it.
        deadline = time.monotonic() + limit_s
        while not self.is_interrupted and time.monotonic() < deadline:
            time.sleep(TIMES.ended_poll_s)
        return self._cause

    def mismatch(
        self, received: Header, expected: Header, members: Sequence[int], **where: Any
    ) -> RingReduceError:
        """Return a `mismatch_error`; or the ring's end, if another rank knows what differs."""
        # A sender whose gradients have changed has begun a comparison of all ranks: that finds the
        # same disagreement, and knows which gradient it is.
        is_comparing = Kind.ALL_GATHER_OBJECT == received.kind != expected.kind
        if is_comparing and (cause := self.await_cause()):
            return cause
        return mismatch_error(received, expected, members, **where)


class Stall:
    """For how long a call has made no progress.

    `waited_s` is that, less what this thread did not see: the process was stopped, or another
    thread kept Python's lock, and progress may have been made meanwhile.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._progress: object = None
        self._looked_s = 0.0
        self._idle_s = self.waited_s = 0.0
        # A peer that was lost meanwhile. Its last frames still count, so the call runs once more
        # before it fails; progress clears this.
        self.lost: int | None = None

    def look(self, progress: object) -> Limit | None:
        """Note `progress`, which changes while the call advances; return the limit reached."""
        now = time.monotonic()
        passed_s = min(now - self._looked_s, TIMES.looked_s)
        self._looked_s = now
        if progress != self._progress:
            self._progress, self.lost = progress, None
            self._idle_s = self.waited_s = 0.0
        else:
            self.waited_s += passed_s
            self._idle_s = 0.0 if self._timeouts.is_busy else self._idle_s + passed_s
        return self._timeouts.reached(self.waited_s, self._idle_s)


def finish(
    call: StalledCall,
    waiting: Waiting,
    check_s: float = TIMES.poll_s,
    *,
    sends: bool | None = None,
) -> None:
    """Continue `call` until it is done, for as long as the timeouts of `waiting` allow.

    `resume` returns after `check_s` at most. Of a message `sends` says which way it goes: then the
    other rank is busy while it is alive, unless it waits for this one, or for one that does. Raises
    PeerTimeoutError if there was no progress within a limit, PeerLostError if a rank that it needs
    is lost or this one has closed its communicator; and what `call.resume` raises, or the cause of
    the interruption, if the call cannot be completed with what has come. Records which ranks it
    waits for, and when.
    """
    timeouts = waiting.timeouts
    if sends is not None:
        timeouts = Timeouts(timeouts.timeout_s, timeouts.busy_timeout_s)
    stall = Stall(timeouts)
    waits: tuple[int, object] | None = None  # for which rank, with which progress
    began_s = 0.0

    def record_wait() -> None:
        if waits is not None:
            waiting.events.part(SpanKind.WAIT, began_s, time.monotonic(), other=waits[0])

    try:
        while True:
            state = call.state()
            if sends is not None:
                timeouts.is_busy = waiting.peers.doing(state.peer, time.monotonic()).is_busy
            if waits != (state.peer, state.progress):
                record_wait()
                waits = state.peer, state.progress
                call_s = waiting.events.current_call().since_s
                began_s = max(call_s, time.monotonic() - check_s)
            if waiting.is_interrupted:
                # Its own part may be complete, though this thread had no time to see that: the
                # others have gone on then, and the next call raises. No other error counts now.
                with contextlib.suppress(RingReduceError):
                    if call.resume():
                        return
                where = call.where(state.peer)
                raise waiting.error(**{**where, "peer": where["rank"]})
            limit = stall.look(state.progress)
            if stall.lost is not None:
                raise lost_error(call.named(stall.lost), **call.where(stall.lost))
            if limit is not None:
                error = PeerTimeoutError(
                    f"waited {stall.waited_s:.1f} s for {state.due}",
                    **call.where(state.peer),
                    remedy=f"Read rank {state.peer}'s log first; raise {limit.variable} "
                    f"(now {limit.seconds:g}) only if it is merely slow.",
                )
                if sends is not None:
                    _explain(error, waiting.peers, Pending(sends, state.peer, 0))
                raise error
            if state.silence is not None:
                state.silence.look()
            stall.lost = call.lost(stall.waited_s)
            if call.resume():
                return
    finally:
        record_wait()


def _explain(error: PeerTimeoutError, peers: PeerTable, pending: Pending) -> None:
    """Say in `error` what the other rank of a message does, or in which cycle both wait."""
    now = time.monotonic()
    text, waits = peers.doing(pending.peer, now).text, peers.waits(pending.peer, now)
    error.remedy = f"{text[0].upper()}{text[1:]}. {error.remedy}"
    if error.rank is not None and waits:
        error.remedy = describe_cycle([Waits(error.rank, pending), *waits]) or error.remedy
