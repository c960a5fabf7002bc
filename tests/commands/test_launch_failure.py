"""Which worker failed first: verdicts on times, exit codes and tracebacks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.commands.launch.failure import Failure, first_cause

VALUE_ERROR = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    '    raise ValueError("bad data")',
    "ValueError: bad data",
)
LOST = (
    "Traceback (most recent call last):",
    '  File "train.py", line 9, in <module>',
    "    comm.barrier()",
    "ringreduce.PeerLostError: rank 0 of 2 lost the connection with rank 1.",
)
TIMED_OUT = (*LOST[:3], "ringreduce.PeerTimeoutError: rank 0 of 2 waited 30.0 s.")
TOLD = (
    *LOST[:3],
    "ringreduce.MismatchError: rank 0 of 3 was told by rank 1: it is in",
)
LEFT = (
    *LOST[:3],
    "ringreduce.MismatchError: rank 0 of 3 was left by rank 1, which closed",
)
MISMATCH = (
    *LOST[:3],
    "ringreduce.MismatchError: rank 1 of 3 is in barrier #3 while",
)
DIRECT = "The above exception was the direct cause of the following exception:"
HANDLING = "During handling of the above exception, another exception occurred:"


def failure(
    rank: int = 0, time_s: float = 0.0, returncode: int = 1, traceback: tuple[str, ...] = ()
) -> Failure:
    return Failure(rank, returncode, time_s, traceback)


def test_without_failures_there_is_no_cause() -> None:
    assert first_cause([]) is None


def test_the_first_in_time_is_the_cause() -> None:
    late, early = failure(0, 2.0), failure(1, 1.0)
    assert first_cause([late, early]) is early


def test_of_two_at_the_same_time_the_lower_rank_is_the_cause() -> None:
    high, low = failure(2, 1.0), failure(1, 1.0)
    assert first_cause([high, low]) is low


@pytest.mark.parametrize("report", [LOST, TIMED_OUT, TOLD, LEFT])
def test_an_earlier_consequence_is_not_the_cause(report: tuple[str, ...]) -> None:
    consequence = failure(0, 1.0, traceback=report)
    cause = failure(1, 2.0, traceback=VALUE_ERROR)
    assert first_cause([consequence, cause]) is cause


def test_among_consequences_alone_the_first_is_the_cause() -> None:
    first, second = failure(1, 1.0, traceback=LOST), failure(0, 2.0, traceback=TIMED_OUT)
    assert first_cause([second, first]) is first


def test_a_failure_without_traceback_can_be_the_cause() -> None:
    consequence = failure(0, 1.0, traceback=LOST)
    killed = failure(1, 2.0, returncode=-9)
    assert first_cause([consequence, killed]) is killed


@given(
    st.lists(
        st.builds(
            failure,
            rank=st.integers(0, 7),
            time_s=st.integers(0, 3).map(float),
            returncode=st.sampled_from([1, 3, -9]),
            traceback=st.sampled_from([(), VALUE_ERROR, LOST, MISMATCH]),
        ),
        min_size=1,
        unique_by=lambda failed: failed.rank,
    )
)
def test_the_cause_is_a_consequence_only_if_all_are(failures: list[Failure]) -> None:
    cause = first_cause(failures)
    assert cause in failures
    assert cause.is_consequence == all(f.is_consequence for f in failures)


@pytest.mark.parametrize("report", [LOST, TIMED_OUT, TOLD, LEFT])
def test_a_report_of_another_rank_is_a_consequence(report: tuple[str, ...]) -> None:
    assert failure(traceback=report).is_consequence


@pytest.mark.parametrize("report", [(), VALUE_ERROR, MISMATCH])
def test_what_a_rank_met_itself_is_no_consequence(report: tuple[str, ...]) -> None:
    assert not failure(traceback=report).is_consequence


def test_a_signal_is_no_consequence_whatever_was_printed_before() -> None:
    assert not failure(returncode=-9, traceback=LOST).is_consequence


def test_an_error_raised_from_a_lost_peer_is_a_consequence() -> None:
    assert failure(traceback=(*LOST, "", DIRECT, "", *VALUE_ERROR)).is_consequence


def test_a_killed_rank_did_not_end_with_what_it_had_logged() -> None:
    assert failure(traceback=VALUE_ERROR).exception == "ValueError: bad data"
    assert failure(returncode=-9, traceback=VALUE_ERROR).exception == ""


@pytest.mark.parametrize(
    ("returncode", "shown"), [(1, 1), (3, 3), (255, 255), (-2, 130), (-9, 137), (-15, 143)]
)
def test_the_exit_code_is_what_a_shell_shows(returncode: int, shown: int) -> None:
    assert failure(returncode=returncode).exit_code == shown


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (3, "exit code 3"),
        (-9, "killed by signal 9 (SIGKILL)"),
        (-11, "killed by signal 11 (SIGSEGV)"),
        (-63, "killed by signal 63 (unknown)"),
    ],
)
def test_the_end_is_described_in_words(returncode: int, text: str) -> None:
    assert failure(returncode=returncode).describe() == text
