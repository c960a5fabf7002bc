"""Ranks that are told to go, as their launcher sees them: neither lost nor failed."""

import signal
from pathlib import Path

import pytest

from ringreduce import WorkerError, launch
from ringreduce.commands.launch.conclusion import left, stopped
from ringreduce.commands.launch.worker import Worker
from ringreduce.commands.launch.worker_records import Exits, Goes, Notices, Raised
from tests.launching import RANK, numbers, script
from tests.processes import is_running, launcher, wait_gone

HEARS = (
    RANK
    + """
import subprocess
from ringreduce.commands.launch import handover
from ringreduce.commands.launch.worker_records import Goes
from ringreduce.effects.notice import EndsInOrder, Notice, hearing
mine = Notice("", str, lambda: False)
def wait_for_notice():
    # Of the rank's process group, as workers that load data are.
    child = subprocess.Popen(["sleep", "1000"])
    print("pid", os.getpid(), flush=True)
    print("child", child.pid, flush=True)
    while not mine.reason:
        time.sleep(0.01)
    assert child.poll() is None
"""
)


def test_a_job_that_stops_by_a_signal_to_the_launcher_ends_with_143(tmp_path: Path) -> None:
    """The signal reaches the ranks' own processes alone; what they have started ends with them."""
    name = script(
        tmp_path,
        HEARS,
        """
        with hearing(mine):
            wait_for_notice()
            mine.is_met = True
            reasons = {0: "SIGTERM", 1: "SIGTERM"}
            handover.tell(Goes(reasons, "after step 4", 143, stops=True, said="Start it again."))
            raise EndsInOrder(143)
        """,
    )
    with launcher(tmp_path, "run", "-n", "2", name) as process:
        process.wait_shown("child", 2)
        process.signal(signal.SIGTERM)  # Which systemd and Slurm may deliver twice.
        process.signal(signal.SIGTERM)
        assert process.wait() == 143
        wait_gone(numbers(process.stdout, "child"))
        assert process.stderr == (
            "ringreduce: training stopped after step 4, since ranks 0, 1 were told to go "
            "(SIGTERM). Start it again.\n"
        )


def test_a_job_whose_training_was_over_ends_well(tmp_path: Path) -> None:
    """Else a scheduler would start it again, from the begin."""
    name = script(tmp_path, HEARS, "with hearing(mine):\n    wait_for_notice()\n")
    with launcher(tmp_path, "run", "-n", "2", name) as process:
        process.wait_shown("child", 2)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        said = "ringreduce: ended well, though told to go (SIGTERM): training was over\n"
        assert process.stderr == said


@pytest.mark.parametrize("code", [0, 143])
def test_a_job_whose_ranks_stop_by_themselves_is_not_started_again(tmp_path, code):
    name = script(
        tmp_path,
        HEARS,
        f"""
        print("begins", flush=True)
        handover.tell(Goes({{1: "rr.leave()"}}, "after step 4", 143, stops=True, said="So."))
        raise EndsInOrder(143 if rank else {code})
        """,
    )
    with launcher(tmp_path, "run", "-n", "2", "--max-restarts", "2", name) as process:
        assert process.wait() == 143
        assert process.stdout.count("begins") == 2
        said = "training stopped after step 4, since rank 1 was told to go (rr.leave()). So."
        assert process.stderr.startswith(f"ringreduce: {said}\n")


def test_after_a_failure_a_rank_that_waits_for_a_step_is_soon_killed(tmp_path: Path) -> None:
    """And not after the time that one has which saves."""
    name = script(
        tmp_path,
        HEARS,
        """
        if rank == 0:
            wait_for("ready")
            raise ValueError("of rank 0")
        with hearing(mine):
            beside("ready").touch()
            wait_for_notice()
            time.sleep(1000)
        """,
    )
    with launcher(tmp_path, "run", "-n", "2", "--grace", "1000", name) as process:
        assert process.wait() == 1
        assert not any(map(is_running, numbers(process.stdout, "child")))
        assert "rank 0 failed first (exit code 1)" in process.stderr


def stops(rank_that_is_told):
    import os

    from ringreduce.commands.launch import handover
    from ringreduce.effects.notice import EndsInOrder

    is_all = rank_that_is_told is None
    if is_all or int(os.environ["RINGREDUCE_RANK"]) == rank_that_is_told:
        handover.tell(Goes({1: "SIGTERM"}, "after step 4", 143 * is_all, stops=is_all, said="So."))
        raise EndsInOrder(143 * is_all)
    return "trained"


def test_a_function_whose_ranks_stop_or_leave_in_order():
    with pytest.raises(WorkerError, match=r"training stopped after step 4, .* \(SIGTERM\)\. So\."):
        launch(stops, 2, None)
    assert launch(stops, 2, 1) == ["trained", None]


GOES = Goes({3: "SIGTERM"}, "after step 410", 0)


def test_one_that_leaves_in_order_has_not_failed():
    worker = Worker(3, None)
    worker.note(Notices(15))
    assert worker.notices
    worker.note(GOES)
    worker.note(Exits("train.py:3"))
    assert worker.failure() is None
    worker.end(0)
    assert worker.failure() is None
    worker.note(Notices(0))
    assert not worker.notices


@pytest.mark.parametrize(("number", "has_failed"), [(15, False), (9, False), (11, True)])
def test_one_that_is_ended_by_a_further_signal_while_it_leaves_has_not_failed(number, has_failed):
    worker = Worker(3, None)
    worker.note(GOES)
    worker.end(-number)
    assert (worker.failure() is not None) == has_failed


def test_one_that_fails_while_it_leaves_has_failed():
    worker = Worker(3, None)
    worker.note(GOES)
    worker.note(Raised("ValueError", exception="ValueError: at the end"))
    worker.end(1)
    assert worker.failure().exception == "ValueError: at the end"


def test_what_is_said_of_those_that_leave_and_of_a_job_that_stops():
    assert left({3: GOES}) == "rank 3 left after step 410 (SIGTERM)"
    other = Goes({1: "rr.leave()"}, "after step 410", 0)
    assert left({3: GOES, 1: other}) == "ranks 1, 3 left after step 410 (SIGTERM, rr.leave())"
    stops = Goes({1: "SIGTERM"}, "after epoch 2", 143, stops=True)
    said = "training stopped after epoch 2, since rank 1 was told to go (SIGTERM)."
    assert stopped({0: stops, 1: stops}) == said
