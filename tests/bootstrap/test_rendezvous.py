"""How ranks meet: who gets in, who is turned away, and what everybody is told."""

from __future__ import annotations

import os
import platform
import socket as sockets
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from ringreduce._version import __version__
from ringreduce.bootstrap import rendezvous
from ringreduce.communicator import formation
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.opened_sockets import bind_of
from ringreduce.pure.networks import Unreached
from ringreduce.pure.wire import WIRE_VERSION
from ringreduce.testing import ring_of_threads
from ringreduce.transport import routes
from ringreduce.transport.address import split_host
from ringreduce.transport.interfaces import own_networks
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.errors import (
    ConfigError,
    MismatchError,
    PeerError,
    PeerLostError,
    RendezvousError,
    RingReduceError,
)
from tests.bootstrap.hellos import hello

_REPLY_MS = 10_000


class Meeting:
    """A rendezvous on a free port, and threads in which ranks join it.

    Rank 0 is given the listening socket, so the port is never anyone else's, and whoever
    knocks before rank 0 is there waits in the kernel's queue.
    """

    def __init__(self, pool: ThreadPoolExecutor, listener: sockets.socket) -> None:
        self._pool, self._listener = pool, listener
        host, port = listener.getsockname()
        self.address = f"{host}:{port}"
        self._opened: list[Communicator] = []

    def config(self, rank: int, size: int, **settings: Any) -> Config:
        common: dict[str, Any] = {"job_id": "ours", "join_timeout_s": 10.0, "timeout_s": 10.0}
        if rank == 0:
            common["rendezvous_fd"] = self._listener.fileno()
        common["rendezvous"] = self.address
        return Config(rank=rank, size=size, **{**common, **settings})

    def join(self, rank: int, size: int, **settings: Any) -> Future[Communicator]:
        """A thread that joins as `rank`."""
        return self._pool.submit(self._join, self.config(rank, size, **settings))

    def _join(self, config: Config) -> Communicator:
        if config.rank == 0:
            self._listener.detach()  # libzmq takes it over, and closes it.
        comm = Communicator(config)
        self._opened.append(comm)
        return comm

    def all_reduce(self, *members: Future[Communicator]) -> list[float]:
        """What the ranks get from a sum of ones, to show that their ring works."""
        rings = [member.result() for member in members]
        sums = self._pool.map(lambda comm: comm.all_reduce(np.ones(1))[0], rings)
        return list(sums)

    def close(self) -> None:
        self._listener.close()
        for comm in self._opened:
            comm.close()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with ThreadPoolExecutor(8) as pool, sockets.create_server(("127.0.0.1", 0)) as listener:
        meeting = Meeting(pool, listener)
        yield meeting
        meeting.close()


