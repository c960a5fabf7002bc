"""Links over ZeroMQ by themselves, without a rendezvous: addresses, and rings of a few members."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

import ringreduce as rr
from ringreduce.collectives.ring import Ring
from ringreduce.communicator.session import Session
from ringreduce.effects.events import Events
from ringreduce.pure.membership import Membership, whole
from ringreduce.pure.timeouts import Timeouts
from ringreduce.testing import ring_of_threads
from ringreduce.transport import frames, inherited, loop, records
from ringreduce.transport.channel import Outgoing
from ringreduce.transport.listening import Bind
from ringreduce.transport.security import Security
from ringreduce.transport.stalls import Waiting
from ringreduce.transport.zeromq import ZmqLink
from tests.processes import wait_until
from tests.rings import outcome

# Three ranks of a job of twelve that form a ring of their own.
MEMBERS = (1, 5, 10)
WORLD_SIZE = 12


def make_link(rank: int, size: int = 3, timeout_s: float = 20.0, **settings: object) -> ZmqLink:
    waiting = Waiting(Timeouts(timeout_s, timeout_s), Events())
    usual = {"bind": Bind(("127.0.0.1",)), "segment_bytes": 4096, "waiting": waiting}
    security = Security(rank=rank, size=size)
    return ZmqLink(security=security, **{**usual, **settings})  # type: ignore[arg-type]


@contextmanager
def rings_of(members: Sequence[int], world_size: int, **settings: object) -> Iterator[list[Ring]]:
    """The rings' ends of the connected links of `members`, of a job of `world_size`."""
    links = {rank: make_link(rank, world_size, **settings) for rank in members}
    addresses = {rank: link.address for rank, link in links.items()}
    common = {"size": len(members), "membership": Membership(tuple(members)), "job": 77}
    common |= {"pairs": None, "places": range(len(members))}
    with closing(*links.values()):
        for link in links.values():
            link.connect(job=77, addresses=addresses, membership=common["membership"], ranks_here=1)
        yield [Ring(link, rank=place, **common) for place, link in enumerate(links.values())]


def on_each(rings: list[Ring], work: Callable[[Ring], object]) -> list[object]:
    """What `work` returned or raised for each end, run at once; one that fails tells the next."""

    def attempt(ring: Ring) -> object:
        found = outcome(lambda: work(ring))
        if isinstance(found, rr.RingReduceError):
            ring.abort()
            # As the watchers do.
            for other in rings:
                other._link._waiting.interrupt(found)
        return found

    with ThreadPoolExecutor(len(rings)) as pool:
        return list(pool.map(attempt, rings))


@contextmanager
def closing(*links: ZmqLink | Outgoing) -> Iterator[None]:
    with ExitStack() as stack:
        for link in links:
            stack.callback(link.close)
        yield


@pytest.mark.parametrize(
    ("size", "streams", "ports"), [(2, 1, 1), (3, 1, 2), (4, 1, 2), (5, 1, 3), (2, 4, 4), (9, 2, 5)]
)
def test_address_has_a_port_for_each_stream_and_each_longer_distance(size, streams, ports):
    link = make_link(0, size, streams=streams)
    with closing(link):
        host, _, numbers = link.address.rpartition(":")
        assert host == "tcp://127.0.0.1"
        assert len(set(numbers.split(","))) == ports


def test_link_that_is_not_connected_says_so():
    link = make_link(0)
    with closing(link), pytest.raises(rr.ClosedError, match="rank 0 of 3 has no connection"):
        Ring(link, rank=0, size=3, membership=whole(3), pairs=None, places=range(3)).barrier()


def test_a_connection_that_cannot_be_tried_is_lost():
    """libzmq says only that it will try again: there was no descriptor, no memory, or no such name.

    Else frames for it would wait for ever, and the receiver blame nobody.
    """
    address, admission = f"tcp://{'x' * 70}:9", Security(rank=0, size=2).data
    with zmq.Context() as context:
        pushing = Outgoing(context, address, 1, records.ChannelRecord(), 0, admission)
        with closing(pushing):
            while not pushing.is_lost:
                pushing.events.receiver.poll(1000)
                pushing.read_events()


