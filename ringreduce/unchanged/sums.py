"""Gradients of a loss for each row, in a `train_step` of the program's own.

Of a tensor that is no scalar TensorFlow gives the gradient of its sum, here over this rank's rows,
while ranks average their gradients as those of means. So each is made that of a mean, times the
rows of the whole batch: then the ranks' mean is the sum over the whole batch, as of one process.
"""

import threading
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import weighting
from ringreduce.keras.rows import rows_in
from ringreduce.keras.step import PLAIN, own_step, put_around


class _Local(threading.local):
    # Rows of the step that this thread computes or traces, and the number of ranks.
    step: tuple[Any, int] | None = None


_local = _Local()


def note_steps(model: Any, ring: Communicator) -> None:
    """Have `gradient` know whether it is called in a training step of `model`'s own."""

    def noted(_: Any, step: Any, data: Any) -> Any:
        before, _local.step = _local.step, (rows_in(data), ring.size)
        try:
            return step(data)
        finally:
            _local.step = before

    if ring.size > 1 and own_step(model) is not None:
        put_around(model, PLAIN, noted)


def gradient(
    original: Any, tape: Any, target: Any, sources: Any, *more: Any, **options: Any
) -> Any:
    """In place of ``tf.GradientTape.gradient``."""
    variables = [hasattr(source, "assign") for source in tf.nest.flatten(sources)]
    is_of_rows = tf.is_tensor(target) and target.shape.rank
    if _local.step is not None and is_of_rows and all(variables) and not (more or options):
        rows, size = _local.step
        weight, dtype = weighting.current(), target.dtype
        factor = tf.constant(1.0) if weight is None else weight.factor
        factor = tf.math.divide_no_nan(float(size), factor)
        # Of other tensors, such as a loss for each class, it is no sum over rows.
        factor = tf.where(tf.equal(tf.shape(target)[0], rows), factor, 1.0)
        options = {"output_gradients": tf.fill(tf.shape(target), tf.cast(factor, dtype))}
    return original(tape, target, sources, *more, **options)