@contextmanager
def handmade_member(meeting: Meeting) -> Iterator[zmq.Socket[bytes]]:
    """A socket at the rendezvous that can say anything."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, _REPLY_MS)
    socket.connect(f"tcp://{meeting.address}")
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def answer(socket: zmq.Socket[bytes]) -> dict[str, Any]:
    return msgspec.msgpack.decode(socket.recv())


def test_all_ranks_get_the_same_ring(meeting):
    members = [meeting.join(rank, 3) for rank in range(3)]
    assert meeting.all_reduce(*members) == [3, 3, 3]


def test_rank_that_came_before_rank_0_is_welcomed(meeting):
    with handmade_member(meeting) as early:
        early.send(hello())
        first = meeting.join(0, 2, timeout_s=0.5)
        welcome = answer(early)
    assert welcome["type"] == "Table"
    assert welcome["members"][1][0] == "tcp://127.0.0.1:9"  # as it said itself
    # No ring comes of it, since nobody listens there.
    assert isinstance(first.exception(), PeerError)


def test_rank_of_another_job_is_turned_away_and_the_right_one_still_joins(meeting):
    first = meeting.join(0, 2)
    stranger = meeting.join(1, 2, job_id="theirs")
    with pytest.raises(RendezvousError, match=r"rank 1 .* belongs to another job") as caught:
        stranger.result()
    assert (caught.value.rank, caught.value.peer) == (1, 0)
    assert meeting.all_reduce(first, meeting.join(1, 2)) == [2, 2]


def test_second_process_with_the_same_rank_is_turned_away(meeting):
    first = meeting.join(0, 3)
    twins = [meeting.join(1, 3), meeting.join(1, 3)]
    (refused,), (waiting,) = wait(twins, return_when=FIRST_COMPLETED)
    with pytest.raises(RendezvousError, match="rank 1 came twice"):
        refused.result()
    assert meeting.all_reduce(first, waiting, meeting.join(2, 3)) == [3, 3, 3]


def test_second_rank_0_is_turned_away(meeting):
    first = meeting.join(0, 2)
    with handmade_member(meeting) as twin:
        twin.send(hello(rank=0))
        assert "rank 0 came twice" in answer(twin)["text"]
    assert meeting.all_reduce(first, meeting.join(1, 2)) == [2, 2]


@pytest.mark.parametrize("rank", [-1, 2, 1 << 60])
def test_rank_without_a_place_is_turned_away(meeting, rank):
    first = meeting.join(0, 2)
    with handmade_member(meeting) as stranger:
        stranger.send(hello(rank=rank))
        assert "has no place in a ring of 2" in answer(stranger)["text"]
    assert meeting.all_reduce(first, meeting.join(1, 2)) == [2, 2]


def test_different_sizes_are_a_mismatch_on_both_sides(meeting):
    members = [meeting.join(0, 2), meeting.join(1, 3)]
    for member in members:
        with pytest.raises(MismatchError, match="rank 1 has size 3, rank 0 has 2"):
            member.result()


def test_rank_beyond_our_size_tells_of_different_sizes(meeting):
    members = [meeting.join(0, 2), meeting.join(2, 3)]
    for member in members:
        with pytest.raises(MismatchError, match="rank 2 has size 3, rank 0 has 2"):
            member.result()


@pytest.mark.parametrize(("setting", "other"), [("segment_bytes", 4096), ("streams", 7)])
def test_different_settings_are_a_mismatch_on_both_sides(meeting, setting, other):
    members = [meeting.join(0, 2), meeting.join(1, 2, **{setting: other})]
    for member in members:
        with pytest.raises(MismatchError) as caught:
            member.result()
        there, here = f"rank 1 has RINGREDUCE_{setting.upper()} {other}", getattr(Config(), setting)
        assert f"{there}, rank 0 has {here}. " in str(caught.value)
        assert caught.value.peer == 1


def test_mismatch_is_told_to_members_that_agree_too(meeting):
    first = meeting.join(0, 3)
    with handmade_member(meeting) as member:
        # One connection keeps the order: rank 1 is admitted before rank 2 disagrees.
        member.send(hello(size=3))
        member.send(hello(size=3, rank=2, settings={"segment_bytes": 64}))
        answers = [answer(member) for _ in range(2)]
    assert [told["mismatch"] for told in answers] == [True, True]
    with pytest.raises(MismatchError):
        first.result()


def test_rank_taken_by_one_of_another_size_is_told_of_the_mismatch_too(meeting):
    first = meeting.join(0, 3)
    with handmade_member(meeting) as member, handmade_member(meeting) as twin:
        member.send(hello(size=3))
        # The answer to what comes after it shows that rank 1 is admitted by now.
        member.send(hello(job_id="theirs"))
        assert "another job" in answer(member)["text"]
        twin.setsockopt(zmq.RCVTIMEO, 3000)
        twin.send(hello(size=4))
        with pytest.raises(MismatchError, match="rank 1 has size 4, rank 0 has 3"):
            first.result()
        assert answer(member)["mismatch"]
        assert answer(twin)["mismatch"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"version": "0.0.1"}, f"ringreduce 0.0.1, rank 0 has {__version__}"),
        ({"wire_version": 99}, f"wire version 99, rank 0 has {WIRE_VERSION}"),
    ],
)
def test_another_version_is_a_mismatch_that_names_both(meeting, fields, text):
    first = meeting.join(0, 2)
    with handmade_member(meeting) as member:
        member.send(hello(**fields))
        told = answer(member)
    assert told["mismatch"]
    assert text in told["text"]
    with pytest.raises(MismatchError, match=text):
        first.result()


@pytest.mark.parametrize("library", ["python", "numpy"])
def test_another_python_or_numpy_is_one_warning_that_names_the_rank(meeting, caplog, library):
    first = meeting.join(0, 3)
    with handmade_member(meeting) as member:
        ours = {"python": platform.python_version(), "numpy": np.__version__}
        member.send(hello(size=3, **ours))
        member.send(hello(size=3, rank=2, **{**ours, library: "2.7.99"}))
        assert answer(member)["type"] == "Table"
    # These members have no sockets; what matters is that they were let in.
    with pytest.raises(RendezvousError, match="has not 2 ports"):
        first.result()
    [warning] = [r.getMessage() for r in caplog.records if "different versions" in r.getMessage()]
    assert warning.startswith("[0/3] ")
    assert "; rank 2 Python" in warning
    assert "2.7.99" in warning
    assert "rank 1" not in warning


def test_taken_port_is_named_with_a_remedy():
    with sockets.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        config = Config(size=2, rendezvous=address, job_id="ours", join_timeout_s=5)
        with pytest.raises(RendezvousError, match=f"cannot listen on {address}") as caught:
            Communicator(config)
    assert "RINGREDUCE_RENDEZVOUS" in str(caught.value)


def test_missing_rank_is_named_on_all_that_came_once_the_time_is_over(meeting):
    started = time.monotonic()
    members = [meeting.join(rank, 3, join_timeout_s=1.5) for rank in (0, 1)]
    for member in members:
        with pytest.raises(RendezvousError, match="rank 2 did not come") as caught:
            member.result()
        assert caught.value.peer == 2
        assert "1.5 s" in str(caught.value)
    assert 1.5 <= time.monotonic() - started < 5


def test_after_a_while_ranks_say_for_whom_they_wait(meeting, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "TIMES", replace(TIMES, remind_s=0.3))
    members = [meeting.join(rank, 3, join_timeout_s=1.5) for rank in (0, 1)]
    for member in members:
        with pytest.raises(RendezvousError, match="rank 2 did not come"):
            member.result()
    # Rank 1 has reached rank 0, which says the rest.
    expected = f"[0/3] waits at {meeting.address} for rank 2; it gives up 1.5 s after its start"
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_all_missing_ranks_are_named(meeting):
    with pytest.raises(RendezvousError, match="ranks 1, 2, 3 did not come"):
        meeting.join(0, 4, join_timeout_s=0.5).result()


def test_long_list_of_missing_ranks_is_cut(meeting):
    with pytest.raises(RendezvousError, match=r"15, 16, \.\.\. did not come"):
        meeting.join(0, 1000, join_timeout_s=0.5).result()


def test_who_was_turned_away_is_in_the_list_of_missing_ranks(meeting):
    first = meeting.join(0, 2, join_timeout_s=2.0)
    with pytest.raises(RendezvousError, match="another job"):
        meeting.join(1, 2, job_id="theirs").result()
    with pytest.raises(RendezvousError, match=r"rank 1 did not come .*belongs to another job"):
        first.result()


@pytest.mark.parametrize("is_open", [True, False], ids=["silent port", "closed port"])
def test_missing_rank_0_is_named_once_the_time_is_over(is_open, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "TIMES", replace(TIMES, remind_s=0.3))
    with sockets.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # nobody else's while this is open
        if is_open:
            reserved.listen()
        started = time.monotonic()
        config = Config(
            rank=1,
            size=2,
            rendezvous=f"127.0.0.1:{reserved.getsockname()[1]}",
            job_id="ours",
            join_timeout_s=1.0,
        )
        with pytest.raises(RendezvousError, match="got no answer from rank 0") as caught:
            Communicator(config)
    assert (caught.value.rank, caught.value.peer) == (1, 0)
    assert "127.0.0.1 leads to this host alone" in str(caught.value)
    assert 1 <= time.monotonic() - started < 4
    (reminder,) = (record.getMessage() for record in caplog.records)
    assert reminder.startswith(f"[1/2] has no answer yet from rank 0 at {config.rendezvous}; ")


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: ring\r\n\r\n",
        b"\x00" * 1000,
        b"\xff" * 100_000,
        bytes(range(256)) * 100,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01NULL" + b"\x00" * 47 + b"\xff" * 64,
        b"",
    ],
    ids=["http", "zeros", "ones", "bytes", "zmtp then garbage", "nothing"],
)
def test_foreign_bytes_at_the_port_do_not_hurt_the_job(meeting, garbage):
    host, port = meeting.address.split(":")
    with sockets.create_connection((host, int(port))) as stranger:
        stranger.sendall(garbage)
        members = [meeting.join(rank, 2) for rank in range(2)]
        assert meeting.all_reduce(*members) == [2, 2]


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        os.urandom(1000),
        msgspec.msgpack.encode({"type": "Hello"}),
        msgspec.msgpack.encode([1] * 100_000),
        hello(rank="one"),
        hello(settings={"segment_bytes": "many"}),
        hello(job_id=None),
        b"\x91" * 50_000,
    ],
    ids=["empty", "no msgpack", "random", "few fields", "long", "text", "setting", "none", "deep"],
)
def test_message_that_is_no_hello_does_not_hurt_the_job(meeting, message):
    first = meeting.join(0, 2)
    with handmade_member(meeting) as stranger:
        stranger.send(message)
        # The answer to what comes after it shows that it has been read.
        stranger.send(hello(job_id="theirs"))
        assert "another job" in answer(stranger)["text"]
    assert meeting.all_reduce(first, meeting.join(1, 2)) == [2, 2]


def test_message_in_many_parts_does_not_hurt_the_job(meeting):
    first = meeting.join(0, 2)
    with handmade_member(meeting) as stranger:
        stranger.send_multipart([b"a", b"", b"c"])
        stranger.send(hello(job_id="theirs"))
        assert "another job" in answer(stranger)["text"]
    assert meeting.all_reduce(first, meeting.join(1, 2)) == [2, 2]


def test_huge_message_is_not_even_received(meeting):
    first = meeting.join(0, 2)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(f"tcp://{meeting.address}")
    stranger.send(hello(host="x" * (4 << 20)))
    dropped = monitor.poll(_REPLY_MS)
    monitor.close()
    stranger.close()
    context.term()
    assert dropped
    assert meeting.all_reduce(first, meeting.join(1, 2)) == [2, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_host_that_does_not_resolve_is_named(rank):
    address = "no-such-host.invalid:4000"
    config = Config(rank=rank, size=2, rendezvous=address, job_id="ours", join_timeout_s=1)
    with pytest.raises(RendezvousError, match=f"cannot reach the rendezvous {address}"):
        Communicator(config)


def test_rank_0_on_another_host_than_the_rendezvous_is_told_so():
    """192.0.2.1 is nobody's, by RFC 5737."""
    config = Config(
        size=2, rendezvous="192.0.2.1:4000", job_id="ours", join_timeout_s=1, secret="s" * 32
    )
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.1"):
        Communicator(config)


