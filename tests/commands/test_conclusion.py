"""What the launcher says at the end: the cause in full, one line for every other rank."""

from __future__ import annotations

from ringreduce.commands.launch.conclusion import conclude
from ringreduce.commands.launch.failure import Failure

BAD = ("Traceback (most recent call last):", "  x", "ValueError: bad data")
LOST = ("Traceback (most recent call last):", "  y", "PeerLostError: rank 0 lost rank 1.")
CAUSE = Failure(1, 3, 5.0, BAD)
CONSEQUENCE = Failure(0, 1, 6.0, LOST)
TITLE = "rank 1 failed first (exit code 3); all workers were stopped"
CAUSE_SHOWN = ["  Traceback (most recent call last):", "    x", "  ValueError: bad data"]


def test_the_cause_is_shown_in_full_and_a_consequence_in_one_line() -> None:
    held = {1: [*BAD, "", "a later line"], 0: list(LOST), 2: list(LOST)}
    assert conclude(CAUSE, [CONSEQUENCE, CAUSE], held, "cause") == [
        TITLE,
        *CAUSE_SHOWN,
        "",
        "  a later line",
        "then rank 0 (exit code 1): PeerLostError: rank 0 lost rank 1.",
        "then rank 2 (stopped): PeerLostError: rank 0 lost rank 1.",
        "--tracebacks all shows those of all ranks",
    ]


def test_all_tracebacks_are_shown_if_that_is_wanted() -> None:
    held = {1: list(BAD), 0: list(LOST)}
    assert conclude(CAUSE, [CONSEQUENCE, CAUSE], held, "all") == [
        TITLE,
        *CAUSE_SHOWN,
        "then rank 0 (exit code 1):",
        "  Traceback (most recent call last):",
        "    y",
        "  PeerLostError: rank 0 lost rank 1.",
    ]


def test_a_traceback_that_was_shown_is_not_repeated() -> None:
    assert conclude(CAUSE, [CAUSE], {}, "cause") == [
        TITLE,
        "  ValueError: bad data (its traceback is above)",
    ]


def test_a_rank_without_a_traceback_gets_one_line() -> None:
    killed, left = Failure(2, -9, 1.0, ()), Failure(0, 4, 2.0, ())
    assert conclude(killed, [left, killed], {}, "cause") == [
        "rank 2 failed first (killed by signal 9 (SIGKILL)); all workers were stopped",
        "then rank 0 (exit code 4)",
    ]


def test_ranks_that_ended_by_themselves_are_named_since_others_may_wait_for_them() -> None:
    ended = "had ended by"
    assert conclude(CAUSE, [CAUSE], {}, "cause", [0])[-1] == f"rank 0 {ended} itself, exit code 0"
    several = conclude(CAUSE, [CAUSE], {}, "cause", range(2, 5))
    expected = f"ranks 2, 3, 4 {ended} themselves, exit code 0"
    assert several == [TITLE, "  ValueError: bad data (its traceback is above)", expected]
