"""Groups: parts of the ranks with collectives, failures and ends of their own."""

import threading
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.communicator import groups, opened_sockets
from ringreduce.testing import ring_of_threads
from ringreduce.transport import descriptors
from tests.rings import SOON_S, Ring, on_each_rank, outcome, outcomes
from tests.scope import in_full


def check(group: rr.Communicator, members: list[int]) -> None:
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
@on_each_rank(over="on_ranks")
def test_collectives_of_a_group_are_its_members_alone(comm, size):
    odd = comm.split(comm.rank % 2)
    check(odd, [rank for rank in range(size) if rank % 2 == comm.rank % 2])
    check(comm, list(range(size)))


@on_each_rank(6, over="on_ranks")
def test_overlapping_groups_and_groups_of_groups(comm):
    """Rows and columns of two by three ranks, as in mixed parallelism; and a turned row."""
    row = comm.split(f"row {comm.rank // 3}")
    column = comm.split(f"column {comm.rank % 3}")
    start = 3 * (comm.rank // 3)
    check(row, [start, start + 1, start + 2])
    check(column, [comm.rank % 3, comm.rank % 3 + 3])
    turned = row.split(0, key=-row.rank)
    check(turned, [start + 2, start + 1, start])
    pair = turned.split(None if turned.rank == 1 else 7)
    assert (pair is None) is (turned.rank == 1)
    if pair is not None:
        check(pair, [start + 2, start])
    check(row, [start, start + 1, start + 2])
    comm.barrier()


@on_each_rank(4, over="on_ranks")
def test_any_ranks_form_a_group_that_ends_before_or_with_its_parent(comm):
    """Named by numbers and text; others are refused before anything is sent."""
    for arguments in ((1.5,), ([0],), (0, 1.5), (0, "a")):
        with pytest.raises(rr.ArrayError, match="cannot split by color"):
            comm.split(*arguments)
    group = comm.split([None, "alone", 2, 2][comm.rank])
    assert (group is None) is (comm.rank == 0)
    if group is not None:
        members = (1,) if comm.rank == 1 else (2, 3)
        check(group, list(members))
        place = f"rank {members.index(comm.rank)} of {len(members)}"
        assert repr(group) == f"<Communicator {place}, ranks {members} of the job, open>"
        group.close()
    pair = comm.split(comm.rank // 2)
    check(pair, [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1])
    comm.barrier()
    comm.close()
    assert pair.closed
    with pytest.raises(rr.ClosedError, match="after close"):
        pair.barrier()


def test_a_world_of_one_can_be_split():
    with rr.Communicator(rr.Config()) as comm:
        group = comm.split("all")
        check(group, [0])
        assert comm.split(None) is None


@on_each_rank(4, transport="zmq")
def test_work_in_the_background_of_two_groups_does_not_mix(comm):
    row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    arrays = [np.full(50_000, float(comm.rank)) for _ in range(8)]
    pending = [
        (row if number % 2 else column).all_reduce(array, async_op=True)
        for number, array in enumerate(arrays)
    ]
    for number, each in enumerate(pending):
        others = comm.rank ^ 1 if number % 2 else comm.rank ^ 2
        assert (each.wait() == comm.rank + others).all()


# --- Failure ----------------------------------------------------------------------------------


def test_a_group_that_breaks_leaves_the_others_alone(on_ranks):
    """Its members name the ranks of the job; the job itself and the other group go on."""

    def work(comm):
        group = comm.split(comm.rank % 2)
        text = ""
        if comm.rank in (1, 3):
            with pytest.raises(rr.MismatchError) as caught:
                group.all_reduce(np.ones(3 if comm.rank == 1 else 4))
            text = str(caught.value)
            assert group.failure is not None
            with pytest.raises(rr.MismatchError):
                group.barrier()
        else:
            check(group, [0, 2])
        check(comm, [0, 1, 2, 3])
        assert comm.failure is None
        return text

    texts = on_ranks(4, work)
    assert any("rank 1 of 4" in text and "rank 3" in text for text in (texts[1], texts[3])), texts


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_killed_rank_breaks_the_groups_it_was_in_and_no_others(tmp_path, transport):
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
        ring.kill(3)
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
    "moment", [in_full("announced"), "connecting", in_full("before the first call")]
)
def test_a_rank_killed_while_a_group_forms_is_named(tmp_path, transport, moment):
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


def test_a_member_that_left_because_its_parent_broke_is_not_the_one_at_fault(monkeypatch):
    exchange = groups._Parent.exchange

    def exchange_and_break(parent, value, why=""):
        passed, comm = exchange(parent, value, why), parent.session
        if comm.config.rank == 1 and value is None:  # The last: the others wait in the group.
            raise comm.fail(rr.PeerLostError("lost rank 2", **comm.config.who, peer=2))
        return passed

    monkeypatch.setattr(groups._Parent, "exchange", exchange_and_break)
    errors = outcomes(3, lambda comm: comm.split(0), transport="zmq")
    assert [(type(error), error.peer) for error in errors] == [(rr.PeerLostError, 2)] * 3, errors


@pytest.mark.parametrize("transport", [in_full("zmq"), "auto"])
def test_groups_used_in_another_order_are_named(transport):
    """Each rank waits in a group for one that is in another; nobody is in user code."""
    together = threading.Barrier(4, timeout=30)

    def work(comm):
        row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        order, started = (row, column), time.monotonic()
        order = order if comm.rank in (0, 3) else order[::-1]
        error = outcome(lambda: [group.all_reduce(np.ones(1000)) for group in order])
        assert time.monotonic() - started < 2 * SOON_S
        together.wait()
        return error

    # A rank that has given up is in user code, for the others.
    limits = {"timeout_s": 2.0, "busy_timeout_s": 4.0}
    errors = ring_of_threads(4, work, transport=transport, **limits)
    assert {type(error) for error in errors} <= {rr.PeerTimeoutError, rr.PeerLostError}, errors
    assert any("is in all_reduce of the group of ranks" in str(error) for error in errors), errors


@on_each_rank(2)
def test_more_groups_than_there_are_numbers_for_are_refused_on_all_ranks(comm):
    comm._session.job.highest_group = 65_533
    assert comm.split(comm.rank) is not None
    with pytest.raises(rr.ArrayError, match="has formed 65535 groups"):
        comm.split(comm.rank)
    comm.barrier()


@pytest.mark.parametrize("module", [opened_sockets, descriptors], ids=["ports", "open files"])
def test_a_rank_that_cannot_open_its_ports_is_named_on_all(monkeypatch, module):
    name, failing = "Control" if module is opened_sockets else "reserve", threading.local()
    usable = getattr(module, name)

    def refused(*arguments, **options):
        if getattr(failing, "now", False):
            raise OSError("no port is left")
        return usable(*arguments, **options)

    def work(comm):
        failing.now = comm.rank == 1
        with pytest.raises((OSError, rr.RendezvousError)) as caught:
            comm.split(0)
        failing.now = False
        comm.barrier()
        return str(caught.value)

    monkeypatch.setattr(module, name, refused)
    texts = ring_of_threads(3, work)
    assert texts[1] == "no port is left"
    for text in (texts[0], texts[2]):
        assert "cannot form a group: rank 1 failed with OSError: no port is left" in text