@pytest.mark.parametrize(
    ("service", "text"),
    [
        (b"hello from something else", "not ringreduce's"),
        (msgspec.msgpack.encode({"type": "Table", "job": 1}), "not ringreduce's"),
        (
            msgspec.msgpack.encode({"type": "Table", "job": 1, "members": [], "material": b""}),
            "not ringreduce's",
        ),
    ],
    ids=["text", "few fields", "table too short"],
)
def test_answer_that_is_no_welcome_is_refused(service, text):
    with ThreadPoolExecutor(1) as pool, zmq.Context() as context:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 1000)
        router.setsockopt(zmq.RCVTIMEO, _REPLY_MS)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        config = Config(
            rank=1, size=2, rendezvous=f"127.0.0.1:{port}", job_id="ours", join_timeout_s=5
        )
        joining = pool.submit(Communicator, config)
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, service])
        with pytest.raises(RingReduceError, match=text):
            joining.result()
        router.close()


@pytest.mark.parametrize(
    ("rank", "address", "bound"),
    [
        (0, "127.0.0.1:4000", "127.0.0.1/8"),
        (1, "127.0.0.1:4000", "127.0.0.1/8"),
        (0, "127.0.0.2:4000", "127.0.0.2/8"),
        (0, "[::1]:4000", "::1/128"),
    ],
)
def test_job_on_one_host_listens_on_loopback_only(rank, address, bound):
    config = Config(rank=rank, size=2, rendezvous=address, job_id="ours")
    assert own_networks(config) == (bound,)


