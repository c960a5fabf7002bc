"""A lost rank of an elastic job is started again: when, what it gets, and what becomes of the job.

No rank here trains: they tell the launcher of rings that none has formed.
"""

import io
import os
import re
import signal
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringreduce.commands.launch import comebacks, newcomers, worker
from ringreduce.commands.launch.comebacks import Place, ending_of
from ringreduce.commands.launch.conclusion import back, not_back
from ringreduce.commands.launch.display import Display
from ringreduce.commands.launch.failure import Failure
from ringreduce.commands.launch.newcomers import Newcomers
from ringreduce.commands.launch.plan import JobPlan
from ringreduce.commands.launch.screen import Screen
from ringreduce.commands.launch.worker import Worker
from ringreduce.commands.launch.worker_records import Goes, Grows, Joined, Raised, Reformed
from ringreduce.vocabulary.config import TIMES, comeback_wanted
from tests.commands.test_elastic_jobs import said
from tests.commands.test_nodes import free_port
from tests.launching import RANK, command_line, numbers, script
from tests.processes import is_running, launcher, wait_gone

ON = "a lost rank is started again (--no-comeback: it is not)"
WHY = "the calls before training gave more than is kept"
OFF = f"a lost rank is not started again: {WHY}"
# Rank 1 of two is lost, and its next processes do what a test says; rank 0 goes on.
COMES = f"""{RANK}
import json
life, size = int(os.environ.get("RINGREDUCE_LIFE", "0")), int(os.environ["RINGREDUCE_SIZE"])
from ringreduce.commands.launch import handover
from ringreduce.commands.launch.worker_records import Goes, Grows, Joined, Joins
from ringreduce.commands.launch.worker_records import Reformed, Stands

def wait_for_end():
    pid = int(beside("pid").read_text())
    while pathlib.Path(f"/proc/{{pid}}").exists():  # until the launcher knows
        time.sleep(0.01)

if life == 0:
    handover.tell(Joins(size))
    handover.tell(Joins(size, "formed"))
    if rank == 1:
        beside("pid").write_text(str(os.getpid()))
    beside(f"formed{{rank}}").touch()
    wait_for(f"formed{{1 - rank}}")
print("pid", os.getpid(), flush=True)
"""
# Rank 1 is killed, and rank 0 goes on without it.
LOST_BEFORE = """
if rank == 1 and life == 0:
    os.kill(os.getpid(), 9)
if rank == 0:
    wait_for_end()
    handover.tell(Reformed(1, (0,), "in step 3", 0.4))
"""
# Rank 0 has said before that it can come back.
GROWS = "\nif rank == 0:\n    handover.tell(Grows())\n"
LOST = GROWS + LOST_BEFORE


@contextmanager
def job(directory: Path, *texts: str, options: tuple[str, ...] = (), **variables: str):
    """A job of two ranks, with `texts` after the common beginning; its processes end with it."""
    given = {"RINGREDUCE_TIME_SCALE": "0.05", **variables}
    name = script(directory, COMES, *texts)
    arguments = ("run", "-n", "2", "--elastic", *options, name)
    with launcher(directory, *arguments, **given) as process:
        yield process
        process.wait()
        wait_gone(numbers(process.stdout))


# --- When one is started again --------------------------------------------------------------
def ends(place: Place, *endings: str) -> Iterator[float]:
    """How long each next process waits, for processes that end at once."""
    for ending in endings:
        place = place.ended(100.0, ending)
        assert place.due_s is not None
        yield place.due_s - 100.0
        place = place.started()


def test_the_first_is_started_at_once_and_the_next_wait_longer_and_longer():
    waits = list(ends(Place(), *[""] * 10))
    assert waits == pytest.approx(
        [0, *(TIMES.comeback_wait_s * 2**k for k in range(6)), *[TIMES.comeback_wait_max_s] * 3]
    )
    assert next(reversed(list(ends(Place(), *[""] * 2000)))) == TIMES.comeback_wait_max_s


def test_what_is_due_waits_for_its_time_and_is_started_once():
    place = Place().ended(100.0).started().ended(100.0)
    assert not place.is_due(100.0)
    assert place.is_due(100.0 + TIMES.comeback_wait_s)
    started = place.started()
    assert (started.life, started.is_due(1e9)) == (2, False)


