"""How ranks that know only one address come to know each other's.

Every rank but 0 sends a Hello to rank 0's rendezvous address: who it is, where its own
socket listens, what it was started with. Rank 0 compares them with its own, and when all
have come answers each with the same Welcome: the table of addresses and a random number
that marks the frames of this ring. Then the rendezvous closes; no data passes through it.

A Hello of another job, or for a rank that is taken, is turned away alone; the job goes on
waiting for the right one. A rightful member that runs another version or other settings
ends the formation on every rank, since the ring can never be right.

Messages are msgpack of typed records (msgspec), limited in size. Nothing is unpickled.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import socket as sockets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq

from ringreduce._version import __version__
from ringreduce.config import TRANSPORTS, Config, host_and_port
from ringreduce.errors import ConfigError, MismatchError, RendezvousError, RingReduceError
from ringreduce.wire import WIRE_VERSION

__all__ = ["Table", "bind_address", "host_identity", "meet"]

_log = logging.getLogger(__name__)

# Of one message. A table of a thousand ranks is about 60 KiB.
_MESSAGE_BYTES_MAX = 1 << 20
_POLL_MS = 50
# Strangers may knock; remembering and reporting a few is enough.
_REFUSALS_KEPT = 8


class _Hello(msgspec.Struct, tag=True):
    version: str
    wire_version: int
    job_id: str
    rank: int
    size: int
    address: str
    host: str
    memory: str
    settings: dict[str, int]
    # What may differ and work all the same; "" from who does not say.
    python: str = ""
    numpy: str = ""


class _Welcome(msgspec.Struct, tag=True):
    job: int
    addresses: list[str]
    hosts: list[str]
    memory: list[str]


class _Refusal(msgspec.Struct, tag=True):
    text: str
    mismatch: bool
    peer: int | None


@dataclass(frozen=True)
class Table:
    """What every rank knows once the ranks have met.

    Attributes:
        job: 64 random bits in the header of every frame of this ring.
        addresses: where each rank's sockets listen.
        hosts: name of each rank's host; equal for ranks that share one.
        memory: what each rank announced of memory that it can share; empty for none.
    """

    job: int
    addresses: tuple[str, ...]
    hosts: tuple[str, ...]
    memory: tuple[str, ...]


def meet(config: Config, address: str, memory: str = "") -> tuple[Table, Callable[[], None]]:
    """Exchange addresses with all ranks.

    Args:
        config: this rank's settings; `config.size` is at least 2.
        address: where this rank's own sockets listen; the others get it as it is.
        memory: how ranks of the same host reach its memory; empty: they cannot.

    Returns:
        The table, and a function that closes this rank's side of the rendezvous. Call it
        once the ring is known to work: on rank 0 it waits until all answers have left.

    Raises:
        RendezvousError: not all ranks came within ``join_timeout_s``, rank 0 did not answer,
            its port is taken, or it turned this rank away.
        MismatchError: a rank runs another version or has other settings.
    """
    hello = _Hello(
        version=__version__,
        wire_version=WIRE_VERSION,
        job_id=config.job_id,
        rank=config.rank,
        size=config.size,
        address=address,
        host=config.host_id or host_identity(),
        memory=memory,
        settings={
            "segment_bytes": config.segment_bytes,
            "streams": config.streams,
            "transport": TRANSPORTS.index(config.transport),
        },
        python=platform.python_version(),
        numpy=np.__version__,
    )
    context = zmq.Context(io_threads=1)
    kind = zmq.ROUTER if config.rank == 0 else zmq.DEALER
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.IPV6, 1)
    # Answers get this long to leave at closing time.
    socket.setsockopt(zmq.LINGER, 1000)

    def close() -> None:
        socket.close()
        context.term()

    try:
        if config.rank == 0:
            table = _receive_members(socket, config, hello)
        else:
            table = _ask_to_join(socket, config, hello)
    except BaseException:
        close()
        raise
    return table, close


def bind_address(config: Config) -> str:
    """Address for this rank's own socket to listen on, any free port.

    The rendezvous's host on rank 0; elsewhere the address of the interface that leads to it,
    so that a job on one host never listens beyond the loopback interface.

    Raises:
        RendezvousError: the rendezvous host's name does not resolve or cannot be reached.
    """
    family, target = _resolve(config)
    if config.rank == 0:
        return _endpoint(target[0], "*")
    try:
        with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
            probe.connect(target)  # Chooses a route; a datagram socket sends nothing here.
            return _endpoint(probe.getsockname()[0], "*")
    except OSError as error:
        raise _unreachable(config, error) from error


def _resolve(config: Config) -> tuple[int, tuple[str, int]]:
    """Address family and numeric address of the rendezvous; libzmq binds no host names."""
    host, port = host_and_port(config.rendezvous)
    try:
        family, _, _, _, target = sockets.getaddrinfo(host, port, type=sockets.SOCK_DGRAM)[0]
    except OSError as error:
        raise _unreachable(config, error) from error
    return family, (str(target[0]), port)


def _endpoint(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _unreachable(config: Config, error: OSError) -> RendezvousError:
    return RendezvousError(
        f"cannot reach the rendezvous {config.rendezvous}: {error.strerror or error}",
        rank=config.rank,
        size=config.size,
        remedy="Check RINGREDUCE_RENDEZVOUS.",
    )


def host_identity() -> str:
    """A name that processes share exactly when they run on the same host."""
    return platform.node() or "localhost"


def _receive_members(socket: zmq.Socket[bytes], config: Config, own: _Hello) -> Table:
    """Rank 0's side: wait until every rank has said a valid Hello, then welcome them all."""
    _listen(socket, config)
    deadline = time.monotonic() + config.join_timeout_s
    members: dict[int, tuple[bytes, _Hello]] = {0: (b"", own)}
    refused: list[str] = []
    try:
        while len(members) < config.size:
            if time.monotonic() >= deadline:
                raise _incomplete(config, members, refused)
            if not socket.poll(_POLL_MS):
                continue
            parts = socket.recv_multipart()
            try:
                hello = msgspec.msgpack.decode(parts[-1], type=_Hello)
            except msgspec.MsgspecError:
                _note(refused, "a message that is no hello")
                continue
            _admit(socket, config, own, members, refused, parts[0], hello)
    except RingReduceError as error:
        for identity, _ in list(members.values())[1:]:
            _refuse(socket, identity, error)
        raise
    ordered = [members[rank] for rank in range(config.size)]
    _warn_of_versions([hello for _, hello in ordered])
    welcome = _Welcome(
        job=secrets.randbits(64),
        addresses=[hello.address for _, hello in ordered],
        hosts=[hello.host for _, hello in ordered],
        memory=[hello.memory for _, hello in ordered],
    )
    for identity, _ in ordered[1:]:
        socket.send_multipart([identity, msgspec.msgpack.encode(welcome)])
    return _table(welcome)