def several_addresses(config: Config) -> tuple[str, ...]:
    """As of a host with three networks, on loopback."""
    last = () if config.rank == 2 else ("127.0.0.3/8",)
    return ("127.0.0.1/8", "127.0.0.2/8", *last)


@pytest.mark.parametrize("settings", [{"transport": "zmq", "encryption": "on"}, {}])
def test_ranks_with_several_addresses(monkeypatch, settings):
    monkeypatch.setattr(formation, "own_networks", several_addresses)

    def work(comm):
        listening = comm._session._watcher._control._incoming.values()
        counts = {len(pulling.endpoints) for pulling in listening}
        group = comm.split(comm.rank == 2)
        parts = comm.all_to_all(np.repeat(float(comm.rank), 30_000))
        return counts, comm.all_reduce(np.ones(1))[0], group.all_reduce(np.ones(1))[0], parts.sum()

    results = ring_of_threads(3, work, **settings)
    assert results == [({3}, 3, 2, 30_000), ({3}, 3, 2, 30_000), ({2}, 3, 1, 30_000)]


def test_a_ring_is_shut_at_each_of_its_addresses(monkeypatch):
    monkeypatch.setattr(formation, "own_networks", several_addresses)

    def work(comm):
        found = []
        for pulling in comm._session.collectives._link.sockets.incoming:
            for address in pulling.endpoints:
                host, port = split_host(address)
                try:
                    sockets.create_connection((host, int(port)), 0.05).close()
                except OSError as error:
                    found.append((host, type(error)))
        comm.barrier()
        return found

    shut = [(f"127.0.0.{number}", TimeoutError) for number in (1, 2, 3)]
    assert ring_of_threads(2, work, transport="zmq") == [shut, shut]


