"""Unix sockets between the ranks of a host: they pass segments and show which rank is lost.

Each rank listens on an abstract address (in no file system; it ends with the process) and stays
connected with every other rank of its host; the kernel names the user at the other end, and other
users are refused. They carry nothing afterwards: one that ends shows that its rank has gone.

Everybody on the host can read these addresses in /proc/net/unix, connect to them, and fill the
queue of a socket before its rank accepts. So nothing here waits for one connection alone: a rank
accepts while it tries to connect, turns other users away unread, and keeps few that say nothing.
"""

import contextlib
import errno
import logging
import os
import secrets
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ringreduce.transport import inherited
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import RendezvousError, RingReduceError
from ringreduce.vocabulary.times import milliseconds

_log = logging.getLogger(__name__)

_HELLO = struct.Struct("<8sQQ")  # magic, job, sender's rank
_DESCRIPTORS, _CREDENTIALS = struct.Struct("2i"), struct.Struct("3i")
_MAGIC = b"RRR-UNIX"
_QUEUE = 1024  # connections that wait to be accepted
# Accepted in a row, before the clock, and what else may end the wait, are looked at again.
_ACCEPTED_AT_ONCE = 64
# Connections without a hello, beside one of each rank. Of more the oldest is closed: what is no
# rank may stay silent for ever, and a rank has no more to do before its hello than to send it.
_SILENT_MAX = 16
_REMEDY = (
    "If these ranks do not share a host, give RINGREDUCE_HOST_ID different values on each; or use "
    "RINGREDUCE_TRANSPORT=zmq."
)
_FULL_REMEDY = (
    "Processes of this host that are no ranks of the job fill its queue (`ss -xp`, as root, shows "
    "which): end them, or use RINGREDUCE_TRANSPORT=zmq."
)


