"""How ranks that know only one address come to know each other's.

Every rank but 0 sends a Hello to rank 0's rendezvous address: who it is, where its own
socket listens, what it was started with. Rank 0 compares them with its own, and when all
have come answers each with the same Welcome: the table of addresses and a random number
that marks the frames of this ring. Then the rendezvous closes; no data passes through it.

A Hello of another job, or for a rank that is taken, is turned away alone; the job goes on
waiting for the right one. A rightful member that runs another version or other settings
ends the formation on every rank, since the ring can never be right.

With a secret all of it is encrypted, and nobody gets to say anything who has not got it
(`ringreduce.transport.security`); each rank announces the key by which it is known afterwards.

Messages are msgpack of typed records (msgspec), limited in size. Nothing is unpickled.
"""

from __future__ import annotations

import hmac
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
from zmq.utils.monitor import parse_monitor_message

from ringreduce._version import __version__
from ringreduce.pure.wire import WIRE_VERSION
from ringreduce.transport.address import endpoint, listens_on_loopback, resolve, unreachable
from ringreduce.transport.monitor import unwatch, watch
from ringreduce.transport.security import MECHANISMS, Authenticator, Security
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.errors import (
    ConfigError,
    MismatchError,
    RendezvousError,
    RingReduceError,
)
from ringreduce.vocabulary.times import milliseconds

__all__ = ["Table", "bind_address", "host_identity", "meet"]

_log = logging.getLogger(__name__)

# Of one message. A table of a thousand ranks is about 60 KiB.
_MESSAGE_BYTES_MAX = 1 << 20
# What decoding raises: text that is no UTF-8 is a ValueError of Python's, not one of msgspec's,
# and depth that has no end a RecursionError.
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
# Strangers may knock; remembering and reporting a few is enough.
_REFUSALS_KEPT = 8
# Further ones are not even answered. Ranks of other jobs are told why they are turned away.
_REFUSALS_ANSWERED = 256
# Messages that may wait on a connection; a rank says one.
_QUEUED_MAX = 16
# What others say of themselves is shown in errors and logs up to this length.
_SHOWN_CHARACTERS = 200
# A handshake can fail because the other side has just died. Not every time.
_FAILED_HANDSHAKES = 3
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class _Hello(msgspec.Struct, tag=True):
    version: str
    wire_version: int
    job_id: str
    rank: int
    size: int
    address: str
    control: str
    host: str
    memory: str
    settings: dict[str, int]
    key: str
    # What may differ and work all the same; "" from who does not say.
    python: str = ""
    numpy: str = ""


