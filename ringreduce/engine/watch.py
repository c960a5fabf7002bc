"""The watcher's thread: exchanges heartbeats, aborts and leaves with the neighbours.

It runs from the forming of the ring until after `leave`, so that ranks in user code learn of
failures too. `ringreduce.pure.watching` decides; this file has the thread, the control channel, the
clock and the log. Only this thread uses the control channel; other threads queue messages for it
and wake it. It never waits for the communicator's lock.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ringreduce.collectives.base import Collectives
from ringreduce.effects.recorder import Recorder
from ringreduce.engine.engine import Owner
from ringreduce.pure.claims import Claim
from ringreduce.pure.notification import abort_for
from ringreduce.pure.watcher_messages import Abort, Heartbeat, Left, Listening
from ringreduce.pure.watching import Action, End, Found, Send, Warn, Watch
from ringreduce.transport.control import Control
from ringreduce.transport.stalls import Waiting
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import MismatchError, PeerError, PeerTimeoutError, RingReduceError
from ringreduce.vocabulary.times import milliseconds

_log = logging.getLogger(__name__)


class Watcher:
    """The watcher of one communicator.

    From now on only its thread uses `control`, which is connected. It notifies `owner` once of the
    error that has ended the ring, and `waiting` of what the other ranks do. `elsewhere` returns the
    call of another group that this rank is in, or an empty text. A connection may carry nothing of
    what is due for `link_timeout_s`.
    """

    def __init__(
        self,
        control: Control,
        recorder: Recorder,
        collectives: Collectives,
        owner: Owner,
        *,
        elsewhere: Callable[[], str],
        waiting: Waiting,
        link_timeout_s: float,
    ) -> None:
        self._control, self._recorder = control, recorder
        self._collectives, self._owner = collectives, owner
        self._timeouts, self._elsewhere = waiting.timeouts, elsewhere
        self._rank, self._size = recorder.rank, recorder.size
        watched = self._rank, self._size, recorder.membership
        self._watch = Watch(*watched, link_timeout_s, time.monotonic())
        # Messages from other threads, to be sent.
        self._waiting: deque[Abort | Left | Claim | Listening] = deque()
        waiting.peers, waiting.listen = self._watch.peer_table, self.post
        self._thread = threading.Thread(
            target=self._loop, name=f"ringreduce watch {self._rank}/{self._size}", daemon=True
        )
        self._thread.start()

    def abort(self, error: RingReduceError) -> None:
        """Notify all ranks why this one gives up; from any thread, without waiting."""
        if self._watch.cause is None:
            self._watch.cause = error
            self.post(abort_for(error, self._rank))

    def post(self, message: Abort | Claim | Listening) -> None:
        """Have the thread send `message`; from any thread, without waiting."""
        self._waiting.append(message)
        self._control.wake()

    def leave(self, calls: int, why: str) -> None:
        """Announce that this rank leaves, unless it has failed, and begin to end; see `join`.

        It has completed `calls` collectives; `why` is the exception that makes it leave, or empty.
        """
        if self._watch.cause is None:
            self._waiting.append(Left(self._rank, calls, why[:1000]))
        self._watch.is_closing = True
        self._control.wake()

    def join(self) -> None:
        """Wait about a second for the thread to end; a stuck one is left alone."""
        if threading.current_thread() is not self._thread:
            self._thread.join(TIMES.join_thread_s)

    def explain(self, error: RingReduceError) -> RingReduceError:
        """The cause of `error`, with which a call has failed, if it is known; else `error`.

        A link knows which neighbour is silent or lost; the watcher also knows which rank that one
        waits for, or why it left. Waits up to half a second for that.
        """
        if error.origin is not None or not isinstance(error, PeerError):
            return error
        if isinstance(error, PeerTimeoutError):
            current = self._recorder.current_call()
            return self._watch.cause or self._watch.named(error, current, time.monotonic())
        deadline = time.monotonic() + TIMES.explain_s
        while (better := self._watch.explained(error)) is None and time.monotonic() < deadline:
            if error.peer is None or error.peer == self._rank:
                break
            time.sleep(TIMES.ended_poll_s / 4)
        return better or error

    def heartbeats(self) -> list[Heartbeat]:
        """The last heartbeats of all ranks; empty unless all are known."""
        return self._watch.heartbeats()

    # --- What follows runs in the watcher's thread. ---

    def _loop(self) -> None:
        watch = self._watch
        try:
            while not watch.is_closing:
                wait_s = max(0.0, watch.due_s - time.monotonic())
                self._step(self._control.receive(int(wait_s * 1000) + 1))
            self._send_waiting()
            deadline = time.monotonic() + TIMES.confirm_s
            while watch.is_owed(self._control.lost()) and time.monotonic() < deadline:
                self._step(self._control.receive(milliseconds(TIMES.ended_poll_s)))
        except Exception as error:  # a bug of ours: nobody may wait for ever
            _log.exception("[%d/%d] the watcher failed", self._rank, self._size)
            text = f"failed in the watcher: {type(error).__name__}: {error}"
            self._carry_out(watch.end(MismatchError(text)))
            self._send_waiting()
        finally:
            self._control.close()

    def _step(self, messages: Sequence[tuple[int, bytes]]) -> None:
        """Process `messages` and everything else that may have changed."""
        watch, control, now = self._watch, self._control, time.monotonic()
        watch.tick(now)
        for neighbour, payload in messages:
            self._carry_out(watch.receive(neighbour, payload, now))
        self._send_waiting()
        self._carry_out(watch.look_for_losses(control.lost(), self._recorder.current_call(), now))
        control.lock()  # Nobody else needs to connect once both neighbours have sent a heartbeat.
        if now >= watch.due_s:
            watch.note_bytes(control.arrived_bytes(watch.late(now)), now)
            current, flow = self._recorder.current_call(), self._collectives.flow()
            elsewhere = self._elsewhere() if current.operation is None else ""
            progress = self._collectives.traffic()
            pending, stopped_s = self._recorder.pending(), self._recorder.events.stopped_s()
            beat = watch.beat(current, flow, progress, now, elsewhere, pending, stopped_s)
            self._carry_out(beat)
            self._timeouts.is_busy = watch.is_busy
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting:
            self._carry_out(self._watch.send(self._waiting.popleft()))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._control.send(action.message, but=action.but)
            elif isinstance(action, Warn):
                _log.warning("[%d/%d] %s", self._rank, self._size, action.text)
            elif isinstance(action, End):
                self._owner.ring_ended(action.error)
            elif isinstance(action, Found) and self._collectives.pairs is not None:
                self._collectives.pairs.found(action.listening)
