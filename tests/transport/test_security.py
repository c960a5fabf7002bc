"""Who gets in: by which keys, on which addresses, until when."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket as sockets
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zmq

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.membership import Membership
from ringreduce.testing import ring_of_threads
from ringreduce.transport import listening, sodium
from ringreduce.transport.address import listens_on_loopback
from ringreduce.transport.authenticator import Authenticator
from ringreduce.transport.security import MATERIAL_BYTES, Admission, Security
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.endpoints import is_loopback
from ringreduce.vocabulary.errors import (
    ConfigError,
    MismatchError,
    RendezvousError,
    RingReduceError,
)

SECRET = "correct horse battery staple"
MATERIAL = bytes(range(MATERIAL_BYTES))
# Nobody is let in or told no in more than a few milliseconds; a refusal is silence.
# Longer than libzmq waits for a handshake: who asks while the authenticator goes is refused then.
_SOON_MS = 15_000


def members(size: int, *, is_encrypted: bool = False, **fields: Any) -> list[Security]:
    """What the ranks of a job know of each other once they have met."""
    common = {"secret": SECRET, "job_id": "ours", "size": size, "hold_s": 20.0, **fields}
    found = [Security(rank=rank, is_encrypted=is_encrypted, **common) for rank in range(size)]
    for member in found:
        member.learn([other.public for other in found], MATERIAL, job=77)
    return found


def admissions(size: int, kind: str = "data", **fields: Any) -> list[Admission]:
    """What the ranks' sockets of that kind require: PLAIN for data, CURVE for control."""
    return [getattr(member, kind) for member in members(size, is_encrypted=True, **fields)]


class Port:
    """A socket of rank 0 at which others try to connect."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.context = zmq.Context()
        self.authenticator: Authenticator = admission.authenticator(self.context)
        self.socket = self.context.socket(zmq.PULL)
        admission.serve(self.socket, "data")
        self.socket.setsockopt(zmq.RCVTIMEO, _SOON_MS)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def allow(self, rank: int | None, domain: str = "data") -> None:
        expected = None if rank is None else self.admission.credentials(rank, 0)
        self.authenticator.allow(domain, expected)

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *exception: object) -> None:
        self.authenticator.close()
        self.context.destroy(linger=0)

    @contextlib.contextmanager
    def attempt(self, prepare: Callable[[zmq.Socket[bytes]], object]) -> Iterator[Visitor]:
        socket = self.context.socket(zmq.PUSH)
        prepare(socket)
        visitor = Visitor(socket)
        socket.connect(self.address)
        try:
            yield visitor
        finally:
            visitor.close()

    def admits(self, prepare: Callable[[zmq.Socket[bytes]], object]) -> bool:
        with self.attempt(prepare) as visitor:
            return visitor.is_admitted()


class Visitor:
    """Someone who connects, and how that went."""

    _GOOD = zmq.EVENT_HANDSHAKE_SUCCEEDED
    _BAD = (
        zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_DISCONNECTED
    )

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.events = socket.get_monitor_socket(int(self._GOOD | self._BAD))

    def is_admitted(self) -> bool:
        assert self.events.poll(_SOON_MS), "neither let in nor refused"
        event = int.from_bytes(self.events.recv_multipart()[0][:2], "little")
        return bool(event == self._GOOD)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.events.close(linger=0)
        self.socket.close(linger=0)


@pytest.fixture(params=["data", "control"], ids=["PLAIN", "CURVE"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_rank_that_is_due_is_let_in_and_named(kind: str) -> None:
    first, second, _ = admissions(3, kind)
    with Port(first) as port:
        port.allow(1)
        with port.attempt(lambda socket: second.join(socket, 0, 0)) as visitor:
            assert visitor.is_admitted()
            visitor.socket.send(b"hello")
            frame = port.socket.recv(copy=False)
        assert frame.bytes == b"hello"
        assert frame.get("User-Id") == "1"
        assert port.authenticator.refused == 0


def test_a_password_opens_one_connection() -> None:
    """Who has read it on the way is too late."""
    first, second = admissions(2)
    with Port(first) as port:
        port.allow(1)
        with port.attempt(lambda socket: second.join(socket, 0, 0)) as visitor:
            assert visitor.is_admitted()
            assert not port.admits(lambda socket: second.join(socket, 0, 0))
            visitor.socket.send(b"still here")
            assert port.socket.recv() == b"still here"


def test_a_group_has_passwords_of_its_own() -> None:
    [job, _] = members(2)
    groups = [Membership((0, 1), group=group, epoch=epoch) for group, epoch in ((1, 0), (0, 1))]
    found = [job, *map(job.for_group, groups)]
    assert len({security.password(0, 1, 0) for security in found}) == 3


def test_a_rank_that_is_not_due_there_is_refused(kind: str) -> None:
    first, _, third = admissions(3, kind)
    with Port(first) as port:
        port.allow(1)
        assert not port.admits(lambda socket: third.join(socket, 0, 0))
        assert port.authenticator.refused == 1


@pytest.mark.parametrize("other", [{"secret": "another one altogether"}, {"job_id": "theirs"}, {}])
def test_a_rank_of_another_ring_is_refused(kind: str, other: dict[str, str]) -> None:
    """With the same secret and job id too: its keys are not those that were announced."""
    first, _ = admissions(2, kind)
    _, stranger = admissions(2, kind, **other)
    with Port(first) as port:
        port.allow(1)
        assert not port.admits(lambda socket: stranger.join(socket, 0, 0))


def test_a_key_made_up_on_the_way_is_refused() -> None:
    """The receiver's public key alone, which is no secret among members, lets nobody in."""
    first, _ = members(2, is_encrypted=True)

    def prepare(socket: zmq.Socket[bytes]) -> None:
        public, private = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_SERVERKEY, first.public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, private)

    with Port(first.control) as port:
        port.allow(1)
        assert not port.admits(prepare)