def test_work_in_the_ring_for_long_makes_what_was_before_forgotten():
    place = Place().ended(0.0, "bad").started().ended(0.0).started().joined(100.0)
    soon = place.ended(99.0 + TIMES.comeback_worked_s, "bad")
    assert soon.due_s is None
    late = 100.0 + TIMES.comeback_worked_s
    assert place.ended(late, "bad").due_s == late
    assert place.ended(late, "bad").life == 2
    # Not if the next one never joins.
    again = place.ended(late, "bad").started()
    assert again.ended(2 * late, "bad").due_s is None


def test_the_same_exception_twice_ends_it_and_another_one_does_not():
    assert list(ends(Place(), "a", "b")) == [0, TIMES.comeback_wait_s]
    place = Place().ended(0.0, "a").started().ended(0.0, "b").started()
    assert place.ended(0.0, "a").due_s is None
    assert place.ended(0.0, "").due_s is not None


def raised(text: str, line: int, code: int = 1) -> Failure:
    trace = ["Traceback (most recent call last):", f'  File "a.py", line {line}, in f', "    x()"]
    return Failure(2, code, 0.0, Raised("ValueError", exception=text, traceback=[*trace, text]))


def test_what_has_ended_a_process_is_known_by_the_exception_and_its_line():
    endings = [ending_of(raised(*each)) for each in (("a", 1), ("a", 2), ("b", 1))]
    assert len({*endings}) == 3
    assert ending_of(raised("a", 1)._replace(time_s=7.0)) == endings[0]
    assert ending_of(Failure(2, -9, 0.0)) == ""
    assert ending_of(Failure(2, 3, 0.0)) == "exit code 3"
    assert ending_of(Failure(2, 0, 0.0, how="exit code 0: SystemExit in a.py:3"))


@pytest.mark.parametrize(
    ("code", "records", "was"),
    [
        (-9, (), False),
        (1, (Raised("ValueError"),), False),
        (-signal.SIGTERM, (), True),
        (1, (Raised("KeyboardInterrupt"),), True),
        (0, (Goes({1: "SIGTERM"}, "after step 4", 0),), True),
    ],
)
def test_what_somebody_has_ended_is_told_from_what_was_lost(code, records, was):
    worker = Worker(1, None)
    for record in records:
        worker.note(record)
    worker.end(code)
    assert worker.was_told_to_end == was


@pytest.mark.parametrize(("text", "wanted"), [("", None), ("0", False), ("1", True)])
def test_a_variable_says_whether_ranks_are_started_again(text, wanted):
    assert comeback_wanted({"RINGREDUCE_COMEBACK": text}) is wanted


# --- What is said ---------------------------------------------------------------------------
def test_what_is_said_of_one_that_comes_back_and_of_one_that_does_not():
    assert back(Joined(2, 1, 402, 0.61), 41.3) == (
        "rank 2 is back in step 402, 41 s after it was started; training stopped for 0.6 s"
    )
    began = "rank 2 failed while it was coming back"
    assert not_back(raised("ValueError: a", 1)) == f"{began} (exit code 1): ValueError: a"
    assert not_back(Failure(2, -9, 0.0)) == f"{began} (killed by signal 9 (SIGKILL))"
    ended = Failure(2, 0, 0.0, how="exit code 0: its program has ended")
    assert not_back(ended).startswith("rank 2 ended while it was coming back (exit code 0")


def test_a_ring_is_known_by_its_processes():
    assert Reformed(4, (0, 2, 1), "", 0.0, (0, 3)).processes == {(0, 0), (1, 3), (2, 0)}


