"""Groups: parts of the ranks with collectives, failures and ends of their own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ringreduce
from ringreduce.communicator import opened_sockets
from ringreduce.communicator.communicator import Communicator
from ringreduce.testing import ring_of_threads
from ringreduce.transport import descriptors
from tests.rings import SOON_S, Ring
from tests.scope import in_full


def check(group: Communicator, members: list[int]) -> None:
    """Every collective over the group, whose members have these ranks in the job."""
    size, own = len(members), members[group.rank]
    assert (group.size, own) == (size, group.config.rank)
    for count in (0, 1, size - 1, size, size + 1, 1009, 40_009):
        array = np.arange(count, dtype=np.float64) + own
        group.all_reduce(array)
        assert np.array_equal(array, np.arange(count) * size + sum(members))
    assert group.all_gather(np.array([own])).tolist() == members
    part = group.reduce_scatter(np.full(3 * size, float(own)))
    assert part.tolist() == [sum(members)] * 3
    for root in range(size):
        assert group.broadcast(np.array([own]), root)[0] == members[root]
        assert group.broadcast_object(own, root) == members[root]
    assert group.all_gather_object({"rank": own}) == [{"rank": member} for member in members]
    mean = group.all_reduce(np.array([float(own * size)]), "mean")
    assert mean[0] == sum(members)
    group.barrier()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_collectives_of_a_group_are_its_members_alone(
    on_ranks: Callable[..., list[Any]], size: int
) -> None:
    def work(comm: Communicator) -> None:
        odd = comm.split(comm.rank % 2)
        assert odd is not None
        check(odd, [rank for rank in range(size) if rank % 2 == comm.rank % 2])
        check(comm, list(range(size)))

    on_ranks(size, work)


def test_overlapping_groups_and_groups_of_groups(on_ranks: Callable[..., list[Any]]) -> None:
    """Rows and columns of two by three ranks, as in mixed parallelism; and a turned row."""

    def work(comm: Communicator) -> None:
        row = comm.split(f"row {comm.rank // 3}")
        column = comm.split(f"column {comm.rank % 3}")
        assert row is not None
        assert column is not None
        start = 3 * (comm.rank // 3)
        check(row, [start, start + 1, start + 2])
        check(column, [comm.rank % 3, comm.rank % 3 + 3])
        turned = row.split(0, key=-row.rank)
        assert turned is not None
        check(turned, [start + 2, start + 1, start])
        pair = turned.split(None if turned.rank == 1 else 7)
        assert (pair is None) is (turned.rank == 1)
        if pair is not None:
            check(pair, [start + 2, start])
        check(row, [start, start + 1, start + 2])
        comm.barrier()

    on_ranks(6, work)


def test_a_rank_may_take_no_part_or_be_alone(on_ranks: Callable[..., list[Any]]) -> None:
    def work(comm: Communicator) -> None:
        group = comm.split([None, "alone", "two", "two"][comm.rank])
        assert (group is None) is (comm.rank == 0)
        if group is not None:
            check(group, [1] if comm.rank == 1 else [2, 3])
        comm.barrier()

    on_ranks(4, work)


def test_a_world_of_one_can_be_split() -> None:
    with Communicator(ringreduce.Config()) as comm:
        group = comm.split("all")
        assert group is not None
        check(group, [0])
        assert comm.split(None) is None


def test_work_in_the_background_of_two_groups_does_not_mix() -> None:
    def work(comm: Communicator) -> None:
        row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        assert row is not None
        assert column is not None
        arrays = [np.full(50_000, float(comm.rank)) for _ in range(8)]
        pending = [
            (row if number % 2 else column).all_reduce(array, async_op=True)
            for number, array in enumerate(arrays)
        ]
        for number, each in enumerate(pending):
            others = comm.rank ^ 1 if number % 2 else comm.rank ^ 2
            assert (each.wait() == comm.rank + others).all()

    ring_of_threads(4, work, transport="zmq")


def test_a_group_says_who_is_in_it() -> None:
    def work(comm: Communicator) -> list[str]:
        group = comm.split(comm.rank % 2)
        return [repr(comm), repr(group)]

    shown = ring_of_threads(4, work)
    assert shown[3] == [
        "<Communicator rank 3 of 4, open>",
        "<Communicator rank 1 of 2, ranks (1, 3) of the job, open>",
    ]


# --- Failure ----------------------------------------------------------------------------------


def test_a_group_that_breaks_leaves_the_others_alone(on_ranks: Callable[..., list[Any]]) -> None:
    """Its members name the ranks of the job; the job itself and the other group go on."""

    def work(comm: Communicator) -> str:
        group = comm.split(comm.rank % 2)
        assert group is not None
        text = ""
        if comm.rank in (1, 3):
            with pytest.raises(ringreduce.MismatchError) as caught:
                group.all_reduce(np.ones(3 if comm.rank == 1 else 4))
            text = str(caught.value)
            assert group.failure is not None
            with pytest.raises(ringreduce.MismatchError):
                group.barrier()
        else:
            check(group, [0, 2])
        check(comm, [0, 1, 2, 3])
        assert comm.failure is None
        return text

    texts = on_ranks(4, work)
    assert any("rank 1 of 4" in text and "rank 3" in text for text in (texts[1], texts[3])), texts


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_killed_rank_breaks_the_groups_it_was_in_and_no_others(
    tmp_path: Path, transport: str
) -> None:
    program = """
        ring = join()
        group = ring.split(RANK % 2)
        say("ready")
        if RANK == 3:
            hold()
        def rounds():
            for _ in range(20):
                assert group.all_reduce(np.full(1000, float(RANK)))[0] == 2
        if RANK == 1:
            attempt("group", lambda: group.all_reduce(np.ones(1000)))
        else:
            while ring.failure is None:
                time.sleep(0.01)
            attempt("group", rounds)
        attempt("ring", ring.barrier)
    """
    with Ring(tmp_path, 4, program, transport=transport) as ring:
        ring.wait("ready")
        ring.workers[3].signal(signal.SIGKILL)
        facts = ring.wait("group", [0, 1, 2])
        assert [fact["kind"] for fact in facts] == ["", "PeerLostError", ""], facts
        assert "rank 3" in facts[1]["text"]
        assert [fact["kind"] for fact in ring.wait("ring", [0, 1, 2])] == ["PeerLostError"] * 3


# Where the killed rank is: what it does in place of this method.
FORMING_AT = {
    "announced": "ringreduce.communicator.groups.form_group",
    "connecting": "ringreduce.transport.control.Control.connect",
    "before the first call": "ringreduce.engine.watch.Watcher.__init__",
}


@pytest.mark.parametrize("transport", ["zmq", "shm"])
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=() if moment == "connecting" else pytest.mark.full)
        for moment in FORMING_AT
    ],
)
def test_a_rank_killed_while_a_group_forms_is_named(
    tmp_path: Path, transport: str, moment: str
) -> None:
    module, _, name = FORMING_AT[moment].rpartition(".")
    program = f"""
        import pkgutil
        ring = join()
        if RANK == 2:
            def end(*arguments, **options):
                os.kill(os.getpid(), signal.SIGKILL)
            setattr(pkgutil.resolve_name("{module}"), "{name}", end)
        attempt("split", lambda: ring.split(0).barrier())
        attempt("ring", ring.barrier)
        hold()  # One that leaves at once may be missed first.
    """
    with Ring(tmp_path, 3, program, transport=transport) as ring:
        for event in ("split", "ring"):
            facts = ring.wait(event, [0, 1])
            assert [fact["kind"] for fact in facts] == ["PeerLostError"] * 2, facts
            assert all("rank 2" in fact["text"] for fact in facts), facts
            assert max(fact["seconds"] for fact in facts) < SOON_S


def test_a_rank_that_does_not_split_is_named(on_ranks: Callable[..., list[Any]]) -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(ringreduce.MismatchError, match=r"is in split|in barrier.* is in split"):
            comm.barrier() if comm.rank == 1 else comm.split(0)

    on_ranks(2, work)


@pytest.mark.parametrize("transport", [in_full("zmq"), "shm"])
def test_groups_used_in_another_order_are_named(tmp_path: Path, transport: str) -> None:
    """Each rank waits in a group for one that is in another; nobody is in user code."""
    program = """
        ring = join()
        row, column = ring.split(RANK // 2), ring.split(RANK % 2)
        def call():
            order = (row, column) if RANK in (0, 3) else (column, row)
            for group in order:
                group.all_reduce(np.ones(1000))
        say("ready")
        attempt("result", call)
        hold()
    """
    # A rank that has given up is in user code, for the others.
    limits = {"timeout_s": 2.0, "busy_timeout_s": 4.0}
    with Ring(tmp_path, 4, program, transport=transport, **limits) as ring:
        facts = ring.wait("result")
        assert {fact["kind"] for fact in facts} <= {"PeerTimeoutError", "PeerLostError"}, facts
        assert any("is in all_reduce of the group of ranks" in fact["text"] for fact in facts), (
            facts
        )
        # Errors of a group say whose call it was.
        assert any(" of the group of ranks " in fact["text"] for fact in facts), facts
        assert all(fact["seconds"] < 2 * SOON_S for fact in facts), facts
        ring.release()


def test_a_group_closes_with_its_parent() -> None:
    def work(comm: Communicator) -> None:
        group = comm.split(comm.rank % 2)
        assert group is not None
        comm.barrier()
        comm.close()
        assert group.closed
        with pytest.raises(ringreduce.ClosedError, match="after close"):
            group.barrier()

    ring_of_threads(4, work)


def test_a_group_may_close_before_its_parent(on_ranks: Callable[..., list[Any]]) -> None:
    def work(comm: Communicator) -> None:
        group = comm.split(comm.rank % 2)
        assert group is not None
        with group:
            check(group, [comm.rank % 2, comm.rank % 2 + 2])
        again = comm.split(comm.rank // 2)
        assert again is not None
        check(again, [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1])

    on_ranks(4, work)


def test_colors_may_be_numbers_and_text() -> None:
    def work(comm: Communicator) -> tuple[int, ...]:
        group = comm.split("left" if comm.rank else 0)
        assert group is not None
        return group.members

    assert ring_of_threads(3, work) == [(0,), (1, 2), (1, 2)]


@pytest.mark.parametrize("arguments", [(1.5,), ([0],), (0, 1.5), (0, "a")])
def test_a_color_or_key_of_another_type_is_refused_before_anything_is_sent(
    arguments: tuple[Any, ...],
) -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(ringreduce.ArrayError, match="cannot split by color"):
            comm.split(*arguments)
        comm.barrier()

    ring_of_threads(2, work)


def test_more_groups_than_there_are_numbers_for_are_refused_on_all_ranks() -> None:
    def work(comm: Communicator) -> None:
        job = comm._session.job
        assert job is not None
        job.highest_group = 65_533
        last = comm.split(comm.rank)
        assert last is not None
        with pytest.raises(ringreduce.ArrayError, match="has formed 65535 groups"):
            comm.split(comm.rank)
        comm.barrier()

    ring_of_threads(2, work)


@pytest.mark.parametrize("module", [opened_sockets, descriptors], ids=["ports", "open files"])
def test_a_rank_that_cannot_open_its_ports_is_named_on_all(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    name, failing = "Control" if module is opened_sockets else "reserve", threading.local()
    usable = getattr(module, name)

    def refused(*arguments: Any, **options: Any) -> Any:
        if getattr(failing, "now", False):
            raise OSError("no port is left")
        return usable(*arguments, **options)

    def work(comm: Communicator) -> str:
        failing.now = comm.rank == 1
        with pytest.raises((OSError, ringreduce.RendezvousError)) as caught:
            comm.split(0)
        failing.now = False
        comm.barrier()
        return str(caught.value)

    monkeypatch.setattr(module, name, refused)
    texts = ring_of_threads(3, work)
    assert texts[1] == "no port is left"
    for text in (texts[0], texts[2]):
        assert "cannot form a group: rank 1 failed with OSError: no port is left" in text
