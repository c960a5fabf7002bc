"""What the launcher says at the end: the cause in full, one line for every other rank."""

from __future__ import annotations

from ringreduce.commands.launch.conclusion import conclude
from ringreduce.commands.launch.failure import Cause, Failure
from ringreduce.commands.launch.worker_records import Raised

BAD = Raised("ValueError", None, None, "ValueError: bad data", ["Traceback:", "", "  x"])
LOST = Raised("PeerLostError", 1, None, "PeerLostError: rank 0 lost rank 1.", ["y"], ["y", "z"])
FIRST = Failure(1, 3, 5.0, BAD)
CAUSE, CONSEQUENCE = Cause(FIRST), Failure(0, 1, 6.0, LOST)
TITLE = "rank 1 failed first (exit code 3); all workers were stopped"


def test_the_cause_is_shown_in_full_and_a_consequence_in_one_line() -> None:
    shown = conclude(CAUSE, [CONSEQUENCE, FIRST])
    assert shown == [
        *(TITLE, "  Traceback:", "", "    x"),
        "then rank 0 (exit code 1): PeerLostError: rank 0 lost rank 1.",
        "--log-dir DIR keeps the tracebacks of all ranks",
    ]
    kept = conclude(CAUSE, [CONSEQUENCE, FIRST], log_dir="logs")
    assert kept == [*shown[:-1], "logs has the tracebacks of all ranks"]


def test_what_a_program_ended_itself_with_is_shown_without_a_traceback() -> None:
    ended = Failure(1, 3, 5.0, Raised("SystemExit", exception="SystemExit: no data"))
    assert conclude(Cause(ended), [ended]) == [TITLE, "  SystemExit: no data"]


def test_a_rank_without_a_traceback_gets_one_line() -> None:
    killed, left = Failure(2, -9, 1.0), Failure(0, 4, 2.0)
    assert conclude(Cause(killed), [left, killed]) == [
        "rank 2 failed first (killed by signal 9 (SIGKILL)); all workers were stopped",
        "then rank 0 (exit code 4)",
    ]


def test_ranks_that_ended_by_themselves_are_named_since_others_may_wait_for_them() -> None:
    ended = "had ended by"
    killed = Failure(1, -9, 1.0)
    one, several = (conclude(Cause(killed), [killed], e) for e in ([0], range(2, 5)))
    assert one[1:] == [f"rank 0 {ended} itself, exit code 0"]
    assert several[1:] == [f"ranks 2, 3, 4 {ended} themselves, exit code 0"]
