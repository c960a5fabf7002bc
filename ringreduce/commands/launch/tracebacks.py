"""Finds tracebacks, and what they say, among the lines that a worker wrote. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
# Lines kept from the one that names the exception.
_TEXT_LINES_MAX = 60
# Python marks a part of the source line above; in a filtered traceback from the first column on.
_MARKERS = re.compile(r"\s*[~^]+")
_FRAME = re.compile(r'  File "([^"]+)", line \d+')
# Our files here, and where other hosts usually have them.
_OURS = f"{Path(__file__).parents[2]}/"
_INSTALLED = "/site-packages/ringreduce/"
_NAMED = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt|Warning)\b(: .*)?")
_WARNING = re.compile(r"\b\w*Warning: |^\s*warnings\.warn\(|^W\d{4} |: W ")


def is_traceback_start(line: str) -> bool:
    """Whether a traceback begins with this line."""
    return line.startswith(_TRACEBACK)


def last_traceback(lines: Sequence[str]) -> tuple[str, ...]:
    """The last traceback in `lines`, and up to `_TEXT_LINES_MAX` lines of its text and after.

    Chained exceptions are one traceback. An exception's text may have many lines (TensorFlow's
    have the cause far down), and nothing marks the last one.
    """
    starts = [i for i, line in enumerate(lines) if is_traceback_start(line)]
    if not starts:
        return ()
    begin = starts[-1]
    for earlier in reversed(starts[:-1]):
        if not any(line.startswith(_CHAINED) for line in lines[earlier:begin]):
            break
        begin = earlier
    return tuple(lines[begin : _exception_index(lines, starts[-1]) + _TEXT_LINES_MAX])


def exception_in(lines: Sequence[str]) -> str:
    """The line that names the exception of the last traceback in `lines`; empty for none.

    One that only says that the cause follows has the line that names the cause after it.
    """
    starts = [i for i, line in enumerate(lines) if is_traceback_start(line)]
    index = _exception_index(lines, starts[-1]) if starts else len(lines)
    if index >= len(lines):
        return ""
    line = lines[index]
    if not line.endswith(":"):
        return line
    text = [other.strip() for other in lines[index + 1 :]]
    named = [other for other in text if _NAMED.fullmatch(other)]
    following = named[0] if named else next(filter(None, text), "")
    return f"{line} {following}".rstrip()


def without_internals(lines: Sequence[str]) -> list[str]:
    """A traceback without our frames, and what follows it, if it ends in an error of ours.

    Such an error says what to do; where it was raised helps nobody who uses the package.
    """
    if not exception_in(lines).startswith("ringreduce."):
        return list(lines)
    kept: list[str] = []
    is_ours, hidden = False, 0
    for line in lines:
        if frame := _FRAME.match(line):
            is_ours = frame[1].startswith(_OURS) or _INSTALLED in frame[1]
            hidden += is_ours
        elif not line.startswith("    "):
            is_ours = False
        if not is_ours:
            if hidden:
                frames = "a frame" if hidden == 1 else f"{hidden} frames"
                kept.append(f"  ... {frames} of ringreduce (--tracebacks all)")
                hidden = 0
            kept.append(line)
    return kept


def last_words(lines: Sequence[str]) -> str:
    """The last line of a log that says something; empty for none.

    Warnings, and the marks below a source line, are passed over unless there is nothing else; so
    is what follows an exception indented, as some texts do.
    """
    telling = [line for line in lines if line.strip() and not _MARKERS.fullmatch(line)]
    calm = [line for i, line in enumerate(telling) if not _is_warning(telling, i)]
    starts = [i for i, line in enumerate(calm) if is_traceback_start(line)]
    index = _exception_index(calm, starts[-1]) if starts else len(calm)
    if index < len(calm) and all(line.startswith(" ") for line in calm[index + 1 :]):
        return calm[index]
    return (calm or telling or [""])[-1]


def _is_warning(lines: Sequence[str], index: int) -> bool:
    """Whether a line is a warning, or the source line that Python shows below one."""
    if _WARNING.search(lines[index]):
        return True
    return index > 0 and lines[index].startswith("  ") and bool(_WARNING.search(lines[index - 1]))


def _exception_index(lines: Sequence[str], start: int) -> int:
    """Index of the line that names the exception of the traceback that begins at `start`."""
    index = start + 1
    while index < len(lines) and (
        lines[index].startswith(" ") or not lines[index] or _MARKERS.fullmatch(lines[index])
    ):
        index += 1
    return index
