"""`launch`: what functions may be, what comes back, and what a failure says and leaves behind.

Functions within a test are pickled by value, as those of a notebook are, so workers do not import
this file.
"""

import json
import os
import signal
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

import ringreduce
from ringreduce import ConfigError, WorkerError
from ringreduce.vocabulary import cores
from tests.launching import numbers
from tests.processes import Process, wait_gone

WAITS = """
import os, signal, sys
import ringreduce

def wait():
    os.write(1, b"worker %d\\n" % os.getpid())
    while True:
        signal.pause()

try:
    ringreduce.launch(wait, 2)
except BaseException as error:
    print("ended with", type(error).__name__, flush=True)
"""

CELLS = [
    """
import ringreduce
scale = 5
def work(factor):
    comm = ringreduce.init()
    print("rank", comm.rank)
    return comm.rank, scale * factor
print(ringreduce.launch(work, 2, 2))
    """,
    """
def fail():
    if ringreduce.init().rank == 1:
        raise ValueError(scale)
ringreduce.launch(fail, 2)
    """,
    """
def wait():
    comm = ringreduce.init()
    print("worker", os.getpid())
    comm.barrier()
    if comm.rank == 0:
        os.kill(KERNEL, signal.SIGINT)  # As the button does.
    signal.pause()
import os, signal
KERNEL = os.getpid()
ringreduce.launch(wait, 2)
    """,
]


def program(directory: Path, text: str) -> Process:
    (directory / "program.py").write_text(textwrap.dedent(text))
    return Process([sys.executable, "program.py"], directory)


def test_a_closure_returns_a_result_from_each_rank_in_order():
    factor = 3

    def work(offset: int, name: str) -> tuple[int, str, bytes]:
        comm = ringreduce.init()
        sizes = comm.all_gather_object(comm.rank * factor + offset)
        return comm.rank, f"{name} {sizes}", bytes(1 << 20)  # More than a pipe holds.

    results = ringreduce.launch(work, 2, 5, "ranks")
    assert [result[:2] for result in results] == [(r, "ranks [5, 8]") for r in range(2)]
    assert {len(result[2]) for result in results} == {1 << 20}


def test_output_appears_here_with_its_rank(capsys):
    def speak() -> None:
        for file in (sys.stdout, sys.stderr):
            print("said", file=file)

    assert ringreduce.launch(speak, 2) == [None, None]
    for text in capsys.readouterr():
        assert sorted(text.splitlines()) == ["[0] said", "[1] said"]


def test_settings_reach_the_workers_of_which_one_is_a_world(tmp_path):
    def work() -> tuple[float, str, str, int, int]:
        config = ringreduce.init().config
        threads = os.environ["OMP_NUM_THREADS"]
        return config.timeout_s, config.transport, threads, config.size, os.getppid()

    options: dict[str, Any] = {"timeout_s": 7, "transport": "zmq", "threads_per_worker": 3}
    found = ringreduce.launch(work, 1, **options, log_dir=tmp_path / "logs")
    assert found == [(7.0, "zmq", "3", 1, os.getpid())]
    [log] = (tmp_path / "logs").iterdir()  # and no flight record
    assert (log.name, log.read_text()) == ("rank-0.log", "")


