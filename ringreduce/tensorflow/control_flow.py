"""Refuses collectives in those parts of a graph that not every rank is sure to run."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.tensorflow import xla
from ringreduce.tensorflow.private import (
    CondBranchFuncGraph,
    ControlFlowFuncGraph,
    FuncGraph,
    WhileBodyFuncGraph,
    WhileCondFuncGraph,
    graphs_being_traced,
    orders_its_ops,
)
from ringreduce.vocabulary.errors import ConfigError

_GRADIENTS = "reduce gradients"
_vouched: weakref.WeakSet[Any] = weakref.WeakSet()


def vouch_for_branch() -> None:
    """State that all ranks take the branch of `tf.cond` that is being traced together."""
    if not tf.executing_eagerly():
        _vouched.add(tf.compat.v1.get_default_graph())


def is_in_loop() -> bool:
    """Whether the graph being traced, or one around it, is the body of a loop."""
    return any(isinstance(graph, WhileBodyFuncGraph) for graph in graphs_being_traced())


def refuse_unreachable(
    communicator: Communicator, what: str = _GRADIENTS, *, of_gradient: bool = False
) -> None:
    """Raise, while tracing, where a collective could not run, or not on all ranks.

    `what` was to be done there, for the message. With `of_gradient` it is the gradient of a
    collective, which its signature identifies.

    Raises:
        ConfigError: under ``jit_compile=True`` where XLA cannot call the ring, or in the condition
            of a loop; inside a branch of `tf.cond`; in the backward pass of a function or loop,
            unless `of_gradient`; in a graph of TensorFlow 1.
    """
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    if xla.is_compiling() and (reason := xla.why_not()) is not None:
        raise ConfigError(
            f"cannot {what} inside a function compiled with jit_compile=True. {reason}",
            **communicator.config.who,
            remedy="Leave that to what needs no ring: model.compile(..., jit_compile=False), and "
            "rr.compile_gradients(model) to have forward and backward pass compiled; in a loop of "
            "your own an inner function that computes only the loss and its gradients.",
        )
    if isinstance(graph, FuncGraph) and not (of_gradient or orders_its_ops(graph)):
        raise ConfigError(
            f"cannot {what} in the backward pass of a tf.function or a loop, where TensorFlow may "
            "run it in another order on each rank",
            **communicator.config.who,
            remedy="In a custom gradient use the gradient of a collective of the forward pass, or "
            "take the gradients in the same tf.function as the loss, outside of loops.",
        )
    # Stop at the enclosing tf.function: around it Keras has a condition of its own, whether the
    # iterator has another batch.
    while isinstance(graph, ControlFlowFuncGraph):
        if isinstance(graph, WhileCondFuncGraph) and xla.is_compiling():
            raise ConfigError(
                f"cannot {what} in the condition of a loop inside a function compiled with "
                "jit_compile=True: nothing would order what comes after the loop",
                **communicator.config.who,
                remedy="Do it in the loop's body, and carry what the condition needs.",
            )
        if isinstance(graph, CondBranchFuncGraph) and graph not in _vouched:
            raise ConfigError(
                f"cannot {what} inside a branch of tf.cond: a rank that takes the "
                "other branch would never answer",
                **communicator.config.who,
                remedy="Make DistributedOptimizer the outermost wrapper, and apply gradients on "
                "every rank in every step."
                if what == _GRADIENTS
                else "Do it outside, on every rank, and choose between values with tf.where.",
            )
        graph = graph.outer_graph
    if not isinstance(graph, FuncGraph):
        raise ConfigError(
            f"cannot {what} in a graph that is not that of a tf.function",
            **communicator.config.who,
            remedy="Use TensorFlow 2: tf.function for tf.Graph, and eager execution left enabled.",
        )
