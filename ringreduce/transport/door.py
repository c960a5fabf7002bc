"""Where a newcomer of the same host meets a job that trains: a Unix socket of the first rank.

Its abstract address is a name that the launcher has drawn, and ends with its process: the next
first rank opens the same name. The kernel names the user at the other end, and other users are
turned away unread. Both ends show that they know the job's secret (`frames.Channel`), for this
name; without a secret, that they know the name, which everybody can read in /proc/net/unix.

Everybody on the host can connect, so strangers are few and have little time, and a newcomer that
was turned away for others tries again. A connection that ends shows that its newcomer has gone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import msgspec

from ringreduce._version import __version__
from ringreduce.commands.launch.frames import NONCE_BYTES, OVERHEAD_BYTES, Channel
from ringreduce.pure.arrivals import (
    Ended,
    FromDoor,
    Here,
    Knock,
    Noted,
    Ready,
    Refusal,
    ToDoor,
    Welcome,
)
from ringreduce.pure.views import Row
from ringreduce.transport import inherited
from ringreduce.transport.security import Security
from ringreduce.transport.unix import credentials, is_ours
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.errors import (
    ConfigError,
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
    RendezvousError,
    RingReduceError,
)
from ringreduce.vocabulary.times import milliseconds

_log = logging.getLogger(__name__)

BYTES_MAX = 80 << 20  # of a record: a welcome has what members have exchanged so far
_PIECE_BYTES = 1 << 16
_QUEUE = 1024  # connections that wait to be accepted
_ACCEPTED_AT_ONCE = 64
# Connections that have not said which newcomer they are; of more the oldest is closed. A newcomer
# has no more to do before that than to send it.
_STRANGERS_MAX = 16
_Record = TypeVar("_Record", ToDoor, FromDoor)


class JobEndedError(RendezvousError):
    """The job has ended: a newcomer has nothing to do any more, and ends with exit code 0."""


def _sealed(channel: Channel[Any], record: msgspec.Struct, bytes_max: int) -> bytes:
    """The record's frame; ConfigError if the other end would not read it."""
    data = msgspec.msgpack.encode(record)
    if len(data) > bytes_max:
        kind = type(record).__name__
        raise ConfigError(f"has a {kind} of {len(data)} bytes, of which {bytes_max} are read")
    return channel.seal(data)


class _Visitor:
    """A connection as the door has it."""

    def __init__(self, connection: socket.socket, channel: Channel[ToDoor]) -> None:
        self.connection, self.channel = connection, channel
        self.is_here = False  # it has shown that it knows the secret
        self.knock: Knock | None = None  # of a newcomer that was welcomed
        self.unsent = bytearray(channel.opening)
        self.is_last = False  # what is unsent is the last
        # When it is closed: as a stranger, or with what it has not read.
        self.until_s = time.monotonic() + TIMES.hello_s


