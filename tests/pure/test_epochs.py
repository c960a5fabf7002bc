"""Which rows belong to which step: each once in a pass, whatever the lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure.epochs import Order, own_rows


def rows_of(order: Order, epoch: int) -> list[list[int]]:
    return [np.arange(order.count)[rows].tolist() for rows in order.of_epoch(epoch)]


@given(st.integers(0, 200), st.integers(1, 9))
def test_own_rows_share_out_a_batch(count, size):
    parts = [own_rows(count, rank, size) for rank in range(size)]
    assert [row for part in parts for row in range(*part)] == list(range(count))
    lengths = [end - first for first, end in parts]
    assert max(lengths) - min(lengths) <= 1


@given(
    count=st.integers(1, 60),
    unit=st.integers(1, 70),
    seed=st.none() | st.integers(0, 5),
    epoch=st.integers(0, 4),
)
def test_an_epoch_of_one_pass_has_every_row_once(count, unit, seed, epoch):
    order = Order(count, unit, -(-count // unit), seed)
    batches = rows_of(order, epoch)
    assert sorted(row for rows in batches for row in rows) == list(range(count))
    assert all(len(rows) <= unit for rows in batches)
    if seed is None:
        assert [row for rows in batches for row in rows] == list(range(count))


def test_epochs_shuffle_differently_and_repeatably():
    order = Order(97, 10, 10, seed=3)
    assert rows_of(order, 0) != rows_of(order, 1)
    assert rows_of(order, 1) == rows_of(Order(97, 10, 10, seed=3), 1)
    assert rows_of(order, 1) != rows_of(Order(97, 10, 10, seed=4), 1)


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("first", [0, 4])
def test_short_epochs_go_on_where_the_last_ended_up_to_the_end(seed, first):
    order = Order(50, 10, 2, seed, first)
    epochs = [rows_of(order, first + epoch) for epoch in range(6)]
    assert [len(batches) for batches in epochs] == [2, 2, 1] * 2
    for at in (0, 3):
        whole = rows_of(Order(50, 10, 5, seed), first + at)
        assert [rows for batches in epochs[at : at + 3] for rows in batches] == whole
    assert rows_of(Order(50, 10, 12, seed), 0) == rows_of(Order(50, 10, 5, seed), 0)
