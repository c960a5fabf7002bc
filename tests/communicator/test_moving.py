"""Calls that give each rank its own part: all_to_all, gather, scatter, of arrays and of objects."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.vocabulary.types import DTYPE_NAMES, dtype_named
from tests.rings import on_each_rank
from tests.scope import in_full

# Rows for each rank: none, one, primes, several frames.
ROWS = (0, 1, 2, 7, 1009, 100_003)


def values(rank: int, count: int, dtype: str = "float64") -> np.ndarray:
    """Numbers below 127 that differ between ranks and places."""
    return ((np.arange(count) * 7 + rank * 13) % 127).astype(dtype_named(dtype))


@pytest.mark.parametrize("size", [2, 3, in_full(5)])
@on_each_rank(over="on_ranks")
def test_all_to_all_of_equal_parts(comm, size):
    own = comm.rank
    for rows in ROWS:
        array = values(own, rows * size)
        before, out = array.copy(), np.full_like(array, -1)
        due = np.concatenate(
            [values(each, rows * size)[rows * own : rows * (own + 1)] for each in range(size)]
        )
        assert np.array_equal(comm.all_to_all(array), due)
        assert comm.all_to_all(array, out=out) is out
        assert np.array_equal(out, due)
        registered = comm.empty(array.shape, array.dtype)
        registered[:] = array
        assert np.array_equal(comm.all_to_all(registered, async_op=True).wait(), due)
        assert np.array_equal(array, before)
    square = comm.all_to_all(np.full((size, 2, 3), own, np.int16))
    assert square.shape == (size, 2, 3)
    assert (square == np.arange(size)[:, None, None]).all()


@pytest.mark.parametrize("size", [2, 3, in_full(5)])
@on_each_rank(over="on_ranks")
def test_all_to_all_of_uneven_parts(comm, size):
    own, numbers = comm.rank, np.random.default_rng(1)
    for most in (1, 3, 30_011):
        counts = numbers.integers(0, most, (size, size), endpoint=True)
        counts[numbers.integers(size)] = 0
        rows = [np.repeat(np.arange(size), counts[each]) * 10 + each for each in range(size)]
        result, received = comm.all_to_all(rows[own][:, None], counts[own])
        assert received == counts[:, own].tolist()
        due = np.concatenate([row[row // 10 == own] for row in rows])
        assert np.array_equal(result, due[:, None])
        again, received = comm.all_to_all(rows[own][:, None], counts)
        assert received == counts[:, own].tolist()
        assert np.array_equal(again, result)


@on_each_rank(3, over="on_ranks")
def test_all_to_all_of_every_dtype(comm):
    for dtype in DTYPE_NAMES:
        result = comm.all_to_all(values(comm.rank, 9, dtype).reshape(3, 3))
        due = [values(each, 9, dtype).reshape(3, 3)[comm.rank] for each in range(3)]
        assert result.dtype == due[0].dtype
        assert np.array_equal(result, due)


@pytest.mark.parametrize("size", [2, 3, in_full(5)])
@on_each_rank(over="on_ranks")
def test_gather_and_scatter(comm, size):
    own = comm.rank
    for root in range(size):
        for rows in ROWS[:-1]:
            found = comm.gather(np.full((rows + own, 2), own), root)
            due = np.repeat(np.arange(size), rows + np.arange(size))[:, None].repeat(2, 1)
            assert np.array_equal(found, due if own == root else due[:0])
            whole = values(root, rows * size) if own == root else None
            found = comm.scatter(whole, root)
            assert np.array_equal(found, values(root, rows * size)[rows * own : rows * (own + 1)])
        found = comm.scatter(np.arange(size), root, [0] * (size - 1) + [size])
        assert found.tolist() == (list(range(size)) if own == size - 1 else [])
        assert comm.gather(np.array(own, np.float32), root).size == size * (own == root)
        gathered = comm.gather_object({"rank": own}, root)
        assert gathered == ([{"rank": each} for each in range(size)] if own == root else None)
        given = [["of", each] for each in range(size)] if own == root else None
        assert comm.scatter_object(given, root) == ["of", own]


@on_each_rank(1)
def test_a_rank_alone_gets_its_own_back(comm):
    assert comm.all_to_all(np.arange(3)).tolist() == [0, 1, 2]
    result, received = comm.all_to_all(np.arange(3), [3])
    assert (result.tolist(), received) == ([0, 1, 2], [3])
    assert comm.gather(np.arange(3)).tolist() == [0, 1, 2]
    assert comm.scatter(np.arange(3)).tolist() == [0, 1, 2]
    assert comm.gather_object(1) == [1]
    assert comm.scatter_object([2]) == 2


WRONG: dict[str, tuple[Callable[[rr.Communicator], Any], str]] = {
    "not even": (lambda c: c.all_to_all(np.ones(3)), "cannot divide 3 rows evenly among 2 ranks"),
    "no rows": (lambda c: c.all_to_all(np.ones(())), "an array without dimensions"),
    "few counts": (lambda c: c.all_to_all(np.ones(2), [2]), "got the counts"),
    "wrong sum": (lambda c: c.all_to_all(np.ones(2), [1, 2]), "for 2 rows"),
    "negative": (lambda c: c.all_to_all(np.ones(2), [-1, 3]), "got the counts"),
    "fractions": (lambda c: c.all_to_all(np.ones(2), [0.5, 1.5]), "got the counts"),
    "counts of others": (
        lambda c: c.all_to_all(np.ones(2), np.array([[1, 1], [-1, 3]])),
        "counts of all ranks",
    ),
    "counts of few": (lambda c: c.all_to_all(np.ones(2), np.ones((1, 2))), "counts of all ranks"),
    "no counts": (lambda c: c.all_to_all(np.ones(2), 2), "got the counts"),
    "out of another dtype": (
        lambda c: c.all_to_all(np.ones(2), out=np.ones(2, int)),
        "`out` of int64",
    ),
    "out of another shape": (lambda c: c.all_to_all(np.ones(2), out=np.ones(4)), "`out` of"),
    "out itself": (lambda c: c.all_to_all(*[a := np.ones(2)], out=a), "shares memory"),
    "root": (lambda c: c.gather(np.ones(2), 2), "got root 2"),
    "list": (lambda c: c.scatter([1, 2], c.rank), "scatter got list on its root"),
    "nothing": (lambda c: c.scatter(None, c.rank), "scatter got NoneType on its root"),
    "few objects": (lambda c: c.scatter_object([1], c.rank), "scatter_object got 1 objects"),
    "no objects": (lambda c: c.scatter_object(None, c.rank), "scatter_object got None"),
}


@on_each_rank(2)
def test_what_cannot_be_is_refused_before_anything_is_sent(comm):
    for call, text in WRONG.values():
        with pytest.raises(rr.ArrayError, match=text):
            call(comm)
    assert comm.all_reduce(np.ones(2)).tolist() == [2, 2]


@on_each_rank(3)
def test_errors_in_a_group_name_the_rank_in_the_job(comm):
    group = comm.split(0 if comm.rank else None)
    if group is not None:
        uneven = group._session.uneven
        calls = {
            rr.ArrayError: lambda: uneven._new((1 << 50, 1 << 20), np.dtype("f4")),
            rr.MismatchError: lambda: uneven._check_received(np.array([-1])),
        }
        for kind, call in calls.items():
            with pytest.raises(kind, match=rf"^rank {comm.rank} of 3 (cannot hold|received)"):
                call()
        out = np.ones(3 if group.rank == 0 else 2)

        def disagree():
            group.all_to_all(np.ones(2), [1, 1], out=out)
            group.barrier()

        with pytest.raises(rr.ArrayError, match=r"rank 1 of 3 all_to_all got `out` of 3 rows"):
            disagree()
