"""How ranks meet: who gets in, who is turned away, and what everybody is told."""

import platform
import re
import socket as sockets
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

import ringreduce as rr
from ringreduce.bootstrap import rendezvous
from ringreduce.bootstrap.hello import Member, Table
from ringreduce.communicator import formation
from ringreduce.communicator.opened_sockets import bind_of
from ringreduce.pure.networks import Unreached
from ringreduce.testing import ring_of_threads
from ringreduce.transport import routes
from ringreduce.transport.address import endpoint, split_host
from ringreduce.transport.interfaces import own_networks
from ringreduce.transport.security import Security
from ringreduce.vocabulary.config import TIMES
from tests.bootstrap.hellos import hello
from tests.processes import DEADLINE_S
from tests.proxy import greeting

_REPLY_MS = int(1000 * DEADLINE_S)


class Meeting:
    """A rendezvous on a free port, and threads in which ranks join it.

    Rank 0 is given the listening socket, so the port is never anyone else's, and whoever
    knocks before rank 0 is there waits in the kernel's queue.
    """

    def __init__(self, pool: ThreadPoolExecutor, listener: sockets.socket) -> None:
        self._pool, self._listener = pool, listener
        self.address = endpoint(*listener.getsockname()[:2]).removeprefix("tcp://")
        self._opened: list[rr.Communicator] = []

    def config(self, rank: int, size: int, **settings: Any) -> rr.Config:
        common: dict[str, Any] = {"job_id": "ours", "join_timeout_s": DEADLINE_S}
        if rank == 0:
            common["rendezvous_fd"] = self._listener.fileno()
        common["rendezvous"] = self.address
        return rr.Config(rank=rank, size=size, **{**common, **settings})

    def join(self, rank: int, size: int, **settings: Any) -> Future[rr.Communicator]:
        """A thread that joins as `rank`."""
        return self._pool.submit(self._join, self.config(rank, size, **settings))

    def _join(self, config: rr.Config) -> rr.Communicator:
        if config.rank == 0:
            self._listener.detach()  # libzmq takes it over, and closes it.
        comm = rr.Communicator(config)
        self._opened.append(comm)
        return comm

    def all_reduce(self, *members: Future[rr.Communicator]) -> list[float]:
        """What the ranks get from a sum of ones, to show that their ring works."""
        rings = [member.result() for member in members]
        sums = self._pool.map(lambda comm: comm.all_reduce(np.ones(1))[0], rings)
        return list(sums)

    def close(self) -> None:
        self._listener.close()
        for comm in self._opened:
            comm.close()


@contextmanager
def meeting_at(host: str) -> Iterator[Meeting]:
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    with ThreadPoolExecutor(8) as pool, sockets.create_server((host, 0), family=family) as listener:
        meeting = Meeting(pool, listener)
        try:
            yield meeting
        finally:
            meeting.close()


@pytest.fixture
def meeting():
    with meeting_at("127.0.0.1") as meeting:
        yield meeting


