"""Unix sockets between the ranks of a host: they pass segments and show which rank is lost.

Each rank listens on an abstract address (in no file system; it ends with the process) and stays
connected with every other rank of its host; the kernel names the user at the other end, and other
users are refused. They carry nothing afterwards: one that ends shows that its rank has gone.
"""

import contextlib
import os
import secrets
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ringreduce.transport import inherited
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import RendezvousError, RingReduceError
from ringreduce.vocabulary.times import milliseconds

_HELLO = struct.Struct("<8sQQ")  # magic, job, sender's rank
_DESCRIPTOR, _CREDENTIALS = struct.Struct("i"), struct.Struct("3i")
_MAGIC = b"RRR-UNIX"


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
            self._listener.listen(1024)
        except OSError:
            self._listener.close()
            raise
        # Connections by rank, to the others and from them.
        self._outgoing: dict[int, socket.socket] = {}
        self._incoming: dict[int, socket.socket] = {}
        self.processes: dict[int, tuple[int, int]] = {}  # of the others, by rank, once connected
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
        timeout_s: float,
        check: Callable[[], None],
    ) -> dict[int, int]:
        """Send this rank's segment to all others; return the descriptors of theirs, by rank.

        Each rank connects to every other one; `names` are by rank where all listen. All must know
        `job`. `descriptor` is this rank's own segment, `size` the job's. While it waits it calls
        `check`, which may raise.

        Raises RendezvousError if a rank did not connect within `timeout_s`, or cannot be reached.
        """
        deadline = time.monotonic() + timeout_s
        others = [other for other in names if other != rank]
        descriptors: dict[int, int] = {}
        ended: list[int] = []
        arriving = select.poll()
        arriving.register(self._listener, select.POLLIN)
        try:
            for other in others:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._outgoing[other] = connection
                connection.connect(f"\0{names[other]}")
                if not _is_ours(connection):  # Before it gets our memory.
                    raise ConnectionError("another user's process listens in its place")
                socket.send_fds(connection, [_HELLO.pack(_MAGIC, job, rank)], [descriptor])
                arriving.register(connection, select.POLLIN)
            while len(descriptors) < len(others):
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError("no connection came in time")
                ready = [descriptor for descriptor, _ in arriving.poll(milliseconds(TIMES.poll_s))]
                if self._listener.fileno() in ready:
                    self._accept(descriptors, others, job)
                elif ready:  # Nothing is sent that way, so it has ended.
                    ended = [r for r, end in self._outgoing.items() if end.fileno() in ready]
                    raise ConnectionError("it has ended, or has another job")
        except (OSError, RingReduceError) as error:
            missing = ended or [other for other in others if other not in descriptors]
            for received in descriptors.values():
                os.close(received)
            if isinstance(error, RingReduceError):
                raise
            raise RendezvousError(
                f"could not share memory with rank {', '.join(map(str, missing))}: {error}",
                rank=rank,
                size=size,
                peer=missing[0],
                remedy="If these ranks do not share a host, give RINGREDUCE_HOST_ID different "
                "values on each; or use RINGREDUCE_TRANSPORT=zmq.",
            ) from error
        self._listener.close()
        for other, connection in self._incoming.items():
            if (process := _identified(_credentials(connection)[0])) is not None:
                self.processes[other] = process
            self._poll.register(connection, select.POLLIN)
        return descriptors

    def _accept(self, descriptors: dict[int, int], others: Sequence[int], job: int) -> None:
        """Accept a connection, if it is from one of the `others` that has none yet."""
        connection, _ = self._listener.accept()
        connection.settimeout(TIMES.hello_s)
        with contextlib.suppress(OSError):  # A stranger, or lost: the right one may still come.
            answer = _receive(connection, job) if _is_ours(connection) else None
            if answer is not None:
                rank, received = answer
                if rank in others and rank not in descriptors:
                    self._incoming[rank], descriptors[rank] = connection, received
                    return
                os.close(received)
        connection.close()

    def gone(self) -> frozenset[int]:
        """Each rank whose connection has ended: it has closed it, or died."""
        with self._lock:
            ready = {descriptor for descriptor, _ in self._poll.poll(0)} if self._incoming else ()
            return frozenset(r for r, end in self._incoming.items() if end.fileno() in ready)

    def close_inherited(self) -> None:
        """In a forked child: close its copies, which end nothing while the parent has its own."""
        for connection in (self._listener, *self._outgoing.values(), *self._incoming.values()):
            connection.close()

    def close(self) -> None:
        with self._lock:
            self.close_inherited()
            self._incoming.clear()


def end_process(process: tuple[int, int]) -> bool:
    """Kill the process with that number and start; return whether it was still there."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(process[0])
        try:
            # Another one that has got its number meanwhile has begun later.
            if _identified(process[0]) == process:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False


def is_stopped(process: tuple[int, int]) -> bool:
    """Whether it is there, and stopped, as by SIGSTOP or a debugger."""
    return _identified(process[0]) == process and _facts(process[0])[:1] in ([b"T"], [b"t"])


def _identified(process: int) -> tuple[int, int] | None:
    """The process and when it began, in ticks; None if it is gone, or not seen from here."""
    facts = _facts(process)
    return (process, int(facts[19])) if facts else None


def _facts(process: int) -> list[bytes]:
    """Its state and what else the kernel says (proc_pid_stat(5), from the third field on)."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
    return []


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end and its user, by SO_PEERCRED."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(packed)
    return process, user


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user."""
    return _credentials(connection)[1] == os.geteuid()


def _receive(connection: socket.socket, job: int) -> tuple[int, int] | None:
    """Rank and segment of the other end; None when it is not of this job."""
    # Not socket.recv_fds: it drops its flags, and without close-on-exec every program that
    # this process starts would keep the others' memory.
    data, ancillary, _, _ = connection.recvmsg(
        _HELLO.size, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
    )
    received = [
        descriptor
        for level, kind, packed in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (descriptor,) in _DESCRIPTOR.iter_unpack(packed)
    ]
    if len(data) == _HELLO.size and len(received) == 1:
        magic, their_job, rank = _HELLO.unpack(data)
        if (magic, their_job) == (_MAGIC, job):
            return int(rank), received[0]
    for descriptor in received:
        os.close(descriptor)
    return None
