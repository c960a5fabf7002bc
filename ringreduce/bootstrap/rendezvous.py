"""How ranks that know one address exchange all of theirs.

Every other rank sends a hello to the first one's rendezvous address. That one compares it with its
own (`ringreduce.bootstrap.admission`), and when all have joined answers each with the same table.
Then each rank reports to the first one, rank 0, which of those that it sends to it cannot reach,
and gets all reports. With a secret, messages are encrypted, and only those that have it send them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import platform
import socket as sockets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from ringreduce._version import __version__
from ringreduce.bootstrap.admission import Members
from ringreduce.bootstrap.hello import (
    FAILED_MAX,
    Failed,
    Hello,
    Refusal,
    Report,
    Reports,
    Table,
    read,
    shown,
)
from ringreduce.pure.wire import WIRE_VERSION
from ringreduce.transport.address import endpoint, is_literal, listens_on_loopback, resolve
from ringreduce.transport.authenticator import Authenticator
from ringreduce.transport.channel import Monitor
from ringreduce.transport.descriptors import borrowed
from ringreduce.transport.interfaces import hosts_of, meeting_hosts
from ringreduce.transport.routes import first_to_answer
from ringreduce.transport.security import Security
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.endpoints import host_and_port, is_loopback
from ringreduce.vocabulary.errors import ConfigError, MismatchError, RendezvousError
from ringreduce.vocabulary.times import milliseconds
from ringreduce.vocabulary.words import named

_log = logging.getLogger(__name__)

_MESSAGE_BYTES_MAX = 1 << 20  # a table of a thousand ranks is about 60 KiB
_QUEUED_MAX = 16  # messages queued on a connection; a rank sends one
_FAILED_HANDSHAKES = 3  # one or two failed handshakes can mean that the other side has just died
# Where users find the address, for errors.
_NAMED_IN = "RINGREDUCE_RENDEZVOUS (or MASTER_ADDR and MASTER_PORT, or TF_CONFIG)"
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Rendezvous:
    """One rank's side of the rendezvous: `meet`, then `exchange`.

    The ranks of a job of two or more meet at `config.rendezvous`, where the first listens. What
    each announces is as in `Table`. While it waits it calls `idle` again and again. Raises
    RendezvousError if the first rank cannot listen.
    """

    def __init__(
        self,
        config: Config,
        address: str,
        control: str,
        memory: str,
        *,
        standby: str,
        networks: tuple[str, ...],
        security: Security,
        idle: Callable[[], None],
    ) -> None:
        self._config, self._security, self._idle = config, security, idle
        hello = Hello(
            version=__version__,
            wire_version=WIRE_VERSION,
            job_id=config.job_id,
            **config.who,
            address=address,
            control=control,
            standby=standby,
            host=config.host_id or platform.node() or "localhost",
            memory=memory,
            settings=config.agreed(),
            # Compared too: it follows from the address, which hosts may resolve differently, and
            # from what libsodium has.
            encryption=security.encryption,
            key=security.public,
            python=platform.python_version(),
            numpy=np.__version__,
            networks=networks,
        )
        self._members = Members(config, hello)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER if self._is_first else zmq.DEALER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_MAX)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.LINGER, milliseconds(TIMES.linger_s))
        self._failures = _Failures(self._socket)
        self._authenticator: Authenticator | None = None
        self._deadline = time.monotonic() + config.join_timeout_s
        self._reminds_s = time.monotonic() + TIMES.remind_s
        try:
            if self._is_first:
                self._authenticator = security.serve_meeting(self._socket, self._context)
                _listen(self._socket, config)
            else:
                self._connect(hello)
        except BaseException:
            self.close()
            raise

    def _connect(self, hello: Hello) -> None:
        hosts, port = resolve(self._config)
        is_name = not is_literal(host_and_port(self._config.rendezvous)[0])
        host = self._answering(hosts, port) if is_name else hosts[0]
        self._security.join_meeting(self._socket)
        # No limit: the first rank's port is open while it is still importing.
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 0)
        # That rank may start later.
        self._socket.setsockopt(zmq.RECONNECT_IVL, milliseconds(TIMES.poll_s))
        self._socket.connect(endpoint(host, port))
        self._send(hello)
        # A little longer than the first rank waits, since its answer names the missing ranks.
        self._deadline += TIMES.answer_s

    def _answering(self, hosts: Sequence[str], port: int) -> str:
        """The address of the first rank's name at which it answers; the first if none does.

        The name is resolved again meanwhile: that of a pod may still lead to the one before it.
        """
        resolved = time.monotonic()
        while (now := time.monotonic()) < self._deadline:
            if now - resolved >= TIMES.name_s:
                resolved = now
                with contextlib.suppress(RendezvousError):
                    hosts, _ = resolve(self._config)
            ways = {0: [(host, port) for host in hosts]}
            answered, _ = first_to_answer(
                self._config.rank, ways, TIMES.reconnect_s, lambda: None, 0.0
            )
            if answered:
                return answered[0]
            time.sleep(TIMES.poll_s)
        return hosts[0]

    def meet(self) -> Table:
        """Return the table once all ranks have joined.

        Raises RendezvousError if not all joined within ``join_timeout_s``, the first one did not
        answer or refused this rank, or a rank listens on the network without a secret;
        MismatchError for another version or settings; ConfigError: the answer is not ringreduce's.
        """
        while (table := self._admit() if self._is_first else self._await_answer()) is None:
            self._idle()
            if time.monotonic() >= self._reminds_s:
                self._reminds_s = math.inf
                self._say_who_is_missing()
        if self._security.data.mechanism == "NULL":
            # A rank that shares memory with all has no data sockets.
            members = table.members
            announced = ((m.address, m.control, m.standby) for m in members)
            ports = filter(None, itertools.chain.from_iterable(announced))
            hosts = [host for member in members for host in hosts_of(member.networks)]
            if not all(map(listens_on_loopback, ports)) or not all(map(is_loopback, hosts)):
                raise RendezvousError(
                    "was told of a rank that listens on the network, and the job has no secret",
                    **self._config.who,
                    remedy="Give all ranks the same RINGREDUCE_SECRET.",
                )
        return table

    # If the block raises, others miss this rank in `exchange`, or find out in the first call.
    guarded = contextlib.nullcontext

    def exchange(self, failed: Sequence[tuple[int, str, str]]) -> dict[int, list[tuple[Any, ...]]]:
        """Return the addresses that ranks could not reach, and why, by rank, once all have told.

        Raises RendezvousError if a rank did not come, or the first one did not answer.
        """
        report = Report(tuple(Failed(*row) for row in failed))
        # A rank reports once it has tried for `TIMES.reach_s`.
        self._deadline = time.monotonic() + TIMES.reach_s + self._config.timeout_s
        if self._is_first:
            reports = self._collect(report)
        else:
            self._deadline += TIMES.answer_s
            self._send(report)
            reports = self._await_reports()
        return {
            rank: [(way.peer, shown(way.address), shown(way.why)) for way in ways]
            for rank, ways in sorted(reports.items())
        }

    def _collect(self, own_report: Report) -> dict[int, tuple[Failed, ...]]:
        """The first rank's side of `exchange`."""
        identities = self._members.identities
        failed = {self._config.rank: own_report.failed}
        while len(failed) <= len(identities) and time.monotonic() < self._deadline:
            self._idle()
            if self._socket.poll(milliseconds(TIMES.poll_s)):
                identity, *_, data = self._socket.recv_multipart()
                # Another rank's late hello is no report.
                if identity in identities and isinstance(report := read(data), Report):
                    failed[identities[identity]] = report.failed
        missing = sorted(set(identities.values()) - set(failed))
        left = FAILED_MAX  # More would not fit into a message, and tell nobody more.
        for rank in sorted(failed):
            failed[rank] = failed[rank][:left]
            left -= len(failed[rank])
        answer: Reports | Refusal = Reports(failed)
        if missing:
            gone = missing[0]
            text = f"waited in vain for rank {gone}, which had joined, to connect to its peers"
            answer = Refusal(text, False, gone)
        for identity in identities:
            self._answer(identity, answer)
        if isinstance(answer, Refusal):
            raise self._error(answer.peer, answer.text)
        return failed

    def _await_reports(self) -> dict[int, tuple[Failed, ...]]:
        """The other ranks' side of `exchange`."""
        while time.monotonic() < self._deadline:
            self._idle()
            if self._socket.poll(milliseconds(TIMES.poll_s)):
                answer = read(self._socket.recv())
                if isinstance(answer, Refusal):
                    raise self._error(answer.peer, answer.text)
                if isinstance(answer, Reports):
                    return answer.failed
        raise self._error(0, "got no answer from rank 0, which had joined")

    def close(self) -> None:
        """Close this rank's side; on the first after sending answers, at most `TIMES.linger_s`."""
        if self._authenticator is not None:
            self._authenticator.close()
        self._failures.close()
        self._socket.close()
        self._context.term()

    def _admit(self) -> Table | None:
        """The first rank's side: once every rank has sent a valid hello, answer all."""
        members = self._members
        identity = b""
        try:
            if time.monotonic() >= self._deadline:
                raise members.incomplete(self._failures.count())
            self._failures.count()  # Empties the queue of events.
            if self._socket.poll(milliseconds(TIMES.poll_s)):
                identity, *_, data = self._socket.recv_multipart()
                hello = read(data)
                if not isinstance(hello, Hello):
                    members.note("a message that is no hello")
                elif (refusal := members.admit(identity, hello)) is not None:
                    self._answer(identity, refusal)
        except (MismatchError, RendezvousError) as error:
            refusal = Refusal(error.message, isinstance(error, MismatchError), error.peer)
            # Also to the rank at fault, which has not joined.
            for waiting in [*members.identities, *([identity] if identity else [])]:
                self._answer(waiting, refusal)
            raise
        if members.missing:
            return None
        table = members.table()
        for identity in members.identities:
            self._answer(identity, table)
        return table

    def _say_who_is_missing(self) -> None:
        config = self._config
        if self._is_first:
            text = f"waits at {config.rendezvous} for {named('rank', self._members.missing)}"
        elif not self._failures.is_connected:
            text = f"has no answer yet from rank 0 at {config.rendezvous}"
        else:
            return  # That rank says for whom it waits.
        _log.warning(
            "[%d/%d] %s; it gives up %g s after its start",
            *(config.rank, config.size, text, config.join_timeout_s),
        )

    def _send(self, message: Hello | Report) -> None:
        """Send to the first rank, without waiting: it is the answer that has a limit."""
        # After a protocol error libzmq has given the connection up, and would wait for ever for
        # another one. The hello of a rank that connects meanwhile is queued.
        with contextlib.suppress(zmq.Again):
            self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)

    def _answer(self, identity: bytes, answer: Table | Reports | Refusal) -> None:
        self._socket.send_multipart([identity, msgspec.msgpack.encode(answer)])

    def _await_answer(self) -> Table | None:
        """The other ranks' side: the table, once it has arrived."""
        config = self._config
        if not self._socket.poll(milliseconds(TIMES.poll_s)):
            self._look_for_trouble()
            return None
        answer = read(self._socket.recv())
        if isinstance(answer, Table) and len(answer.members) == config.size:
            return answer
        if isinstance(answer, Refusal):
            kind = MismatchError if answer.mismatch else RendezvousError
            text = answer.text if answer.peer == 0 else f"was told by rank 0: it {answer.text}"
            raise kind(
                text,
                **config.who,
                peer=answer.peer,
                remedy="Start each rank once, all with the same job id, version and settings.",
            )
        raise ConfigError(
            f"got an answer from {config.rendezvous} that is not ringreduce's",
            **config.who,
            remedy=f"Check {_NAMED_IN}.",
        )

    def _look_for_trouble(self) -> None:
        config = self._config
        refused = self._failures.count() >= _FAILED_HANDSHAKES or self._failures.is_final
        if not refused and time.monotonic() < self._deadline:
            return
        self._socket.setsockopt(zmq.LINGER, 0)  # An unsent hello must not delay `close`.
        if refused:
            raise self._error(
                0,
                f"was refused in the handshake at {config.rendezvous}: what listens there does "
                "not know this job's secret, or is no ringreduce",
                "All ranks need the same RINGREDUCE_SECRET (all or none) and the same "
                "RINGREDUCE_JOB_ID, or equal variables of their launcher (the whole cluster in "
                "TF_CONFIG). Hosts without a common home have different files "
                "~/.ringreduce/secret.",
            )
        first, *_ = resolve(config)[0]
        only_here = f": {first} leads to this host alone" if is_loopback(first) else ""
        raise self._error(
            0,
            f"got no answer from rank 0 at {config.rendezvous} in {config.join_timeout_s:g} s",
            f"Check that rank 0 runs and that {_NAMED_IN} has its address{only_here}.",
        )

    @property
    def _is_first(self) -> bool:
        return self._config.rank == 0

    def _error(self, peer: int | None, text: str, remedy: str | None = None) -> RendezvousError:
        remedy = remedy or f"Read rank {peer}'s log first."
        return RendezvousError(text, **self._config.who, peer=peer, remedy=remedy)


