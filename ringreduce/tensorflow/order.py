"""Runs the collectives of a graph in the order of the program, on every rank.

TensorFlow orders stateful ops as the program does, but one that touches variables, such as a loop
with a reduction in it, only against those that touch the same ones; XLA runs independent ops in any
order. So each collective depends on the ordering token of the one before it, an int32 scalar.

A token cannot be used in another function's graph, nor outside of its loop. So a variable of the
communicator holds the latest: the first collective of a graph reads it, and each writes its own.
"""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.tensorflow import private
from ringreduce.tensorflow.kept import kept

_numbers = itertools.count()
# Attribute of a graph: its latest tokens, by communicator. A dictionary by graph would keep all
# graphs alive, since tokens refer to them.
_LATEST = "_ringreduce_latest"


@dataclass
class _Latest:
    handle: Any  # of the variable, captured in this graph
    token: Any = None  # of that collective; None before the first
    written: list[Any] = field(default_factory=list)  # the op that stored it
    seen: set[str] = field(default_factory=set)  # names of the ops that have used the variable


def token(ring: Communicator) -> Any:
    """The token of the collective that was traced last, on which the next one is to depend."""
    latest = _latest(tf.compat.v1.get_default_graph(), ring)
    # Functions, loops and conditions with collectives in them, since the latest token.
    others = [op for op in latest.handle.consumers() if op.name not in latest.seen]
    if latest.token is None or others:
        with tf.control_dependencies([*latest.written, *others]), tf.device("CPU:0"):
            latest.token = tf.raw_ops.ReadVariableOp(resource=latest.handle, dtype=tf.int32)
        latest.token.set_shape(())
        latest.seen.update(op.name for op in (*others, latest.token.op))
    return latest.token


def follow(ring: Communicator, token: Any) -> None:
    """Make the next collective depend on `token`."""
    latest = _latest(tf.compat.v1.get_default_graph(), ring)
    with tf.control_dependencies(latest.written), tf.device("CPU:0"):
        written = tf.raw_ops.AssignVariableOp(resource=latest.handle, value=token)
    latest.token, latest.written = token, [written]
    latest.seen.add(written.name)


def in_order(ring: Communicator) -> Any:
    """A context: ops added within run after the last collective. For what TensorFlow runs."""
    return tf.control_dependencies([token(ring)])


def done(ring: Communicator, results: Sequence[Any]) -> None:
    """Make the next collective depend on the one that gave `results`: tensors or ops."""
    with tf.control_dependencies(results):
        follow(ring, tf.identity(tf.constant(0, tf.int32)))


def _latest(graph: Any, ring: Communicator) -> _Latest:
    if not hasattr(graph, _LATEST):
        setattr(graph, _LATEST, weakref.WeakKeyDictionary())
    by_communicator = getattr(graph, _LATEST)
    if ring not in by_communicator:
        handle = private.capture_once(graph, kept(ring, _Variable).handle)
        by_communicator[ring] = _Latest(handle)
    latest: _Latest = by_communicator[ring]
    return latest


class _Variable:
    """That of a communicator; 4 bytes, as long as the process lives: any graph may refer to it."""

    def __init__(self) -> None:
        # Ops, not a `tf.Variable`: a function may create one of those only in its first trace, and
        # TensorFlow would ask for its gradient.
        with tf.init_scope(), tf.device("CPU:0"):
            name = f"ordering token of ringreduce {next(_numbers)}"
            self.handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=(), shared_name=name)
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=tf.constant(0))
