"""`on_rank_zero`: once, on rank 0, with the same outcome on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.rank_zero import on_rank_zero
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.errors import ArrayError, ClosedError, WorkerError


def test_it_is_called_once_and_all_ranks_get_the_result():
    called = []

    def named(name: str, *, folder: str) -> dict[str, object]:
        called.append(name)
        return {"path": f"{folder}/{name}", "bytes": 7}

    def work(comm: Communicator) -> object:
        return on_rank_zero(named, "data.npz", folder="cache", communicator=comm)

    assert ring_of_threads(3, work) == [{"path": "cache/data.npz", "bytes": 7}] * 3
    assert called == ["data.npz"]


def test_what_rank_0_raises_is_raised_on_all_and_the_ring_still_works():
    def work(comm: Communicator) -> str:
        def fails() -> None:
            raise FileNotFoundError("no such archive")

        kind = FileNotFoundError if comm.rank == 0 else WorkerError
        with pytest.raises(kind, match="no such archive") as caught:
            on_rank_zero(fails, communicator=comm)
        assert (comm.all_reduce(np.ones(3)) == comm.size).all()
        return str(caught.value)

    texts = ring_of_threads(2, work)
    assert texts[1].startswith("rank 1 of 2 waited for test_what_rank_0_raises")
    assert texts[1].endswith(
        "fails on rank 0, which raised FileNotFoundError: no such archive. Read rank 0's log first."
    )


def test_a_result_that_cannot_be_sent_is_an_error_on_all():
    def work(comm: Communicator) -> None:
        kind = ArrayError if comm.rank == 0 else WorkerError
        with pytest.raises(kind, match=r"cannot send the result of object, a object"):
            on_rank_zero(object, communicator=comm)
        assert (comm.all_reduce(np.ones(3)) == comm.size).all()

    ring_of_threads(2, work)


def test_an_interrupt_ends_the_ring_instead_of_being_sent():
    def work(comm: Communicator) -> None:
        def interrupted() -> None:
            raise KeyboardInterrupt

        on_rank_zero(interrupted, communicator=comm)

    with pytest.raises(KeyboardInterrupt) as caught:
        ring_of_threads(2, work)
    notes = getattr(caught.value, "__notes__", None)  # From Python 3.11 on.
    assert notes is None or "which ended with KeyboardInterrupt" in notes[0]


def test_alone_it_is_a_plain_call():
    def work(comm: Communicator) -> object:
        return on_rank_zero(divmod, 7, 2, communicator=comm)

    assert ring_of_threads(1, work) == [(3, 1)]


def test_without_a_ring_it_is_refused():
    with pytest.raises(ClosedError, match=r"Call ringreduce.init\(\) first"):
        on_rank_zero(print)
