"""Refuses collectives in those parts of a graph that not every rank is sure to run."""

import weakref
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.tensorflow import private, xla
from ringreduce.vocabulary.errors import ConfigError

_GRADIENTS = "reduce gradients"
_vouched: weakref.WeakSet[Any] = weakref.WeakSet()


def vouch_for_branch() -> None:
    """State that all ranks take the branch of `tf.cond` that is being traced together."""
    if not tf.executing_eagerly():
        _vouched.add(tf.compat.v1.get_default_graph())


def is_in_loop() -> bool:
    """Whether the graph being traced, or one around it, is the body of a loop."""
    graphs = private.graphs_being_traced()
    return any(isinstance(graph, private.WhileBodyFuncGraph) for graph in graphs)


def refuse_unreachable(
    ring: Communicator, what: str = _GRADIENTS, *, of_gradient: bool = False
) -> None:
    """ConfigError, while tracing, where a collective could not run, or not on all ranks.

    `what` was to be done there, for the message. With `of_gradient` it is the gradient of a
    collective, which its signature identifies: that may be in a backward pass.
    """
    if not tf.executing_eagerly() and (problem := _problem(what, of_gradient)) is not None:
        where, remedy = problem
        raise ConfigError(f"cannot {what} {where}", **ring.config.who, remedy=remedy)


def _problem(what: str, of_gradient: bool) -> tuple[str, str] | None:
    """Where in a graph it was to be done, and what to do instead; None: there it can be done."""
    graph = tf.compat.v1.get_default_graph()
    if xla.is_compiling() and (reason := xla.why_not()) is not None:
        return (
            f"inside a function compiled with jit_compile=True. {reason}",
            "Leave that to what needs no ring: model.compile(..., jit_compile=False); in a loop of "
            "your own compile an inner function that computes only the loss and its gradients.",
        )
    if isinstance(graph, private.FuncGraph) and not (of_gradient or private.orders_its_ops(graph)):
        return (
            "in the backward pass of a tf.function or a loop, where TensorFlow may run it in "
            "another order on each rank",
            "In a custom gradient use the gradient of a collective of the forward pass, or take "
            "the gradients in the same tf.function as the loss, outside of loops.",
        )
    # Stop at the enclosing tf.function: around it Keras has a condition of its own, whether the
    # iterator has another batch.
    while isinstance(graph, private.ControlFlowFuncGraph):
        if isinstance(graph, private.WhileCondFuncGraph) and xla.is_compiling():
            return (
                "in the condition of a loop inside a function compiled with jit_compile=True: "
                "nothing would order what comes after the loop",
                "Do it in the loop's body, and carry what the condition needs.",
            )
        if isinstance(graph, private.CondBranchFuncGraph) and graph not in _vouched:
            return (
                "inside a branch of tf.cond: a rank that takes the other branch would never answer",
                "Make DistributedOptimizer the outermost wrapper, and apply gradients on every "
                "rank in every step."
                if what == _GRADIENTS
                else "Do it outside, on every rank, and choose between values with tf.where.",
            )
        graph = graph.outer_graph
    if not isinstance(graph, private.FuncGraph):
        return (
            "in a graph that is not that of a tf.function",
            "Use TensorFlow 2: tf.function for tf.Graph, and eager execution left enabled.",
        )
    return None