def memory_domain() -> str:
    """Text that is equal for processes that can reach each other by `Mesh`."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    # Each network namespace, and so each container, has its own abstract addresses.
    return f"{boot}.{os.stat('/proc/self/ns/net').st_ino}.{os.geteuid()}"


class Mesh:
    """This rank's connections to the others of its host; OSError if there is no socket."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.name = f"ringreduce-{secrets.token_hex(16)}"
        try:
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(_QUEUE)
        except OSError:
            self._listener.close()
            raise
        # Connections by rank, to the others and from them.
        self._outgoing: dict[int, socket.socket] = {}
        self._incoming: dict[int, socket.socket] = {}
        # Those that were accepted and have said nothing, by descriptor, the oldest first.
        self._silent: dict[int, socket.socket] = {}
        self._turned_away = 0  # connections of other users
        self.processes: dict[int, tuple[int, int]] = {}  # of the others, by rank, once connected
        # Files in which they say how far they have come, until `take_standings`.
        self._standings: dict[int, int] = {}
        self._poll = select.poll()
        # Several threads may wait for other ranks, and a signal handler may close this.
        self._lock = threading.RLock()
        inherited.watch(self)

    def connect(
        self,
        names: Mapping[int, str],
        *,
        rank: int,
        size: int,
        job: int,
        descriptor: int,
        standing: int,
        timeout_s: float,
        check: Callable[[], None],
    ) -> dict[int, int]:
        """Send this rank's segment to all others; return the descriptors of theirs, by rank.

        Each rank connects to every other one; `names` are by rank where all listen. All must know
        `job`. `descriptor` is this rank's own segment, `standing` the file of its standing, `size`
        the job's. While it waits it calls `check`, which may raise.

        Raises RendezvousError if a rank did not connect within `timeout_s`, or cannot be reached.
        """
        deadline = time.monotonic() + timeout_s
        who: dict[str, Any] = {"rank": rank, "size": size}
        others = [other for other in names if other != rank]
        unreached, missing = list(others), list(others)
        descriptors: dict[int, int] = {}
        files, remedy = (descriptor, standing), _REMEDY
        self._listener.setblocking(False)
        arriving = select.poll()
        arriving.register(self._listener, select.POLLIN)
        try:
            while unreached or len(descriptors) < len(others):
                check()
                for other in list(unreached):
                    missing = [other]
                    if self._reach(other, names[other], _HELLO.pack(_MAGIC, job, rank), files):
                        unreached.remove(other)
                        arriving.register(self._outgoing[other], select.POLLIN)
                missing = unreached or [other for other in others if other not in descriptors]
                if time.monotonic() > deadline:
                    if unreached:
                        full, remedy = f"@{names[missing[0]]}", _FULL_REMEDY
                        raise TimeoutError(f"its socket {full} had no room in {timeout_s:g} s")
                    raise TimeoutError("no connection came in time")
                # A full queue is not reported when it has room: what is unreached is tried again.
                ready = {number for number, _ in arriving.poll(milliseconds(TIMES.poll_s))}
                take = partial(self._take, others=others, job=job, descriptors=descriptors)
                for number in ready & self._silent.keys():
                    if take(self._silent[number]):
                        arriving.unregister(number)
                        del self._silent[number]
                is_empty = self._accept(arriving, take, len(others), who)
                ended = [r for r, end in self._outgoing.items() if end.fileno() in ready]
                # Nothing is sent that way. What a rank sent before it ended may still be queued.
                if ended and is_empty:
                    missing = ended
                    raise ConnectionError("it has ended, or has another job")
        except BaseException as error:
            for received in (*descriptors.values(), *self.take_standings().values()):
                os.close(received)
            if not isinstance(error, OSError) or isinstance(error, RingReduceError):
                raise
            text = f"could not share memory with rank {', '.join(map(str, missing))}: {error}"
            if self._turned_away:
                text += f" (turned away: {self._turned_away} connections of other users)"
            raise RendezvousError(text, **who, peer=missing[0], remedy=remedy) from error
        finally:
            for connection in self._silent.values():
                connection.close()
            self._silent.clear()
        self._listener.close()
        for other, connection in self._incoming.items():
            if (process := _identified(credentials(connection)[0])) is not None:
                self.processes[other] = process
            self._poll.register(connection, select.POLLIN)
        return descriptors

    def _reach(self, other: int, name: str, hello: bytes, files: Sequence[int]) -> bool:
        """Connect to a rank and send it this one's segment; return False if its queue is full."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._outgoing[other] = connection
        connection.setblocking(False)
        try:
            connection.connect(f"\0{name}")
        except BlockingIOError:
            connection.close()
            del self._outgoing[other]
            return False
        except ConnectionRefusedError:
            raise ConnectionError("it has ended, or has closed its socket") from None
        if not is_ours(connection):  # Before it gets our memory.
            raise ConnectionError("another user's process listens in its place")
        socket.send_fds(connection, [hello], files)
        return True

    def _accept(
        self,
        arriving: select.poll,
        take: Callable[[socket.socket], bool],
        count: int,
        who: Mapping[str, int],
    ) -> bool:
        """Accept some connections, of `count` ranks and of strangers; return whether it was all."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return True
            connection.setblocking(False)
            process, user = credentials(connection)
            if not is_ours(connection):
                connection.close()
                self._turned_away += 1
                if self._turned_away == 1:
                    _log.warning(
                        "[%d/%d] turned away a connection of user %d (process %d) at the socket "
                        "where it awaits the ranks of this host",
                        *(who["rank"], who["size"], user, process),
                    )
            elif not take(connection):
                if len(self._silent) >= count + _SILENT_MAX:
                    oldest = next(iter(self._silent))
                    arriving.unregister(oldest)
                    self._silent.pop(oldest).close()
                self._silent[connection.fileno()] = connection
                arriving.register(connection, select.POLLIN)
        return False

    def _take(
        self,
        connection: socket.socket,
        others: Sequence[int],
        job: int,
        descriptors: dict[int, int],
    ) -> bool:
        """Read a hello and keep the connection, or close it; return False if none has come yet."""
        try:
            answer = _receive(connection, job)
        except BlockingIOError:
            return False
        except OSError:  # It is lost; the right one may still come.
            answer = None
        if answer is not None:
            rank, received = answer
            if rank in others and rank not in descriptors:
                self._incoming[rank] = connection
                descriptors[rank], self._standings[rank] = received
                return True
            for each in received:
                os.close(each)
        connection.close()
        return True

    def take_standings(self) -> dict[int, int]:
        """The files of the others' standings, once; the caller closes them."""
        taken, self._standings = self._standings, {}
        return taken

    def gone(self) -> frozenset[int]:
        """Each rank whose connection has ended: it has closed it, or died."""
        with self._lock:
            ready = {descriptor for descriptor, _ in self._poll.poll(0)} if self._incoming else ()
            return frozenset(r for r, end in self._incoming.items() if end.fileno() in ready)

    def close_inherited(self) -> None:
        """In a forked child: close its copies, which end nothing while the parent has its own."""
        kept = self._outgoing, self._incoming, self._silent
        for connection in (self._listener, *(one for ends in kept for one in ends.values())):
            connection.close()

    def close(self) -> None:
        with self._lock:
            self.close_inherited()
            self._incoming.clear()