def _warn_of_versions(hellos: Sequence[_Hello]) -> None:
    """Name ranks that run another Python or numpy than rank 0, which can change results."""
    own, size = hellos[0], len(hellos)
    others = [
        f"rank {hello.rank} Python {hello.python[:32]}, numpy {hello.numpy[:32]}"
        for hello in hellos
        if hello.python and (hello.python, hello.numpy) != (own.python, own.numpy)
    ]
    if others:
        _log.warning(
            "[0/%d] ranks run different versions, so results may differ: rank 0 Python %s, "
            "numpy %s; %s",
            *(size, own.python, own.numpy, "; ".join(others[:_REFUSALS_KEPT])),
        )


def _refuse(socket: zmq.Socket[bytes], identity: bytes, error: RingReduceError) -> None:
    refusal = _Refusal(
        text=error.message, mismatch=isinstance(error, MismatchError), peer=error.peer
    )
    socket.send_multipart([identity, msgspec.msgpack.encode(refusal)])


def _listen(socket: zmq.Socket[bytes], config: Config) -> None:
    _, (host, port) = _resolve(config)
    if config.rendezvous_fd is not None and _is_listening(config.rendezvous_fd, port):
        os.set_inheritable(config.rendezvous_fd, False)  # It came through an exec; once is enough.
        socket.setsockopt(zmq.USE_FD, config.rendezvous_fd)
    try:
        socket.bind(_endpoint(host, port))
    except zmq.ZMQError as error:
        raise RendezvousError(
            f"cannot listen on {config.rendezvous} for the other ranks: {error.strerror}",
            rank=0,
            size=config.size,
            remedy="Another program, or another job, has that port, or the address is not this "
            "host's: choose another in RINGREDUCE_RENDEZVOUS.",
        ) from error


def _is_listening(descriptor: int, port: int) -> bool:
    """Whether the inherited socket still is one; a process's second ring finds it used up."""
    try:
        with sockets.socket(fileno=os.dup(descriptor)) as inherited:
            listens = inherited.getsockopt(sockets.SOL_SOCKET, sockets.SO_ACCEPTCONN)
            return bool(listens) and inherited.getsockname()[1] == port
    except OSError:
        return False


