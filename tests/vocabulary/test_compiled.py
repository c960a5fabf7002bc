"""Compiled functions are compiled anew when a file that they take constants from has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FUNCTION = """\
from ringreduce.vocabulary.compiled import jit
from smallest.constants import NUMBER

@jit
def inner():
    return NUMBER

@jit
def outer():
    return inner() + 1

print(outer(), len(outer.stats.cache_hits), "from the cache")
"""


def output(folder: Path) -> str:
    command = [sys.executable, "-c", "import smallest.function"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


def test_a_constant_of_another_file_is_compiled_anew(tmp_path: Path) -> None:
    package = tmp_path / "smallest"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / ".#function.py").symlink_to("nobody@nowhere")
    (package / "function.py").write_text(FUNCTION)
    (package / "constants.py").write_text("NUMBER = 1\n")
    assert output(tmp_path) == "2 0 from the cache"
    assert output(tmp_path) == "2 1 from the cache"
    (package / "constants.py").write_text("NUMBER = 41\n")
    assert output(tmp_path) == "42 0 from the cache"
