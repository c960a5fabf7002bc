"""The order of the collectives in a graph: that of the program, on every rank.

TensorFlow runs stateful ops in program order, but not all of them: one that touches variables, such
as a condition, a loop or another function with a reduction in it, waits for those that touch the
same ones and for no others. XLA runs whatever does not depend on each other in any order at all. So
each collective comes after the ordering token of the one before it: an int32 scalar that is there
when that has been done.

A token cannot be seen from another function's graph, nor from outside of a loop. So a variable
holds the latest, one for each communicator: the first collective of a graph reads it, and each
writes its token to it. Whatever has collectives in it then touches that variable: TensorFlow orders
those, and XLA, for which a variable is a value that goes in and comes out, sees what depends on
what.

TensorFlow does not order what touches a variable in the backward pass of a function that it makes
for a tape outside of that. There ranks may come to collectives in different orders, which their
signatures show (`ringreduce.tensorflow.numbering`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.tensorflow import private

__all__ = ["done", "follow", "in_order", "token"]

# Handles of variables. One of 4 bytes lives as long as the process: any graph may refer to it.
_variables: weakref.WeakKeyDictionary[Communicator, Any] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
# Attribute of a graph: its latest tokens, by communicator. A dictionary by graph would keep all
# graphs alive, since tokens refer to theirs.
_LATEST = "_ringreduce_latest"


@dataclass
class _Latest:
    """How far a graph has come in the order of a communicator.

    Attributes:
        handle: of the variable, as it is seen from this graph.
        token: of the latest collective; None before the first.
        written: the op that wrote it to the variable, in a list.
        seen: names of the ops that used the variable until then.
    """

    handle: Any
    token: Any = None
    written: list[Any] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def others(self) -> list[Any]:
        """Functions, loops and conditions with collectives in them, since the latest token."""
        return [op for op in self.handle.consumers() if op.name not in self.seen]


def token(communicator: Communicator) -> Any:
    """The token of the collective that was traced last, for the next one to come after it."""
    if tf.executing_eagerly():
        return tf.constant(0, tf.int32)
    latest = _latest(tf.compat.v1.get_default_graph(), communicator)
    others = latest.others()
    if latest.token is None or others:
        with tf.control_dependencies([*latest.written, *others]), tf.device("CPU:0"):
            latest.token = tf.raw_ops.ReadVariableOp(resource=latest.handle, dtype=tf.int32)
        latest.token.set_shape(())
        latest.seen.update(op.name for op in (*others, latest.token.op))
    return latest.token


def follow(communicator: Communicator, token: Any) -> None:
    """Have the next collective come after what `token` stands for."""
    if tf.executing_eagerly():
        return
    latest = _latest(tf.compat.v1.get_default_graph(), communicator)
    with tf.control_dependencies(latest.written), tf.device("CPU:0"):
        written = tf.raw_ops.AssignVariableOp(resource=latest.handle, value=token)
    latest.token, latest.written = token, [written]
    latest.seen.add(written.name)


@contextmanager
def in_order(communicator: Communicator) -> Iterator[None]:
    """Ops that are added within come after the last collective. For graphs that TensorFlow runs."""
    with tf.control_dependencies([token(communicator)]):
        yield


def done(communicator: Communicator, results: Sequence[Any]) -> None:
    """Have the next collective come after the one that gave `results`: tensors, or ops."""
    with tf.control_dependencies(results):
        follow(communicator, tf.identity(tf.constant(0, tf.int32)))


def _latest(graph: Any, communicator: Communicator) -> _Latest:
    if not hasattr(graph, _LATEST):
        setattr(graph, _LATEST, weakref.WeakKeyDictionary())
    by_communicator = getattr(graph, _LATEST)
    if communicator not in by_communicator:
        handle = private.capture_once(graph, _variable(communicator))
        by_communicator[communicator] = _Latest(handle)
    found: _Latest = by_communicator[communicator]
    return found


def _variable(communicator: Communicator) -> Any:
    if communicator not in _variables:
        # By ops, and not as a `tf.Variable`: a function may make one of those only when it is
        # traced for the first time, and TensorFlow would ask for its gradient.
        with tf.init_scope(), tf.device("CPU:0"):
            name = f"ordering token of ringreduce {next(_numbers)}"
            handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=(), shared_name=name)
            tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0))
            _variables.setdefault(communicator, handle)
    return _variables[communicator]
