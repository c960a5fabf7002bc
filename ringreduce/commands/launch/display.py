"""Decides which of the workers' lines are shown, and when; all of them go into the logs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ringreduce.commands.launch.logs import Logs
from ringreduce.commands.launch.screen import Screen, Source
from ringreduce.commands.launch.startup import is_startup_line
from ringreduce.vocabulary.config import TIMES

# Of a rank whose output is not shown, kept for the case that it fails.
_KEPT_LINES = 400

OUTPUTS = ("all", "rank0", "failed")


class Display:
    """What the workers of one attempt write.

    Lines that are not whole yet are shown of one rank alone. On a terminal they are the live line;
    elsewhere, and in the logs, what they have become is a line of its own every ten seconds.

    Args:
        output: one of `OUTPUTS`, whose lines are shown as they come.
        terminal_rank: the rank that has the launcher's terminal, if any; it is always shown.
    """

    def __init__(
        self, screen: Screen, logs: Logs | None, size: int, output: str, terminal_rank: int | None
    ) -> None:
        self._screen, self._logs = screen, logs
        self._live_rank = terminal_rank or 0
        shown = {"all": range(size), "rank0": range(1), "failed": range(0)}[output]
        self._hidden = {
            rank: deque[tuple[Source, str]](maxlen=_KEPT_LINES)
            for rank in range(size)
            if rank not in shown and rank != terminal_rank
        }
        self._partials: dict[Source, _Partial] = {}

    def update(self, source: Source, lines: Sequence[str], partial: str) -> None:
        """Take what a worker has written: whole lines, and the one that is not whole yet."""
        now_s = time.monotonic()
        self.keep(source.rank, lines)
        self.show(source, lines)
        if lines or source not in self._partials:
            self._partials[source] = _Partial(now_s)
        self._partials[source].text = partial
        if source.rank == self._live_rank and self._can_be_live(source):
            self._screen.show_live(source, partial)

    def tick(self) -> None:
        """Show what has waited long enough."""
        now_s = time.monotonic()
        for source, partial in self._partials.items():
            if partial.is_due(now_s):
                self.keep(source.rank, [partial.text])
                if source.rank == self._live_rank and not self._can_be_live(source):
                    self.show(source, [partial.text])
                partial.shown, partial.since_s = partial.text, now_s

    def end_lines(self) -> None:
        """Show as lines what workers have not ended, as when a child holds an output open."""
        for source, partial in self._partials.items():
            if partial.text:
                self.keep(source.rank, [partial.text])
                self.show(source, [partial.text])
        self._partials.clear()

    def reveal(self, rank: int) -> None:
        """Show the last lines of a rank whose output was not shown."""
        for source, line in self._hidden.pop(rank, ()):
            self._screen.show(source, [line])

    def _can_be_live(self, source: Source) -> bool:
        return source.rank not in self._hidden and self._screen.can_be_live(source)

    def show(self, source: Source, lines: Sequence[str]) -> None:
        """Show whole lines of a worker, if its output is shown."""
        if source.rank in self._hidden:
            self._hidden[source.rank].extend((source, line) for line in lines)
            return
        # Of all ranks, rank 0 is enough for what TensorFlow says as it starts.
        is_once = source.rank > 0 and source.is_error
        self._screen.show(source, [x for x in lines if not (is_once and is_startup_line(x))])

    def keep(self, rank: int, lines: Sequence[str]) -> None:
        """Add whole lines of a worker to the logs."""
        if self._logs is None or not lines:
            return
        try:
            self._logs.write(rank, lines)
        except OSError as error:
            # A full disk must not end the job; the lines are shown.
            self._screen.say(f"no longer keeps the workers' output: {error}")
            self._logs = None


@dataclass
class _Partial:
    """A line that is not whole yet.

    Attributes:
        since_s: when the last whole line came, or its state was last written.
        shown: the state that was written.
    """

    since_s: float
    text: str = ""
    shown: str = ""

    def is_due(self, now_s: float) -> bool:
        """Whether its state is to be written now."""
        waited = now_s - self.since_s >= TIMES.partial_line_s
        return waited and bool(self.text) and self.text != self.shown
