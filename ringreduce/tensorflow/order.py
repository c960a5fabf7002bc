"""The order of the collectives in a graph: that of the program, on every rank.

TensorFlow runs stateful ops in program order, but not all of them: one that touches variables, such
as a condition or a loop with a reduction in it, waits for those that touch the same ones and for no
others. XLA runs whatever does not depend on each other in any order at all. So each collective
comes after the token of the one before it: an int32 scalar that is there when that has been done.

What a `tf.function` does that is called from another is ordered by its data alone: it may be called
from several places, so no token can come from outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

__all__ = ["done", "follow", "in_turn", "token"]

# Of each graph, as an attribute of it: the last token, and how many ops there were then. A
# dictionary by graph would keep them all alive, since a token refers to its own.
_LATEST = "_ringreduce_latest"


def token() -> Any:
    """The token of the collective that was traced last, for the next one to come after it."""
    if not tf.executing_eagerly():
        graph = tf_ops.get_default_graph()
        while True:
            if hasattr(graph, _LATEST):
                return getattr(graph, _LATEST)[0]
            # From within a branch or a loop the tokens around it can be seen.
            if not isinstance(graph, ControlFlowFuncGraph):
                break
            graph = graph.outer_graph
    return tf.constant(0, tf.int32)


def follow(latest: Any) -> None:
    """Have the next collective of this graph come after what the token `latest` stands for."""
    if not tf.executing_eagerly():
        graph = tf_ops.get_default_graph()
        setattr(graph, _LATEST, (latest, len(graph.get_operations())))


@contextmanager
def in_turn() -> Iterator[None]:
    """Ops that are added within come after the last collective. For graphs that TensorFlow runs."""
    with tf.control_dependencies([token(), *_loops_and_conditions()]):
        yield


def done(results: Sequence[Any]) -> None:
    """Have the next collective come after the one that gave `results`."""
    with tf.control_dependencies(results):
        follow(tf.identity(tf.constant(0, tf.int32)))


def _loops_and_conditions() -> list[Any]:
    """Those with collectives in them since the last token."""
    if tf.executing_eagerly():
        return []
    graph = tf_ops.get_default_graph()
    _, seen = getattr(graph, _LATEST, (None, 0))
    parts = ("_true_graph", "_false_graph", "_body_graph")
    return [
        op
        for op in graph.get_operations()[seen:]
        if any(hasattr(getattr(op, part, None), _LATEST) for part in parts)
    ]