@pytest.mark.parametrize("mechanism", ["NULL", "PLAIN"])
def test_without_a_key_nobody_is_let_in(kind: str, mechanism: str) -> None:
    def prepare(socket: zmq.Socket[bytes]) -> None:
        if mechanism == "PLAIN":
            socket.setsockopt(zmq.PLAIN_USERNAME, b"1")
            socket.setsockopt(zmq.PLAIN_PASSWORD, SECRET.encode())

    first, _ = admissions(2, kind)
    with Port(first) as port:
        port.allow(1)
        assert not port.admits(prepare)


def test_whoever_connects_before_the_ranks_have_met_is_kept_waiting(kind: str) -> None:
    first, second, third = admissions(3, kind)
    with Port(first) as port, port.attempt(lambda socket: second.join(socket, 0, 0)) as early:
        # A stranger who is answered shows that the one before has been heard, and is not.
        port.allow(1, "other")
        assert not early.events.poll(200)
        with port.attempt(lambda socket: third.join(socket, 0, 0)) as wrong:
            port.allow(1)
            assert early.is_admitted()
            assert not wrong.is_admitted()


def test_waiting_comes_to_an_end() -> None:
    first, second = admissions(2, hold_s=0.2)
    with Port(first) as port:
        assert not port.admits(lambda socket: second.join(socket, 0, 0))


def test_after_the_authenticator_has_gone_nobody_is_let_in(kind: str) -> None:
    first, second = admissions(2, kind)
    with Port(first) as port:
        port.allow(1)
        with port.attempt(lambda socket: second.join(socket, 0, 0)) as inside:
            assert inside.is_admitted()
            port.authenticator.close()
            assert not port.admits(lambda socket: second.join(socket, 0, 0))
            inside.socket.send(b"still here")
            assert port.socket.recv() == b"still here"


def test_without_a_secret_nobody_is_asked() -> None:
    first, second = members(2, secret="")
    assert first.data.mechanism == first.control.mechanism == "NULL"
    assert first.public == ""
    with Port(first.data) as port:
        port.allow(None)
        assert port.admits(lambda socket: second.data.join(socket, 0, 0))


@pytest.mark.parametrize(
    "request_",
    [
        [],
        [b""],
        [b"", b"1.0"],
        [b"", b"2.0", b"1", b"data", b"127.0.0.1", b"", b"PLAIN", b"1", b"x"],
        [b"x", b"1.0", b"1", b"data", b"127.0.0.1", b"", b"PLAIN", b"1", b"x"],
        [b"", b"1.0", b"1", b"data", b"127.0.0.1", b"", b"CURVE", b"short"],
        [b"", b"1.0", b"1", b"data", b"127.0.0.1", b"", b"CURVE", b"x" * 4096],
        [b"", b"1.0", b"1", b"data", b"127.0.0.1", b"", b"\xff\xfe"],
        [b"", b"1.0", b"1", b"data", b"127.0.0.1", b"", b"PLAIN", b"1", b"x", b"y", b"z"],
    ],
)
def test_a_request_that_is_not_zap_is_refused_and_the_next_is_heard(request_: list[bytes]) -> None:
    first, second = admissions(2)
    with Port(first) as port:
        port.allow(1)
        asking = port.context.socket(zmq.DEALER)
        asking.setsockopt(zmq.RCVTIMEO, _SOON_MS)
        asking.connect("inproc://zeromq.zap.01")
        if request_:
            asking.send_multipart(request_)
            if len(request_) > 1:
                assert asking.recv_multipart()[3] == b"400"
        assert port.admits(lambda socket: second.join(socket, 0, 0))


