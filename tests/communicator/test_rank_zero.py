"""`on_rank_zero`: once, on rank 0, with the same outcome on every rank."""

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.testing import ring_of_threads
from tests.rings import on_each_rank


def test_it_is_called_once_and_all_ranks_get_the_result():
    """Alone it is a plain call, and without a ring it is refused."""
    called = []

    def named(name, *, folder):
        called.append(name)
        return {"path": f"{folder}/{name}", "bytes": 7}

    def work(comm):
        return rr.on_rank_zero(named, "data.npz", folder="cache", communicator=comm)

    for size in (1, 3):
        assert ring_of_threads(size, work) == [{"path": "cache/data.npz", "bytes": 7}] * size
    assert called == ["data.npz"] * 2
    with pytest.raises(rr.ClosedError, match=r"Call ringreduce.init\(\) first"):
        rr.on_rank_zero(print)


@on_each_rank(2)
def test_a_result_in_place_of_a_function_is_an_error_on_every_rank(comm):
    text = r"got None to call on rank 0, which is no function.*on_rank_zero\(lambda: \.\.\.\)"
    with pytest.raises(rr.ConfigError, match=text):
        rr.on_rank_zero(None, communicator=comm)


def test_what_rank_0_raises_is_raised_on_all_and_the_ring_still_works():
    def work(comm):
        def fails():
            raise FileNotFoundError("no such archive")

        kind = FileNotFoundError if comm.rank == 0 else rr.WorkerError
        with pytest.raises(kind, match="no such archive") as caught:
            rr.on_rank_zero(fails, communicator=comm)
        assert (comm.all_reduce(np.ones(3)) == comm.size).all()
        return str(caught.value)

    texts = ring_of_threads(2, work)
    assert texts[1].startswith("rank 1 of 2 waited for test_what_rank_0_raises")
    assert texts[1].endswith(
        "fails on rank 0, which raised FileNotFoundError: no such archive. Read rank 0's log first."
    )


@on_each_rank(2)
def test_a_result_that_cannot_be_sent_is_an_error_on_all(comm):
    kind = rr.ArrayError if comm.rank == 0 else rr.WorkerError
    with pytest.raises(kind, match=r"cannot send the result of object, a object"):
        rr.on_rank_zero(object, communicator=comm)
    assert (comm.all_reduce(np.ones(3)) == comm.size).all()


def test_an_interrupt_ends_the_ring_instead_of_being_sent():
    def work(comm):
        def interrupted():
            raise KeyboardInterrupt

        rr.on_rank_zero(interrupted, communicator=comm)

    with pytest.raises(KeyboardInterrupt) as caught:
        ring_of_threads(2, work)
    notes = getattr(caught.value, "__notes__", None)  # From Python 3.11 on.
    assert notes is None or "which ended with KeyboardInterrupt" in notes[0]
