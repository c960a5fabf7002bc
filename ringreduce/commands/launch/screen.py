"""Writes the lines of all workers to the launcher's output, marked with ranks, and into files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ringreduce.vocabulary.config import color_wanted
from ringreduce.vocabulary.errors import ConfigError

_COLORS = (36, 33, 32, 35, 34, 31)


class Screen:
    """Shows the lines of `size` workers, which begin with the rank."""

    def __init__(self, size: int, stdout: TextIO, stderr: TextIO) -> None:
        self._stdout, self._stderr = stdout, stderr
        self._width = len(str(size - 1))
        self._size = size
        self._kept: list[TextIO] = []

    def keep(self, folder: Path) -> None:
        """Write each worker's lines into `folder` too. Raises ConfigError if that is impossible."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank in range(self._size):
                self._kept.append((folder / f"rank-{rank}.log").open("w", encoding="utf-8"))
        except OSError as error:
            self.close()
            raise ConfigError(
                f"cannot keep the workers' output in {folder}: {error}",
                remedy="Give --log-dir, or RINGREDUCE_LOG_DIR, a folder that can be written to.",
            ) from error

    def close(self) -> None:
        """Close the files of `keep`."""
        kept, self._kept = self._kept, []
        for file in kept:
            with contextlib.suppress(OSError):
                file.close()

    def show(self, rank: int, lines: Sequence[str], *, is_error: bool) -> None:
        """Write whole lines of one worker."""
        target = self._stderr if is_error else self._stdout
        mark = self._mark(rank, target)
        _write(target, "".join(f"{mark}{line}\n" for line in lines))
        if not self._kept:
            return
        try:
            self._kept[rank].writelines(f"{line}\n" for line in lines)
            self._kept[rank].flush()
        except OSError as error:
            # A full disk must not end the job; the lines were shown.
            self.say(f"no longer keeps the workers' output: {error}")
            self.close()

    def say(self, text: str) -> None:
        """Write a line of the launcher's own."""
        _write(self._stderr, f"ringreduce: {text}\n")

    def _mark(self, rank: int, target: TextIO) -> str:
        mark = f"[{rank:>{self._width}}]"
        if target.isatty() and color_wanted():
            mark = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{mark}\x1b[0m"
        return mark + " "


def _write(target: TextIO, text: str) -> None:
    """Write and flush; a reader that has ended, as in `| head`, must not end the job."""
    try:
        target.write(text)
        target.flush()
    except OSError:
        # Else Python's flush of the buffer at exit would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target.fileno())
        os.close(nowhere)
