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
# Of an op that is a condition or a loop, the graphs of what is in it.
_PARTS = ("_true_graph", "_false_graph", "_body_graph")


def token() -> Any:
    """The token of the collective that was traced last, for the next one to come after it."""
    for graph in _graphs_from_here():
        if loops := _loops_and_conditions(graph):
            with graph.as_default():
                done([*_latest(graph)[0], *loops])
        if hasattr(graph, _LATEST):
            return getattr(graph, _LATEST)[0]
    return tf.constant(0, tf.int32)


def follow(latest: Any) -> None:
    """Have the next collective of this graph come after what the token `latest` stands for."""
    if not tf.executing_eagerly():
        graph = tf_ops.get_default_graph()
        setattr(graph, _LATEST, (latest, len(graph.get_operations())))


@contextmanager
def in_turn() -> Iterator[None]:
    """Ops that are added within come after the last collective. For graphs that TensorFlow runs."""
    with tf.control_dependencies([token()]):
        yield


def done(results: Sequence[Any]) -> None:
    """Have the next collective come after the one that gave `results`: tensors, or ops."""
    with tf.control_dependencies(results):
        follow(tf.identity(tf.constant(0, tf.int32)))


def _latest(graph: Any) -> tuple[list[Any], int]:
    """The last token of a graph, if it has any, and how many ops there were then."""
    found = getattr(graph, _LATEST, None)
    return ([], 0) if found is None else ([found[0]], found[1])


def _graphs_from_here() -> Iterator[Any]:
    """This graph and those around it whose tokens can be seen here, up to the first with one."""
    if tf.executing_eagerly():
        return
    graph = tf_ops.get_default_graph()
    while True:
        yield graph
        # From within a branch or a loop what is around it can be seen.
        if hasattr(graph, _LATEST) or not isinstance(graph, ControlFlowFuncGraph):
            return
        graph = graph.outer_graph


def _loops_and_conditions(graph: Any) -> list[Any]:
    """Those in `graph`, since its last token, that have collectives in them."""
    return [
        op
        for op in graph.get_operations()[_latest(graph)[1] :]
        if any(_has_collectives(getattr(op, part, None)) for part in _PARTS)
    ]


def _has_collectives(graph: Any) -> bool:
    return graph is not None and (hasattr(graph, _LATEST) or bool(_loops_and_conditions(graph)))