def test_whether_one_can_come_back_is_said_once_and_holds_until_the_next_word(monkeypatch):
    """Also for one that waits for its turn."""
    clock = types.SimpleNamespace(now_s=0.0, monotonic=lambda: clock.now_s)
    for module in (newcomers, worker):
        monkeypatch.setattr(module, "time", clock)
    started, shown = [], io.StringIO()
    host = types.SimpleNamespace(start_again=lambda rank, life: started.append((rank, life)))
    screen = Screen(["0", "1"], shown, shown)
    places = Newcomers(Display(screen, None, JobPlan([], 2)), screen, host)
    lost = Worker(1, None)
    lost.end(-9)
    places.lose(lost)
    places.follow()
    assert not started
    places.hear(Grows())
    places.follow()
    assert started == [(1, 1)]
    places.last(1).end(-9)
    clock.now_s += TIMES.cause_s
    places.follow()
    for reason in (WHY, WHY, "another"):
        places.hear(Grows(reason))
    clock.now_s += TIMES.comeback_wait_s
    places.follow()
    assert started == [(1, 1)]
    for _ in range(2):
        places.hear(Grows())
    places.follow()
    assert started == [(1, 1), (1, 2)]
    assert said(shown.getvalue()) == [
        ON,
        "rank 1 was started again (life 1)",
        "rank 1 failed while it was coming back (killed by signal 9 (SIGKILL))",
        f"rank 1 is started again in {TIMES.comeback_wait_s:g} s",
        OFF,
        "rank 1 was started again (life 2)",
    ]


# --- Jobs -----------------------------------------------------------------------------------
FACTS = """
if rank == 1:
    names = ("RANK", "SIZE", "LOCAL_RANK", "JOB_ID", "DOOR", "CORES", "SECRET", "RESTART")
    facts = {name: os.environ.get(f"RINGREDUCE_{name}") for name in names}
    facts |= {"threads": os.environ["OMP_NUM_THREADS"], "arguments": sys.argv}
    facts |= {"cores": sorted(os.sched_getaffinity(0))}
    beside(f"facts{life}").write_text(json.dumps(facts))
"""


def test_a_lost_rank_is_started_again_at_its_place_and_is_back(tmp_path):
    """It has all that the lost one had; others know that it lives, and the lost one does not."""
    text = """
        if rank == 0:
            wait_for("up")
            assert handover.word_of(1).is_gone and not handover.word_of(1, life=1).is_gone
            handover.tell(Reformed(2, (0, 1), "", 0.2, lives=(0, 1)))
            for _ in range(2):
                handover.tell(Joined(1, 1, 402, 0.6))
        else:
            beside("up").touch()
            print("of the newcomer", flush=True)
        """
    options = ("--log-dir", "logs", "--bind" if len(os.sched_getaffinity(0)) > 1 else "--no-bind")
    with job(tmp_path, FACTS, LOST, text, options=options) as process:
        assert process.wait() == 0, process.stderr
    lines = said(process.stderr)
    assert [re.sub(r", \d+ s", ", 0 s", line) for line in lines] == [
        ON,
        "rank 1 was lost in step 3 (killed by signal 9 (SIGKILL)): rank 0 went on after 0.4 s",
        "rank 1 was started again (life 1)",
        "rank 1 is back in step 402, 0 s after it was started; training stopped for 0.6 s",
    ]
    lives = [(tmp_path / f"facts{life}").read_text() for life in (0, 1)]
    assert lives[0] == lives[1]
    assert '"DOOR": null' not in lives[0]
    assert "[1] of the newcomer" in process.stdout
    assert "of the newcomer" in (tmp_path / "logs" / "rank-1.1.log").read_text()


def test_what_fails_before_it_is_back_is_shown_and_ends_nothing(tmp_path):
    """And not tried a third time for the same exception."""
    text = """
        if rank == 0:
            wait_for("tried")
        else:
            raise ValueError("bad")
        """
    with job(tmp_path, LOST, text) as process:
        process.wait_error("is not started again")
        (tmp_path / "tried").touch()
        assert process.wait() == 0
    failed = "rank 1 failed while it was coming back (exit code 1): ValueError: bad"
    assert said(process.stderr)[2:] == [
        "rank 1 was started again (life 1)",
        failed,
        f"rank 1 is started again in {10 * 0.05:g} s",
        "rank 1 was started again (life 2)",
        failed,
        "rank 1 is not started again, ended twice by: ValueError: bad",
        "ended well without rank 1",
    ]
    assert process.stderr.count("[1] ValueError: bad") == 1