class Door:
    """Lets newcomers in at the abstract Unix address `name`, as rank `config.rank`; on Linux.

    `welcome` answers the newcomers that knock: it refuses one whose place is not free, or that
    cannot come in. `check_ready` answers those that are ready; None: it may be taken in. Both are
    called in the door's thread, where they keep all other newcomers waiting, and the training's
    threads from Python's lock: they must be quick, and not wait for anything.

    The thread sleeps until something comes. While another process has the name still, as a first
    rank that dies, it tries again. An error in it, also one of the two callbacks, closes the door,
    says so in the log, and disturbs nothing else. It ends in `close`; in forked children nothing of
    the door is left. All methods may be called from any thread, and wait for nothing, but `close`.
    """

    def __init__(
        self,
        name: str,
        security: Security,
        config: Config,
        welcome: Callable[[Knock], Welcome | Refusal],
        check_ready: Callable[[Ready], Refusal | None],
        *,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self._name, self._config = name, config
        self._secret, self._bytes_max = security.door_secret(name), bytes_max
        self._welcome, self._check_ready = welcome, check_ready
        self._listener: socket.socket | None = None
        self._binds_s, self._warns_s = 0.0, time.monotonic() + TIMES.slow_warning_s
        # By descriptor, the oldest first; and newcomers that were welcomed, by place.
        self._visitors: dict[int, _Visitor] = {}
        self._at_place: dict[int, _Visitor] = {}
        self._lives: dict[int, int] = {}  # by place, the last that was welcomed
        self._ready: dict[int, Row] = {}
        self._ended: Ended | None = None
        self._is_closing = self._has_warned = False
        self._orders: deque[Callable[[], None]] = deque()
        # For what other threads read or change; never held while the door waits.
        self._lock = threading.RLock()
        self._wake = -1  # by which they wake the thread; closed with the door
        self._thread = threading.Thread(target=self._run, name="ringreduce door", daemon=True)
        inherited.watch(self)
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread.start()
        except (OSError, RuntimeError) as error:  # There is no descriptor, or no thread.
            self._fail(error)
            self._close_all()

    def ready(self) -> tuple[Row, ...]:
        """The rows of the newcomers that are ready, and there, now; by place."""
        with self._lock:
            return tuple(self._ready[place] for place in sorted(self._ready))

    def refuse(self, place: int, text: str) -> None:
        """Tell the newcomer of that place, if there is one, that it is not taken in."""
        with self._lock:
            self._ready.pop(place, None)
            if (visitor := self._at_place.get(place)) is not None:
                self._order(partial(self._send_last, visitor, Refusal(text)))

    def chosen(self, places: Collection[int]) -> None:
        """Note that the newcomers of these places were taken in; they close their connections."""
        with self._lock:
            for place in places:
                self._ready.pop(place, None)

    def end(self, text: str) -> None:
        """Tell all newcomers, also those that come until `close`, that the job has ended."""
        with self._lock:
            self._ready.clear()
            self._order(partial(self._end, Ended(text)))

    def close(self) -> None:
        """Close all connections and end the thread, for good; what was told is sent before.

        Newcomers that were told nothing see that their connection has ended, and may come again to
        the next first rank. Waits for those that do not read, and for a callback, a second or two.
        Calling it again does nothing.
        """
        self._order(self._begin_closing)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(TIMES.join_thread_s)

    def close_inherited(self) -> None:
        """In a forked child: close its copies, of which newcomers notice nothing."""
        self._lock, self._thread = threading.RLock(), threading.Thread()
        self._close_all()

    def _order(self, order: Callable[[], None]) -> None:
        """Have the thread do it; does nothing once the door is closed."""
        with self._lock:
            if self._wake >= 0:
                self._orders.append(order)
                os.eventfd_write(self._wake, 1)

    # ---- In the thread. ----

    def _run(self) -> None:
        try:
            while not self._is_closing or self._visitors:
                if self._listener is None and not self._is_closing:
                    self._listen()
                self._serve(self._wait())
        except Exception as error:
            self._fail(error)
        finally:
            self._close_all()

    def _fail(self, error: BaseException) -> None:
        _log.warning(
            "[%d/%d] takes in no newcomers any more: its door failed: %s: %s",
            *(self._config.rank, self._config.size, type(error).__name__, error),
        )

    def _close_all(self) -> None:
        with self._lock:
            inherited.unwatch(self)
            self._ready.clear()
            self._at_place.clear()
            if self._listener is not None:
                self._listener.close()
            for visitor in list(self._visitors.values()):
                visitor.connection.close()
            self._visitors.clear()
            if self._wake >= 0:
                os.close(self._wake)
            self._wake = -1

    def _listen(self) -> None:
        """Open the name, unless another process has it still."""
        if time.monotonic() < self._binds_s:
            return
        with inherited.opening:  # A child that kept it would keep the name.
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.setblocking(False)
            self._listener.bind(f"\0{self._name}")
            self._listener.listen(_QUEUE)
            return
        except OSError as error:
            self._listener.close()
            self._listener = None
            if error.errno != errno.EADDRINUSE:
                raise
        now = time.monotonic()
        self._binds_s = now + TIMES.reconnect_s
        if now >= self._warns_s:
            self._warns_s = math.inf
            _log.warning(
                "[%d/%d] can take in no newcomers yet: another process has the socket @%s still",
                *(self._config.rank, self._config.size, self._name),
            )

    def _wait(self) -> dict[int, int]:
        """Sleep until something comes, or is due; what has come, by descriptor."""
        poll = select.poll()  # Made anew: it has no descriptor that a child would share.
        poll.register(self._wake, select.POLLIN)
        due_s = math.inf if self._listener is not None or self._is_closing else self._binds_s
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        for descriptor, visitor in self._visitors.items():
            writes = select.POLLOUT if visitor.unsent else 0
            poll.register(descriptor, writes | (0 if visitor.is_last else select.POLLIN))
            due_s = min(due_s, visitor.until_s)
        wait_s = due_s - time.monotonic()
        return dict(poll.poll(None if due_s == math.inf else milliseconds(max(0.0, wait_s))))

    def _serve(self, come: dict[int, int]) -> None:
        """Take what has come; then accept others, which may get descriptors of these."""
        if self._wake in come:
            os.eventfd_read(self._wake)
            while self._orders:
                self._orders.popleft()()
        for descriptor, events in come.items():
            visitor = self._visitors.get(descriptor)
            if visitor is not None and events & ~select.POLLOUT:
                self._read(visitor)
            elif visitor is not None:
                self._flush(visitor)
        if self._listener is not None and self._listener.fileno() in come:
            self._accept(self._listener)
        now = time.monotonic()
        for visitor in [each for each in self._visitors.values() if each.until_s <= now]:
            self._drop(visitor)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            channel: Channel[ToDoor] = _channel(ToDoor, self._secret, self._bytes_max)
            with inherited.opening:
                try:
                    connection, _ = listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    return
                visitor = self._visitors[connection.fileno()] = _Visitor(connection, channel)
            if not is_ours(connection):
                process, user = credentials(connection)
                self._turned_away(f"process {process} of user {user}")
                self._drop(visitor)
                continue
            connection.setblocking(False)
            self._flush(visitor)
            strangers = [each for each in self._visitors.values() if not self._is_known(each)]
            if len(strangers) > _STRANGERS_MAX:
                self._drop(strangers[0])

    def _turned_away(self, why: object) -> None:
        if not self._has_warned:
            self._has_warned = True  # Anybody of this host may connect.
            _log.warning(
                "[%d/%d] turned away a stranger at the socket for newcomers (%s)",
                *(self._config.rank, self._config.size, why),
            )

    def _is_known(self, visitor: _Visitor) -> bool:
        """Whether it is the newcomer of its place."""
        return visitor.knock is not None and self._at_place.get(visitor.knock.place) is visitor

    def _is_served(self, visitor: _Visitor) -> bool:
        """Whether more can be said to it, and heard from it."""
        is_open = self._visitors.get(visitor.connection.fileno()) is visitor
        return is_open and not visitor.is_last

    def _read(self, visitor: _Visitor) -> None:
        if visitor.is_last:  # It has gone.
            self._drop(visitor)
            return
        try:
            data = visitor.connection.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(visitor)
            return
        channel, was_open = visitor.channel, visitor.channel.is_open
        try:
            records = channel.feed(data)
        except ConfigError as error:
            if channel.is_proven:
                text = f"rank {self._config.rank}, which has ringreduce {__version__}, {error}"
                self._send_last(visitor, Refusal(text))
            else:
                self._turned_away(error)
                self._drop(visitor)
            return
        if channel.is_open and not was_open:
            self._send(visitor, Here())
        for record in records:
            if self._is_served(visitor):
                self._take(visitor, record)

    def _take(self, visitor: _Visitor, record: ToDoor) -> None:
        if isinstance(record, Here) and not visitor.is_here:
            visitor.is_here = True
        elif isinstance(record, Knock) and visitor.knock is None:
            self._let_in(visitor, record)
        elif isinstance(record, Ready) and self._is_known(visitor):
            self._note(visitor, record)
        else:
            self._drop(visitor)  # No newcomer sends that now.

    def _let_in(self, visitor: _Visitor, knock: Knock) -> None:
        """Answer a newcomer, which is known from then on if it is welcome."""
        if self._ended is not None:
            self._send_last(visitor, self._ended)
            return
        answer = self._why_not(knock) or self._welcome(knock)
        if isinstance(answer, Refusal):
            self._send_last(visitor, answer)
            return
        place, life = knock.place, knock.life
        if (before := self._at_place.get(place)) is not None:
            text = f"a later process has come for rank {place}: life {life}, and this one is "
            self._send_last(before, Refusal(f"{text}{self._lives[place]}"))
        visitor.knock, visitor.until_s = knock, math.inf
        with self._lock:
            self._lives[place], self._at_place[place] = life, visitor
        try:
            self._send(visitor, answer)
        except ConfigError as error:
            self._send_last(visitor, Refusal(f"rank {self._config.rank} {error}"))

    def _why_not(self, knock: Knock) -> Refusal | None:
        own, place, life = self._config, knock.place, knock.life
        last = self._lives.get(place, 0)
        if knock.version != __version__:
            have = f"{knock.version[:80]}, rank {own.rank} has {__version__}"
            return Refusal(f"it has ringreduce {have}: it was changed since the job began")
        if knock.job_id != own.job_id:
            return Refusal("it belongs to another job")
        if place >= own.size or place == own.rank:
            return Refusal(f"rank {place} is no place that is free in a job of {own.size}")
        if life < last or (life == last and place in self._at_place):
            return Refusal(f"a later process has come for rank {place}: life {last}, not {life}")
        return None

    def _note(self, visitor: _Visitor, ready: Ready) -> None:
        knock, row = visitor.knock, ready.row
        assert knock is not None
        if (row.place, row.life) != (knock.place, knock.life):
            refusal: Refusal | None = Refusal("its row is another process's")
        else:
            refusal = self._check_ready(ready)
        if refusal is not None:
            self._send_last(visitor, refusal)
            return
        with self._lock:
            self._ready[row.place] = row
        self._send(visitor, Noted())

    def _send(self, visitor: _Visitor, record: FromDoor) -> None:
        visitor.unsent += _sealed(visitor.channel, record, self._bytes_max)
        self._flush(visitor)

    def _send_last(self, visitor: _Visitor, record: FromDoor) -> None:
        """Tell it, and close the connection once it has been sent."""
        if not self._is_served(visitor):
            return
        self._forget(visitor)
        visitor.is_last, visitor.until_s = True, time.monotonic() + TIMES.linger_s
        self._send(visitor, record)

    def _flush(self, visitor: _Visitor) -> None:
        try:
            while visitor.unsent:
                # A program may have given SIGPIPE its default back, which would end the rank.
                sent = visitor.connection.send(visitor.unsent, socket.MSG_NOSIGNAL)
                del visitor.unsent[:sent]
        except BlockingIOError:
            return
        except OSError:
            self._drop(visitor)
            return
        if visitor.is_last:
            self._drop(visitor)

    def _forget(self, visitor: _Visitor) -> None:
        """It is the newcomer of its place no more."""
        if self._is_known(visitor) and visitor.knock is not None:
            with self._lock:
                del self._at_place[visitor.knock.place]
                self._ready.pop(visitor.knock.place, None)

    def _drop(self, visitor: _Visitor) -> None:
        if self._visitors.get(visitor.connection.fileno()) is visitor:
            self._forget(visitor)
            del self._visitors[visitor.connection.fileno()]
            visitor.connection.close()

    def _end(self, ended: Ended) -> None:
        self._ended = ended
        for visitor in list(self._at_place.values()):
            self._send_last(visitor, ended)

    def _begin_closing(self) -> None:
        self._is_closing = True
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for visitor in list(self._visitors.values()):
            if not visitor.is_last:
                self._drop(visitor)


class Visit:
    """A newcomer's connection with the door, from `knock` on.

    One thread at a time may use it. In forked children it is closed.
    """

    def __init__(self, connection: socket.socket, security: Security, name: str, bytes_max: int):
        self._connection, self._who, self._bytes_max = connection, security.who, bytes_max
        self._channel: Channel[FromDoor] = _channel(
            FromDoor, security.door_secret(name), bytes_max, is_first=True
        )
        self._records: deque[FromDoor] = deque()
        self._error: RingReduceError | None = None  # that has ended it
        self._first: int | None = None  # the rank at the other end
        inherited.watch(self)

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended, and nothing was said against the newcomer."""
        return isinstance(self._error, PeerLostError)

    def fileno(self) -> int:
        """A descriptor that can be read once `check` has something to say; -1: it is closed."""
        return self._connection.fileno()

    def ready(self, row: Row, facts: dict[str, Any], timeout_s: float) -> None:
        """Offer to be taken in, as `row` says, from now on; returns when the job has noted it.

        Raises as `check`, PeerTimeoutError if no answer comes within `timeout_s`, and ConfigError
        if `facts` are too long.
        """
        self.check()
        until_s = time.monotonic() + timeout_s
        self._send(Ready(row, facts), until_s)
        record = self._receive(until_s)
        if record is None:
            text = f"waited {timeout_s:g} s for the job to note that it is ready"
            raise PeerTimeoutError(text, **self._who, peer=self._first)
        if not isinstance(record, Noted):
            raise self._ended_by(record)

    def check(self) -> None:
        """Return if the newcomer may go on waiting; does not block.

        Raises:
            JobEndedError: the job has ended.
            RendezvousError: the job refuses it.
            PeerLostError: the first rank has ended, or has closed its door. The newcomer is not
                ready any more; `knock` again finds the next first rank.
            MismatchError: the other end has another version.
        """
        if self._error is None and (record := self._receive(0.0)) is not None:
            self._ended_by(record)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the visit: the newcomer is not ready any more. Calling it again does nothing."""
        inherited.unwatch(self)
        self._connection.close()

    def close_inherited(self) -> None:
        """In a forked child: close its copy, of which the job notices nothing."""
        self._connection.close()

    def _ended_by(self, record: FromDoor) -> RingReduceError:
        """The error that `record` means; from now on `check` raises it."""
        if isinstance(record, Refusal):
            text = f"is not taken into the job: {record.text}"
            self._error = RendezvousError(text, **self._who, peer=self._first)
        elif isinstance(record, Ended):
            self._error = JobEndedError(f"has nothing to do: {record.text}", **self._who)
        else:
            self._error = self._other_version(f"got a {type(record).__name__}")
        return self._error

    def _other_version(self, what: object) -> MismatchError:
        return MismatchError(
            f"does not understand the job that it would come into: it {what}",
            **self._who,
            remedy=f"This process has ringreduce {__version__}; give it the version that the job "
            "has had since it began, or start the whole job again.",
        )

    def _enter(self, message: Knock, until_s: float) -> Welcome | None:
        """The answer to a newcomer; None: none has come. Raises as `knock`."""
        self._write(self._channel.opening, until_s)
        if (record := self._receive(until_s)) is None:
            return None
        if not isinstance(record, Here):
            raise self._ended_by(record)
        self._send(Here(), until_s)
        self._send(message, until_s)
        record = self._receive(until_s)
        if isinstance(record, Welcome):
            self._first = record.view.members[0]
            return record
        if record is None:
            return None
        raise self._ended_by(record)

    def _receive(self, until_s: float) -> FromDoor | None:
        """The next record; None: there is none until then."""
        while not self._records:
            try:
                data = self._connection.recv(_PIECE_BYTES)
            except BlockingIOError:
                if self._await(select.POLLIN, until_s):
                    continue
                return None
            except OSError:
                data = b""
            if not data:
                self._error = PeerLostError(
                    "lost its connection with the job before it was taken in: "
                    f"rank {self._first} has ended, or takes in no newcomers any more",
                    **self._who,
                    peer=self._first,
                    remedy="Where the other ranks go on, this one may come again.",
                )
                raise self._error
            try:
                self._records += self._channel.feed(data)
            except ConfigError as error:
                self._error = self._other_version(error) if self._channel.is_proven else None
                raise self._error or error from None
        return self._records.popleft()

    def _await(self, events: int, until_s: float) -> bool:
        """Sleep until one of these can be done; False: not until then."""
        poll = select.poll()
        poll.register(self._connection, events)
        wait_s = until_s - time.monotonic()
        return wait_s > 0 and bool(poll.poll(milliseconds(wait_s)))

    def _send(self, record: ToDoor, until_s: float) -> None:
        self._write(_sealed(self._channel, record, self._bytes_max), until_s)

    def _write(self, data: bytes, until_s: float) -> None:
        """Send it; if the other end has gone, what it said before can be received still."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._connection.send(rest, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if not self._await(select.POLLOUT, until_s):
                    return
            except OSError:
                return


def knock(
    name: str,
    security: Security,
    message: Knock,
    timeout_s: float,
    *,
    bytes_max: int = BYTES_MAX,
) -> tuple[Welcome, Visit]:
    """Come to the job's first rank, at the door of that name; the caller closes the visit.

    Tries again within `timeout_s` while nobody listens there, as when the first rank has just been
    lost; after a PeerLostError of a visit it may be called again, and another `Visit.ready` is due.

    Raises:
        JobEndedError: the job has ended; the newcomer ends with exit code 0.
        RendezvousError: the job refuses the newcomer; what listens there is not the job, or
            nobody is; or no answer came in time.
        MismatchError: the job has another version of ringreduce.
        ConfigError: the newcomer's facts are too long.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            connection.setblocking(False)
            visit = Visit(connection, security, name, bytes_max)
            undo.callback(visit.close)
            try:
                connection.connect(f"\0{name}")
                if not is_ours(connection):  # Before it gets anything.
                    raise _is_not_the_job(name, security, "belongs to another user")
                why = f"what listens at @{name} did not answer"
                if (welcome := visit._enter(message, until_s)) is not None:
                    undo.pop_all()
                    return welcome, visit
            except PeerLostError:
                why = f"what listens at @{name} closed the connection"
            except BlockingIOError:
                why = f"the queue of @{name} is full"
            except OSError as error:
                is_free = error.errno == errno.ECONNREFUSED
                why = f"nobody listens at @{name}" if is_free else f"@{name}: {error.strerror}"
            except ConfigError as error:
                if visit._channel.is_proven:
                    raise
                raise _is_not_the_job(name, security, str(error)) from None
        if time.monotonic() + TIMES.reconnect_s >= until_s:
            text = f"waited {timeout_s:g} s to be let into the job: {why}"
            remedy = "See whether the job's other ranks still train, and read their logs."
            raise RendezvousError(text, **security.who, remedy=remedy)
        time.sleep(TIMES.reconnect_s)


def _is_not_the_job(name: str, security: Security, what: str) -> RendezvousError:
    return RendezvousError(
        f"was not let into the job: what listens at @{name} {what}",
        **security.who,
        remedy="The launcher gives all processes of a job the same secret, and the same name.",
    )


def _channel(
    kinds: Any, secret: str, bytes_max: int, *, is_first: bool = False
) -> Channel[_Record]:
    """A connection's frames; `is_first` at the newcomer's end."""
    nonce, limit = secrets.token_bytes(NONCE_BYTES), bytes_max + OVERHEAD_BYTES
    return Channel(kinds, secret, nonce, is_first=is_first, bytes_max=limit)
