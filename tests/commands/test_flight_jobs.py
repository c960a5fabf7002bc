"""Jobs of real processes that fail or hang: their flight records, and what the report says."""

import signal
import textwrap
from pathlib import Path

import pytest

from ringreduce.pure.flight import Dump, decode_dump
from tests.launching import RANK, command_line, script
from tests.processes import Process, launcher, wait_until

SIZE = 3
BEGINNING = """
import os, signal, sys, time
import numpy as np
import ringreduce
comm = ringreduce.init()
def reduce():
    comm.all_reduce(np.ones(1000, np.float32))
reduce()
"""


def job(directory: Path, text: str, **environment: str) -> Process:
    """Three workers that run `text` after a first all-reduce, with their logs in ``logs``."""
    (directory / "train.py").write_text(BEGINNING + textwrap.dedent(text))
    arguments = ("run", "-n", str(SIZE), "--timeout", "20", "--log-dir", "logs", "train.py")
    return launcher(directory, *arguments, **environment)


def paragraph(directory: Path) -> str:
    """The report's, on one line."""
    done = command_line("report", str(directory / "logs"))
    assert done.exit_code == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    return " ".join(done.stdout.partition("\n\n")[0].split())


def records(directory: Path) -> dict[int, Dump]:
    paths = (directory / "logs").glob("flight-rank*.json")
    return {dump.rank: dump for path in paths if (dump := decode_dump(path.read_bytes()))}


def test_a_rank_that_is_killed_is_named(tmp_path):
    """And what workers print is kept without prefix."""
    text = """
    print("out", comm.rank, flush=True)
    print("err", comm.rank, file=sys.stderr, flush=True)
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    reduce()
    """
    # On a busy machine ranks take longer to learn of it than the launcher waits for their records.
    with job(tmp_path, text, RINGREDUCE_TIME_SCALE="2") as process:
        assert process.wait() == 128 + signal.SIGKILL
    assert set(records(tmp_path)) == {0, 1}
    said = paragraph(tmp_path)
    assert said.startswith("Rank 2 is the culprit: ranks 0, 1 lost it, and it left no record")
    for rank in range(SIZE):
        kept = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(kept[:2]) == [f"err {rank}", f"out {rank}"]


@pytest.mark.full
def test_a_rank_that_raises_is_named_with_the_line(tmp_path):
    text = """
    if comm.rank == 1:
        raise ValueError("no such shard")
    reduce()
    """
    with job(tmp_path, text) as process:
        assert process.wait() == 1
    assert set(records(tmp_path)) == {0, 1, 2}
    line = (tmp_path / "train.py").read_text().partition("raise ")[0].count("\n") + 1
    assert paragraph(tmp_path).startswith(
        "Rank 1 is the culprit: its own error came first, in user code, at "
        f"train.py:{line}: ValueError: no such shard."
    )


def test_a_rank_in_user_code_is_named_while_the_job_goes_on(tmp_path):
    """Asked twice, since the first time the others may not have waited for a second yet.

    No child of a worker is asked: a loader's process has no handler, and would die.
    """
    text = """
    import subprocess
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    if comm.rank == 1:
        print("reading", flush=True)
        while not os.path.exists("go on"):
            time.sleep(0.01)  # a slow disk
    reduce()
    child.communicate()
    assert child.returncode == 0, child.returncode
    print("done", flush=True)
    """
    with job(tmp_path, text) as process:
        process.wait_shown("reading")

        def stands_still() -> bool:
            process.signal(signal.SIGUSR1)
            return "is the culprit" in command_line("report", str(tmp_path / "logs")).stdout

        wait_until(stands_still, "the report to name a rank")
        said = paragraph(tmp_path)
        dumps = records(tmp_path)
        (tmp_path / "go on").touch()
        assert process.wait() == 0
        assert process.stdout.count("done") == SIZE
    assert said.startswith("Rank 1 is the culprit: it was in user code for ")
    assert "at train.py:" in said
    assert "while ranks 0, 2 wait in all_reduce #2 for " in said
    assert all(dump.why == "SIGUSR1" and dump.failure is None for dump in dumps.values())


def test_a_signal_before_a_rank_has_joined_does_not_end_the_job(tmp_path):
    """The folder comes from the environment here."""
    text = "print('started', flush=True)\nwait_for('go on')\n"
    joins = "import ringreduce\nringreduce.init().barrier()\nprint('done')\n"
    kept = tmp_path / "kept"
    command = ("run", script(tmp_path, RANK, text, joins))
    with launcher(tmp_path, *command, RINGREDUCE_LOG_DIR=str(kept)) as process:
        process.wait_shown("started")
        process.signal(signal.SIGUSR1)
        (tmp_path / "go on").touch()
        assert process.wait() == 0, process.stderr
    assert (kept / "rank-0.log").read_text() == "started\ndone\n"


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "logs").touch()
    with job(tmp_path, "") as process:
        assert process.wait() == 2
        assert "cannot keep the workers' output in logs" in process.stderr
        assert "--log-dir" in process.stderr