@contextmanager
def handmade_member(meeting: Meeting) -> Iterator[zmq.Socket[bytes]]:
    """A socket at the rendezvous that can say anything."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, _REPLY_MS)
        socket.connect(f"tcp://{meeting.address}")
        yield socket


def answer(socket: zmq.Socket[bytes]) -> dict[str, Any]:
    return msgspec.msgpack.decode(socket.recv())


def test_rank_that_came_before_rank_0_is_welcomed(meeting):
    with handmade_member(meeting) as early:
        early.send(hello())
        first = meeting.join(0, 2, timeout_s=0.5)
        welcome = answer(early)
    assert welcome["type"] == "Table"
    assert welcome["members"][1][0] == "tcp://127.0.0.1:9"  # as it said itself
    # No ring comes of it, since nobody listens there.
    assert isinstance(first.exception(), rr.PeerError)


def test_second_process_with_the_same_rank_is_turned_away(meeting):
    first = meeting.join(0, 3)
    twins = [meeting.join(1, 3), meeting.join(1, 3)]
    (refused,), (waiting,) = wait(twins, return_when=FIRST_COMPLETED)
    with pytest.raises(rr.RendezvousError, match="rank 1 came twice"):
        refused.result()
    assert meeting.all_reduce(first, waiting, meeting.join(2, 3)) == [3, 3, 3]


def assert_raised(members: list[Future[Any]], kind: type[Exception], text: str) -> list[Any]:
    """Each member has failed with such an error; return them."""
    errors = [member.exception() for member in members]
    for error in errors:
        assert isinstance(error, kind), error
        assert re.search(text, str(error)), error
    return errors


@pytest.mark.parametrize("rank", [1, 2])
def test_different_sizes_are_a_mismatch_on_both_sides(meeting, rank):
    """Also of a rank beyond our size."""
    members = [meeting.join(0, 2), meeting.join(rank, 3)]
    assert_raised(members, rr.MismatchError, f"rank {rank} has size 3, rank 0 has 2")


@pytest.mark.parametrize(("setting", "other"), [("segment_bytes", 4096), ("streams", 7)])
def test_different_settings_are_a_mismatch_on_both_sides(meeting, setting, other):
    members = [meeting.join(0, 2), meeting.join(1, 2, **{setting: other})]
    there, here = f"rank 1 has RINGREDUCE_{setting.upper()} {other}", getattr(rr.Config(), setting)
    for error in assert_raised(members, rr.MismatchError, f"{there}, rank 0 has {here}. "):
        assert error.peer == 1


def test_mismatch_is_told_to_a_rank_that_agrees_and_to_one_whose_place_is_taken(meeting):
    first = meeting.join(0, 3)
    with handmade_member(meeting) as member, handmade_member(meeting) as twin:
        member.send(hello(size=3))
        # The answer to what comes after it shows that rank 1 is admitted by now.
        member.send(hello(job_id="theirs"))
        assert "another job" in answer(member)["text"]
        twin.send(hello(size=4))
        with pytest.raises(rr.MismatchError, match="rank 1 has size 4, rank 0 has 3"):
            first.result()
        assert answer(member)["mismatch"]
        assert answer(twin)["mismatch"]


@pytest.mark.parametrize("library", ["python", "numpy"])
def test_another_python_or_numpy_is_one_warning_that_names_the_rank(meeting, caplog, library):
    first = meeting.join(0, 3)
    with handmade_member(meeting) as member:
        ours = {"python": platform.python_version(), "numpy": np.__version__}
        member.send(hello(size=3, **ours))
        member.send(hello(size=3, rank=2, **{**ours, library: "2.7.99"}))
        assert answer(member)["type"] == "Table"
    # These members have no sockets; what matters is that they were let in.
    with pytest.raises(rr.RendezvousError, match="has not 2 ports"):
        first.result()
    [warning] = [r.getMessage() for r in caplog.records if "different versions" in r.getMessage()]
    assert warning.startswith("[0/3] ")
    assert "; rank 2 Python" in warning
    assert "2.7.99" in warning
    assert "rank 1" not in warning


def lone(rank: int, rendezvous: str, **settings: Any) -> rr.Config:
    """Settings of one of two ranks that nobody meets."""
    return rr.Config(rank=rank, size=2, rendezvous=rendezvous, job_id="ours", **settings)


def test_taken_port_is_named_with_a_remedy():
    with sockets.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(rr.RendezvousError, match=f"cannot listen on {address}") as caught:
            rr.Communicator(lone(0, address, join_timeout_s=5))
    assert "RINGREDUCE_RENDEZVOUS" in str(caught.value)


def test_missing_rank_is_named_on_all_that_came_once_the_time_is_over(meeting, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "TIMES", replace(TIMES, remind_s=0.3))
    started = time.monotonic()
    members = [meeting.join(rank, 3, join_timeout_s=1.5) for rank in (0, 1)]
    for error in assert_raised(members, rr.RendezvousError, r"waited 1\.5 s .*rank 2 did not come"):
        assert error.peer == 2
    assert 1.5 <= time.monotonic() - started < 5
    # After a while they say for whom they wait. Rank 1 has reached rank 0, which says the rest.
    expected = f"[0/3] waits at {meeting.address} for rank 2; it gives up 1.5 s after its start"
    assert [record.getMessage() for record in caplog.records] == [expected]


@pytest.mark.parametrize(
    ("size", "named"), [(4, "ranks 1, 2, 3 did not come"), (1000, r"15, 16, \.\.\. did not come")]
)
def test_all_missing_ranks_are_named_in_a_list_that_may_be_cut(meeting, size, named):
    assert_raised([meeting.join(0, size, join_timeout_s=0.5)], rr.RendezvousError, named)


def test_who_was_turned_away_is_in_the_list_of_missing_ranks(meeting):
    first = meeting.join(0, 2, join_timeout_s=2.0)
    with pytest.raises(rr.RendezvousError, match=r"rank 1 .* belongs to another job") as caught:
        meeting.join(1, 2, job_id="theirs").result()
    assert (caught.value.rank, caught.value.peer) == (1, 0)
    with pytest.raises(rr.RendezvousError, match=r"rank 1 did not come .*belongs to another job"):
        first.result()


@pytest.mark.parametrize("is_open", [True, False], ids=["silent port", "closed port"])
def test_missing_rank_0_is_named_once_the_time_is_over(is_open, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "TIMES", replace(TIMES, remind_s=0.3))
    with sockets.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # nobody else's while this is open
        if is_open:
            reserved.listen()
        started = time.monotonic()
        config = lone(1, f"127.0.0.1:{reserved.getsockname()[1]}", join_timeout_s=1.0)
        with pytest.raises(rr.RendezvousError, match="got no answer from rank 0") as caught:
            rr.Communicator(config)
    assert (caught.value.rank, caught.value.peer) == (1, 0)
    assert "127.0.0.1 leads to this host alone" in str(caught.value)
    assert 1 <= time.monotonic() - started < 4
    (reminder,) = (record.getMessage() for record in caplog.records)
    assert reminder.startswith(f"[1/2] has no answer yet from rank 0 at {config.rendezvous}; ")


def test_foreign_bytes_at_the_port_do_not_hurt_the_job(meeting):
    host, port = meeting.address.split(":")
    with ExitStack() as opened:
        http, null = b"GET / HTTP/1.1\r\nHost: ring\r\n\r\n", greeting() + b"\xff" * 64
        for garbage in (http, bytes(1000), b"\xff" * 100_000, bytes(range(256)) * 100, null, b""):
            stranger = opened.enter_context(sockets.create_connection((host, int(port))))
            stranger.sendall(garbage)
        members = [meeting.join(rank, 2) for rank in range(2)]
        assert meeting.all_reduce(*members) == [2, 2]


def test_huge_message_is_not_even_received(meeting):
    first = meeting.join(0, 2)
    with (
        handmade_member(meeting) as stranger,
        stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor,
    ):
        stranger.send(hello(host="x" * (4 << 20)))
        assert monitor.poll(_REPLY_MS)
        stranger.disable_monitor()
    assert meeting.all_reduce(first, meeting.join(1, 2)) == [2, 2]


@pytest.mark.parametrize(
    "told",
    [
        b"hello from something else",
        msgspec.msgpack.encode({"type": "Table", "job": 1}),
        msgspec.msgpack.encode({"type": "Table", "job": 1, "members": [], "material": b""}),
    ],
    ids=["text", "few fields", "table too short"],
)
def test_answer_that_is_no_welcome_is_refused(told):
    with ThreadPoolExecutor(1) as pool, zmq.Context() as context:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 1000)
        router.setsockopt(zmq.RCVTIMEO, _REPLY_MS)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        config = lone(1, f"127.0.0.1:{port}", join_timeout_s=5)
        joining = pool.submit(rr.Communicator, config)
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, told])
        with pytest.raises(rr.RingReduceError, match="not ringreduce's"):
            joining.result()
        router.close()


def test_another_program_in_rank_0s_place_is_an_error_in_time(monkeypatch):
    """After a protocol error libzmq connects no more, and would wait for ever to send."""
    monkeypatch.setattr(rendezvous, "TIMES", replace(TIMES, reach_s=0.1, answer_s=0.1))
    with zmq.Context() as context:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.RCVTIMEO, _REPLY_MS)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        config = lone(1, f"127.0.0.1:{port}", timeout_s=0.2)
        own = {"standby": "", "networks": (), "idle": lambda: None}
        member = rendezvous.Rendezvous(config, "", "", "", security=Security.of(config), **own)
        identity, _ = router.recv_multipart()
        names = "address", "control", "standby", "host", "memory", "key"
        rows = (Member(**dict.fromkeys(names, "")),) * 2
        router.send_multipart([identity, msgspec.msgpack.encode(Table(1, rows, b""))])
        member.meet()
        router.close(linger=0)
    with sockets.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(DEADLINE_S)
        other, _ = listener.accept()
        with other:
            other.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))
            while other.recv(1000):  # Until libzmq has given it up.
                pass
        with pytest.raises(rr.RendezvousError, match="got no answer from rank 0, which had joined"):
            member.exchange([])
    member.close()


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
    assert own_networks(lone(rank, address)) == (bound,)


def several_addresses(config: rr.Config) -> tuple[str, ...]:
    """As of a host with three networks, on loopback."""
    last = () if config.rank == 2 else ("127.0.0.3/8",)
    return ("127.0.0.1/8", "127.0.0.2/8", *last)


@pytest.mark.parametrize("settings", [{"transport": "zmq", "encryption": "on"}, {}])
def test_ranks_with_several_addresses_use_all_and_shut_them(monkeypatch, settings):
    monkeypatch.setattr(formation, "own_networks", several_addresses)

    def assert_shut(host, port):
        with pytest.raises(TimeoutError):
            sockets.create_connection((host, int(port)), 0.05).close()

    def shut(pulling):
        for address in pulling.endpoints:
            assert_shut(*split_host(address))
        return len(pulling.endpoints)

    def work(comm):
        group = comm.split(comm.rank == 2)
        parts = comm.all_to_all(np.repeat(float(comm.rank), 30_000))
        found = comm.all_reduce(np.ones(1))[0], group.all_reduce(np.ones(1))[0], parts.sum()
        data = comm._session.collectives._link.sockets.incoming if settings else ()
        standby = comm._session.job.standby
        for listening in standby._listeners:
            assert_shut(*listening.getsockname()[:2])
        control = comm._session._watcher._control._incoming.values()
        counts = {shut(pulling) for pulling in (*data, *control)}
        assert counts == {len(standby._listeners)}
        comm.barrier()
        return counts, *found

    results = ring_of_threads(3, work, **settings)
    assert results == [({3}, 3, 2, 30_000), ({3}, 3, 2, 30_000), ({2}, 3, 1, 30_000)]


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
        with pytest.raises(rr.RendezvousError) as caught:
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
        with pytest.raises(rr.PeerLostError) as caught:
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
            data = session.collectives._link.sockets.incoming
            opened = [*data, *session._watcher._control._incoming.values(), session.job.standby]
            return [int(each.address.rpartition(":")[2]) for each in opened]

        found = ring_of_threads(3, work, transport="zmq", ports=ports)
        used = [port for rank in found for port in rank]
        assert len(used) == len(set(used)) == 3 * 5
        assert all(first < port <= first + 400 for port in used)
        few = {"ports": f"{first}-{first + 3}", "join_timeout_s": 1}
        with pytest.raises(rr.ConfigError, match=r"needs 5 ports, and RINGREDUCE_PORTS=.* has 4"):
            ring_of_threads(3, work, transport="zmq", **few)


def test_an_address_that_does_not_answer_is_in_the_table_of_all_ranks(monkeypatch):
    """Rank 1 offers an address at which it does not listen."""

    def wrong(config, networks):
        host = "127.0.0.3" if config.rank == 1 else "127.0.0.1"
        return bind_of(config, networks)._replace(hosts=(host,))

    networks = "127.0.0.1/8", "127.0.0.2/8"
    monkeypatch.setattr(formation, "own_networks", lambda config: networks)
    monkeypatch.setattr(formation, "bind_of", wrong)
    with pytest.raises(rr.RendezvousError) as caught:
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
    jobs = [set(ring_of_threads(2, lambda c: c._session.collectives._job)) for _ in range(2)]
    assert [len(job) for job in jobs] == [1, 1]
    assert jobs[0] != jobs[1]


def test_ring_forms_over_ipv6():
    try:
        sockets.create_server(("::1", 0), family=sockets.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6 loopback address")
    with meeting_at("::1") as meeting:
        assert meeting.all_reduce(meeting.join(0, 2), meeting.join(1, 2)) == [2, 2]
