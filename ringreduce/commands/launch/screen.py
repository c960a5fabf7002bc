"""Writes the lines of all workers to the launcher's output, marked with ranks.

On a terminal the last row may be a live line: one that a worker has not ended yet. Other lines
are written above it.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from ringreduce.commands.launch.output import cut, last_state, without_colors
from ringreduce.vocabulary.config import color_wanted

_COLORS = (36, 33, 32, 35, 34, 31)
_NO_COLOR = "\x1b[0m"
_ERASE = "\r\x1b[K"


class Source(NamedTuple):
    """Standard output, or error, of a worker."""

    rank: int
    is_error: bool


class Screen:
    """Shows the lines of workers, which begin with a label: the rank, and perhaps its host."""

    def __init__(self, labels: Sequence[str], stdout: TextIO, stderr: TextIO) -> None:
        self._stdout, self._stderr = stdout, stderr
        self._labels = labels
        self._width = max(map(len, labels))
        self._live: tuple[Source, str] | None = None

    @property
    def columns(self) -> int | None:
        """Columns of the terminal that a worker's line may take; None without a terminal."""
        if not self._stdout.isatty():
            return None
        columns = os.get_terminal_size(self._stdout.fileno()).columns - self._width - len("[] ")
        return columns if columns > 0 else None

    def can_be_live(self, source: Source) -> bool:
        """Whether a line of `source` that is not whole may be shown."""
        return self._stdout.isatty() and self._target(source).isatty()

    def show(self, source: Source, lines: Sequence[str]) -> None:
        if not lines:
            return
        target = self._target(source)
        mark = self._mark(source.rank, target)
        text = "".join(f"{mark}{self._line(line, target)}\n" for line in lines)
        if self._live is not None and self._live[0] == source:
            self._erase()  # The first line is what the live line has become.
        self._write(target, text)

    def show_live(self, source: Source, text: str) -> None:
        """Make `text` the live line; for no text there is none, if it was from `source`."""
        # The last column stays free, where some terminals begin the next row.
        text = self._line(cut(text, (self.columns or 80) - 1), self._stdout)
        if self._live == (source, text):
            return  # What a person has typed stays.
        if text or (self._live is not None and self._live[0] == source):
            self._erase()
        if text:
            _write(self._stdout, self._mark(source.rank, self._stdout) + text)
            self._live = (source, text)

    def say(self, *lines: str) -> None:
        """Write lines of the launcher's own; they may quote a worker's."""
        text = "".join(f"ringreduce: {line}\n" for line in lines)
        in_color = self._stderr.isatty() and color_wanted()
        self._write(self._stderr, text if in_color else without_colors(text))

    def _target(self, source: Source) -> TextIO:
        return self._stderr if source.is_error else self._stdout

    def _line(self, line: str, target: TextIO) -> str:
        if not target.isatty():
            return without_colors(last_state(line))
        if not color_wanted():
            return without_colors(line)
        # A color that a line leaves on is not for the next one.
        return line + _NO_COLOR if "\x1b" in line else line

    def _write(self, target: TextIO, text: str) -> None:
        """Write lines, above the live line if both are on a terminal."""
        live = self._live if target.isatty() else None
        if live is None:
            _write(target, text)
            return
        self._erase()
        _write(target, text)
        source, shown = live
        _write(self._stdout, self._mark(source.rank, self._stdout) + shown)
        self._live = live

    def _erase(self) -> None:
        if self._live is not None:
            _write(self._stdout, _ERASE)
            self._live = None

    def _mark(self, rank: int, target: TextIO) -> str:
        mark = f"[{self._labels[rank]:>{self._width}}]"
        if target.isatty() and color_wanted():
            mark = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{mark}{_NO_COLOR}"
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
