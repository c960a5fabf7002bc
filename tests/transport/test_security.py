"""Who gets in: by which keys, on which addresses, until when."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket as sockets
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import zmq

import ringreduce as rr
from ringreduce.pure.membership import Membership
from ringreduce.testing import ring_of_threads
from ringreduce.transport import listening, sodium
from ringreduce.transport.address import listens_on_loopback
from ringreduce.transport.authenticator import Authenticator
from ringreduce.transport.security import MATERIAL_BYTES, Admission, Security
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.endpoints import is_loopback
from ringreduce.vocabulary.times import Times
from tests.bootstrap.test_rendezvous import meeting_at
from tests.rings import on_each_rank, outcome
from tests.scope import in_full

SECRET = "correct horse battery staple"
MATERIAL = bytes(range(MATERIAL_BYTES))
# Nobody is let in or told no in more than a few milliseconds; a refusal is silence.
# Longer than libzmq waits for a handshake: who asks while the authenticator goes is refused then.
_SOON_MS = int(1500 * TIMES.handshake_s)


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
    def attempt(self, visitor: Admission | Callable[[zmq.Socket[bytes]], Any]) -> Iterator[Visitor]:
        """A visitor with what an admission says, or with other options."""
        with self.context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            visitor(socket) if callable(visitor) else visitor.join(socket, 0, 0)
            bad = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            bad |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
            with socket.get_monitor_socket(int(zmq.EVENT_HANDSHAKE_SUCCEEDED | bad)) as events:
                socket.connect(self.address)
                yield Visitor(socket, events)
                socket.disable_monitor()

    def admits(self, visitor: Admission | Callable[[zmq.Socket[bytes]], Any]) -> bool:
        with self.attempt(visitor) as attempt:
            return attempt.is_admitted()


class Visitor(NamedTuple):
    """Someone who connects, and how that went."""

    socket: zmq.Socket[bytes]
    events: zmq.Socket[bytes]

    def is_admitted(self) -> bool:
        assert self.events.poll(_SOON_MS), "neither let in nor refused"
        event = int.from_bytes(self.events.recv_multipart()[0][:2], "little")
        return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)


@pytest.fixture(params=["data", "control"], ids=["PLAIN", "CURVE"])
def kind(request):
    return str(request.param)


def test_the_rank_that_is_due_is_let_in_and_named(kind):
    first, second, _ = admissions(3, kind)
    with Port(first) as port:
        port.allow(1)
        with port.attempt(second) as visitor:
            assert visitor.is_admitted()
            visitor.socket.send(b"hello")
            frame = port.socket.recv(copy=False)
        assert frame.bytes == b"hello"
        assert frame.get("User-Id") == "1"
        assert port.authenticator.refused == 0


def test_a_password_opens_one_connection():
    """Who has read it on the way is too late."""
    first, second = admissions(2)
    with Port(first) as port:
        port.allow(1)
        with port.attempt(second) as visitor:
            assert visitor.is_admitted()
            assert not port.admits(second)
            visitor.socket.send(b"still here")
            assert port.socket.recv() == b"still here"


def test_a_group_has_passwords_of_its_own():
    [job, _] = members(2)
    groups = [Membership((0, 1), group=group, epoch=epoch) for group, epoch in ((1, 0), (0, 1))]
    found = [job, *map(job.for_group, groups)]
    assert len({security.password(0, 1, 0) for security in found}) == 3


def guess(socket):
    socket.setsockopt(zmq.PLAIN_USERNAME, b"1")
    socket.setsockopt(zmq.PLAIN_PASSWORD, SECRET.encode())


def make_up(socket, server):
    """The receiver's public key alone, which is no secret among members, lets nobody in."""
    public, private = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, private)


@pytest.mark.parametrize(
    "other",
    [
        {"rank": 2},
        {"secret": "another one altogether"},
        {"job_id": "theirs"},
        {},  # The same secret and job id too: its keys are not those that were announced.
        None,
        guess,
        make_up,
    ],
    ids=["rank", "secret", "job", "ring", "no key", "password", "key"],
)
def test_who_is_not_due_there_is_refused(kind, other):
    ours = members(3, is_encrypted=True)
    with Port(getattr(ours[0], kind)) as port:
        port.allow(1)

        def prepare(socket):
            if other is make_up:
                make_up(socket, ours[0].public)
            elif callable(other):
                other(socket)
            elif other is not None:
                theirs = ours if "rank" in other else members(3, is_encrypted=True, **other)
                getattr(theirs[2 if "rank" in other else 1], kind).join(socket, 0, 0)

        assert not port.admits(prepare)
        assert port.authenticator.refused <= 1