class _Welcome(msgspec.Struct, tag=True):
    job: int
    addresses: list[str]
    controls: list[str]
    hosts: list[str]
    memory: list[str]
    keys: list[str]


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
        controls: where each rank's control channel listens.
        hosts: name of each rank's host; equal for ranks that share one.
        memory: what each rank announced of memory that it can share; empty for none.
        keys: each rank's public key; empty without a secret.
    """

    job: int
    addresses: tuple[str, ...]
    controls: tuple[str, ...]
    hosts: tuple[str, ...]
    memory: tuple[str, ...]
    keys: tuple[str, ...]


def meet(
    config: Config,
    address: str,
    control: str,
    memory: str = "",
    security: Security | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Table, Callable[[], None]]:
    """Exchange addresses with all ranks.

    Args:
        config: this rank's settings; `config.size` is at least 2.
        address: where this rank's own sockets listen; the others get it as it is.
        control: the same of its control channel.
        memory: how ranks of the same host reach its memory; empty: they cannot.
        security: this rank's keys; by default what `config` asks for.
        meanwhile: called again and again while this waits.

    Returns:
        The table, and a function that closes this rank's side of the rendezvous. Call it
        once the ring is known to work: on rank 0 it waits until all answers have left.

    Raises:
        RendezvousError: not all ranks came within ``join_timeout_s``, rank 0 did not answer,
            its port is taken, or it turned this rank away.
        MismatchError: a rank runs another version or has other settings.
    """
    security = security or Security.of(config)
    hello = _Hello(
        version=__version__,
        wire_version=WIRE_VERSION,
        job_id=config.job_id,
        rank=config.rank,
        size=config.size,
        address=address,
        control=control,
        host=config.host_id or host_identity(),
        memory=memory,
        settings={
            **config.agreed(),
            # Follows from the address, which may look different on different hosts.
            "mechanism": MECHANISMS.index(security.mechanism),
        },
        key=security.public,
        python=platform.python_version(),
        numpy=np.__version__,
    )
    context = zmq.Context(io_threads=1)
    kind = zmq.ROUTER if config.rank == 0 else zmq.DEALER
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.RCVHWM, _QUEUED_MAX)
    socket.setsockopt(zmq.IPV6, 1)
    # Answers get this long to leave at closing time.
    socket.setsockopt(zmq.LINGER, 1000)
    failures = _Failures(socket)
    authenticator: Authenticator | None = None

    def close() -> None:
        if authenticator is not None:
            authenticator.close()
        failures.close()
        socket.close()
        context.term()

    try:
        if config.rank == 0:
            authenticator = security.serve_meeting(socket, context)
            table = _receive_members(socket, config, hello, failures, meanwhile)
        else:
            security.join_meeting(socket)
            table = _ask_to_join(socket, config, hello, failures, meanwhile)
        announced = (*table.addresses, *table.controls)
        if security.mechanism == "NULL" and not all(map(listens_on_loopback, announced)):
            raise RendezvousError(
                "was told of a rank that listens on the network, and the job has no secret",
                rank=config.rank,
                size=config.size,
                remedy="Give all ranks the same RINGREDUCE_SECRET.",
            )
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
    family, target = resolve(config)
    if config.rank == 0:
        return endpoint(target[0], "*")
    try:
        with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
            probe.connect(target)  # Chooses a route; a datagram socket sends nothing here.
            return endpoint(probe.getsockname()[0], "*")
    except OSError as error:
        raise unreachable(config, error) from error


class _Failures:
    """Counts the handshakes at `socket` that failed; such connections are never heard of else."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket, self._count = socket, 0
        # Whether one was in another language: libzmq does not try to connect again then.
        self.is_final = False
        self._events = watch(socket, int(_HANDSHAKE_FAILED))

    def count(self) -> int:
        """Their number until now."""
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())
            self.is_final |= event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            self._count += 1
        return self._count

    def close(self) -> None:
        unwatch(self._socket, self._events)


def host_identity() -> str:
    """A name that processes share exactly when they run on the same host."""
    return platform.node() or "localhost"


