"""``ringreduce run`` in tests: small programs, most of which know nothing of ringreduce."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.processes import DEADLINE_S, clean_environment

__all__ = ["RANK", "WAITS", "numbers", "run", "script"]

RANK = "import os\nrank = int(os.environ['RINGREDUCE_RANK'])\n"
# Says its number, then waits for a signal: what the launcher ends.
WAITS = (
    "import os, signal\nprint('pid', os.getpid(), flush=True)\nwhile True:\n    signal.pause()\n"
)


def script(directory: Path, text: str) -> str:
    """Write a program; return its name, relative to where `launcher` starts."""
    (directory / "script.py").write_text(textwrap.dedent(text))
    return "script.py"


def run(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``ringreduce run *arguments``, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "ringreduce", "run", *arguments],
        cwd=directory,
        env=clean_environment(**environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def numbers(text: str, word: str = "pid") -> list[int]:
    """The numbers that follow `word` in an output."""
    return [int(number) for number in re.findall(rf"{word} (\d+)", text)]
