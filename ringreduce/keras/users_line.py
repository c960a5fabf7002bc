"""Which line of the user's program is running, for errors and warnings about what it passed."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

import keras
import tensorflow as tf

_PACKAGES = (
    *(str(Path(str(module.__file__)).parent) for module in (keras, tf)),
    str(Path(__file__).parents[1]),
)


def users_line() -> tuple[str, int]:
    """File and line of the innermost caller that is neither ours nor a framework's."""
    frame = _users_frame()
    return frame.f_code.co_filename, frame.f_lineno


def _users_frame() -> FrameType:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    return frame


def warn_at_users_line(text: str, category: type[Warning]) -> None:
    """`warnings.warn` that points at the user's program."""
    frame = _users_frame()
    # With the registry of that module the same warning of a line is shown once, as Python's are.
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
