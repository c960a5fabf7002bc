"""Which worker failed first: verdicts on times, exit codes and exceptions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.commands.launch.failure import Cause, Failure, find_cause
from ringreduce.commands.launch.worker import Worker
from ringreduce.commands.launch.worker_records import Exits, Raised

VALUE_ERROR = Raised("ValueError", exception="ValueError: bad data", traceback=["a", "b"])
LOST = Raised("PeerLostError", peer=7)
TIMED_OUT = Raised("PeerTimeoutError", peer=7)
TOLD = Raised("MismatchError", peer=2, origin=7)
LEFT = Raised("MismatchError", peer=7)
NOT_JOINED = Raised("RendezvousError")


def failure(
    rank: int = 0, time_s: float = 0.0, returncode: int = 1, raised: Raised | None = None
) -> Failure:
    return Failure(rank, returncode, time_s, raised)


def cause_of(*failures: Failure, size: int = 8) -> Cause:
    cause = find_cause(failures, range(size))
    return cause


def test_the_first_in_time_is_the_cause_of_two_at_once_the_lower_rank():
    assert find_cause([], range(8)) is None
    late, high, low = failure(0, 2.0), failure(2, 1.0), failure(1, 1.0)
    assert cause_of(late, high, low) == Cause(low)


@pytest.mark.parametrize("report", [LOST, TIMED_OUT, TOLD, LEFT, NOT_JOINED])
@pytest.mark.parametrize("cause", [failure(1, 2.0, raised=VALUE_ERROR), failure(1, 2.0, -9)])
def test_an_earlier_consequence_is_not_the_cause(report, cause):
    assert cause_of(failure(0, 1.0, raised=report), cause) == Cause(cause)


@pytest.mark.parametrize("report", [LOST, TIMED_OUT, LEFT])
def test_a_rank_that_others_name_and_that_has_not_failed_is_to_blame(report):
    first, second = failure(1, 1.0, raised=report), failure(0, 2.0, raised=report)
    cause = cause_of(second, first)
    assert cause == Cause(first, silent=(7,), is_certain=False)
    assert cause.describe() == (
        "rank 7 held up or left the others and did not fail itself; rank 1 was the first to "
        "notice (exit code 1)"
    )


def test_ranks_that_did_not_come_are_to_blame():
    cause = cause_of(failure(0, 1.0, raised=NOT_JOINED), size=3)
    assert (cause.silent, cause.rank, cause.is_certain) == ((1, 2), 1, False)


@given(
    st.lists(
        st.builds(
            failure,
            rank=st.integers(0, 6),
            time_s=st.integers(0, 3).map(float),
            returncode=st.sampled_from([1, 3, -9]),
            raised=st.sampled_from([None, VALUE_ERROR, LOST, TOLD]),
        ),
        min_size=1,
        unique_by=lambda failed: failed.rank,
    )
)
def test_a_failure_of_its_own_is_the_cause_if_there_is_one(failures):
    cause = cause_of(*failures)
    own = [f for f in failures if f.raised in (None, VALUE_ERROR)]
    if own:
        assert cause.first in own
        assert cause.first.time_s == min(f.time_s for f in own)
        assert cause.is_certain


def test_the_end_is_described_in_words_and_its_code_is_what_a_shell_shows():
    codes = {1: 1, 3: 3, 255: 255, -2: 130, -9: 137, -15: 143}
    assert {code: failure(returncode=code).exit_code for code in codes} == codes
    texts = {
        **{3: "exit code 3", -9: "killed by signal 9 (SIGKILL)"},
        **{-11: "killed by signal 11 (SIGSEGV)", -63: "killed by signal 63 (unknown)"},
    }
    assert {code: failure(returncode=code).describe() for code in texts} == texts
    assert Failure(0, 1, 0.0, has_left=True).describe().startswith("exit code 0, before it joined")


def test_a_rank_that_has_called_exit_is_lost_by_that_before_its_process_has_ended():
    worker = Worker(1, None)
    assert worker.loss() is None
    worker.note(Exits("train.py:9"))
    assert worker.failure() is None
    assert worker.loss().describe() == "exit code 0: SystemExit in train.py:9"
