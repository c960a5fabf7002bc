"""Ranks whose calls do not match: all get the same error, which says what both sides do."""

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import testing
from ringreduce.effects import native
from ringreduce.pure.encodings import Coding, encoding_of
from ringreduce.testing import ring_of_threads
from ringreduce.transport.shm import ShmLink
from ringreduce.transport.stalls import State
from ringreduce.transport.zeromq import ZmqLink
from tests.processes import wait_until
from tests.rings import outcome
from tests.scope import in_full

# How ranks reach each other, what hosts they are on, and which of them do another thing.
DISAGREEING: dict[str, tuple[dict[str, Any], set[int]]] = {
    "zmq": ({"transport": "zmq"}, {1}),
    "sealed": ({"transport": "zmq", "encryption": "on"}, {1}),
    "shm": ({"transport": "shm"}, {1}),
    "two hosts, within one": ({"hosts": "aab"}, {1}),
    "two hosts, between them": ({"hosts": "aab"}, {2}),
    "two hosts, two lanes": ({"hosts": "ababa"}, {1, 3}),
}
X, LARGE = np.ones(100), np.ones(300_000)
SINGLE, WIDE = X.astype(np.float32), LARGE.astype(np.float32)


Call = Callable[[rr.Communicator], Any]


def reduce(array: np.ndarray, *arguments: Any, **options: Any) -> Call:
    return lambda comm: comm.all_reduce(array.copy(), *arguments, **options)


def coded(name: str, end: int | None = None) -> Call:
    return reduce(WIDE[:end], coding=Coding(encoding_of(name)))


def broadcast(root: int = 0) -> Call:
    return lambda comm: comm.broadcast(X.copy(), root)


def gather(shape: tuple[int, ...]) -> Call:
    return lambda comm: comm.all_gather(np.ones(shape))


def exchange(parts: np.ndarray) -> Call:
    return lambda comm: comm.all_to_all(parts)


def both(*calls: Call) -> Call:
    return lambda comm: [call(comm) for call in calls]


def apart(call: Callable[[rr.Communicator, int], Any]) -> tuple[Call, Call]:
    """What `call` does on some ranks, where it gets 1, and on the others."""
    return (lambda comm: call(comm, 1)), (lambda comm: call(comm, 0))


def message(send: Call, said: str, tag: int = 0) -> tuple[Call, Call, str]:
    """Rank 0 sends so, which is said so, and rank 1 receives three numbers with that tag."""

    def call(comm: rr.Communicator) -> None:
        if comm.rank < 2:
            comm.recv(np.ones(3), 0, tag=tag) if comm.rank else send(comm)

    return call, call, f"recv #0 of 3 float64, tag {tag} while rank 0 is in {said}"