@pytest.mark.parametrize("is_deaf", [False, True])
def test_the_end_of_the_job_ends_what_comes_back(tmp_path, is_deaf):
    text = f"""
        if rank == 0:
            wait_for("up")
            exit()
        def end(*_):
            beside("told").touch()
            if not {is_deaf}:
                sys.exit(3)
        signal.signal(signal.SIGTERM, end)
        beside("up").touch()
        while True:
            signal.pause()
        """
    # The time that the other one has to end is no matter of the test.
    scale = {"RINGREDUCE_TIME_SCALE": "0.05" if is_deaf else "1"}
    with job(tmp_path, LOST, text, **scale) as process:
        assert process.wait() == 0
    assert (tmp_path / "told").exists() or is_deaf
    assert said(process.stderr)[2:] == [
        "rank 1 was started again (life 1)",
        "ended well without rank 1",
    ]


def test_what_is_back_and_fails_is_the_cause_as_any(tmp_path):
    text = """
        if rank == 0:
            wait_for("up")
            handover.tell(Reformed(2, (0, 1), "", 0.2, lives=(0, 1)))
            beside("joined").touch()
            exit()
        beside("up").touch()
        wait_for("joined")
        sys.exit(3)
        """
    with job(tmp_path, LOST, text) as process:
        assert process.wait() == 3
    assert said(process.stderr)[3].startswith("rank 1 failed first (exit code 3)")


def test_what_is_back_may_be_lost_and_is_started_again_after_a_while(tmp_path):
    """Also if it ends before anybody has told that it was back."""
    text = """
        if rank == 0:
            while not handover.word_of(1, life=1).is_gone:
                time.sleep(0.01)
            assert not handover.word_of(1, life=2).is_gone
            handover.tell(Reformed(2, (0, 1), "", 0.2, lives=(0, 1)))
            handover.tell(Reformed(3, (0,), "in step 5", 0.3, lives=(0, 1)))
            wait_for("up2")
        else:
            beside(f"up{life}").touch()
            if life == 1:
                os.kill(os.getpid(), 9)
            signal.pause()
        """
    with job(tmp_path, LOST, text, RINGREDUCE_TIME_SCALE="0.3") as process:
        assert process.wait() == 0, process.stderr
    assert said(process.stderr)[2:] == [
        "rank 1 was started again (life 1)",
        "rank 1 was lost in step 5 (killed by signal 9 (SIGKILL)): rank 0 went on after 0.3 s",
        "rank 1 is started again in 3 s",
        "rank 1 was started again (life 2)",
        "ended well without rank 1",
    ]


def test_what_is_back_and_lost_by_the_same_exception_is_not_started_again(tmp_path):
    """Nor is that shown again."""
    text = """
        if rank == 1:
            if life:
                beside("up").touch()
                wait_for("joined")
            raise ValueError("bad")
        wait_for_end()
        handover.tell(Reformed(1, (0,), "in step 3", 0.4))
        wait_for("up")
        handover.tell(Reformed(2, (0, 1), "", 0.2, lives=(0, 1)))
        beside("joined").touch()
        while not handover.word_of(1, life=1).is_gone:
            time.sleep(0.01)
        handover.tell(Reformed(3, (0,), "in step 5", 0.3, lives=(0, 1)))
        wait_for("tried")
        """
    with job(tmp_path, GROWS, text) as process:
        process.wait_error("rank 1 is not started again, ended twice by: ValueError: bad")
        (tmp_path / "tried").touch()
        assert process.wait() == 0
    assert "rank 1 was lost in step 5 (exit code 1): rank 0 went on" in process.stderr
    assert process.stderr.count("[1] ValueError: bad") == 1


def test_a_ring_with_a_process_that_was_lost_is_none(tmp_path):
    text = """
        handover.tell(Reformed(2, (0, 1), "", 0.2))
        """
    with job(tmp_path, LOST, text, options=("--no-comeback",)) as process:
        assert process.wait() == 0
    assert said(process.stderr)[-1] == "ended well without rank 1"


LEAVES = f"""{GROWS}
if rank == 1:
    handover.tell(Goes({{1: "SIGTERM"}}, "after step 4", 0))
    exit()
wait_for_end()
handover.tell(Reformed(1, (0,), "in step 3", 0.4))
"""
TRAINED = LOST + "handover.tell(Stands(1, 1, is_gone=False))"
REFUSES = f"{GROWS}    handover.tell(Grows({WHY!r}))\n{LOST_BEFORE}"


