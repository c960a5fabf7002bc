"""`DistributedGradientTape`: gradients averaged over all ranks, for loops without a wrapper."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from ringreduce import tensorflow as bridge
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import weighting
from ringreduce.keras.optimizer import BUCKET_BYTES, FIRST_BUCKET_BYTES
from ringreduce.tensorflow.accumulation import Kind, weighted
from ringreduce.tensorflow.sparse import with_shape
from ringreduce.tensorflow.variables import path_of
from ringreduce.vocabulary.errors import ConfigError

__all__ = ["DistributedGradientTape"]


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` averages over all ranks.

    Use it with a plain optimizer. A `DistributedOptimizer` would average the same gradients
    again, which changes nothing and takes as long. Nothing else is done: call
    `broadcast_variables` on the model's and the optimizer's variables before the first step, so
    that all ranks begin alike.

        with rr.DistributedGradientTape() as tape:
            loss = loss_of(model(inputs, training=True), labels)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    Only `gradient` averages; `jacobian`, `batch_jacobian` and the rest are the tape's own.
    A new one in each step costs nothing: what ranks have agreed on is kept.

    Args:
        tape: the tape to wrap; by default a new one, made with `persistent` and
            `watch_accessed_variables`.
        communicator: whose ranks; by default the process's, when `gradient` is called.
        persistent, watch_accessed_variables: as for `tf.GradientTape`; refused with a `tape`.
        bucket_bytes, check_numerics, compression, sparse_as_dense: as for
            `DistributedOptimizer`.

    Raises:
        ConfigError: `tape` is no tape, or an option is impossible.
    """

    def __init__(
        self,
        tape: Any = None,
        communicator: Communicator | None = None,
        *,
        persistent: bool = False,
        watch_accessed_variables: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        check_numerics: str = "off",
        compression: str = "none",
        sparse_as_dense: bool = False,
    ) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes is {bucket_bytes}; accepted: 1 and more")
        if tape is None:
            tape = tf.GradientTape(persistent, watch_accessed_variables)
        elif not isinstance(tape, tf.GradientTape):
            raise ConfigError(
                f"got {tape!r} to wrap, which is no tf.GradientTape",
                remedy="Pass one, or nothing to have one made.",
            )
        elif persistent or not watch_accessed_variables:
            raise ConfigError(
                "got a tape, and options for making one",
                remedy="Make the tape with persistent and watch_accessed_variables.",
            )
        self._tape, self._communicator = tape, communicator
        self._options: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "first_bytes": min(bucket_bytes, FIRST_BUCKET_BYTES),
            "check_numerics": check_numerics,
            "compression": compression,
            "sparse_as_dense": sparse_as_dense,
        }
        # Made once only for its errors, so that they come where the mistake is.
        bridge.GradientBridge(default_communicator, **self._options)

    def __enter__(self) -> DistributedGradientTape:
        """Begin to record."""
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop recording."""
        self._tape.__exit__(*exception)

    # Python that runs while tracing, and nothing that AutoGraph could make ops of.
    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The gradients of `target` by `sources`, averaged over all ranks.

        Collective: all ranks must call it at the same place.

        Args:
            target: as for `tf.GradientTape.gradient`; each rank's own loss.
            sources: a tensor or variable, or a nested structure of them, equal on all ranks
                in number, order, shape and dtype.
            output_gradients, unconnected_gradients: as for `tf.GradientTape.gradient`.

        Returns:
            The structure of `sources`, with a gradient in each place; None where `target` does
            not depend on it, which must be so on all ranks. Equal on all ranks to the last bit.

        Raises:
            ConfigError: inside a branch of `tf.cond`, or ``jit_compile=True`` where XLA cannot call
                the ring; a gradient has no fixed shape.
            RingReduceError: eagerly, when the reduction fails. Out of a `tf.function` it is
                of a class that is also `tf.errors.UnknownError`.
        """
        own = self._tape.gradient(target, sources, output_gradients, unconnected_gradients)
        gradients, flat = tf.nest.flatten(own), tf.nest.flatten(sources)
        gradients = [with_shape(g, source.shape) for g, source in zip(gradients, flat, strict=True)]
        if (weight := weighting.current()) is not None:
            gradients = [weighted(gradient, Kind.MEAN, weight.factor) for gradient in gradients]
        paths = [_name(source, number) for number, source in enumerate(flat)]
        kept = _bridge_of(self._communicator or default_communicator(), self._options)
        return tf.nest.pack_sequence_as(own, kept.mean(gradients, paths))

    def __getattr__(self, name: str) -> Any:
        # What is not found otherwise: watch, stop_recording, reset, watched_variables, jacobian.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._tape, name)


# The bridge has the plans that ranks agreed on, and what the native library knows of them. A tape
# is made in each step, so it is not the tape that keeps it.
_bridges: weakref.WeakKeyDictionary[Communicator, dict[tuple[Any, ...], Any]] = (
    weakref.WeakKeyDictionary()
)


def _bridge_of(communicator: Communicator, options: dict[str, Any]) -> Any:
    """The one bridge of `communicator` with these options."""
    if communicator not in _bridges:
        # Plans refer to their communicator, so a weak key is not enough to forget them.
        for known in list(_bridges):
            if known.closed:
                del _bridges[known]
        _bridges[communicator] = {}
    bridges, key = _bridges[communicator], tuple(options.values())
    if key not in bridges:
        # Asked for only while a caller holds it, as `gradient` does.
        reference: Any = weakref.ref(communicator)
        bridges[key] = bridge.GradientBridge(reference, **options)
    return bridges[key]


def _name(source: Any, number: int) -> str:
    """What messages call a source: a variable's path. Names of tensors differ between ranks."""
    is_variable = isinstance(source, tf.Variable) or hasattr(source, "path")
    return path_of(source) if is_variable else f"source {number}"
