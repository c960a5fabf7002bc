"""A watcher's conclusions: facts in, decisions out. Pure: no clock, thread or socket.

`ringreduce.engine.watch` supplies the facts and carries out the actions returned here.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ringreduce.pure import watcher_messages as messages
from ringreduce.pure.claims import Claim, Claims
from ringreduce.pure.decoding import UNREADABLE
from ringreduce.pure.liveness import Flow, PeerTable
from ringreduce.pure.membership import Membership
from ringreduce.pure.notification import abort_error, abort_for, left_error
from ringreduce.pure.spans import Present
from ringreduce.vocabulary import errors
from ringreduce.vocabulary.config import TIMES

_SPARING_BEATS = 20  # a neighbour that has been silent for long is sent one of this many heartbeats
_COMPLAINTS_MAX = 8
_LINK_REMEDY = (
    "Look at the network between their hosts; raise RINGREDUCE_LINK_TIMEOUT_S if it recovers from "
    "such gaps."
)
_ACKNOWLEDGEMENT = messages.encode(messages.Acknowledgement())


class Send(NamedTuple):
    """Send `message` to the neighbours, except to those of `but`."""

    message: bytes
    but: frozenset[int] = frozenset()


class Warn(NamedTuple):
    """Log `text`, of this rank, as a warning."""

    text: str


class End(NamedTuple):
    """Tell the communicator the `error` that has ended the ring."""

    error: errors.RingReduceError


class Found(NamedTuple):
    """Tell the links that another rank is `listening` for this one."""

    listening: messages.Listening


Action = Send | Warn | End | Found


class Watch:
    """Keeps a watcher's knowledge of the ranks of `membership`; all times are on one clock."""

    def __init__(
        self, rank: int, size: int, membership: Membership, link_timeout_s: float, now_s: float
    ) -> None:
        self._rank, self._size = rank, size
        self._who: dict[str, Any] = {"rank": rank, "size": size}  # for errors
        self._neighbours = membership.neighbours(rank)
        self._link_timeout_s = link_timeout_s
        self.peer_table = PeerTable(rank, membership, now_s)  # what is known of the other ranks
        # Why the ring has ended; None while it has not.
        self.cause: errors.RingReduceError | None = None
        self.is_closing = False  # this rank is leaving; then no lost connection is a failure
        self.due_s = now_s  # when the next heartbeat, or the next check of a possible loss, is due
        self._unacknowledged: set[int] = set()
        # Bytes received in all from neighbours whose heartbeats are late, and when these grew last.
        self._arrived: dict[int, int] = {}
        self._grew_s: dict[int, float] = {}
        self._number = self._complaints = 0
        self._last: messages.Heartbeat | None = None
        self._ticked_s, self._paused = now_s, (now_s, 0.0)
        # Frames sent, and since when as many, by receiver and channel.
        self._sent: dict[tuple[int, int], tuple[int, float]] = {}
        # By receiver and channel, where some that were sent are missing: frames that have come, and
        # since when it is known.
        self._missing: dict[tuple[int, int], tuple[int, float]] = {}
        self._silent: set[int] = set()  # receivers of connections that were warned of
        self._lost: dict[int, float] = {}
        self._absence: tuple[Present, float] | None = None
        self._claims, self._told = Claims(len(self._neighbours)), set[str]()
        self.is_busy = False  # the rank that holds up this rank's call is alive and in user code
        # What changes while collectives advance, and when it did; the call; when to warn next.
        self._progress: tuple[object, float] = (None, now_s)
        self._call: tuple[int, float] = (-1, 0.0)
        self._warn_s = 0.0
        self._listening: set[messages.Listening] = set()  # passed on, or made by this rank

    def send(self, message: messages.Message | Claim) -> list[Action]:
        """Send a message of this rank.

        The neighbours acknowledge one that must reach all ranks; they pass on that this rank
        listens; they compare a value with theirs, as this rank does.
        """
        if isinstance(message, Claim):
            peer = self._claims.make(message)
            sent = Send(messages.encode(messages.Value(message.key, message.value)))
            return [sent, *([] if peer is None else self._disagree(message, peer))]
        if isinstance(message, messages.Listening):
            self._listening.add(message)
        else:
            self._unacknowledged = set(self._neighbours)
        return [Send(messages.encode(message))]

    def _disagree(self, claim: Claim, peer: int) -> list[Action]:
        text = claim.text.replace("{peer}", str(peer))
        if claim.finds_equals:
            # Once, though rank 0 has two neighbours.
            is_told, self._told = claim.key in self._told, {*self._told, claim.key}
            return [] if is_told or self._who["rank"] else [Warn(f"{text} {claim.remedy}")]
        return self.end(errors.MismatchError(text, **self._who, peer=peer, remedy=claim.remedy))

    def is_owed(self, lost: Collection[int]) -> bool:
        """Whether a neighbour that is still there has not acknowledged the last announcement."""
        gone = {n for n in self._unacknowledged if self.peer_table.left(n)} | set(lost)
        return bool(self._unacknowledged - gone)

    def tick(self, now_s: float) -> None:
        """Note the time, and whether this process has stood still since the last call."""
        if now_s - self._ticked_s >= TIMES.silent_s:
            self._paused = now_s, now_s - self._ticked_s
        if now_s - self._ticked_s > 2 * TIMES.heartbeat_s:
            # Frames not sent while the process stood still are no sign of a dead connection.
            self._sent = {key: (frames, now_s) for key, (frames, _) in self._sent.items()}
            self._missing = {key: (frames, now_s) for key, (frames, _) in self._missing.items()}
        self._ticked_s = now_s

    def receive(self, neighbour: int, payload: bytes, now_s: float) -> list[Action]:
        try:
            message = messages.decode(payload, self._size)
        except UNREADABLE as error:
            self._complaints += 1
            text = f"ignored a message of rank {neighbour} that cannot be read: {error}"
            return [Warn(text)] if self._complaints <= _COMPLAINTS_MAX else []
        if isinstance(message, messages.Heartbeats):
            for heartbeat, age_s in message.heartbeats:
                self.peer_table.note(heartbeat, age_s, now_s)
            return []
        if isinstance(message, messages.Acknowledgement):
            self._unacknowledged.discard(neighbour)
            return []
        if isinstance(message, messages.Value):
            claim = self._claims.receive(neighbour, message.key, message.value)
            return [] if claim is None else self._disagree(claim, neighbour)
        if isinstance(message, messages.Listening):
            if message in self._listening:
                return []  # It has come before, on the other way round.
            self._listening.add(message)
            is_for_us = message.sender == self._rank
            return [Found(message) if is_for_us else Send(payload, frozenset({neighbour}))]
        others = frozenset(self._neighbours) - {neighbour}
        actions: list[Action] = [Send(_ACKNOWLEDGEMENT, others)]
        if isinstance(message, messages.Left):
            if self.peer_table.leave(message):
                actions.append(Send(payload, frozenset({neighbour})))
        elif self.cause is None:
            self.cause = abort_error(message, **self._who)
            paused_at, paused_s = self._paused
            if self.cause.peer == self._rank and now_s - paused_at < TIMES.pause_memory_s:
                self._explain_pause(self.cause, paused_s, "have gone on without it")
            actions += [Send(payload, frozenset({neighbour})), End(self.cause)]
        return actions

    def late(self, now_s: float) -> list[int]:
        limit_s = 2 * TIMES.heartbeat_s
        return [n for n in self._neighbours if self.peer_table.unheard_s(n, now_s) >= limit_s]

    def note_bytes(self, arrived: Mapping[int, int], now_s: float) -> None:
        """Note the total bytes received from late neighbours: a process that runs sends some."""
        for neighbour, count in arrived.items():
            if count != self._arrived.get(neighbour, count):
                self._grew_s[neighbour] = now_s
                self.peer_table.note_alive(neighbour, now_s)
        # Only of those: later heartbeats count too, and say nothing of the time after them.
        self._arrived = dict(arrived)

    def look_for_losses(
        self, lost: Mapping[int, bool], current: Present, now_s: float
    ) -> list[Action]:
        """Handle lost connections of neighbours; True: nothing more can arrive from that one."""
        # A connection looks lost for a moment when its first message arrives before its event;
        # forget that, so that it does not count when the connection is really lost.
        self._lost = {n: since for n, since in self._lost.items() if n in lost}
        for neighbour, has_ended in lost.items():
            since_s = self._lost.setdefault(neighbour, now_s)
            if self.is_closing or self.cause is not None or self.peer_table.left(neighbour):
                continue
            silent_s = self.peer_table.silent_s(neighbour, since_s)
            # A rank that was silent before will not announce that it leaves.
            is_over = has_ended or silent_s >= TIMES.silent_s
            if now_s - since_s < (TIMES.ended_s if is_over else TIMES.half_ended_s):
                self.due_s = min(self.due_s, now_s + TIMES.ended_poll_s)
                continue
            kind: type[errors.PeerError] = errors.PeerLostError
            text = f"lost rank {neighbour}: its connection has ended, so it died"
            remedy = f"Read rank {neighbour}'s log first."
            if self.peer_table.unheard_s(neighbour, now_s) < now_s - since_s:
                # Its heartbeats come the other way round.
                text = (
                    f"lost the connection with rank {neighbour}, which is alive: nothing was "
                    f"confirmed on it for {self._link_timeout_s:g} s"
                )
                remedy = _LINK_REMEDY
            elif silent_s >= TIMES.silent_s:
                text = (
                    f"lost rank {neighbour}: nothing came from it for {silent_s:.1f} s: it or its "
                    "host is cut off or down"
                )
                if silent_s >= self._link_timeout_s:
                    kind = errors.PeerTimeoutError
            where = self._where(current)
            return self.end(kind(text, **where, peer=neighbour, remedy=remedy))
        return []

    def end(self, error: errors.RingReduceError) -> list[Action]:
        """End the ring for an error that this rank has found itself."""
        if self.cause is not None or self.is_closing:
            return []
        self.cause = error
        # Notify the others first, since the communicator will write its flight record.
        return [*self.send(abort_for(error, self._rank)), End(error)]

    def beat(
        self, current: Present, flow: Flow, progress: object, now_s: float,
        elsewhere: str = "", pending: messages.Pending | None = None, stopped_s: float = 0.0,
    ) -> list[Action]:  # fmt: skip
        """Send a heartbeat, and check those of others.

        `progress` changes while collectives advance; `elsewhere` is the call of another group that
        this rank is in, or empty; `pending` the send or recv that it waits in. Calls have stopped
        this rank's own work for `stopped_s` in all.
        """
        self.due_s = now_s + TIMES.heartbeat_s
        self._number += 1
        overdue = sorted(flow.overdue, key=lambda frame: -frame.dry_s)[: messages.OVERDUE_MAX]
        # Neighbours that this rank itself sees alive though they send no heartbeats.
        alive = [n for n, grew_s in self._grew_s.items() if now_s - grew_s < TIMES.silent_s]
        locked = [n for n in alive if self.peer_table.unheard_s(n, now_s) >= TIMES.silent_s]
        heartbeat = self._last = messages.Heartbeat(
            rank=self._rank,
            number=self._number,
            calls=current.calls,
            operation=(current.operation or elsewhere)[:64],
            since_s=max(0.0, now_s - current.since_s),
            overdue=tuple(overdue),
            locked=tuple(locked),
            pending=pending,
            stopped_s=stopped_s,
            sent_to_next=flow.sent_to_next,
        )
        spared = frozenset(
            neighbour
            for neighbour in self._neighbours
            if self.peer_table.unheard_s(neighbour, now_s) > TIMES.sparing_s
            and self._number % _SPARING_BEATS != 0
        )
        heartbeats = ((heartbeat, 0.0), *self.peer_table.heartbeats(now_s))
        actions: list[Action] = [Send(messages.encode(messages.Heartbeats(heartbeats)), spared)]
        if self.cause is None:
            actions += self._look_for_absence(current, now_s)
        if self.cause is None:
            actions += self._look_for_dead_links(flow, current, now_s)
        if self.cause is None:
            actions += self._look_for_delays(current, progress, now_s)
        return actions

    def _look_for_dead_links(self, flow: Flow, current: Present, now_s: float) -> list[Action]:
        """Warn of a connection on which nothing comes that this rank has sent, then end the ring.

        Its receiver waits, and not one byte has come there for that long, while frames that were
        sent at least as long ago are missing, whatever the operating system reports. On a merely
        slow link bytes keep arriving.
        """
        sent: dict[tuple[int, int], tuple[int, float]] = {}
        for receiver, channel, frames in flow.sent:
            before = self._sent.get((receiver, channel), (-1, 0.0))
            sent[receiver, channel] = before if before[0] == frames else (frames, now_s)
        self._sent = sent
        actions: list[Action] = []
        missing, self._missing = self._missing, {}
        warned, self._silent = self._silent, set()
        for receiver, overdue, age_s in self.peer_table.unanswered(now_s):
            key = receiver, overdue.channel
            frames, sent_s = sent.get(key, (0, now_s))
            if frames <= overdue.frames:
                continue
            known = missing.get(key, (overdue.frames, now_s))
            # The missing frame was sent with the last one, or before this was first looked at.
            since_s = min(sent_s, known[1] if known[0] == overdue.frames else now_s)
            self._missing[key] = overdue.frames, since_s
            # A heartbeat from before the frame was overdue proves nothing: that rank may have
            # stopped since.
            silent_s = min(overdue.dry_s, now_s - since_s - age_s)
            if silent_s < min(TIMES.link_warning_s, self._link_timeout_s):
                continue
            if silent_s >= self._link_timeout_s:
                text = (
                    f"lost the connection from rank {self._rank} to rank {receiver}: frames were "
                    f"sent, and not a byte has come for {self._link_timeout_s:g} s, though both "
                    "are alive"
                )
                where = self._where(current) | {"peer": receiver}
                return self.end(errors.PeerLostError(text, **where, remedy=_LINK_REMEDY))
            if receiver not in warned | self._silent:
                text = (
                    f"sends to rank {receiver}, and not a byte has come there for "
                    f"{silent_s:.1f} s, though both are alive: the network between their hosts "
                    f"stands still. The job ends if that lasts {self._link_timeout_s:g} s "
                    "(RINGREDUCE_LINK_TIMEOUT_S)"
                )
                actions.append(Warn(text))
            self._silent.add(receiver)
        return actions

    def _look_for_delays(self, current: Present, progress: object, now_s: float) -> list[Action]:
        """Warn, at growing intervals, of neighbours that keep this rank waiting."""
        call = current.calls, current.since_s
        if call != self._call:
            self._call, self._warn_s = call, 0.0
            self._progress = self._progress[0], max(current.since_s, self._progress[1])
        if progress != self._progress[0]:
            self._progress = progress, now_s
        self.is_busy = False
        if current.operation is None:
            return []
        waited_s = now_s - max(current.since_s, self._progress[1])
        suspicion = self.peer_table.suspect(current, now_s)
        limit_s = TIMES.slow_warning_s
        what = "no other rank is seen to hold it up"
        if suspicion is not None:
            self.is_busy, what = suspicion.is_busy, suspicion.text
            limit_s = TIMES.silent_warning_s if suspicion.is_silent else limit_s
        if waited_s < max(limit_s, self._warn_s):
            return []
        self._warn_s = max(TIMES.slow_warning_s, 2 * waited_s)
        if suspicion is not None and suspicion.rank not in self._neighbours:
            return []
        where = f"{waited_s:.1f} s in {current.operation} after {current.calls} calls"
        return [Warn(f"has waited {where}: {what}")]

    def heartbeats(self) -> list[messages.Heartbeat]:
        """The last heartbeats of all ranks; from any thread. Empty unless all are known."""
        last, others = self._last, self.peer_table.last()
        return [last, *others] if last is not None and others else []

    def _look_for_absence(self, current: Present, now_s: float) -> list[Action]:
        """End the ring if this rank waits in a call that a rank which has left will never make."""
        left = None if current.operation is None else self.peer_table.absent(current.calls)
        if left is None:
            self._absence = None
        elif self._absence is None or self._absence[0] != current:
            # Act only when seen twice: `current` may have been read in the middle of a change.
            self._absence = current, now_s
            self.due_s = min(self.due_s, now_s + TIMES.ended_s)
        elif now_s - self._absence[1] >= TIMES.ended_s / 2:
            return self.end(left_error(left.rank, left.calls, left.why, **self._where(current)))
        return []

    def explained(self, error: errors.RingReduceError) -> errors.RingReduceError | None:
        """Why the peer of a call that met `error` has gone, once that is known."""
        left = None if error.peer is None else self.peer_table.left(error.peer)
        if left is None:
            return self.cause
        fields = {name: getattr(error, name) for name in ("operation", "sequence", "step")}
        return left_error(left.rank, left.calls, left.why, **fields, **self._who)

    def named(
        self, error: errors.PeerTimeoutError, current: Present, now_s: float
    ) -> errors.RingReduceError:
        """`error`, naming the rank that all wait for, if that is known."""
        named = copy.copy(error)
        limit = (error.remedy or "").partition("; ")[2]
        paused_at, paused_s = self._paused
        is_recent = now_s - paused_at < TIMES.pause_memory_s
        stood_s = max(now_s - self._ticked_s, paused_s if is_recent else 0.0)
        suspicion = self.peer_table.suspect(current, now_s)
        unheard_s = stood_s
        if suspicion is not None and suspicion.is_silent:
            unheard_s = self.peer_table.silent_s(suspicion.rank, now_s)
        # A rank that was silent for longer than this process stood still is to blame all the same.
        if stood_s >= TIMES.silent_s and unheard_s - stood_s < TIMES.silent_s:
            self._explain_pause(named, stood_s, "may have given it up")
        elif self.peer_table.is_cut_off(now_s):
            named.remedy = "No other rank is heard any more: this one may be cut off."
        elif suspicion is not None:
            named.peer = suspicion.rank
            what = suspicion.text[0].upper() + suspicion.text[1:]
            named.remedy = f"{what}. Read rank {suspicion.rank}'s log first" + (
                f"; {limit}" if limit else "."
            )
        return named

    def _explain_pause(self, error: errors.RingReduceError, stood_s: float, what: str) -> None:
        if stood_s:
            error.remedy = (
                f"This process stood still for {stood_s:.1f} s (it or its host was stopped, or "
                f"Python's lock was held), and the others {what}."
            )

    def _where(self, current: Present) -> dict[str, Any]:
        return {**self._who, "operation": current.operation}