def test_refusals_are_counted_and_not_all_logged(caplog: pytest.LogCaptureFixture) -> None:
    first, second = admissions(2)
    with Port(first) as port, caplog.at_level(logging.WARNING):
        port.allow(None)
        for _ in range(30):
            assert not port.admits(lambda socket: second.join(socket, 0, 0))
        assert port.authenticator.refused == 30
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 8
    assert "refused a connection from 127.0.0.1 without the key" in lines[0]


@pytest.mark.parametrize(
    "keys",
    [
        lambda own: [],
        lambda own: [own],
        lambda own: [own, own],
        lambda own: [own, ""],
        lambda own: [own, "x" * 39],
        lambda own: [own, "\xff" * 40],
        lambda own: [own, "~" * 40],
        lambda own: ["0" * 40, own],
    ],
)
def test_keys_that_are_not_one_for_each_rank_are_refused(keys: Any) -> None:
    security = Security(secret=SECRET, job_id="ours", rank=0, size=2)
    with pytest.raises(RendezvousError, match="not one for each rank"):
        security.learn(keys(security.public), MATERIAL, job=77)


@pytest.mark.parametrize("material", [b"", bytes(31), bytes(33)])
def test_material_of_another_length_is_refused(material: bytes) -> None:
    first, second = (Security(secret=SECRET, job_id="ours", rank=rank, size=2) for rank in (0, 1))
    with pytest.raises(RendezvousError, match="not one for each rank"):
        first.learn([first.public, second.public], material, job=77)


def test_every_ring_has_fresh_keys() -> None:
    assert len({security.public for security in members(3) + members(3)}) == 6


def test_nothing_of_the_secret_is_in_what_is_shown() -> None:
    for security in members(2):
        assert SECRET not in repr(vars(security))


# --- Which addresses, which mechanism -------------------------------------------------------


def config(rendezvous: str = "127.0.0.1:4000", **fields: Any) -> Config:
    return Config(**{"size": 2, "rendezvous": rendezvous, "job_id": "ours", **fields})


@pytest.mark.parametrize("rendezvous", ["192.0.2.1:4000", "0.0.0.0:4000", "[2001:db8::1]:4000"])
@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_secret_the_network_is_refused(rendezvous: str, rank: int) -> None:
    with pytest.raises(ConfigError, match="the job has no secret") as caught:
        Communicator(config(rendezvous, rank=rank))
    assert "RINGREDUCE_SECRET" in str(caught.value)


def test_encryption_without_a_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no secret to encrypt with"):
        Communicator(config(encryption="on"))


@pytest.mark.parametrize(
    ("rendezvous", "encryption", "cipher"),
    [
        ("127.0.0.1:4000", "auto", "none"),
        ("127.0.0.1:4000", "on", "AEGIS-128L"),
        ("127.0.0.1:4000", "off", "none"),
        ("192.0.2.1:4000", "auto", "AEGIS-128L"),
        ("192.0.2.1:4000", "on", "AEGIS-128L"),
        ("192.0.2.1:4000", "off", "none"),
    ],
)
def test_what_is_spoken_follows_from_the_address(
    rendezvous: str, encryption: str, cipher: str
) -> None:
    security = Security.of(config(rendezvous, encryption=encryption, secret=SECRET))
    assert security.encryption == cipher
    assert security.seals is (cipher != "none")
    assert security.data.mechanism == "PLAIN"
    assert security.control.mechanism == ("CURVE" if security.seals else "PLAIN")


def test_sending_unencrypted_between_hosts_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(2):
        settings = {"encryption": "off", "secret": SECRET, "rank": rank}
        Security.of(config("192.0.2.1:4000", **settings))
    [line] = [record.getMessage() for record in caplog.records]
    assert "sends data unencrypted (RINGREDUCE_ENCRYPTION=off)" in line


def test_without_aegis_everything_is_encrypted_with_curve(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sodium, "load", lambda: False)
    security = Security.of(config("192.0.2.1:4000", secret=SECRET))
    assert security.encryption == security.data.mechanism == security.control.mechanism == "CURVE"
    assert not security.seals
    [line] = [record.getMessage() for record in caplog.records]
    assert "this libsodium has no AEGIS-128L" in line
    caplog.clear()

    def work(comm: Communicator) -> float:
        return float(comm.all_reduce(np.arange(30_000.0))[-1])

    assert ring_of_threads(2, work, transport="zmq", encryption="on") == [59_998.0] * 2


def test_ranks_that_encrypt_differently_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # The rank that asks first has it, the other does not; each is a thread and asks twice.
    found: dict[int, bool] = {}
    monkeypatch.setattr(sodium, "load", lambda: found.setdefault(threading.get_ident(), not found))
    with pytest.raises(MismatchError, match=r"rank 1 has encryption .*, rank 0 has "):
        ring_of_threads(2, lambda comm: None, transport="zmq", encryption="on")


