"""Batch normalization over the batches of all ranks.

Each rank computes count, mean and sum of squared deviations of its own batch; after one all-gather
every rank combines them in the same order. Sums of values and of squares would lose all digits
where the mean is large against the deviations.

See: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979.
"""

from functools import partial
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import private, weighting
from ringreduce.tensorflow import collectives, xla
from ringreduce.tensorflow.control_flow import refuse_unreachable
from ringreduce.vocabulary.errors import ConfigError


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` with the moments of all ranks' batches together.

    N ranks with batches of B train as one process with a batch of N B does, and moving statistics
    are equal on all ranks. Batches may differ in size. Use it where a rank's own batch is small. It
    exchanges 3 numbers for each channel in the forward pass, and again in the backward pass;
    inference sends nothing. In training all ranks must call it equally often and in the same order,
    and either all differentiate it or none. A step of `model.fit` does, also with ``run_eagerly``
    and with ``steps_per_execution``.

    It is saved as plain `keras.layers.BatchNormalization`, with the same weights, and loads as that
    where ringreduce is not installed. To continue training with synchronized moments use
    ``rr.load_model(path, sync_batch_normalization=True)``.

    Args:
        arguments, options: as for `keras.layers.BatchNormalization`, without ``synchronized``.
        communicator: by default the process's, which must exist when the layer is first called in
            training. It is no part of the layer's configuration.

    Raises:
        ConfigError: ``synchronized=True``, which is for `tf.distribute`.
    """

    def __init__(
        self, *arguments: Any, communicator: Communicator | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        if self.synchronized:
            remedy = "Leave it out: it is for tf.distribute. This layer always synchronizes."
            raise ConfigError("SyncBatchNormalization got synchronized=True", remedy=remedy)
        self.communicator = communicator

    # Read by `compile`, and set by the base class, to no effect.
    supports_jit = property(
        lambda self: xla.why_not() is None,
        lambda self, value: None,
        doc="Whether XLA can compile it: where XLA can call the ring.",
    )

    # The base class calls this in training only; inputs are float32 or float64.
    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        ring = self.communicator or default_communicator()
        if ring.size == 1:
            return super()._moments(inputs, mask)  # type: ignore[no-any-return]
        refuse_unreachable(ring, "synchronize batch normalization")
        moments = tf.stack(_own_moments(inputs, mask, self.axis % len(inputs.shape)))
        if (weight := weighting.current()) is not None:
            # Leave out the placeholder batch of a rank that has no data left.
            moments = tf.where(weight.own > 0, moments, tf.zeros_like(moments))
        gather = partial(collectives.all_gather, ring=ring, counts=[1] * ring.size)
        return _combined(weighting.across_ranks(moments[tf.newaxis], gather))


private.save_as(SyncBatchNormalization, keras.layers.BatchNormalization)


def _own_moments(inputs: Any, mask: Any, channels: int) -> tuple[Any, Any, Any]:
    """Count, mean and sum of squared deviations of each channel, shape (channels,).

    `inputs` are at least float32, with channels in the dimension `channels`. `mask`, shaped as
    `inputs` without the last dimension, says which elements count; None: all.
    """
    axes = [axis for axis in range(len(inputs.shape)) if axis != channels]
    if mask is None:
        # From the shape: a sum of so many ones would lose digits.
        number = tf.reduce_prod(tf.gather(tf.shape(inputs, out_type=tf.int64), axes))
        count = tf.fill([tf.shape(inputs)[channels]], tf.cast(number, inputs.dtype))
        counted = None
    else:
        counted = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
        # A choice, not a product: elements left out may be NaN.
        inputs = tf.where(counted, inputs, tf.zeros_like(inputs))
        counted = tf.cast(counted, inputs.dtype)
        count = tf.reduce_sum(counted, axes)
    mean = tf.math.divide_no_nan(tf.reduce_sum(inputs, axes), count)
    shape = [1] * len(inputs.shape)
    shape[channels] = -1
    # The sum does not depend on the mean to first order, so no gradient goes that way.
    deviation = inputs - tf.reshape(tf.stop_gradient(mean), shape)
    if counted is not None:
        deviation *= counted
    return count, mean, tf.reduce_sum(tf.square(deviation), axes)


def _combined(moments: Any) -> tuple[Any, Any]:
    """Mean and variance of each channel; `moments` has the shape (ranks, 3, channels)."""
    counts, means, squares = tf.unstack(moments, axis=1)
    total = tf.reduce_sum(counts, 0)
    mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), total)
    # As above: no gradient through the mean that deviations are taken from.
    between = tf.reduce_sum(counts * tf.square(means - tf.stop_gradient(mean)), 0)
    return mean, tf.math.divide_no_nan(tf.reduce_sum(squares, 0) + between, total)
