"""Jobs of real processes that fail or hang: their flight records, and what the report says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from ringreduce.pure.flight import Dump, decode_dump
from tests.processes import DEADLINE_S, Process, clean_environment, launcher, wait_until

SIZE = 4
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
    """Four workers that run `text` after a first all-reduce, with their logs in ``logs``."""
    (directory / "train.py").write_text(BEGINNING + textwrap.dedent(text))
    arguments = ("run", "-n", str(SIZE), "--timeout", "20", "--log-dir", "logs", "train.py")
    variables = clean_environment(**environment)
    return launcher(directory, *arguments, environment=variables)


def report(directory: Path, folder: str = "logs") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ringreduce", "report", folder],
        cwd=directory,
        env=clean_environment(COLUMNS="80"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def paragraph(directory: Path) -> str:
    """The report's, on one line."""
    done = report(directory)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    return " ".join(done.stdout.partition("\n\n")[0].split())


def records(directory: Path) -> dict[int, Dump]:
    paths = (directory / "logs").glob("flight-rank*.json")
    return {dump.rank: dump for path in paths if (dump := decode_dump(path.read_bytes()))}


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    text = """
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    reduce()
    """
    with job(tmp_path, text) as process:
        assert process.wait() == 128 + signal.SIGKILL
    assert set(records(tmp_path)) == {0, 1, 2}
    said = paragraph(tmp_path)
    assert said.startswith("Rank 3 is the culprit: ranks 0, 1, 2 lost it, and it left no record")


def test_a_rank_that_raises_is_named_with_the_line(tmp_path: Path) -> None:
    text = """
    if comm.rank == 2:
        raise ValueError("no such shard")
    reduce()
    """
    with job(tmp_path, text) as process:
        assert process.wait() == 1
    assert set(records(tmp_path)) == {0, 1, 2, 3}
    line = (
        (tmp_path / "train.py")
        .read_text()
        .splitlines()
        .index('    raise ValueError("no such shard")')
    )
    assert paragraph(tmp_path).startswith(
        "Rank 2 is the culprit: its own error came first, in user code, at "
        f"train.py:{line + 1}: ValueError: no such shard."
    )


def test_a_rank_in_user_code_is_named_while_the_job_goes_on(tmp_path: Path) -> None:
    """Asked twice, since the first time the others may not have waited for a second yet."""
    text = """
    if comm.rank == 1:
        print("reading", flush=True)
        while not os.path.exists("go on"):
            time.sleep(0.01)  # a slow disk
    reduce()
    print("done", flush=True)
    """
    with job(tmp_path, text) as process:
        process.wait_shown("reading")

        def stands_still() -> bool:
            process.signal(signal.SIGUSR1)
            return "is the culprit" in report(tmp_path).stdout

        wait_until(stands_still, "the report to name a rank")
        said = paragraph(tmp_path)
        dumps = records(tmp_path)
        (tmp_path / "go on").touch()
        assert process.wait() == 0
        assert process.stdout.count("done") == SIZE
    assert said.startswith("Rank 1 is the culprit: it was in user code for ")
    assert "at train.py:" in said
    assert "while ranks 0, 2, 3 wait in all_reduce #2 for " in said
    assert all(dump.why == "SIGUSR1" and dump.failure is None for dump in dumps.values())


def test_a_signal_before_a_rank_has_joined_does_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "print('started', flush=True)\n"
        "while not os.path.exists('go on'):\n"
        "    time.sleep(0.01)\n"
        "import ringreduce\n"
        "ringreduce.init().barrier()\n"
        "print('done')\n"
    )
    with launcher(tmp_path, "run", "-n", "2", "--log-dir", "logs", "train.py") as process:
        process.wait_shown("started", 2)
        process.signal(signal.SIGUSR1)
        (tmp_path / "go on").touch()
        assert process.wait() == 0, process.stderr
        assert process.stdout.count("done") == 2


def test_children_of_a_worker_do_not_get_the_signal(tmp_path: Path) -> None:
    """A loader's process has no handler, and would die."""
    text = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    comm.barrier()
    print("ready", flush=True)
    while not os.path.exists(f"logs/flight-rank{comm.rank}.json"):
        time.sleep(0.01)
    child.communicate(b"\\n")
    assert child.returncode == 0, child.returncode
    """
    with job(tmp_path, text) as process:
        process.wait_shown("ready", SIZE)
        process.signal(signal.SIGUSR1)
        assert process.wait() == 0, process.stderr


def test_what_workers_print_is_kept_without_prefix(tmp_path: Path) -> None:
    text = """
    print("out", comm.rank)
    sys.stdout.flush()
    print("err", comm.rank, file=sys.stderr)
    """
    with job(tmp_path, text) as process:
        assert process.wait() == 0
    for rank in range(SIZE):
        kept = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert sorted(kept.splitlines()) == [f"err {rank}", f"out {rank}"]
    assert records(tmp_path) == {}


def test_the_folder_may_come_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('here')\n")
    environment = clean_environment(RINGREDUCE_LOG_DIR=str(tmp_path / "kept"))
    with launcher(tmp_path, "run", "train.py", environment=environment) as process:
        assert process.wait() == 0
    assert (tmp_path / "kept" / "rank-0.log").read_text() == "here\n"


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with job(tmp_path, "") as process:
        assert process.wait() == 2
        assert "cannot keep the workers' output in logs" in process.stderr
        assert "--log-dir" in process.stderr


def test_a_report_on_nothing_is_a_clear_error(tmp_path: Path) -> None:
    done = report(tmp_path, "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no folder nowhere" in done.stderr
    done = report(tmp_path, ".")
    assert done.returncode == 2
    assert "there is no flight record" in done.stderr
    assert os.listdir(tmp_path) == []
