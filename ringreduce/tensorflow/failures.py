"""Makes errors of the ring leave a TensorFlow function as ours, and not as TensorFlow's alone.

An op fails with a code and a text, of which TensorFlow makes a `tf.errors.UnknownError`, in C++ or
in Python. Here that class gets a ``__new__`` which reads the text. If it is that of an error that
has broken a communicator of this process, the instance is of both classes: ``except
ringreduce.PeerLostError`` catches it, and so does ``except tf.errors.OpError``.

This is the only change to TensorFlow. Nothing else can convert the error of `model.fit`: TensorFlow
makes the exception from a status, by a fixed table of codes, with none of our code on the stack.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.session import FORMED_ANEW
from ringreduce.vocabulary.errors import ClosedError, RingReduceError

_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
# An op's text is cut to RR_WHY_BYTES; this many characters tell errors apart.
_TELLING = 1000
_CLOSED = "the communicator was closed"


def watch(communicator: Communicator) -> None:
    """From now on errors of `communicator` leave TensorFlow functions as they are."""
    _communicators.add(communicator)
    _teach_unknown_error()


@cache
def _teach_unknown_error() -> None:
    unknown = tf.errors.UnknownError

    def make(cls: type, *arguments: Any, **options: Any) -> Any:
        text = options.get("message", arguments[2] if len(arguments) > 2 else None)
        ours = _ours(str(text)) if cls is unknown else None
        return Exception.__new__(cls, *arguments, **options) if ours is None else _both(ours)

    # The class defines no `__new__`, and C++ calls one that is set on it too.
    unknown.__new__ = make


def _ours(text: str) -> RingReduceError | None:
    """The error that `text` belongs to, or None."""
    for communicator in list(_communicators):
        failure = communicator.failure
        if failure is not None and str(failure)[:_TELLING] in text:
            return failure
    if FORMED_ANEW in text:
        return ClosedError(FORMED_ANEW, remedy="Make the step again.")
    if _CLOSED in text:
        return ClosedError(_CLOSED, remedy="Train before shutdown() or close().")
    return None


def _both(error: RingReduceError) -> Exception:
    """A copy of `error` that is an `UnknownError` too."""
    kind = _class_of_both(type(error))  # type: ignore[arg-type]
    made: Exception = kind.__new__(kind)
    made.args = error.args
    # Set what the two constructors, which do not run, would have set.
    made.__dict__.update(error.__dict__)
    made.__dict__.update(_node_def=None, _op=None, _error_code=tf.errors.UNKNOWN)
    made.__dict__.update(_message=str(error), _experimental_payloads={})
    return made


@cache
def _class_of_both(kind: type[RingReduceError]) -> type[Exception]:
    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        # Python calls it with TensorFlow's arguments on what `make` returned.
        "__init__": lambda self, *arguments, **options: None,
        # Ours is an attribute, TensorFlow's a property without a setter.
        "message": "",
        # Pickled and copied as the plain error, which every process knows.
        "__reduce__": lambda self: (kind, *kind.__reduce__(self)[1:]),
    }
    return type(kind.__name__, (kind, tf.errors.UnknownError), members)
