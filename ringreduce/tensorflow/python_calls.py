"""Calls a Python function that communicates: eagerly, in a graph, and in what XLA compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.tensorflow import compiled, failures, order, private, xla
from ringreduce.tensorflow.control_flow import refuse_unreachable


def call(
    communicator: Communicator,
    what: str,
    run: Callable[..., Sequence[Any]],
    arguments: Sequence[Any],
    results: Sequence[tuple[Any, Any]],
    *,
    of_gradient: bool = False,
) -> list[Any]:
    """The results of `run`, as tensors; in a graph this adds a stateful op that calls it.

    Args:
        communicator: `run` uses it; calls on it run in the program's order.
        what: what `run` does, for messages.
        run: gets the values of `arguments`, which it must not change, and returns arrays, whose
            memory becomes TensorFlow's. Its `StopIteration` becomes `tf.errors.OutOfRangeError`.
        results: static shape and dtype of each; at least one.
        of_gradient: as for `refuse_unreachable`.

    Raises:
        ConfigError: not all ranks could take part here.
        RingReduceError: eagerly, what `run` raised; from a graph when it is run.
    """
    failures.watch(communicator)
    if tf.executing_eagerly():
        try:
            found = run(*(tensor.numpy() for tensor in arguments))
        except StopIteration as end:
            raise tf.errors.OutOfRangeError(None, None, str(end)) from None
        return [tf.convert_to_tensor(value) for value in found]
    if private.is_for_shapes(tf.compat.v1.get_default_graph()):
        # The input of a model is no tensor yet.
        return [tf.compat.v1.placeholder(dtype, shape) for shape, dtype in results]
    refuse_unreachable(communicator, what, of_gradient=of_gradient)
    if xla.is_compiling():
        return compiled.call(communicator, what, run, arguments, results)

    # This runs on the CPU; TensorFlow copies arguments there from any device.
    with order.in_order(communicator):
        dtypes = [dtype for _, dtype in results]
        tensors = tf.numpy_function(run, arguments, dtypes, stateful=True)
    order.done(communicator, tensors)
    for tensor, (shape, _) in zip(tensors, results, strict=True):
        tensor.set_shape(shape)
    return list(tensors)