def test_a_group_in_which_a_rank_is_not_reached_fails_on_all_ranks(monkeypatch):
    find, calls = routes.Routes.find, Counter()

    def fail(found, *arguments):
        calls[found] += 1
        if calls[found] == 2 and found._rank == 1:
            return [Unreached(1, 0, "127.0.0.1:9", "refused")]
        return find(found, *arguments)

    monkeypatch.setattr(formation, "own_networks", several_addresses)
    monkeypatch.setattr(routes.Routes, "find", fail)

    def work(comm):
        with pytest.raises(RendezvousError) as caught:
            comm.split(comm.rank == 2)
        return comm.all_reduce(np.ones(1))[0], str(caught.value)

    for total, text in ring_of_threads(3, work, transport="zmq"):
        assert total == 3
        assert "ranks cannot reach each other" in text
        assert "127.0.0.1:9  refused" in text


def test_a_message_to_a_rank_that_is_not_reached_says_where_it_was_tried(monkeypatch):
    monkeypatch.setattr(formation, "own_networks", several_addresses)

    def work(comm):
        comm._session.job.routes._reached.clear()
        monkeypatch.setattr(
            routes, "first_to_answer", lambda *_: ({}, [Unreached(0, 1, "10.0.0.5:9", "refused")])
        )
        with pytest.raises(PeerLostError) as caught:
            comm.send(np.ones(3), 1) if comm.rank == 0 else comm.recv(np.ones(3), 0)
        return str(caught.value)

    sender, receiver = ring_of_threads(2, work, transport="zmq")
    assert "rank 0 of 2 cannot connect to rank 1 (10.0.0.5:9: refused), in send #0" in sender
    assert "(10.0.0.5:9: refused)" in receiver