def test_whoever_connects_before_the_ranks_have_met_is_kept_waiting(kind):
    assert Times().handshake_s >= Security().hold_s  # Else libzmq ends the wait.
    first, second, third = admissions(3, kind)
    with Port(first) as port, port.attempt(second) as early:
        # A stranger who is answered shows that the one before has been heard, and is not.
        port.allow(1, "other")
        assert not early.events.poll(200)
        with port.attempt(third) as wrong:
            port.allow(1)
            assert early.is_admitted()
            assert not wrong.is_admitted()


def test_waiting_comes_to_an_end():
    first, second = admissions(2, hold_s=0.2)
    with Port(first) as port:
        assert not port.admits(second)


# Both kinds wait for as long as a handshake may take.
@pytest.mark.parametrize("kind", [in_full("data"), "control"], ids=["PLAIN", "CURVE"])
def test_after_the_authenticator_has_gone_nobody_is_let_in(kind):
    first, second = admissions(2, kind)
    with Port(first) as port:
        port.allow(1)
        with port.attempt(second) as inside:
            assert inside.is_admitted()
            port.authenticator.close()
            assert not port.admits(second)
            inside.socket.send(b"still here")
            assert port.socket.recv() == b"still here"


def test_without_a_secret_nobody_is_asked():
    first, second = members(2, secret="")
    assert first.data.mechanism == first.control.mechanism == "NULL"
    assert first.public == ""
    with Port(first.data) as port:
        port.allow(None)
        assert port.admits(second.data)


def test_refusals_are_counted_and_not_all_logged(caplog):
    first, second = admissions(2)
    with Port(first) as port, caplog.at_level(logging.WARNING):
        port.allow(None)
        for _ in range(30):
            assert not port.admits(second)
        assert port.authenticator.refused == 30
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 8
    assert "refused a connection from 127.0.0.1 without the key" in lines[0]


@pytest.mark.parametrize(
    ("keys", "material"),
    [
        *((keys, MATERIAL) for keys in ([], [None], [None, None], [None, ""])),
        *(([None, key], MATERIAL) for key in ("x" * 39, "\xff" * 40, "~" * 40)),
        (["0" * 40, None], MATERIAL),
        *(([None, "0" * 40], material) for material in (b"", bytes(31), bytes(33))),
    ],
)
def test_keys_that_are_not_one_for_each_rank_are_refused(keys, material):
    """None is the rank's own."""
    security = Security(secret=SECRET, job_id="ours", rank=0, size=2)
    keys = [security.public if key is None else key for key in keys]
    with pytest.raises(rr.RendezvousError, match="not one for each rank"):
        security.learn(keys, material, job=77)


def test_every_ring_has_fresh_keys_and_shows_nothing_of_the_secret():
    both = members(3) + members(3)
    assert len({security.public for security in both}) == 6
    assert not any(SECRET in repr(vars(security)) for security in both)


# --- Which addresses, which mechanism -------------------------------------------------------


def config(rendezvous: str = "127.0.0.1:4000", **fields: Any) -> rr.Config:
    return rr.Config(**{"size": 2, "rendezvous": rendezvous, "job_id": "ours", **fields})


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_secret_the_network_and_encryption_are_refused(rank):
    for rendezvous in ("192.0.2.1:4000", "0.0.0.0:4000", "[2001:db8::1]:4000"):
        with pytest.raises(rr.ConfigError, match=r"the job has no secret(.|\n)*RINGREDUCE_SECRET"):
            rr.Communicator(config(rendezvous, rank=rank))
    with pytest.raises(rr.ConfigError, match="has no secret to encrypt with"):
        rr.Communicator(config(encryption="on", rank=rank))


@pytest.mark.parametrize("encryption", ["auto", "on", "off"])
@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_what_is_spoken_follows_from_the_address(host, encryption):
    security = Security.of(config(f"{host}:4000", encryption=encryption, secret=SECRET))
    assert security.seals is (encryption == "on" or (encryption == "auto" and host[0:3] == "192"))
    assert security.encryption == ("AEGIS-128L" if security.seals else "none")
    assert security.data.mechanism == "PLAIN"
    assert security.control.mechanism == ("CURVE" if security.seals else "PLAIN")


def test_sending_unencrypted_between_hosts_is_said(caplog):
    for rank in range(2):
        settings = {"encryption": "off", "secret": SECRET, "rank": rank}
        Security.of(config("192.0.2.1:4000", **settings))
    [line] = [record.getMessage() for record in caplog.records]
    assert "sends data unencrypted (RINGREDUCE_ENCRYPTION=off)" in line


