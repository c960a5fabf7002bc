"""Shares of a batch: nothing is lost, in proportion, and at least a row for each rank."""

from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure.shares import apportion, weights_of, weights_of_times

WEIGHTS = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=9)


@given(st.integers(0, 500), WEIGHTS)
def test_rows_add_up_and_every_rank_has_one_if_there_are_enough(count, weights):
    rows = apportion(count, weights)
    assert sum(rows) == count
    assert min(rows) >= (count >= len(weights))


@given(st.integers(0, 500), WEIGHTS)
def test_rows_are_within_one_of_the_proportion_but_for_the_minimum(count, weights):
    rows, total = apportion(count, weights), sum(weights)
    exact = [count * weight / total for weight in weights]
    if min(exact) >= 1 or count < len(weights):
        assert all(abs(own - share) < 1 for own, share in zip(rows, exact, strict=True))


def test_examples():
    assert apportion(64, [2, 1]) == [43, 21]
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(3, [1000, 1, 1]) == [1, 1, 1]
    assert apportion(5, [1000, 1, 1]) == [3, 1, 1]
    assert apportion(1, [1, 3, 2]) == [0, 1, 0]
    assert apportion(0, [1, 2]) == [0, 0]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_weights_keep_the_proportion_of_shares(shares):
    weights = weights_of(shares)
    for weight, share in zip(weights, shares, strict=True):
        assert abs(weight / max(weights) - share / max(shares)) <= 2e-6


def test_a_rank_that_needs_twice_the_time_gets_half_and_noise_changes_nothing():
    assert apportion(90, weights_of_times([0.1, 0.2, 0.2])) == [45, 23, 22]
    assert weights_of_times([0.100, 0.103]) == (1, 1)
    assert weights_of_times([0.0, 0.0]) == (1, 1)
