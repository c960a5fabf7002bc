"""Errors of the ring as they come out of a TensorFlow function: ours, not TensorFlow's.

An op can fail with a code and a text alone, and TensorFlow makes an exception of its own of
them (`tf.errors.UnknownError`). It does so in one Python function, which is wrapped here: when
the text holds that of an error which has broken one of this process's communicators, that
error is raised, with TensorFlow's as `graph_error`. Everything else passes unchanged. A
TensorFlow without that function leaves users with TensorFlow's exception, and our text in it.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from tensorflow.python.eager import core

from ringreduce.communicator import Communicator
from ringreduce.errors import ClosedError, RingReduceError

__all__ = ["watch"]

_log = logging.getLogger(__name__)

_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
# A text crosses into an op cut to RR_WHY_BYTES; so much of it tells errors apart.
_TELLING = 1000
_CLOSED = "the communicator was closed"


def watch(communicator: Communicator) -> None:
    """From now on errors of `communicator` come out of functions as they are."""
    _communicators.add(communicator)
    _wrap()


@cache
def _wrap() -> None:
    convert = getattr(core, "_status_to_exception", None)
    if convert is None:
        _log.warning("errors of the ring come out of functions as tf.errors.UnknownError")
        return
    core._status_to_exception = _converting(convert)


def _converting(convert: Callable[[Any], Exception]) -> Callable[[Any], Exception]:
    def status_to_exception(status: Any) -> Exception:
        raised = convert(status)
        ours = _ours(str(getattr(status, "message", "")))
        if ours is None:
            return raised
        ours.graph_error = raised  # type: ignore[attr-defined]
        return ours

    return status_to_exception


def _ours(text: str) -> RingReduceError | None:
    """A copy of the error that `text` is about, so that tracebacks do not pile up on one object."""
    for communicator in list(_communicators):
        failure = communicator.failure
        if failure is not None and str(failure)[:_TELLING] in text:
            return copy.copy(failure)
    if _CLOSED in text:
        return ClosedError(_CLOSED, remedy="Train before shutdown() or close().")
    return None
