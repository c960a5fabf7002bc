"""Warnings that point at the line of the user's program that they are about."""

import sys
import warnings
from pathlib import Path
from types import FrameType

import keras
import tensorflow as tf

_FRAMEWORKS = [str(Path(str(module.__file__)).parent) for module in (keras, tf)]
_PACKAGES = (*_FRAMEWORKS, str(Path(__file__).parents[2]))


class DataWarning(UserWarning):
    """Ranks may train on the same data, on less than all of it, or on x made differently."""


class ParityWarning(UserWarning):
    """N ranks do not train as one process with the same global batch does, or not as was asked."""


def users_frame() -> FrameType:
    """The innermost caller that is neither ours nor a framework's, nor AutoGraph's of a user's."""
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        if is_users(frame.f_code.co_filename):
            break
        frame = outer
    return frame


def is_users(name: str) -> bool:
    """Whether a file of that name is neither ours nor a framework's, nor AutoGraph's."""
    return not name.startswith(_PACKAGES) and "__autograph_generated" not in name


def warn_at_users_line(text: str, category: type[Warning]) -> None:
    """`warnings.warn` that points at the user's program."""
    frame = users_frame()
    place = frame.f_code.co_filename, frame.f_lineno
    # With the registry of that module the same warning of a line is shown once, as Python's are.
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, *place, registry=registry)
