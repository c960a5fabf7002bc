"""The watcher: one thread of a rank that speaks for it and listens for the others.

It says four times a second what this rank is doing and passes on what it has heard
(`ringreduce.pure.liveness`); it notices at once when a neighbour's connection ends; it carries
the news of a failure both ways round the ring, to ranks in user code too; and it warns of
those who keep this rank waiting, by name. What it finds out about the end of the ring it
tells the communicator, which raises it from the call under way or from the next one.

The thread is started when the ring has formed and ends after `leave`. It alone uses the
control channel; other threads leave words for it and wake it. It never waits for the
communicator's lock.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec

from ringreduce.pure import liveness
from ringreduce.pure.liveness import (
    Board,
    Heartbeat,
    Heartbeats,
    Left,
    News,
    Seen,
    Sent,
    Standing,
    Suspicion,
    Wait,
)
from ringreduce.transport.base import Flow
from ringreduce.transport.control import Control
from ringreduce.transport.news import left_error, read_news, write_news
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import (
    MismatchError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    RingReduceError,
)
from ringreduce.vocabulary.times import milliseconds

__all__ = ["Watcher"]

_log = logging.getLogger(__name__)

# Of so many heartbeats a neighbour that is silent for long gets one.
_SPARING_BEATS = 20
# A rank that is waited for in four of five looks over five seconds is slow for good.
_LOOKS, _LOOKS_SLOW = 20, 16
_COMPLAINTS_MAX = 8
_SEEN = liveness.encode(Seen())


class Watcher:
    """The watcher of one communicator.

    Args:
        control: connected; used by the watcher's thread alone from now on.
        rank, size: this rank, among at least two.
        link_timeout_s: how long a connection may carry nothing of what is due.
        standing: what this rank is doing.
        flow: where its links stand.
        progress: a number that changes while its collectives get on.
        tell: called once, from the watcher's thread, with the error that has ended the ring.
    """

    def __init__(
        self,
        control: Control,
        *,
        rank: int,
        size: int,
        link_timeout_s: float,
        standing: Callable[[], Standing],
        flow: Callable[[], Flow],
        progress: Callable[[], object],
        tell: Callable[[RingReduceError], object],
    ) -> None:
        self._control = control
        self._rank, self._size = rank, size
        self._link_timeout_s = link_timeout_s
        self._standing, self._flow, self._progress, self._tell = standing, flow, progress, tell
        now = time.monotonic()
        self._board = Board(rank, size, now)
        self._words: deque[bytes] = deque()
        # Neighbours that have not confirmed the last of them.
        self._unconfirmed: set[int] = set()
        self._cause: RingReduceError | None = None
        self._is_closing = False
        self._number = 0
        self._heartbeat_s = now
        self._ticked_s, self._paused = now, (now, 0.0)
        self._sent: dict[tuple[int, int], tuple[int, float]] = {}
        self._lost: dict[int, float] = {}
        self._is_locked = False
        self._absence: tuple[Standing, float] | None = None
        self._seen_progress: object = None
        self._progressed_s = now
        self._call: tuple[int, float] = (-1, 0.0)
        self._warn_s = 0.0
        self._has_warned = False
        self._looks: deque[int] = deque(maxlen=_LOOKS)
        self._slow_s = -TIMES.straggler_pause_s
        self._complaints = 0
        self._thread = threading.Thread(
            target=self._loop, name=f"ringreduce watch {rank}/{size}", daemon=True
        )
        self._thread.start()

    def abort(self, error: RingReduceError) -> None:
        """Tell all ranks why this one gives up; from any thread, without waiting."""
        if self._cause is None:
            self._cause = error
            self._say(News(write_news(error, self._rank)))

    def leave(self, calls: int, why: str) -> None:
        """Tell all ranks that this one leaves, unless it has failed, and begin to end; see `join`.

        Args:
            calls: collectives that it has completed.
            why: the exception that makes it leave, where one does; else empty.
        """
        if self._cause is None:
            self._say(Left(self._rank, calls, why[:1000]))
        self._is_closing = True
        self._control.wake()

    def join(self) -> None:
        """Return once the thread has ended, after about a second; a stuck one is left alone."""
        if threading.current_thread() is not self._thread:
            self._thread.join(TIMES.join_thread_s)

    def explain(self, error: RingReduceError) -> RingReduceError:
        """What a call should raise that met `error` by itself: the cause, where that is known.

        A link knows which neighbour is silent or gone; whom that one waits for in its turn, or
        whether it has said why it goes, is known here. Waits up to half a second for that.
        """
        if error.origin is not None or not isinstance(error, PeerError):
            return error
        if isinstance(error, PeerTimeoutError):
            return self._cause or self._named(error)
        deadline = time.monotonic() + TIMES.explain_s
        while error.peer is not None and error.peer != self._rank:
            left = self._board.left(error.peer)
            if left is not None:
                return self._left_error(left, error)
            if self._cause is not None or time.monotonic() >= deadline:
                break
            time.sleep(TIMES.ended_poll_s / 4)
        return self._cause or error

    def peers(self) -> list[dict[str, Any]]:
        """What is known of every other rank, for a report."""
        now, known = time.monotonic(), []
        for rank in range(self._size):
            if rank == self._rank:
                continue
            latest, left = self._board.latest(rank, now), self._board.left(rank)
            facts: dict[str, Any] = {"rank": rank, "left": left is not None}
            if latest is not None:
                heartbeat, age_s = latest
                facts |= {
                    "heard_s": round(age_s, 3),
                    "calls": heartbeat.calls,
                    "operation": heartbeat.operation or None,
                    "since_s": round(heartbeat.since_s + age_s, 3),
                }
            known.append(facts)
        return known

    # --- What follows runs in the watcher's thread. ---

    def _loop(self) -> None:
        try:
            while not self._is_closing:
                wait_s = max(0.0, self._heartbeat_s - time.monotonic())
                self._turn(self._control.receive(int(wait_s * 1000) + 1))
            self._send_words()
            deadline = time.monotonic() + TIMES.confirm_s
            while self._is_owed() and time.monotonic() < deadline:
                self._turn(self._control.receive(milliseconds(TIMES.ended_poll_s)))
        except Exception as error:  # a bug of ours: nobody may wait for ever
            _log.exception("[%d/%d] the watcher failed", self._rank, self._size)
            self._end(MismatchError(f"failed in the watcher: {type(error).__name__}: {error}"))
            self._send_words()
        finally:
            self._control.close()

    def _turn(self, words: list[tuple[int, bytes]]) -> None:
        now = time.monotonic()
        if now - self._ticked_s >= TIMES.silent_s:
            self._paused = now, now - self._ticked_s
        if now - self._ticked_s > 2 * TIMES.heartbeat_s:
            # What was not sent while all stood still is no sign of a dead connection.
            self._sent = {key: (frames, now) for key, (frames, _) in self._sent.items()}
        self._ticked_s = now
        for neighbour, word in words:
            self._take(neighbour, word, now)
        self._send_words()
        self._look_for_losses(now)
        if not self._is_locked:
            # From the first heartbeat of both neighbours on nobody has any business at our ports.
            self._is_locked = self._control.lock()
        if now >= self._heartbeat_s:
            self._heartbeat_s = now + TIMES.heartbeat_s
            self._send_heartbeat(now)
        self._send_words()

    def _say(self, message: liveness.Message) -> None:
        self._words.append(liveness.encode(message))
        self._control.wake()

    def _send_words(self) -> None:
        while self._words:
            self._unconfirmed = set(self._control.neighbours)
            self._control.send(self._words.popleft())

    def _is_owed(self) -> bool:
        """Whether a neighbour that is still there has not confirmed what was said last."""
        gone = {n for n in self._unconfirmed if self._board.has_left(n)} | set(self._control.lost())
        return bool(self._unconfirmed - gone)

    def _take(self, neighbour: int, word: bytes, now: float) -> None:
        try:
            message = liveness.decode(word, self._size)
        except (ValueError, msgspec.MsgspecError) as error:
            self._complaints += 1
            if self._complaints <= _COMPLAINTS_MAX:
                _log.warning(
                    "[%d/%d] ignored a word of rank %d that cannot be read: %s",
                    *(self._rank, self._size, neighbour, error),
                )
            return
        if isinstance(message, Heartbeats):
            for heartbeat, age_s in message.heartbeats:
                self._board.hear(heartbeat, age_s, now)
            return
        if isinstance(message, Seen):
            self._unconfirmed.discard(neighbour)
            return
        self._control.send(_SEEN, but=set(self._control.neighbours) - {neighbour})
        if isinstance(message, Left):
            if self._board.leave(message):
                self._control.send(word, but={neighbour})
        elif self._cause is None:
            self._control.send(word, but={neighbour})
            self._hear(read_news(message.cause, rank=self._rank, size=self._size))

    def _hear(self, error: RingReduceError) -> None:
        """Another rank has given up."""
        paused_at, paused_s = self._paused
        if (
            error.peer == self._rank
            and paused_s
            and time.monotonic() - paused_at < TIMES.pause_memory_s
        ):
            error.remedy = (
                f"This process stood still for {paused_s:.1f} s (stopped, or its host was), and "
                "the others have gone on without it."
            )
        self._cause = error
        self._tell(error)

    def _end(self, error: RingReduceError) -> None:
        """This rank has found out by itself that the ring is at its end."""
        if self._cause is None and not self._is_closing:
            self.abort(error)
            self._send_words()  # before this rank writes its flight record
            self._tell(error)

    def _look_for_losses(self, now: float) -> None:
        lost = self._control.lost()
        # A word may come before the news of the connection that it came on, which for a moment
        # looks lost; that must not count when it is.
        self._lost = {n: since for n, since in self._lost.items() if n in lost}
        for neighbour in lost:
            since = self._lost.setdefault(neighbour, now)
            if self._is_closing or self._cause is not None or self._board.has_left(neighbour):
                continue
            silent_s = self._board.silent_s(neighbour, since)
            # Of one that was silent already no word is to be expected.
            is_over = self._control.has_ended(neighbour) or silent_s >= TIMES.silent_s
            if now - since < (TIMES.ended_s if is_over else TIMES.half_ended_s):
                self._heartbeat_s = min(
                    self._heartbeat_s, now + TIMES.ended_poll_s
                )  # Look again soon.
                continue
            how = (
                f"nothing was heard of it for {silent_s:.1f} s: it is cut off, or its host is down"
                if silent_s >= TIMES.silent_s
                else "its connection has ended, so it died"
            )
            self._end(
                PeerLostError(
                    f"lost rank {neighbour}: {how}",
                    **self._where(),
                    peer=neighbour,
                    remedy=f"Read rank {neighbour}'s log first.",
                )
            )

    def _where(self) -> dict[str, Any]:
        operation = self._standing().operation
        return {"rank": self._rank, "size": self._size, "operation": operation}

    def _send_heartbeat(self, now: float) -> None:
        standing, flow = self._standing(), self._flow()
        own = self._own(standing, flow, now)
        heartbeats = ((own, 0.0), *self._board.heartbeats(now))
        patient = {
            neighbour
            for neighbour in self._control.neighbours
            if self._board.silent_s(neighbour, now) > TIMES.sparing_s
            and self._number % _SPARING_BEATS != 0
        }
        self._control.send(liveness.encode(Heartbeats(heartbeats)), but=patient)
        if self._cause is not None:
            return
        self._look_for_absence(standing, now)
        dead = self._board.dead(own, self._link_timeout_s, now)
        if dead is not None:
            self._end(self._dead_error(*dead))
        else:
            self._look_for_stalls(standing, flow, now)

    def _own(self, standing: Standing, flow: Flow, now: float) -> Heartbeat:
        self._number += 1
        sent = []
        for receiver, channel, frames in flow.sent:
            known = self._sent.get((receiver, channel))
            if known is None or known[0] != frames:
                known = self._sent[receiver, channel] = (frames, now)
            sent.append(Sent(receiver, channel, frames, now - known[1]))
        return Heartbeat(
            rank=self._rank,
            number=self._number,
            calls=standing.calls,
            operation=(standing.operation or "")[:64],
            since_s=max(0.0, now - standing.since_s),
            done=flow.done,
            sent=tuple(sent),
            wait=None if flow.waits is None else Wait(*flow.waits),
        )

    def _look_for_absence(self, standing: Standing, now: float) -> None:
        """Whether this rank waits in a call that a rank which has left will never make."""
        left = None if standing.operation is None else self._board.absent(standing.calls)
        if left is None:
            self._absence = None
        elif self._absence is None or self._absence[0] != standing:
            # Seen twice, so that a standing that was read in the midst of a change does not count.
            self._absence = standing, now
            self._heartbeat_s = min(self._heartbeat_s, now + TIMES.ended_s)
        elif now - self._absence[1] >= TIMES.ended_s / 2:
            self._end(self._left_error(left, None))

    def _left_error(self, left: Left, met: RingReduceError | None) -> RingReduceError:
        if met is None:
            return left_error(left.rank, left.calls, left.why, **self._where())
        fields = {name: getattr(met, name) for name in ("operation", "sequence", "step")}
        fields |= {"rank": self._rank, "size": self._size}
        return left_error(left.rank, left.calls, left.why, **fields)

    def _dead_error(self, sender: int, receiver: int) -> RingReduceError:
        peer = sender if receiver == self._rank else receiver
        return PeerLostError(
            f"lost the connection from rank {sender} to rank {receiver}: frames were sent, and "
            f"not a byte has come for {self._link_timeout_s:g} s, though both are alive",
            **self._where(),
            peer=peer,
            remedy="Look at the network between their hosts; raise RINGREDUCE_LINK_TIMEOUT_S if it "
            "recovers from such gaps.",
        )

    def _look_for_stalls(self, standing: Standing, flow: Flow, now: float) -> None:
        """Warn of those who keep this rank waiting, once in a while."""
        call = standing.calls, standing.since_s
        progress = self._progress()
        if call != self._call:
            self._call, self._warn_s = call, 0.0
            if self._has_warned:
                self._has_warned = False
                _log.info("[%d/%d] goes on", self._rank, self._size)
            self._progressed_s = max(standing.since_s, self._progressed_s)
        if progress != self._seen_progress:
            self._seen_progress, self._progressed_s = progress, now
        if standing.operation is None:
            self._looks.append(-1)
            return
        waited_s = now - max(standing.since_s, self._progressed_s)
        suspicion = self._board.suspect(standing, now)
        self._looks.append(-1 if suspicion is None else suspicion.rank)
        if suspicion is not None and suspicion.kind == "silent":
            limit_s = TIMES.silent_warning_s
        elif waited_s < TIMES.silent_s and now - standing.since_s >= TIMES.slow_warning_s:
            # It gets on, slowly.
            suspicion = self._board.slowest(standing, flow.done)
            waited_s, limit_s = now - standing.since_s, TIMES.slow_warning_s
        else:
            limit_s = TIMES.slow_warning_s
        if waited_s >= max(limit_s, self._warn_s):
            self._warn_s = max(TIMES.slow_warning_s, 2 * waited_s)
            self._warn(standing, suspicion, waited_s)
        elif not self._has_warned and now - self._slow_s >= TIMES.straggler_pause_s:
            self._look_for_stragglers(now)

    def _warn(self, standing: Standing, suspicion: Suspicion | None, waited_s: float) -> None:
        if suspicion is not None and not self._speaks_of(suspicion.rank):
            return
        self._has_warned = True
        text = "no other rank is seen to hold it up" if suspicion is None else suspicion.text
        _log.warning(
            "[%d/%d] has waited %.1f s in %s after %d calls: %s",
            *(self._rank, self._size, waited_s, standing.operation, standing.calls, text),
        )

    def _look_for_stragglers(self, now: float) -> None:
        counts = Counter(rank for rank in self._looks if rank >= 0)
        for rank, count in counts.most_common(1):
            if count >= _LOOKS_SLOW and self._speaks_of(rank):
                self._slow_s = now
                seconds = _LOOKS * TIMES.heartbeat_s
                _log.warning(
                    "[%d/%d] has waited for rank %d most of the last %.0f s: it is slower",
                    *(self._rank, self._size, rank, seconds),
                )

    def _speaks_of(self, rank: int) -> bool:
        """Whether it is this rank's to warn of `rank`: its neighbours do, or all would."""
        return rank in self._control.neighbours

    # --- Called by a thread whose call has failed. ---

    def _named(self, error: PeerTimeoutError) -> RingReduceError:
        """`error` about the rank that all wait for, as far as that is known."""
        now = time.monotonic()
        named = copy.copy(error)
        limit = (error.remedy or "").partition("; ")[2]
        paused_at, paused_s = self._paused
        stood_s = max(
            now - self._ticked_s, paused_s if now - paused_at < TIMES.pause_memory_s else 0.0
        )
        suspicion = self._board.suspect(self._standing(), now)
        if stood_s >= TIMES.silent_s:
            named.remedy = (
                f"This process stood still for {stood_s:.1f} s (stopped, or its host was), and "
                "the others may have given it up."
            )
        elif self._board.hears_nobody(now):
            named.remedy = "No other rank is heard any more: this one may be cut off."
        elif suspicion is not None:
            named.peer = suspicion.rank
            what = suspicion.text[0].upper() + suspicion.text[1:]
            named.remedy = f"{what}. Read rank {suspicion.rank}'s log first" + (
                f"; {limit}" if limit else "."
            )
        return named