@pytest.mark.parametrize(
    ("text", "options", "shown"),
    [
        (LEAVES, (), "rank 1 left after step 4"),
        (LOST, ("--no-comeback",), "rank 1 was lost in step 3"),
        (TRAINED, (), "rank 1 was lost in step 3"),
        (LOST.replace("9)", "15)"), (), "rank 1 was lost in step 3"),
        (REFUSES, (), "rank 1 was lost in step 3"),
        (REFUSES, ("--no-comeback",), "rank 1 was lost in step 3"),
    ],
    ids=["left", "option", "trained", "told to end", "reason", "option and reason"],
)
def test_what_is_not_started_again(tmp_path, text, options, shown):
    waits = "\nprint('waits', flush=True)\nwait_for('shown')\n"
    with job(tmp_path, text, waits, options=options) as process:
        process.wait_error(shown)
        (tmp_path / "shown").touch()
        assert process.wait() == 0
    is_heard = "--no-comeback" not in options
    assert process.stderr.count(ON) == is_heard
    assert process.stderr.count(OFF) == (is_heard and text == REFUSES)
    assert "was started again" not in process.stderr
    assert said(process.stderr)[-1] == "ended well without rank 1"


def test_it_waits_until_the_lost_process_has_ended(tmp_path):
    """As one that was left out and does not know it yet."""
    text = """
        if rank == 1 and life == 0:
            wait_for("left out")
            os.kill(os.getpid(), 9)
        elif rank == 0:
            handover.tell(Reformed(1, (0,), "in step 3", 0.4))
            wait_for("up")
        else:
            assert not pathlib.Path("/proc", beside("pid").read_text()).exists()
            beside("up").touch()
        """
    with job(tmp_path, GROWS, text) as process:
        process.wait_error("rank 1 was lost in step 3")
        assert "started again (life" not in process.stderr
        (tmp_path / "left out").touch()
        assert process.wait() == 0
    assert "rank 1 was started again (life 1)" in said(process.stderr)


def test_it_is_started_once_the_others_say_that_it_can_come_back(tmp_path):
    """What the lost one says counts for nothing."""
    text = """
        if rank == 1 and life == 0:
            wait_for("left out")
            handover.tell(Grows())
            os.kill(os.getpid(), 9)
        if rank == 1:
            beside("up").touch()
            exit()
        handover.tell(Reformed(1, (0,), "in step 3", 0.4))
        wait_for_end()
        print("waits", flush=True)
        wait_for("shown")
        handover.tell(Grows())
        wait_for("up")
        """
    with job(tmp_path, text) as process:
        process.wait_error("rank 1 was lost in step 3")
        (tmp_path / "left out").touch()
        process.wait_shown("waits")
        assert "started again" not in process.stderr
        (tmp_path / "shown").touch()
        assert process.wait() == 0
    assert said(process.stderr)[1:3] == [ON, "rank 1 was started again (life 1)"]


STAYS = """
if rank == 1:
    beside("up").touch()
while True:
    signal.pause()
"""


def test_ctrl_c_ends_what_comes_back(tmp_path):
    with job(tmp_path, LOST, STAYS) as process:
        process.wait_shown("pid", times=3)
        process.signal(signal.SIGINT)
        assert process.wait() == 130
        assert not any(map(is_running, numbers(process.stdout)))
    assert "coming back" not in process.stderr


def test_a_failure_of_the_job_ends_what_comes_back(tmp_path):
    text = "if rank == 0:\n    wait_for('up')\n    sys.exit(7)\n"
    with job(tmp_path, LOST, text, STAYS) as process:
        assert process.wait() == 7
        assert not any(map(is_running, numbers(process.stdout)))
    assert "rank 0 failed first (exit code 7)" in process.stderr


@pytest.mark.parametrize("wanted", ["", "1"])
def test_where_it_cannot_be_started_again_that_is_said_if_it_was_wanted(tmp_path, wanted):
    where = ("--nnodes", "1", "--node-rank", "0", "--rendezvous", f"127.0.0.1:{free_port()}")
    given = {"HOME": str(tmp_path), "RINGREDUCE_COMEBACK": wanted}
    with job(tmp_path, REFUSES, options=where, **given) as process:
        process.wait()
    lines = [line for line in said(process.stderr) if "start" in line]
    assert lines == [comebacks.ELSEWHERE] * bool(wanted)


def test_the_option_is_in_the_help():
    assert "--no-comeback" in command_line("run", "--help").stdout
