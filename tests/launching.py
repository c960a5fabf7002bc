"""``ringreduce run`` in tests: small programs, most of which know nothing of ringreduce."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

from typer.testing import CliRunner, Result

from ringreduce.commands.cli import app
from tests.processes import DEADLINE_S, clean_environment, wait_until

__all__ = ["RANK", "WAITS", "Terminal", "command_line", "numbers", "pieces", "run", "script"]

# Ranks wait for files beside the program.
RANK = """import os, pathlib, signal, sys, time
rank = int(os.environ['RINGREDUCE_RANK'])
def beside(name):
    return pathlib.Path(__file__).with_name(name)
def wait_for(name):
    while not beside(name).exists():
        time.sleep(0.01)
"""
# Says its number, then waits for a signal: what the launcher ends.
WAITS = (
    "import os, signal\nprint('pid', os.getpid(), flush=True)\nwhile True:\n    signal.pause()\n"
)


def script(directory: Path, *texts: str) -> str:
    """Write a program of these texts; return its name, relative to where `launcher` starts."""
    (directory / "script.py").write_text("".join(map(textwrap.dedent, texts)))
    return "script.py"


def run(
    directory: Path,
    *arguments: str,
    typed: str = "",
    timeout_s: float = DEADLINE_S,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """``ringreduce run *arguments``, to its end, with a text that comes through a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "ringreduce", "run", *arguments],
        cwd=directory,
        env=clean_environment(**environment),
        input=typed,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def command_line(*arguments: str, **environment: str) -> Result:
    """Run ``ringreduce *arguments`` in this process, as at a terminal of 80 columns."""
    shown = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "80"}
    return CliRunner().invoke(app, arguments, prog_name="ringreduce", env={**shown, **environment})


def numbers(text: str, word: str = "pid") -> list[int]:
    """The numbers that follow `word` in an output."""
    return [int(number) for number in re.findall(rf"{word} (\d+)", text)]


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """What makes up `data`, cut at these places."""
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


class Terminal:
    """``ringreduce run *arguments`` on a terminal of its own; killed when the block ends.

    Attributes:
        shown: all that was written to the terminal until now.
    """

    def __init__(
        self, directory: Path, *arguments: str, columns: int = 80, **environment: str
    ) -> None:
        self._file, tty = pty.openpty()
        fcntl.ioctl(tty, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.shown = b""
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "ringreduce", "run", *arguments],
            cwd=directory,
            env=clean_environment(**{"NO_COLOR": "1", "TERM": "xterm", **environment}),
            stdin=tty,
            stdout=tty,
            stderr=tty,
            start_new_session=True,
            preexec_fn=_lead,
        )
        os.close(tty)

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def wait_shown(self, text: str, times: int = 1) -> None:
        """Return once `text` was written `times` times."""
        self._read_until(lambda: self.shown.count(text.encode()) >= times, text)

    def wait(self) -> int:
        """The exit code, once it has ended."""
        self._read_until(lambda: self._popen.poll() is not None, "the end")
        self._read()
        return self._popen.returncode

    def _read_until(self, condition: Callable[[], object], what: str) -> None:
        def holds() -> object:
            self._read()
            return condition()

        try:
            wait_until(holds, repr(what))
        except AssertionError as error:
            raise AssertionError(f"{error}; shown: {self.shown!r}") from None

    def _read(self) -> None:
        while select.select([self._file], [], [], 0)[0]:
            # The system's answer once nobody has the terminal open.
            with contextlib.suppress(OSError):
                if data := os.read(self._file, 1 << 16):
                    self.shown += data
                    continue
            return

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGKILL)
        self._popen.wait(10)
        os.close(self._file)


def _lead() -> None:
    """In the child: take the terminal, so that Ctrl-C on it reaches the launcher."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