OTHERS, UNEVEN = "other gradients, shapes or root", "Pass counts to all_to_all on all ranks, or"
PARTS, HUGE = np.ones((30, 3001)), np.ones(2_000_000)
SUM, SEND, BARRIER = reduce(X), broadcast(), rr.Communicator.barrier
# What some ranks do, what the others do, and words that the errors of all must hold.
DISAGREEMENTS: dict[str, tuple[Any, ...]] = {
    "operator": (reduce(X, "max"), SUM, ", max", ", sum"),
    "dtype": (reduce(SINGLE), SUM, "100 float32", "100 float64"),
    "length": (reduce(X[:99]), SUM, "of 99 ", "of 100 "),
    "kind": (BARRIER, SUM, "barrier #1", "all_reduce #1"),
    "order": (both(SEND, SUM), both(SUM, SEND), "broadcast #1", "all_reduce #1"),
    "signature": (reduce(X, signature=1), reduce(X, signature=2), OTHERS, "all_reduce #1"),
    **{
        f"signature of {name}, {count}": apart(
            lambda c, n, name=name, count=count: getattr(c, name)(np.ones(count), signature=n)
        )
        for name in ("all_reduce", "reduce_scatter", "broadcast")
        for count in (3, 100_003)
    },
    "large": (reduce(LARGE[:-1]), reduce(LARGE), "of 299999 ", "of 300000 "),
    "encoded": (coded("bf16"), reduce(WIDE), "all_reduce #1"),
    "encodings": (coded("bf16"), coded("fp16"), "all_reduce #1"),
    "encoded length": (coded("int8", -1), coded("int8"), "all_reduce #1"),
    "small after large": (*(both(reduce(HUGE), reduce(X[:n])) for n in (2, 3)), "of 2 ", "of 3 "),
    "root": (lambda c: c.broadcast(X.copy(), 3 - c.rank), SEND, "root", "broadcast #1"),
    # Roots wait for nobody: of two that both are, each learns of it from its next call.
    "two roots": (broadcast(2), SEND, "broadcast #1"),
    "object": (lambda c: c.broadcast_object(1), BARRIER, "broadcast_object #1", "barrier #1"),
    "gather": (gather((2, 3)), gather((2, 4)), OTHERS, "all_gather #1"),
    "scatter": (lambda c: c.reduce_scatter(X.copy()), SUM, "reduce_scatter #1", "all_reduce #1"),
    "split": (BARRIER, lambda c: c.split(0), "is in split"),
    "parts of other shapes": apart(lambda c, n: c.all_to_all(np.ones((c.size, 1 + n)))),
    "parts of other rows": apart(lambda c, n: c.all_to_all(np.ones(c.size * (1 + n)))),
    "parts of other dtypes": apart(lambda c, n: c.all_to_all(np.ones(c.size, "if"[n]))),
    "uneven parts of other dtypes": apart(
        lambda c, n: c.all_to_all(np.ones(c.size, "if"[n]), [1] * c.size)
    ),
    "known counts": apart(
        lambda c, n: c.all_to_all(
            np.ones(c.size), np.roll(np.eye(c.size, dtype=int) * c.size, n, axis=1)
        )
    ),
    "counts on some": (
        lambda c: c.all_to_all(np.ones(c.size, int), [1] * c.size),
        lambda c: c.all_to_all(np.ones(c.size, int)),
        *("with counts", UNEVEN),
    ),
    # Once parts have travelled, and in the midst of it.
    **{
        f"large parts and {name}": (both(exchange(PARTS), other), exchange(PARTS))
        for name, other in {
            "all_reduce": reduce(PARTS),
            "another shape": exchange(PARTS[:, :-1].copy()),
            "another dtype": exchange(PARTS.astype(int)),
        }.items()
    },
    "root of gather": apart(lambda c, n: c.gather(np.ones(2), n)),
    "root of objects": apart(lambda c, n: c.scatter_object([1] * c.size, n)),
    "gather and all_gather": (lambda c: c.gather(np.ones(2)), gather((2,))),
    "tags": message(lambda c: c.send(X[:3], 1, tag=4), "send #0 of 3 float64, tag 4", 5),
    "counts of a message": message(lambda c: c.send(X[:2], 1), "send #0 of 2 float64, tag 0"),
    "dtypes of a message": message(lambda c: c.send(SINGLE[:3], 1), "send #0 of 3 float32, tag 0"),
    "object and array": message(lambda c: c.send_object(1, 1), "send_object #0, tag 0"),
}


def cases() -> Iterator[Any]:
    """Every disagreement in every way; outside the full suite in one of those of two hosts."""
    of_hosts = [way for way in DISAGREEING if "hosts" in way]
    for number, name in enumerate(DISAGREEMENTS):
        chosen = "zmq", "shm", of_hosts[number % len(of_hosts)]
        for way in DISAGREEING:
            yield (name, way) if way in chosen else in_full(name, way)