def test_a_broadcast_that_is_not_taken_has_few_ciphertexts_in_memory():
    links: dict[int, ZmqLink] = {}

    def held():
        return sum(record.borrowed - record.released for record in links[0].records)

    def work(comm):
        links[comm.rank] = comm._session.collectives._link
        comm.barrier()
        array = np.full(1 << 23, 1.0 - comm.rank)
        if comm.rank == 1:
            wait_until(lambda: held() >= 16, "rank 0 to wait for this one")
            assert max(held() for _ in range(1000)) <= 17
        return (comm.broadcast(array) == 1).all()

    assert ring_of_threads(2, work, transport="zmq", encryption="on") == [True] * 2


@pytest.mark.parametrize(("count", "calls"), [(10, 2500), (50_021, 80)])
@pytest.mark.parametrize("encryption", ["off", "on"])
def test_signals_do_not_break_a_ring(count, calls, encryption):
    """Ten thousand a second, which interrupt libzmq's system calls in the threads of the loops."""
    timer = {signal.SIGALRM}

    def work(comm):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, timer)
        try:
            return all((comm.all_reduce(np.ones(count)) == 2).all() for _ in range(calls))
        finally:
            # pyzmq does not repeat an interrupted end of a context.
            signal.pthread_sigmask(signal.SIG_BLOCK, timer)

    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, timer)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        settings = {"transport": "zmq", "encryption": encryption, "segment_bytes": 32_768}
        assert ring_of_threads(2, work, **settings) == [True] * 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, timer)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("call", [Ring.barrier, lambda ring: ring.all_reduce(np.ones(50_021), 1)])
def test_member_that_has_left_is_named_by_its_rank_in_the_job(call):
    with rings_of(MEMBERS, WORLD_SIZE) as rings:
        on_each(rings, Ring.barrier)
        rings[2].close()
        errors = on_each(rings[:2], call)
    for error, rank in zip(errors, MEMBERS, strict=False):
        # The watcher knows more; here there is none. One that is told gets the other's error.
        assert isinstance(error, rr.PeerLostError), errors
        assert error.rank in MEMBERS[:2], rank
        assert (error.size, error.peer) == (WORLD_SIZE, 10)
        assert "rank 10" in str(error)


@pytest.mark.parametrize("call", [Ring.barrier, lambda ring: ring.all_reduce(np.ones(50_021), 1)])
def test_silent_member_is_named_by_its_rank_in_the_job(call):
    with rings_of(MEMBERS, WORLD_SIZE, timeout_s=0.3) as rings:
        on_each(rings, Ring.barrier)
        errors = on_each(rings[1:], call)
    # The rank behind the silent one waited for it, and the next one for that; or were told.
    for error in errors:
        assert isinstance(error, rr.PeerTimeoutError), errors
        silent = 5 if "all_reduce" in str(error) and error.rank == 10 else 1
        assert f"rank {error.rank} of 12" in str(error)
        assert f"from rank {silent} (tcp://127.0.0.1:" in str(error)


def test_error_of_one_member_reaches_all_that_wait_over_any_distance():
    """Ranks wait for one another over one place and over two; aborts go both ways."""
    cause = rr.MismatchError("has seen enough", rank=3, size=5)

    def work(ring):
        if ring is rings[3]:
            raise cause
        ring.barrier()

    with rings_of(range(5), 5) as rings:
        on_each(rings, Ring.barrier)
        errors = on_each(rings, work)
    for error in errors:
        assert isinstance(error, rr.MismatchError), errors
        assert "has seen enough" in str(error)
        assert error is cause or error.origin == 3


def test_what_is_closed_closes_nothing_in_a_child():
    """Its ports may be another socket's by then, which a child inherits."""
    before = set(inherited._watched)
    link = make_link(0)
    assert link.sockets in inherited._watched
    link.close()
    assert link.sockets not in inherited._watched
    ring_of_threads(2, lambda comm: comm.barrier(), transport="zmq")
    assert all(isinstance(each, Session) for each in set(inherited._watched) - before)


def test_what_any_stream_has_borrowed_counts(monkeypatch):
    """Python runs here what is compiled in a call."""
    monkeypatch.setattr(loop, "libzmq", SimpleNamespace(sched_yield=lambda: 0, usleep=lambda _: 0))
    is_released = loop.is_released.py_func
    channels = np.zeros(3, records.CHANNEL).view(np.recarray)
    for stream in range(3):
        channels[stream].borrowed += 1
        assert [is_released(channels, 3, but) for but in (0, 1)] == [False, True]
        channels[stream].released += 1
        assert is_released(channels, 3, 0)


def test_only_ranks_with_a_core_each_yield_while_they_wait():
    cores = len(os.sched_getaffinity(0))
    assert frames.yields(cores) > 0
    assert frames.yields(cores + 1) == 0
