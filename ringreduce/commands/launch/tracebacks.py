"""Finds the line of a log that says how a program ended. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TRACEBACK = "Traceback (most recent call last):"
# Python marks a part of the source line above; in a filtered traceback from the first column on.
_MARKERS = re.compile(r"\s*[~^]+")
_WARNING = re.compile(r"\b\w*Warning: |^\s*warnings\.warn\(|^W\d{4} |: W ")


def _is_traceback_start(line: str) -> bool:
    """Whether a traceback begins with this line."""
    return line.startswith(_TRACEBACK)


def last_words(lines: Sequence[str]) -> str:
    """The last line of a log that says something; empty for none.

    Warnings, and the marks below a source line, are passed over unless there is nothing else; so
    is what follows an exception indented, as some texts do.
    """
    telling = [line for line in lines if line.strip() and not _MARKERS.fullmatch(line)]
    calm = [line for i, line in enumerate(telling) if not _is_warning(telling, i)]
    starts = [i for i, line in enumerate(calm) if _is_traceback_start(line)]
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