def test_a_module_here_is_found_there(tmp_path, monkeypatch):
    (tmp_path / "their_module.py").write_text("import sys\n\ndef work():\n    return sys.argv\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["caller", "--flag"])
    import their_module

    assert ringreduce.launch(their_module.work, 1) == [["caller", "--flag"]]


def test_the_first_failure_is_raised_with_traceback(capsys):
    def work() -> None:
        comm = ringreduce.init()
        if comm.rank == 1:
            raise ValueError("no luck")
        comm.barrier()

    with pytest.raises(WorkerError) as caught:
        ringreduce.launch(work, 2)
    error = caught.value
    assert (error.peer, error.size) == (1, 2)
    first, frame, *rest = error.traceback.splitlines()
    assert (first, frame[-7:]) == ("Traceback (most recent call last):", "in work")
    # How rank 0 ends depends on when it is stopped.
    others = rest[rest.index("ValueError: no luck") + 1 :]
    assert all(line.startswith("then rank 0") for line in others)
    assert "Traceback" not in capsys.readouterr().err  # It is in the error.
    title = "rank 1 of 2 failed first (exit code 1); all workers were stopped."
    assert str(error) == f"{title}\n{error.traceback}"


def test_what_the_kernel_kills_for_lack_of_memory_is_said_with_its_memory(tmp_path, monkeypatch):
    def work() -> None:
        if os.environ["RINGREDUCE_RANK"] == "1":
            (group / "memory.events").write_text("oom 1\noom_kill 1\n")
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    group, process = tmp_path / "sys/fs/cgroup", tmp_path / "proc/self"
    for folder in (group, process):
        folder.mkdir(parents=True)
    (process / "cgroup").write_text("0::/\n")
    (group / "memory.events").write_text("oom 0\noom_kill 0\n")
    (group / "memory.max").write_text("4294967296\n")
    for read in (cores.kernel_kills, cores.memory_limit):
        monkeypatch.setattr(read, "__defaults__", (tmp_path,))
    said = r"killed by the kernel, which lacked memory: ranks 0, 1 together may have 4\.00 GiB; "
    with pytest.raises(WorkerError, match=rf"rank 1 of 2 failed first \({said}"):
        ringreduce.launch(work, 2)


def test_workers_that_do_not_end_are_killed_after_their_grace(tmp_path, capsys):
    def work() -> None:
        if os.environ["RINGREDUCE_RANK"] == "0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (tmp_path / "ready").touch()
            signal.pause()
        while not (tmp_path / "ready").exists():
            pass
        raise ValueError("no luck")

    with pytest.raises(WorkerError, match="rank 1 of 2 failed first"):
        ringreduce.launch(work, 2, grace_s=0.2)
    assert "killed rank 0, which had not ended 0.2 s after SIGTERM" in capsys.readouterr().err


def test_a_rank_without_a_result_is_named():
    def work(result: Any) -> object:
        return result() if os.environ["RINGREDUCE_RANK"] == "1" else None

    unsendable, ended = "result, a lock, cannot be pickled", "ended with exit code 0 before"
    for result, complaint in ((threading.Lock, unsendable), (sys.exit, f"rank 1 of 2 {ended}")):
        with pytest.raises(WorkerError, match=complaint) as caught:
            ringreduce.launch(work, 2, result)
        assert caught.value.peer == 1


def test_after_a_restart_the_results_are_those_of_the_last_attempt():
    def work() -> float:
        restart = int(os.environ["RINGREDUCE_RESTART"])
        return restart / restart

    assert ringreduce.launch(work, 1, max_restarts=2) == [1]


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        ((1, threading.Lock()), {}, r"cannot send .*print .*cannot pickle '_thread.lock'"),
        *(((n,), {}, rf"launch got '?{n}'? as the number") for n in (0, -1, 1.5, None, "2")),
        ((1,), {"rank": 1, "epochs": 3}, r"option epochs, rank\. Known are .* timeout_s"),
        ((1,), {"timeout_s": -1}, "timeout_s is -1"),
    ],
)
def test_what_launch_cannot_do_is_refused(arguments, options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        ringreduce.launch(print, *arguments, **options)


def test_it_may_be_called_in_another_thread():
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(ringreduce.launch(lambda: 5, 1)))
    thread.start()
    thread.join()
    assert found == [5]


def test_functions_and_classes_of_main_and_their_source_in_tracebacks(tmp_path):
    """Lines of code that is in no file, as in a notebook, are shown too."""
    text = """
    import json, linecache
    import ringreduce

    class Point:
        def __init__(self, x):
            self.x = x

    SCALE = 2
    def scaled(point):
        return Point(point.x * SCALE)

    points = ringreduce.launch(scaled, 2, Point(4))

    CELL = "def fail():\\n    raise KeyError('from a cell')\\n"
    linecache.cache["<cell 1>"] = len(CELL), None, CELL.splitlines(True), "<cell 1>"
    exec(compile(CELL, "<cell 1>", "exec"))
    try:
        ringreduce.launch(fail, 1)
    except ringreduce.WorkerError as error:
        same = all(type(point) is Point for point in points)
        print(json.dumps([[point.x for point in points], same, error.traceback]))
    """
    with program(tmp_path, text) as done:
        assert done.wait() == 0, done.stderr
        xs, same, traceback = json.loads(done.stdout)
    assert (xs, same) == ([8, 8], True)
    assert "    raise KeyError('from a cell')\n" in traceback


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_workers_and_program(tmp_path, number):
    with program(tmp_path, WAITS) as running:
        running.wait_shown("worker ", times=2)
        running.signal(number)
        is_raised = number == signal.SIGINT
        assert running.wait() == (0 if is_raised else -number)
        assert running.stdout.endswith("ended with KeyboardInterrupt\n") == is_raised
        wait_gone(numbers(running.stdout, "worker"))


@pytest.mark.full
def test_a_cell_of_a_notebook_launches_its_own_functions(tmp_path):
    """Output and errors are the cell's, and an interrupted cell leaves no worker."""
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    options = {"timeout": 60, "allow_errors": True, "kernel_name": "python3"}
    NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}, **options).execute()
    outputs = [
        "".join(o.get("text", f"{o.get('ename')}: {o.get('evalue')}") for o in cell.outputs)
        for cell in notebook.cells
    ]
    first, second, third = outputs
    lines = sorted(first.splitlines())
    assert lines == ["[(0, 10), (1, 10)]", "[0] rank 0", "[1] rank 1"]
    assert "WorkerError: rank 1 of 2 failed first" in second
    assert "    raise ValueError(scale)\nValueError: 5" in second
    pids = numbers(third, "worker")
    assert len(pids) == 2
    assert third.endswith("KeyboardInterrupt: ")
    wait_gone(pids)
