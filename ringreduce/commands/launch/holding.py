"""Holds a traceback back until its process has ended or has gone on. Pure.

Only then is it known whether it is the cause of a failure, which the launcher shows at the end, or
a consequence, of which one line is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.commands.launch.tracebacks import is_traceback_start

# More is shown at once, so that it does not fill memory.
_LINES_MAX = 2000


class Holding:
    """Lines of one worker's standard error, from the start of a traceback on."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._since_s = 0.0

    def feed(self, lines: Sequence[str], now_s: float) -> list[str]:
        """Add lines that were written; return those to show now."""
        starts = [i for i, line in enumerate(lines) if is_traceback_start(line)]
        if not self._lines:
            begin = starts[0] if starts else len(lines)
            self._lines, self._since_s = list(lines[begin:]), now_s
            return list(lines[:begin])
        self._lines.extend(lines)
        return self.take() if len(self._lines) > _LINES_MAX else []

    def holds_since(self) -> float | None:
        """When the traceback began; None while nothing is held."""
        return self._since_s if self._lines else None

    def take(self) -> list[str]:
        """All lines that are held; none is from now on."""
        lines, self._lines = self._lines, []
        return lines