def _receive_members(
    socket: zmq.Socket[bytes],
    config: Config,
    own: _Hello,
    failures: _Failures,
    meanwhile: Callable[[], None],
) -> Table:
    """Rank 0's side: wait until every rank has said a valid Hello, then welcome them all."""
    _listen(socket, config)
    deadline = time.monotonic() + config.join_timeout_s
    members: dict[int, tuple[bytes, _Hello]] = {0: (b"", own)}
    refused: list[str] = []
    try:
        while len(members) < config.size:
            if time.monotonic() >= deadline:
                raise _incomplete(config, members, refused, failures.count())
            failures.count()  # They must not pile up.
            meanwhile()
            if not socket.poll(milliseconds(TIMES.poll_s)):
                continue
            parts = socket.recv_multipart()
            try:
                hello = msgspec.msgpack.decode(parts[-1], type=_Hello)
            except _UNREADABLE:
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
        controls=[hello.control for _, hello in ordered],
        hosts=[hello.host for _, hello in ordered],
        memory=[hello.memory for _, hello in ordered],
        keys=[hello.key for _, hello in ordered],
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
    _, (host, port) = resolve(config)
    if config.rendezvous_fd is not None and _is_listening(config.rendezvous_fd, port):
        os.set_inheritable(config.rendezvous_fd, False)  # It came through an exec; once is enough.
        socket.setsockopt(zmq.USE_FD, config.rendezvous_fd)
    try:
        socket.bind(endpoint(host, port))
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
    who = f"rank {hello.rank} ({_shown(hello.host)})"
    theirs, ours = (text.encode(errors="replace") for text in (hello.job_id, own.job_id))
    if not hmac.compare_digest(theirs, ours):
        why = f"{who} belongs to another job"
    elif not 0 <= hello.rank < max(hello.size, config.size):
        why = f"{who} has no place in a ring of {config.size}"
    elif hello.rank in members and hello.size == own.size:
        why = f"rank {hello.rank} came twice, the second time from {_shown(hello.host)}"
    else:
        for what, other, this in (
            ("ringreduce", hello.version, own.version),
            ("wire version", hello.wire_version, own.wire_version),
            ("size", hello.size, own.size),
            ("settings", hello.settings, own.settings),
        ):
            if other != this:
                error = MismatchError(
                    f"found that rank {hello.rank} has {what} {_shown(other)}, rank 0 has {this}",
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
    if len(refused) > _REFUSALS_ANSWERED:
        return
    refusal = _Refusal(text=f"was turned away by rank 0: {why}", mismatch=False, peer=0)
    socket.send_multipart([identity, msgspec.msgpack.encode(refusal)])


def _shown(value: object) -> str:
    """What a stranger may have written, safe to be read on a terminal."""
    text = str(value)[:_SHOWN_CHARACTERS]
    return text.encode("unicode_escape").decode()


def _note(refused: list[str], why: str) -> None:
    """Remember, and log the first few."""
    if len(refused) <= _REFUSALS_ANSWERED:
        refused.append(why)
    if len(refused) <= _REFUSALS_KEPT:
        _log.warning("rendezvous turned away: %s", why)


def _incomplete(
    config: Config, members: dict[int, tuple[bytes, _Hello]], refused: list[str], failures: int
) -> RendezvousError:
    missing = [rank for rank in range(config.size) if rank not in members]
    named = ", ".join(str(rank) for rank in missing[:16]) + (", ..." if len(missing) > 16 else "")
    text = (
        f"waited {config.join_timeout_s:g} s at {config.rendezvous} and "
        f"{'rank' if len(missing) == 1 else 'ranks'} {named} did not come"
    )
    named_refusals = refused[:_REFUSALS_KEPT]
    if failures:
        named_refusals.append(f"{failures} connections that could not show the job's secret")
    if named_refusals:
        text += f" (turned away: {'; '.join(named_refusals)})"
    return RendezvousError(
        text,
        rank=0,
        size=config.size,
        peer=missing[0],
        remedy="Read the log of the missing ranks; raise RINGREDUCE_JOIN_TIMEOUT_S if they "
        "start slowly.",
    )


def _ask_to_join(
    socket: zmq.Socket[bytes],
    config: Config,
    hello: _Hello,
    failures: _Failures,
    meanwhile: Callable[[], None],
) -> Table:
    """The other ranks' side: say Hello and wait for the table."""
    _, (host, port) = resolve(config)
    # Rank 0 may be importing still, while its port is open already: that is no failure.
    socket.setsockopt(zmq.HANDSHAKE_IVL, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, milliseconds(TIMES.poll_s))  # Rank 0 may come later.
    socket.connect(endpoint(host, port))
    socket.send(msgspec.msgpack.encode(hello))
    # A little longer than rank 0 waits: its answer names who is missing, ours could not.
    deadline = time.monotonic() + config.join_timeout_s + TIMES.answer_s
    while not socket.poll(milliseconds(TIMES.poll_s)):
        meanwhile()
        if failures.count() >= _FAILED_HANDSHAKES or failures.is_final:
            socket.setsockopt(zmq.LINGER, 0)
            raise RendezvousError(
                f"was refused in the handshake at {config.rendezvous}: what listens there does "
                "not know this job's secret, or is no ringreduce",
                rank=config.rank,
                size=config.size,
                peer=0,
                remedy="All ranks need the same RINGREDUCE_SECRET (all or none) and the same "
                "RINGREDUCE_JOB_ID.",
            )
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
        if isinstance(answer, _Welcome):
            columns = (answer.addresses, answer.controls, answer.hosts, answer.memory, answer.keys)
            if all(len(column) == config.size for column in columns):
                return _table(answer)
    except _UNREADABLE:
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
    return Table(
        job=welcome.job,
        addresses=tuple(welcome.addresses),
        controls=tuple(welcome.controls),
        hosts=tuple(welcome.hosts),
        memory=tuple(welcome.memory),
        keys=tuple(welcome.keys),
    )
