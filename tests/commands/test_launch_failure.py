"""Which worker failed first: verdicts on times, exit codes and tracebacks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.commands.launch.failure import (
    Failure,
    first_cause,
    is_traceback_start,
    last_traceback,
)

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


def test_a_traceback_starts_with_its_title() -> None:
    assert is_traceback_start("Traceback (most recent call last):")


@pytest.mark.parametrize("line", ["", "ValueError: bad", "  Traceback (most recent call last):"])
def test_other_lines_start_no_traceback(line: str) -> None:
    assert not is_traceback_start(line)


def test_without_a_traceback_there_is_none() -> None:
    assert last_traceback(["epoch 1", "ValueError: only mentioned"]) == ()


def test_the_traceback_is_found_among_other_lines() -> None:
    assert last_traceback(["epoch 1", *VALUE_ERROR]) == VALUE_ERROR


def test_what_follows_is_kept_since_it_may_be_the_exceptions_text() -> None:
    lines = [*VALUE_ERROR[:3], "UnknownError: Graph execution error:", "", *LOST[3:], "bye"]
    assert last_traceback(["epoch 1", *lines]) == tuple(lines)
    assert failure(traceback=tuple(lines)).is_consequence
    assert failure(traceback=tuple(lines)).exception == "UnknownError: Graph execution error:"


def test_what_follows_is_kept_up_to_a_limit() -> None:
    assert len(last_traceback([*VALUE_ERROR, *["a line"] * 1000])) == 63


def test_the_exception_is_that_of_the_last_traceback_of_a_chain() -> None:
    lines = (*VALUE_ERROR, "", HANDLING, "", *LOST)
    assert failure(traceback=lines).exception == LOST[-1]
    assert failure().exception == ""


def test_the_last_of_several_tracebacks_counts() -> None:
    assert last_traceback([*VALUE_ERROR, "epoch 2", *LOST]) == LOST


@pytest.mark.parametrize("link", [DIRECT, HANDLING])
def test_chained_exceptions_are_one_traceback(link: str) -> None:
    lines = (*VALUE_ERROR, "", link, "", *LOST)
    assert last_traceback(["epoch 1", *lines]) == lines


def test_a_chain_of_three_is_one_traceback() -> None:
    lines = (*VALUE_ERROR, "", HANDLING, "", *MISMATCH, "", DIRECT, "", *LOST)
    assert last_traceback(lines) == lines


def test_a_traceback_before_the_chain_is_left_out() -> None:
    lines = (*VALUE_ERROR, "", HANDLING, "", *LOST)
    assert last_traceback([*MISMATCH, "epoch 2", *lines]) == lines


def test_blank_source_lines_do_not_end_a_traceback() -> None:
    lines = (*VALUE_ERROR[:2], "", *VALUE_ERROR[2:])
    assert last_traceback(lines) == lines


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_traceback_cut_off_by_death_is_kept_as_far_as_it_goes(length: int) -> None:
    assert last_traceback(VALUE_ERROR[:length]) == VALUE_ERROR[:length]


@given(st.lists(st.sampled_from([*VALUE_ERROR, *LOST, "", HANDLING, "log"]), max_size=30))
def test_a_traceback_is_a_run_of_the_lines_it_was_found_in(lines: list[str]) -> None:
    found = list(last_traceback(lines))
    assert bool(found) == any(map(is_traceback_start, lines))
    assert any(lines[i : i + len(found)] == found for i in range(len(lines) + 1))
