"""Tests on ranks fail with the rank that failed, and the next call has a new ring."""

import os
import signal

import pytest

import ringreduce.keras as rr
from tests.ranks import on_ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]


def end(rank, how):
    if rr.rank() == rank:
        how()
    rr.all_reduce(1.0)


def fail():
    amount = 7
    raise ValueError(f"no {amount}")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("how", "said"), [(fail, "amount = 7"), (die, "ended with -9")])
def test_a_call_that_fails_on_one_rank_fails_and_the_next_does_not(ranks, how, said):
    with pytest.raises(AssertionError, match=f"(?s)rank 1\n.*{said}"):
        ranks(2, end, 1, how)
    assert ranks(2, rr.rank) == [0, 1]


def other_values():
    return rr.rank()


def test_results_that_differ_fail(ranks):
    with pytest.raises(AssertionError, match=r"\[0, 1\]"):
        on_ranks(2)(other_values)(ranks)


@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_sizes_may_be_those_of_a_parametrization():
    return rr.size()