def test_ports_are_from_the_range_and_too_few_are_refused():
    with sockets.create_server(("127.0.0.1", 0)) as taken:
        first = min(taken.getsockname()[1], 65000)
        ports = f"{first}-{first + 400}"

        def work(comm):
            session = comm._session
            incoming = [
                *session.collectives._link.sockets.incoming,
                *session._watcher._control._incoming.values(),
            ]
            addresses = [each.address for each in incoming] + [session.job.standby.address]
            return [int(address.rpartition(":")[2]) for address in addresses]

        found = ring_of_threads(3, work, transport="zmq", ports=ports)
        used = [port for rank in found for port in rank]
        assert len(used) == len(set(used)) == 3 * 5
        assert all(first < port <= first + 400 for port in used)
        with pytest.raises(ConfigError, match=r"needs 5 ports, and RINGREDUCE_PORTS=.* has 4"):
            ring_of_threads(
                3, work, transport="zmq", ports=f"{first}-{first + 3}", join_timeout_s=1
            )


def test_an_address_that_does_not_answer_is_in_the_table_of_all_ranks(monkeypatch):
    """Rank 1 offers an address at which it does not listen."""

    def offered(config: Config) -> tuple[str, ...]:
        return ("127.0.0.1/8", "127.0.0.2/8")

    def wrong(config: Config, networks: Any) -> Any:
        host = "127.0.0.3" if config.rank == 1 else "127.0.0.1"
        return bind_of(config, networks)._replace(hosts=(host,))

    monkeypatch.setattr(formation, "own_networks", offered)
    monkeypatch.setattr(formation, "bind_of", wrong)
    with pytest.raises(RendezvousError) as caught:
        ring_of_threads(3, lambda comm: None, hosts=["a", "b", "c"])
    texts = [str(caught.value), *caught.value.__notes__]
    assert len(texts) == 3
    for text in texts:
        rows = [line.split() for line in text.splitlines() if line.endswith("refused")]
        assert [row[:4] for row in rows] == [["0", "a", "1", "b"]] * 2 + [["2", "c", "1", "b"]] * 2
        assert [row[4].split(":")[0] for row in rows] == ["127.0.0.1", "127.0.0.2"] * 2
        assert "RINGREDUCE_PORTS" in text


def test_job_identity_is_new_for_each_ring():
    """Frames of a ring that is gone must not be taken for this one's."""
    jobs = [ring_of_threads(2, lambda comm: comm._session.collectives._job) for _ in range(2)]
    assert jobs[0][0] == jobs[0][1]
    assert jobs[1][0] == jobs[1][1]
    assert jobs[0][0] != jobs[1][0]


def test_rendezvous_by_name(meeting):
    name = meeting.address.replace("127.0.0.1", "localhost")
    if sockets.gethostbyname("localhost") != "127.0.0.1":
        pytest.skip("localhost is another address here")
    family = sockets.getaddrinfo("localhost", 1, type=sockets.SOCK_DGRAM)[0][0]
    if family != sockets.AF_INET:
        pytest.skip("localhost is an IPv6 address here")
    assert meeting.all_reduce(*(meeting.join(r, 2, rendezvous=name) for r in range(2))) == [2, 2]


def test_ring_forms_over_ipv6():
    try:
        listener = sockets.create_server(("::1", 0), family=sockets.AF_INET6)
    except OSError:
        pytest.skip("this host has no IPv6 loopback address")
    address = f"[::1]:{listener.getsockname()[1]}"

    def join(rank: int) -> float:
        descriptor = listener.detach() if rank == 0 else None
        config = Config(
            rank=rank,
            size=2,
            rendezvous=address,
            rendezvous_fd=descriptor,
            job_id="ours",
            join_timeout_s=10,
            timeout_s=10,
        )
        with Communicator(config) as comm:
            return comm.all_reduce(np.ones(1))[0]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join, range(2))) == [2, 2]