def test_without_aegis_everything_is_encrypted_with_curve(caplog, monkeypatch):
    monkeypatch.setattr(sodium, "load", lambda: False)
    security = Security.of(config("192.0.2.1:4000", secret=SECRET))
    assert security.encryption == security.data.mechanism == security.control.mechanism == "CURVE"
    assert not security.seals
    [line] = [record.getMessage() for record in caplog.records]
    assert "this libsodium has no AEGIS-128L" in line
    caplog.clear()

    assert ring_of_threads(2, greatest, transport="zmq", encryption="on") == [2.0] * 2


def test_ranks_that_encrypt_differently_are_told(monkeypatch):
    # The rank that asks first has it, the other does not; each is a thread and asks twice.
    found: dict[int, bool] = {}
    monkeypatch.setattr(sodium, "load", lambda: found.setdefault(threading.get_ident(), not found))
    with pytest.raises(rr.MismatchError, match=r"rank 1 has encryption .*, rank 0 has "):
        ring_of_threads(2, lambda comm: None, transport="zmq", encryption="on")


def test_loopback():
    """Of hosts, and of announced addresses."""
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1")))
    others = ("10.0.0.1", "::", "0.0.0.0", "fe80::1%eth0", "", "localhost.evil")
    assert not any(map(is_loopback, others))
    assert all(map(listens_on_loopback, ("tcp://127.0.0.1:4,5", "tcp://[::1]:4")))
    mixed = "tcp://127.0.0.1:4;tcp://10.0.0.1:4"
    assert not any(map(listens_on_loopback, ("tcp://10.0.0.1:4", mixed, "ipc:///tmp/x", "")))


# --- Whole rings ----------------------------------------------------------------------------


def greatest(comm: rr.Communicator) -> float:
    array = np.ones(300_000)
    comm.all_reduce(array)
    comm.barrier()
    return float(array.max())


@pytest.mark.parametrize("encryption", ["auto", "on", "off"])
@pytest.mark.parametrize("streams", [1, 3])
@on_each_rank(3, transport="zmq", given=["encryption", "streams"])
def test_a_ring_with_a_secret_reduces_and_is_shut(comm, encryption, streams):
    assert greatest(comm) == 3.0
    assert comm._session.collectives._link.sockets._authenticator._thread is None


@pytest.mark.parametrize("hosts", ["aabb", "abb"])
def test_rings_between_hosts_are_shut_too(hosts):
    """Lanes but the first carry nothing in the first barrier."""
    size = len(hosts)
    assert ring_of_threads(size, greatest, hosts=hosts, encryption="on") == [float(size)] * size


def join_both(*changes: dict[str, Any], **common: Any) -> list[object]:
    """What two ranks get that join with those changes; rank 0 waits a while for the other."""
    limits = {"join_timeout_s": 2.0, "timeout_s": 5.0}
    with meeting_at("127.0.0.1") as meeting:
        both = [meeting.join(n, 2, **limits, **common, **each) for n, each in enumerate(changes)]
        return [outcome(member.result) for member in both]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"secret": SECRET}, {"secret": "another one altogether"}),
        in_full({"secret": SECRET, "job_id": "a"}, {"secret": SECRET, "job_id": "b"}),
        ({"secret": SECRET}, {}),
        in_full({}, {"secret": SECRET}),
    ],
    ids=["another secret", "another job", "no secret", "secret for nobody"],
)
def test_who_lacks_the_secret_is_told_at_once_and_rank_0_says_so(first, second):
    errors = join_both(first, second)
    assert [type(error) for error in errors] == [rr.RendezvousError] * 2
    assert "connections that could not show the job's secret" in str(errors[0])
    assert "was refused in the handshake" in str(errors[1])
    assert "RINGREDUCE_SECRET" in str(errors[1])
    assert not any(SECRET in str(error) for error in errors)


def test_ranks_that_disagree_on_encryption_are_told():
    for error in join_both({"encryption": "on"}, {"encryption": "off"}, secret=SECRET):
        assert "rank 1 has RINGREDUCE_ENCRYPTION off, rank 0 has on" in str(error)


# --- The door -------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_a_shut_listener_answers_nobody_while_those_inside_go_on():
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


def test_what_does_not_listen_cannot_be_shut():
    with sockets.socket() as unbound:
        assert not listening.shut(unbound.fileno())
    assert not listening.shut(-1)