@pytest.mark.parametrize(
    ("host", "holds"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("::", False),
        ("0.0.0.0", False),
        ("fe80::1%eth0", False),
        ("", False),
        ("localhost.evil", False),
    ],
)
def test_loopback(host: str, holds: bool) -> None:
    assert is_loopback(host) is holds


@pytest.mark.parametrize(
    ("address", "holds"),
    [
        ("tcp://127.0.0.1:4,5", True),
        ("tcp://[::1]:4", True),
        ("tcp://10.0.0.1:4", False),
        ("tcp://127.0.0.1:4;tcp://10.0.0.1:4", False),
        ("ipc:///tmp/x", False),
        ("", False),
    ],
)
def test_announced_addresses_on_loopback(address: str, holds: bool) -> None:
    assert listens_on_loopback(address) is holds


# --- Whole rings ----------------------------------------------------------------------------


@pytest.mark.parametrize("encryption", ["auto", "on", "off"])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_ring_with_a_secret_reduces_and_is_shut(encryption: str, streams: int) -> None:
    def work(comm: Communicator) -> tuple[float, bool]:
        link = comm._session.collectives._link  # type: ignore[attr-defined]
        array = np.ones(300_000)
        comm.all_reduce(array)
        comm.barrier()
        return float(array.max()), link.sockets._authenticator._thread is None

    settings: dict[str, Any] = {"transport": "zmq", "encryption": encryption, "streams": streams}
    assert ring_of_threads(3, work, **settings) == [(3.0, True)] * 3


@pytest.mark.parametrize(("size", "hosts"), [(4, "aabb"), (3, "abb")])
def test_rings_between_hosts_are_shut_too(size: int, hosts: str) -> None:
    """Lanes but the first carry nothing in the first barrier."""

    def work(comm: Communicator) -> float:
        array = np.ones(300_000)
        comm.all_reduce(array)
        return float(array.max())

    assert ring_of_threads(size, work, hosts=hosts, encryption="on") == [float(size)] * size


def join_both(*changes: dict[str, Any], **common: Any) -> list[object]:
    """What two ranks get that join with those changes; rank 0 waits a second for the other."""
    with sockets.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        descriptor = listener.detach()
    over = threading.Barrier(2)

    def join(rank: int) -> object:
        fields = {"rank": rank, "rendezvous_fd": None if rank else descriptor, **common}
        settings = config(address, join_timeout_s=2.0, timeout_s=5.0, **fields | changes[rank])
        try:
            with Communicator(settings) as comm:
                return comm.all_reduce(np.ones(1))[0]
        except RingReduceError as error:
            return error
        finally:
            over.wait(20)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(join, range(2)))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            ({"secret": SECRET}, {"secret": "another one altogether"}), id="another secret"
        ),
        pytest.param(
            ({"secret": SECRET, "job_id": "a"}, {"secret": SECRET, "job_id": "b"}),
            id="another job",
            marks=pytest.mark.full,
        ),
        pytest.param(({"secret": SECRET}, {}), id="no secret"),
        pytest.param(({}, {"secret": SECRET}), id="secret for nobody", marks=pytest.mark.full),
    ],
)
def test_who_lacks_the_secret_is_told_at_once_and_rank_0_says_so(
    changes: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    first, second = join_both(*changes)
    assert isinstance(second, RendezvousError)
    assert "was refused in the handshake" in str(second)
    assert "RINGREDUCE_SECRET" in str(second)
    assert isinstance(first, RendezvousError)
    assert "connections that could not show the job's secret" in str(first)
    for error in (first, second):
        assert SECRET not in str(error)


def test_ranks_that_disagree_on_encryption_are_told() -> None:
    for error in join_both({"encryption": "on"}, {"encryption": "off"}, secret=SECRET):
        assert "rank 1 has RINGREDUCE_ENCRYPTION off, rank 0 has on" in str(error)


# --- The door -------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_a_shut_listener_answers_nobody_while_those_inside_go_on() -> None:
    with sockets.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with sockets.create_connection(address) as inside, listener.accept()[0] as accepted:
            assert listening.shut(listener.fileno())
            with pytest.raises(TimeoutError):
                sockets.create_connection(address, timeout=0.3)
            sent = secrets.token_bytes(100_000)
            writing = threading.Thread(target=inside.sendall, args=(sent,))
            writing.start()
            received = b""
            while len(received) < len(sent):
                received += accepted.recv(1 << 16)
            writing.join()
            assert received == sent


def test_what_does_not_listen_cannot_be_shut() -> None:
    with sockets.socket() as unbound:
        assert not listening.shut(unbound.fileno())
    assert not listening.shut(-1)
