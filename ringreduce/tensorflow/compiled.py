"""Calls a Python function that communicates from within what XLA compiles.

As with a bucket of gradients, its arguments are packed into our memory, the engine calls it there,
and its result is unpacked. XLA fixes all shapes before anything runs, so the result's shape must be
known when the call is traced.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.effects.handoff import BucketItem, Layout, RoundFailed
from ringreduce.pure.buckets import ALIGNMENT
from ringreduce.tensorflow import order, xla
from ringreduce.tensorflow.private import ControlFlowFuncGraph
from ringreduce.vocabulary.errors import ConfigError, MismatchError, RingReduceError


def call(
    communicator: Communicator,
    what: str,
    run: Callable[..., Sequence[Any]],
    arguments: Sequence[Any],
    results: Sequence[tuple[Any, Any]],
) -> list[Any]:
    """Add a call of `run` to a graph that XLA will compile; return its results, tensors.

    The engine calls `run`, one call at a time, in the program's order. Arguments and results are
    those of `python_calls.call`, but shapes must be known; `run` may write to its arrays,
    and the arrays that it returns are copied.

    Raises:
        ConfigError: a shape is not known.
    """
    shapes = [tf.TensorShape(shape) for shape, _ in results]
    for tensor_shape in (*shapes, *(tensor.shape for tensor in arguments)):
        if not tensor_shape.is_fully_defined():
            raise ConfigError(
                f"cannot {what} of shape {tensor_shape} inside a function compiled with "
                "jit_compile=True, which fixes all shapes",
                **communicator.config.who,
                remedy="Give it a tensor of fixed shape: batches of one size (drop_remainder=True)"
                ", or a sum over the batch.",
            )
    graph = tf.compat.v1.get_default_graph()
    # Branches and loops belong to the function around them.
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    kinds = [(tuple(shape), tf.as_dtype(dtype)) for shape, dtype in results]
    number = _register(communicator, what, run, arguments, kinds)
    # As long as the function may run.
    weakref.finalize(graph, communicator.engine.forget, number).atexit = False
    started = xla.start(number, 0, arguments, order.token(communicator))
    *found, token = xla.wait(number, 0, kinds, [started])
    order.follow(communicator, token)
    return found


def _register(
    communicator: Communicator,
    what: str,
    run: Callable[..., Sequence[Any]],
    arguments: Sequence[Any],
    results: Sequence[tuple[tuple[int, ...], Any]],
) -> int:
    """Have the engine call `run` in memory of ours; return the number of that with the engine."""
    spans, kinds, end = [], [], 0
    for shape, dtype in (*((tuple(t.shape), t.dtype) for t in arguments), *results):
        numpy_dtype = np.dtype(dtype.as_numpy_dtype)
        nbytes = math.prod(shape) * numpy_dtype.itemsize
        spans.append((end, nbytes))
        kinds.append((shape, numpy_dtype))
        end += nbytes + -nbytes % ALIGNMENT
    memory = communicator.empty(end, np.uint8)
    arrays = [
        memory[start : start + nbytes].view(dtype).reshape(shape)
        for (start, nbytes), (shape, dtype) in zip(spans, kinds, strict=True)
    ]
    count = len(arguments)

    def reduce(_: BucketItem) -> None:
        try:
            returned = run(*arrays[:count])
        except RingReduceError as error:
            if communicator.failure is None:
                raise RoundFailed(str(error)) from error
            raise
        for result, value in zip(arrays[count:], returned, strict=True):
            found = np.asarray(value)
            if found.shape != result.shape:
                raise MismatchError(
                    f"got a result of shape {found.shape} where {result.shape} was compiled, as if "
                    "tensors had the shape of this rank's on all ranks",
                    **communicator.config.who,
                    operation=what,
                    remedy="Under jit_compile=True pass tensors of equal shape on all ranks.",
                )
            np.copyto(result, found)

    engine = communicator.engine
    assert engine.native is not None
    number = engine.native.register([Layout(memory, end, spans[:count], spans[count:])])
    engine.serve(number, reduce)
    return number
