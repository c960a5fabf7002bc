"""Decides which of the workers' lines are shown, and when; all of them go into the logs."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringreduce.commands.launch.exchange import Output
from ringreduce.commands.launch.output import LineBuffer, added, last_state, without_colors
from ringreduce.commands.launch.plan import JobPlan
from ringreduce.commands.launch.screen import Screen, Source
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import ConfigError

_KEPT_LINES = 400  # of a rank whose output is not shown, kept for the case that it fails

OUTPUTS = ("all", "rank0", "failed")
# TensorFlow 2.18 to 2.21 writes this in every process; anything else may be an error that matters.
STARTUP = re.compile(
    r"^I0000 00:00:\d"  # Information that its C++ code gives before logging is set up.
    r"|All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|oneDNN custom operations are on\."
    r"|Could not find cuda drivers on your machine"
    r"|Unable to register cu(DNN|FFT|BLAS) factory: Attempting to register factory"
    r"|computation placer already registered"
    r"|This TensorFlow binary is optimized to use available CPU instructions"
    r"|^To enable the following instructions: .* rebuild TensorFlow with"
    r"|failed call to cuInit: (INTERNAL: CUDA error: Failed call to cuInit: )?"
    r"(UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE)"
    r"|TF-TRT Warning: Could not find TensorRT"
)


class Display:
    """Shows and logs what the workers of one attempt write.

    Lines that are not whole yet are shown of one rank alone. On a terminal they are the live line;
    elsewhere, and in the logs, what is added in ten seconds is a line of its own.
    """

    def __init__(self, screen: Screen, logs: Logs | None, plan: JobPlan) -> None:
        self._screen, self._logs = screen, logs
        self._live_rank = plan.stdin_rank or 0
        self._is_all_shown = plan.output == "all"
        shown = {"all": range(plan.size), "rank0": range(1), "failed": range(0)}[plan.output]
        self._hidden = {
            rank: deque[tuple[Source, str]](maxlen=_KEPT_LINES)
            for rank in range(plan.size)
            if rank not in shown and rank != plan.stdin_rank
        }
        # By the process that writes: what one of a rank has not ended is no line of the next one.
        self._streams: dict[tuple[Source, int], _Stream] = {}

    def take(self, output: Output) -> None:
        source, life = Source(output.rank, output.is_error), output.life
        new = _Stream(source, LineBuffer(), time.monotonic(), life)
        stream = self._streams.setdefault((source, life), new)
        lines = stream.buffer.feed(output.data)
        self._add(stream, lines)
        if lines or not stream.partial:
            stream.since_s = time.monotonic()
        stream.partial = stream.buffer.partial
        if self._is_live(stream.source):
            self._screen.show_live(stream.source, stream.partial)

    def follow(self, ranks: Sequence[int]) -> None:
        """Show the first of the `ranks` that are left as rank 0 was shown, if that is lost."""
        if self._live_rank not in ranks:
            if self._live_rank not in self._hidden:
                self._hidden.pop(ranks[0], None)
            self._live_rank = ranks[0]

    def start(self, rank: int, life: int) -> None:
        """Process `life` of a rank begins to write: it is none of the first ranks of the ring."""
        self._log(lambda logs: logs.start(rank, life))
        if not self._is_all_shown:
            self._hidden[rank] = deque(maxlen=_KEPT_LINES)

    def tick(self) -> None:
        now_s = time.monotonic()
        for stream in self._streams.values():
            is_due = now_s - stream.since_s >= TIMES.partial_line_s
            if is_due and stream.partial and stream.partial != stream.kept:
                self.keep(stream.source.rank, added([stream.partial], stream.kept), stream.life)
                if stream.source.rank == self._live_rank and not self._is_live(stream.source):
                    self._show(stream.source, added([stream.partial], stream.shown))
                    stream.shown = stream.partial
                stream.kept, stream.since_s = stream.partial, now_s

    def end_lines(self) -> None:
        """Show as lines what workers have not ended, as when a child holds an output open."""
        for stream in self._streams.values():
            if stream.partial:
                self._add(stream, [stream.partial])
        self._streams.clear()

    def reveal(self, rank: int) -> None:
        """Show the last lines of a rank whose output was not shown."""
        for source, line in self._hidden.pop(rank, ()):
            self._screen.show(source, [line])

    def show_error(self, rank: int, lines: Sequence[str]) -> None:
        """Show lines as if a worker had written them to its standard error, if that is shown."""
        self._show(Source(rank, is_error=True), lines)

    def keep(self, rank: int, lines: Sequence[str], life: int = 0) -> None:
        if lines:
            self._log(lambda logs: logs.write(rank, lines, life))

    def _log(self, write: Callable[[Logs], None]) -> None:
        if self._logs is None:
            return
        try:
            write(self._logs)
        except OSError as error:
            # A full disk must not end the job; the lines are shown.
            self._screen.say(f"no longer keeps the workers' output: {error}")
            self._logs = None

    def _add(self, stream: _Stream, lines: Sequence[str]) -> None:
        """Keep and show whole lines; of the first, a part may have been before."""
        if lines:
            self.keep(stream.source.rank, added(lines, stream.kept), stream.life)
            self._show(stream.source, added(lines, stream.shown), stream.life)
            stream.kept = stream.shown = ""

    def _show(self, source: Source, lines: Sequence[str], life: int = 0) -> None:
        if source.rank in self._hidden:
            self._hidden[source.rank].extend((source, line) for line in lines)
            return
        # Rank 0's first process is enough for what all say alike.
        is_once = source.is_error and (source.rank > 0 or life > 0)
        self._screen.show(source, [x for x in lines if not (is_once and STARTUP.search(x))])

    def _is_live(self, source: Source) -> bool:
        """Whether a line of `source` that is not whole is the live line."""
        is_shown = source.rank == self._live_rank and source.rank not in self._hidden
        return is_shown and self._screen.can_be_live(source)


class Logs:
    """The lines of `ranks` in ``rank-0.log`` and so on; ConfigError if they cannot be made.

    Those of a rank that was lost, and started again, are in ``rank-2.1.log``.
    """

    def __init__(self, folder: Path, ranks: range) -> None:
        self._folder = folder.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank in ranks:
                self.start(rank)
        except OSError as error:
            raise ConfigError(
                f"cannot keep the workers' output in {folder}: {error}",
                remedy="Give --log-dir, or RINGREDUCE_LOG_DIR, a folder that can be written to.",
            ) from error

    def start(self, rank: int, life: int = 0) -> None:
        """Make an empty file for a process of a rank. Raises OSError."""
        self._file(rank, life).write_bytes(b"")

    def _file(self, rank: int, life: int) -> Path:
        return self._folder / (f"rank-{rank}.{life}.log" if life else f"rank-{rank}.log")

    def write(self, rank: int, lines: Sequence[str], life: int = 0) -> None:
        """Add whole lines of one worker. Raises OSError, as on a full disk."""
        with self._file(rank, life).open("a", encoding="utf-8") as file:
            file.writelines(f"{without_colors(last_state(line))}\n" for line in lines)


@dataclass
class _Stream:
    source: Source
    buffer: LineBuffer
    since_s: float  # when the line that is not whole yet began, or its state was last written
    life: int = 0
    partial: str = ""  # that line
    # Its states that were written last: to the logs, to the screen.
    kept: str = ""
    shown: str = ""
