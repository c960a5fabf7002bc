"""Makes errors of the ring leave a TensorFlow function as ours, and not as TensorFlow's alone.

An op fails with a code and a text, of which TensorFlow makes an exception in C++, with none of our
code on the stack. So the functions that hold our ops, and no others, are called through `_call`. If
the text is that of an error that has broken a communicator of this process, the exception is of
both classes: ``except ringreduce.PeerLostError`` and ``except tf.errors.OpError`` catch it.

After Ctrl-C the op may fail too, since another rank has ended first. If Python then raises
KeyboardInterrupt in the constructor of TensorFlow's exception, or a signal handler SystemExit, C++
makes a RuntimeError of both.
"""

import re
import weakref
from functools import cache, partial
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.pure.watcher_messages import FORMS_ANEW
from ringreduce.tensorflow import private
from ringreduce.vocabulary.errors import ClosedError, ConfigError, RingReduceError
from ringreduce.vocabulary.words import for_rr

_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()
# Graphs, traced or being traced, whose functions end with our errors.
_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
_CLOSED, _AFTER = "the communicator was closed", "made a call after close()"
_CACHING = "cache lockfile already exists"
_INTERRUPTED = re.compile(r"REPLACED BY (KeyboardInterrupt|SystemExit)(?:: (.*))?")


def watch(ring: Communicator) -> None:
    """From now on errors of `ring` leave the function that is being traced as they are."""
    _communicators.add(ring)
    _graphs.update(private.graphs_being_traced())
    if _look not in private.called_with_traced:
        private.called_with_traced.append(_look)


def _look(function: Any) -> None:
    if function.graph in _graphs:
        private.call_through(function, _call)


def _call(call: partial[Any]) -> Any:
    """Call a function that was traced, and raise ours if it fails with our text."""
    if not tf.executing_eagerly():
        # In another one, which is being traced.
        _graphs.update(private.graphs_being_traced())
    try:
        return call()
    except tf.errors.OpError as error:
        ours = None if isinstance(error, RingReduceError) else _ours(error.message or "")
        if ours is None:
            raise
        raise _both(ours) from None
    except RuntimeError as error:
        if (match := _INTERRUPTED.search(str(error))) is None:
            raise
        kind, code = match.groups()
        if kind == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        raise SystemExit(int(code) if code and code.isdecimal() else code) from None


def _ours(text: str) -> RingReduceError | None:
    for ring in list(_communicators):
        failure = ring.failure
        if failure is not None and failure.is_quoted_in(text):
            return failure
    if FORMS_ANEW in text:
        return ClosedError(FORMS_ANEW, remedy="Make the step again.")
    if _CACHING in text:
        lock = text.partition(_CACHING)[2].partition("('")[2].partition("')")[0]
        return ConfigError(
            f"reads a dataset of .cache(file) whose file another rank writes: there is {lock}",
            remedy=for_rr(
                'Give each rank its own: .cache(f"name-{rr.rank()}").',
                "Cache in memory, by .cache() without a file.",
            )
            + " If no other rank has it, a run that was killed has left the lockfile: delete it.",
        )
    if _CLOSED in text or _AFTER in text:
        return ClosedError(_CLOSED, remedy="Train before shutdown() or close().")
    return None


def _both(error: RingReduceError) -> Exception:
    """A copy of `error` that is an `UnknownError` too."""
    kind = _class_of_both(type(error))  # type: ignore[arg-type]
    made: Exception = kind.__new__(kind)
    made.args = error.args
    # With what the two constructors, which do not run, would have set.
    fields = {"_node_def": None, "_op": None, "_error_code": tf.errors.UNKNOWN}
    vars(made).update(vars(error), **fields, _message=str(error), _experimental_payloads={})
    return made


@cache
def _class_of_both(kind: type[RingReduceError]) -> type[Exception]:
    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        # Ours is an attribute, TensorFlow's a property without a setter.
        "message": "",
        # Pickled and copied as the plain error, which every process knows.
        "__reduce__": lambda self: (kind, *kind.__reduce__(self)[1:]),
    }
    return type(kind.__name__, (kind, tf.errors.UnknownError), members)