@pytest.mark.parametrize(("name", "way"), list(cases()))
def test_ranks_that_disagree_all_get_a_mismatch_that_says_what_both_sides_do(way, name):
    settings, others = DISAGREEING[way]
    if settings.get("transport") != "zmq" and native.library() is None:
        pytest.skip(native.why_missing())
    first, second, *words = DISAGREEMENTS[name]

    def work(comm):
        call = first if comm.rank in others else second
        error = None
        # A rank that is not concerned yet learns of it from its next call.
        while not isinstance(error, rr.RingReduceError):
            error = outcome(lambda: (call(comm), comm.barrier()))
        return error, outcome(comm.barrier)

    size, texts = len(settings.get("hosts", "abc")), []
    # They wait for nothing but each other: longer than a test may take.
    for error, again in ring_of_threads(size, work, timeout_s=300.0, **settings):
        assert isinstance(error, rr.MismatchError)
        assert isinstance(again, rr.MismatchError)
        texts.append(str(error))
        # Its number is that within the host, where there are several.
        text = texts[-1] if "#0" in "".join(words) else re.sub(r"#\d+", "#1", texts[-1])
        # Ranks of another lane than the one at fault know another number.
        assert way == "two hosts, two lanes" or all(word in text for word in words), text
    if name in ("order", "small after large"):
        # Small arrays have no segments in shared memory, and large ones before them had many.
        places = "hop 1|exchange step 1 of [12]|(segment 1 of 1|meeting) in shared memory"
        assert any(re.search(rf", in \w+ #\d, ({places})\.", text) for text in texts), texts


IN_A_CALL, FORMING = "in a call", "while a group forms"


@pytest.mark.parametrize(
    ("way", "where"),
    [
        # The ranks of a host are connected at once, and meet in no barrier.
        *[(way, IN_A_CALL) for way in ("shm", "zmq", "two hosts, within one")],
        *[(way, FORMING) for way in ("zmq", "two hosts, within one")],
    ],
)
def test_a_call_whose_part_is_complete_returns_though_others_have_failed_since(
    way, where, monkeypatch
):
    """Rank 2 has the time to look whether its part is complete once rank 1 has ended the ring."""
    settings, _ = DISAGREEING[way]
    if settings.get("transport") != "zmq" and native.library() is None:
        pytest.skip(native.why_missing())
    rank_2 = threading.local()  # `usual`: of that thread, links whose calls are not held up

    def hold_up(kind: type[ShmLink] | type[ZmqLink]) -> None:
        resume = kind.resume

        def resume_late(link: Any) -> bool:
            if link in getattr(rank_2, "usual", (link,)):
                return resume(link)
            del rank_2.usual  # Once.
            while not resume(link):
                pass
            wait_until(lambda: link._waiting.is_interrupted, "the others to fail")
            monkeypatch.setattr(link, "resume", lambda: True)
            monkeypatch.setattr(link, "state", lambda: State(0, 0, "what has come"))
            return False

        monkeypatch.setattr(kind, "resume", resume_late)

    def work(comm: rr.Communicator) -> Any:
        if comm.rank == 2:
            rank_2.usual = comm._session.collectives.links if where == FORMING else ()
        # Returns on every rank.
        ring = comm.split(0) if where == FORMING else (comm.barrier(), comm)[1]
        if comm.rank == 1:
            ring._session.fail(rr.MismatchError("got other gradients", rank=1, size=3, peer=0))
        return outcome(ring.barrier)

    for kind in (ShmLink, ZmqLink):
        hold_up(kind)
    for error in ring_of_threads(3, work, **settings):
        assert isinstance(error, rr.MismatchError), error
        assert "got other gradients" in str(error)


def test_a_ring_of_threads_works_once_all_have_formed_it(monkeypatch):
    """Else a rank that fails at once could be why another one does not form."""
    begun = threading.Event()
    form = testing.Communicator

    def form_late(config: rr.Config) -> rr.Communicator:
        formed = form(config)
        assert config.rank != 1 or not begun.wait(0.2)
        return formed

    monkeypatch.setattr(testing, "Communicator", form_late)
    ring_of_threads(3, lambda comm: begun.set())
    assert begun.is_set()


def test_a_rank_that_comes_late_is_told_the_cause_though_all_have_left():
    # The abort lies in its queue when it finds that it can no longer send.
    left = [threading.Event(), threading.Event()]

    def work(comm):
        if comm.rank == 0:
            assert all(event.wait(20) for event in left)
        error = outcome(comm.barrier if comm.rank == 1 else lambda: comm.all_reduce(np.ones(10)))
        comm.close()
        if comm.rank:
            left[comm.rank - 1].set()
        return error

    late, *_ = ring_of_threads(3, work, transport="zmq")
    assert isinstance(late, rr.MismatchError)
    assert "was told by rank 2" in str(late)
