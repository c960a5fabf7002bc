"""Calls a Python function that communicates: eagerly, in a graph, and in what XLA compiles.

There shapes of results must be known when the call is traced: arguments are packed into memory of
ours, the engine calls the function, and its results are unpacked.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import drain_engine, note_blocked, note_unkept
from ringreduce.effects.handoff import Area, BucketItem, Layout, RoundFailed
from ringreduce.pure.buckets import ALIGNMENT
from ringreduce.tensorflow import failures, order, private, xla
from ringreduce.tensorflow.control_flow import refuse_unreachable
from ringreduce.tensorflow.rounds import serve
from ringreduce.vocabulary.errors import ConfigError, MismatchError, RingReduceError


def call(
    ring: Communicator,
    what: str,
    run: Callable[..., Sequence[Any]],
    arguments: Sequence[Any],
    results: Sequence[tuple[Any, Any]],
    *,
    of_gradient: bool = False,
) -> list[Any]:
    """The results of `run`, as tensors; in a graph this adds a stateful op that calls it.

    `run` uses `ring`, in the program's order; `what` it does is for messages. It gets the values of
    `arguments`, which it must not change, and returns arrays, whose memory becomes TensorFlow's;
    `results` has static shape and dtype of each, at least one. Its `StopIteration` becomes
    `tf.errors.OutOfRangeError`. `of_gradient` is as for `refuse_unreachable`.

    ConfigError where not all ranks could take part. Other errors are those of `run`: eagerly here,
    from a graph when it is run.
    """
    failures.watch(ring)
    if tf.executing_eagerly():
        try:
            returned = run(*(tensor.numpy() for tensor in arguments))
        except StopIteration as end:
            raise tf.errors.OutOfRangeError(None, None, str(end)) from None
        return [tf.convert_to_tensor(value) for value in returned]
    if private.is_for_shapes(tf.compat.v1.get_default_graph()):
        # The input of a model is no tensor yet.
        return [tf.compat.v1.placeholder(dtype, shape) for shape, dtype in results]
    note_unkept(ring, f"a collective in a tf.function, to {what},")
    refuse_unreachable(ring, what, of_gradient=of_gradient)
    if xla.is_compiling():
        return _compiled(ring, what, run, arguments, results)

    # This runs on the CPU; TensorFlow copies arguments there from any device.
    with order.in_order(ring):
        dtypes = [dtype for _, dtype in results]
        tensors = tf.numpy_function(run, arguments, dtypes, stateful=True)
    order.done(ring, tensors)
    for tensor, (shape, _) in zip(tensors, results, strict=True):
        tensor.set_shape(shape)
    return list(tensors)


def _compiled(
    ring: Communicator,
    what: str,
    run: Callable[..., Sequence[Any]],
    arguments: Sequence[Any],
    results: Sequence[tuple[Any, Any]],
) -> list[Any]:
    """`call` in a graph that XLA will compile; ConfigError where a shape is not known."""
    kinds = [(tensor.shape, tensor.dtype) for tensor in arguments]
    kinds += [(tf.TensorShape(shape), tf.as_dtype(dtype)) for shape, dtype in results]
    for shape, _ in kinds:
        if not shape.is_fully_defined():
            raise ConfigError(
                f"cannot {what} of shape {shape} inside a function compiled with "
                "jit_compile=True, which fixes all shapes",
                **ring.config.who,
                remedy="Give it a tensor of fixed shape: batches of one size (drop_remainder=True)"
                ", or a sum over the batch.",
            )
    # Memory for all of them, and where each is.
    spans, end, count = [], 0, len(arguments)
    for shape, dtype in kinds:
        nbytes = shape.num_elements() * dtype.size
        spans.append((end, nbytes))
        end += nbytes + -nbytes % ALIGNMENT
    memory = ring.empty(end, np.uint8)
    arrays = [
        memory[start : start + nbytes].view(dtype.as_numpy_dtype).reshape(shape.as_list())
        for (start, nbytes), (shape, dtype) in zip(spans, kinds, strict=True)
    ]

    def reduce(_: BucketItem) -> None:
        try:
            returned = run(*arrays[:count])
        except RingReduceError as error:
            if ring.failure is None:
                raise RoundFailed(str(error)) from error
            raise
        for result, value in zip(arrays[count:], returned, strict=True):
            array = np.asarray(value)
            if array.shape != result.shape:
                raise MismatchError(
                    f"got a result of shape {array.shape} where {result.shape} was compiled, as if "
                    "tensors had the shape of this rank's on all ranks",
                    **ring.config.who,
                    operation=what,
                    remedy="Under jit_compile=True pass tensors of equal shape on all ranks.",
                )
            np.copyto(result, array)

    layout = Layout([Area(memory)], memory.size, spans[:count], spans[count:])
    # As long as the function may run, to which branches and loops belong.
    graph = private.function_around(tf.compat.v1.get_default_graph())
    number = serve(graph, ring, [layout], reduce)
    started = xla.start(number, 0, arguments, order.token(ring))
    *tensors, token = xla.wait(number, 0, kinds[count:], started)
    order.follow(ring, token)
    return tensors


def blocking(ring: Communicator, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, for `call`, whose time is noted as one in which the step waits for a reduction."""

    def timed(*arrays: np.ndarray) -> Any:
        began = time.perf_counter()
        drain_engine(ring)  # of the buckets, which come before
        drained = time.perf_counter()
        try:
            return run(*arrays)
        finally:
            now = time.perf_counter()
            note_blocked(ring, now - began, now - drained)

    return timed