def _admit(
    socket: zmq.Socket[bytes],
    config: Config,
    own: _Hello,
    members: dict[int, tuple[bytes, _Hello]],
    refused: list[str],
    identity: bytes,
    hello: _Hello,
) -> None:
    """Add `hello` to `members`, or turn it away; raise when it shows that the job is wrong."""
    who = f"rank {hello.rank} ({hello.host[:64]})"
    if hello.job_id != own.job_id:
        why = f"{who} belongs to another job"
    elif not 0 <= hello.rank < max(hello.size, config.size):
        why = f"{who} has no place in a ring of {config.size}"
    elif hello.rank in members and hello.size == own.size:
        why = f"rank {hello.rank} came twice, the second time from {hello.host[:64]}"
    else:
        for what, theirs, ours in (
            ("ringreduce", hello.version, own.version),
            ("wire version", hello.wire_version, own.wire_version),
            ("size", hello.size, own.size),
            ("settings", hello.settings, own.settings),
        ):
            if theirs != ours:
                error = MismatchError(
                    f"found that rank {hello.rank} has {what} {theirs}, rank 0 has {ours}",
                    rank=0,
                    size=config.size,
                    peer=hello.rank,
                    remedy="Start all ranks with the same ringreduce and the same RINGREDUCE_* "
                    "settings.",
                )
                # The offender may be a second one of its rank, so it is told by itself.
                _refuse(socket, identity, error)
                raise error
        members[hello.rank] = (identity, hello)
        return
    _note(refused, why)
    refusal = _Refusal(text=f"was turned away by rank 0: {why}", mismatch=False, peer=0)
    socket.send_multipart([identity, msgspec.msgpack.encode(refusal)])


def _note(refused: list[str], why: str) -> None:
    if len(refused) < _REFUSALS_KEPT:
        refused.append(why)
        _log.warning("rendezvous turned away: %s", why)


def _incomplete(
    config: Config, members: dict[int, tuple[bytes, _Hello]], refused: list[str]
) -> RendezvousError:
    missing = [rank for rank in range(config.size) if rank not in members]
    named = ", ".join(str(rank) for rank in missing[:16]) + (", ..." if len(missing) > 16 else "")
    text = (
        f"waited {config.join_timeout_s:g} s at {config.rendezvous} and "
        f"{'rank' if len(missing) == 1 else 'ranks'} {named} did not come"
    )
    if refused:
        text += f" (turned away: {'; '.join(refused)})"
    return RendezvousError(
        text,
        rank=0,
        size=config.size,
        peer=missing[0],
        remedy="Read the log of the missing ranks; raise RINGREDUCE_JOIN_TIMEOUT_S if they "
        "start slowly.",
    )


def _ask_to_join(socket: zmq.Socket[bytes], config: Config, hello: _Hello) -> Table:
    """The other ranks' side: say Hello and wait for the table."""
    _, (host, port) = _resolve(config)
    socket.setsockopt(zmq.RECONNECT_IVL, _POLL_MS)  # Rank 0 may come later.
    socket.connect(_endpoint(host, port))
    socket.send(msgspec.msgpack.encode(hello))
    # A little longer than rank 0 waits: its answer names who is missing, ours could not.
    deadline = time.monotonic() + config.join_timeout_s + 0.5
    while not socket.poll(_POLL_MS):
        if time.monotonic() >= deadline:
            # A hello that nobody takes must not hold up the closing.
            socket.setsockopt(zmq.LINGER, 0)
            raise RendezvousError(
                f"got no answer from rank 0 at {config.rendezvous} in {config.join_timeout_s:g} s",
                rank=config.rank,
                size=config.size,
                peer=0,
                remedy="Check that rank 0 runs and that RINGREDUCE_RENDEZVOUS is its address.",
            )
    try:
        answer = msgspec.msgpack.decode(socket.recv(), type=_Welcome | _Refusal)
        if isinstance(answer, _Welcome) and all(
            len(column) == config.size for column in (answer.addresses, answer.hosts, answer.memory)
        ):
            return _table(answer)
    except msgspec.MsgspecError:
        answer = None
    if isinstance(answer, _Refusal):
        kind = MismatchError if answer.mismatch else RendezvousError
        told = answer.text if answer.peer == 0 else f"was told by rank 0: it {answer.text}"
        raise kind(
            told,
            rank=config.rank,
            size=config.size,
            peer=answer.peer,
            remedy="Start each rank once, all with the same job id, version and settings.",
        )
    raise ConfigError(
        f"got an answer from {config.rendezvous} that is not ringreduce's",
        rank=config.rank,
        size=config.size,
        remedy="Check RINGREDUCE_RENDEZVOUS.",
    )


def _table(welcome: _Welcome) -> Table:
    return Table(welcome.job, tuple(welcome.addresses), tuple(welcome.hosts), tuple(welcome.memory))
