"""Processes in tests: started with their output in files, watched with deadlines, always ended.

Output goes to files rather than pipes: a file can be looked at again and again while the
process runs, never fills up, and never blocks the reader.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from tests import forkserver

__all__ = [
    "DEADLINE_S",
    "Process",
    "clean_environment",
    "is_running",
    "launcher",
    "run_python",
    "wait_gone",
    "wait_until",
]

# Nothing here takes a third of this on an idle machine.
DEADLINE_S = 45.0


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return once `condition` holds; fail the test when it still does not after `deadline_s`."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {deadline_s:g} s in vain for {what}")
        time.sleep(0.01)  # How often we look; what we wait for is the condition.


def wait_gone(pids: Iterable[int], deadline_s: float = 10.0) -> None:
    """Return once none of these processes runs; a zombie nobody has reaped yet counts as gone."""
    for pid in pids:
        wait_until(lambda pid=pid: not is_running(pid), f"process {pid} to end", deadline_s)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def clean_environment(**variables: str) -> dict[str, str]:
    """Our environment without what a job, a terminal or a user's thread limits would add.

    Two stay, since the whole suite is run with them too: that the native library is hidden, and
    the scale of times.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if (
            name in ("RINGREDUCE_NATIVE", "RINGREDUCE_TIME_SCALE")
            or not name.startswith(("RINGREDUCE_", "TF_NUM_"))
        )
        and not name.endswith("_NUM_THREADS")
        and name != "COLUMNS"
    }
    return kept | variables


def run_python(
    program: str, *arguments: str, timeout_s: float = 60.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program's text in a fresh interpreter, which can import the tests."""
    path = str(Path(__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env=clean_environment(PYTHONPATH=path, **variables),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _receive_ctrl_c() -> None:
    """In the child: what a shell starts in the background ignores SIGINT, and hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Process:
    """A child whose output is kept in files of `directory`; killed when the block ends.

    Args:
        command: what to run; the program is found in PATH.
        directory: the child's working folder, and where its output goes.
        name: of the files that hold the output.
        environment: all of it; ours without what belongs to a job by default.
        pass_fds: descriptors that the child has too, under the same numbers.
        stdin: nothing, or `subprocess.PIPE`.
        worker: the command is ``[sys.executable, script, *arguments]`` and may be forked from a
            process that has imported what scripts need (`tests.forkserver`).
        output: another folder for the files.
    """

    def __init__(
        self,
        command: Iterable[str],
        directory: Path,
        *,
        name: str = "process",
        environment: Mapping[str, str] | None = None,
        pass_fds: tuple[int, ...] = (),
        stdin: int = subprocess.DEVNULL,
        worker: bool = False,
        output: Path | None = None,
    ) -> None:
        output = output or directory
        self._paths = output / f"{name}.out", output / f"{name}.err"
        self._popen: subprocess.Popen[bytes] | forkserver.Forked
        with self._paths[0].open("wb") as out, self._paths[1].open("wb") as err:
            common: dict[str, Any] = {
                "stdin": stdin,
                "stdout": out.fileno(),
                "stderr": err.fileno(),
                "cwd": directory,
                "env": dict(clean_environment() if environment is None else environment),
                "pass_fds": pass_fds,
            }
            if worker and forkserver.is_wanted():
                self._popen = forkserver.Forked(list(command)[1:], **common)
            else:
                self._popen = subprocess.Popen(list(command), preexec_fn=_receive_ctrl_c, **common)
        self.pid = self._popen.pid

    @property
    def stdout(self) -> str:
        return self._paths[0].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._paths[1].read_text(errors="replace")

    @property
    def stdin(self) -> IO[bytes]:
        assert self._popen.stdin is not None
        return self._popen.stdin

    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """The exit code, once it has ended."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still runs after {timeout_s:g} s; said:\n{self.stdout}\n{self.stderr}"
            ) from None

    def wait_shown(self, text: str, times: int = 1) -> None:
        """Return once `text` was written to standard output `times` times."""
        self._wait_written(lambda: self.stdout.count(text) >= times, f"{text!r} x {times}")

    def wait_error(self, text: str) -> None:
        """Return once `text` was written to standard error."""
        self._wait_written(lambda: text in self.stderr, repr(text))

    def _wait_written(self, is_written: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            if is_written():
                return True
            assert self._popen.poll() is None, f"ended early:\n{self.stdout}\n{self.stderr}"
            return False

        wait_until(holds, what)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        if self._popen.poll() is None:
            # A stopped process would not react to anything milder.
            self._popen.send_signal(signal.SIGKILL)
        self._popen.wait(10)


def launcher(directory: Path, *arguments: str, **variables: str) -> Process:
    """``ringreduce *arguments``, started in `directory` with these further variables."""
    command = [sys.executable, "-m", "ringreduce", *arguments]
    return Process(command, directory, name="launcher", environment=clean_environment(**variables))