class _Failures:
    """Counts failed handshakes at `socket`; libzmq reports them only as monitor events."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._count = 0
        self.is_final = False  # After a protocol error libzmq does not connect again.
        self.is_connected = False  # another end has been let in, or has let this one in
        self._events = Monitor(socket, _HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def count(self) -> int:
        """Their number so far."""
        for kind, _ in self._events.read():
            self.is_final |= kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            self.is_connected |= kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._count += kind != zmq.EVENT_HANDSHAKE_SUCCEEDED
        return self._count

    def close(self) -> None:
        self._events.close()


def _listen(socket: zmq.Socket[bytes], config: Config) -> None:
    hosts, (_, port) = meeting_hosts(config), resolve(config)
    if config.rendezvous_fd is not None and _is_listening(config.rendezvous_fd, port):
        os.set_inheritable(config.rendezvous_fd, False)  # This process's children must not get it.
        socket.setsockopt(zmq.USE_FD, config.rendezvous_fd)
        hosts = hosts[:1]
    try:
        for host in hosts:
            socket.bind(endpoint(host, port))
    except zmq.ZMQError as error:
        raise RendezvousError(
            f"cannot listen on {config.rendezvous} for the other ranks: {error.strerror}",
            **config.who,
            remedy="Another program, or another job, has that port: choose another in "
            f"{_NAMED_IN}.",
        ) from error


def _is_listening(descriptor: int, port: int) -> bool:
    """Whether the inherited socket still listens; a process's first ring closes it."""
    try:
        with borrowed(descriptor) as inherited:
            listens = inherited.getsockopt(sockets.SOL_SOCKET, sockets.SO_ACCEPTCONN)
            return bool(listens) and inherited.getsockname()[1] == port
    except OSError:
        return False