def end_process(process: tuple[int, int]) -> bool:
    """Kill the process with that number and start; return whether it was there, and not ending."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(process[0])
        try:
            # Another one that has got its number meanwhile has begun later.
            if _identified(process[0]) == process and not _is_ending(process[0]):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False


def has_ended(process: tuple[int, int]) -> bool:
    """Whether the process is seen to have ended, all of it; False where that cannot be seen."""
    try:
        descriptor = os.pidfd_open(process[0])
    except OSError as error:
        return error.errno == errno.ESRCH
    try:
        now = _identified(process[0])
        if now is not None and now != process:  # Its number is another one's.
            return True
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        return bool(ended.poll(0))
    finally:
        os.close(descriptor)


def is_stopped(process: tuple[int, int]) -> bool:
    """Whether it is there, and stopped, as by SIGSTOP or a debugger."""
    return _identified(process[0]) == process and _facts(process[0])[:1] in ([b"T"], [b"t"])


def _identified(process: int) -> tuple[int, int] | None:
    """The process and when it began, in ticks; None if it is gone, or not seen from here."""
    facts = _facts(process)
    return (process, int(facts[19])) if facts else None


def _is_ending(process: int) -> bool:
    """Whether it does nothing more but give back what it has; PF_EXITING of the kernel."""
    return len(facts := _facts(process)) > 6 and bool(int(facts[6]) & 4)


def _facts(process: int) -> list[bytes]:
    """Its state and what else the kernel says (proc_pid_stat(5), from the third field on)."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
    return []


def credentials(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end and its user, by SO_PEERCRED."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(packed)
    return process, user


def is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user."""
    return credentials(connection)[1] == os.geteuid()


def _receive(connection: socket.socket, job: int) -> tuple[int, tuple[int, int]] | None:
    """Rank, and segment and standing, of the other end; None when it is not of this job."""
    # Not socket.recv_fds: it drops its flags, and without close-on-exec every program that
    # this process starts would keep the others' memory.
    data, ancillary, _, _ = connection.recvmsg(
        _HELLO.size, socket.CMSG_LEN(_DESCRIPTORS.size), socket.MSG_CMSG_CLOEXEC
    )
    received = [
        descriptor
        for level, kind, packed in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (descriptor,) in struct.iter_unpack("i", packed)
    ]
    if len(data) == _HELLO.size and len(received) == 2:
        magic, their_job, rank = _HELLO.unpack(data)
        if (magic, their_job) == (_MAGIC, job):
            return int(rank), (received[0], received[1])
    for descriptor in received:
        os.close(descriptor)
    return None
