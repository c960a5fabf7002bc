"""`DistributedGradientTape`: gradients averaged over all ranks, for loops without a wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import weighting
from ringreduce.keras.checks.elastic_refusals import refuse
from ringreduce.keras.checks.warnings import compare_rows
from ringreduce.keras.layers.part import is_own_piece
from ringreduce.keras.optimizer.first_step import InitialValues
from ringreduce.keras.optimizer.local_variables import LocalVariables
from ringreduce.keras.recording.loops import recorder_of_tapes
from ringreduce.keras.repeating import is_repeating
from ringreduce.keras.strategies.reducer import Reducer
from ringreduce.keras.weighting import Averaging, gradient_op
from ringreduce.pure.buckets import BUCKET_BYTES
from ringreduce.tensorflow import GradientBridge, draws
from ringreduce.tensorflow.kept import kept
from ringreduce.tensorflow.low_rank import PowerSGD
from ringreduce.tensorflow.sparse import as_gradient
from ringreduce.tensorflow.variables import path_of
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp
from ringreduce.vocabulary.words import brief


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` averages over all ranks.

    Use it with a plain optimizer. A `DistributedOptimizer` would average the same gradients again,
    which changes nothing and takes as long.

    When a variable is first among the sources, every rank receives rank 0's value of it. In an
    eager loop its gradients are computed before that; a rank whose values differed is left out of
    that mean. Call `broadcast_variables` before such a loop to avoid it, and for what is no source:
    the optimizer's variables where they differ, moving averages::

        with rr.DistributedGradientTape() as tape:
            loss = loss_of(model(inputs, training=True), labels)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    Only `gradient` averages; `jacobian`, `batch_jacobian` and the rest are the tape's own. A new
    tape in each step costs nothing: what ranks have agreed on is kept.

    Args:
        tape: the tape to wrap, which may be persistent; by default a new one.
        communicator: by default the process's, when `gradient` is called.
        local_variables: sources whose values and gradients are not shared.
        bucket_bytes, check_numerics, compression, sparse_as_dense, scale_local_gradients, op: as
            for `DistributedOptimizer`.

    Raises:
        ConfigError: `tape` is no tape, or an option is impossible.
    """

    def __init__(
        self,
        tape: Any = None,
        communicator: Communicator | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        check_numerics: str = "off",
        compression: str | PowerSGD = "none",
        sparse_as_dense: bool = False,
        local_variables: Sequence[Any] = (),
        scale_local_gradients: bool = False,
        op: ReduceOp | str = ReduceOp.MEAN,
    ) -> None:
        tape = tf.GradientTape() if tape is None else tape
        if not isinstance(tape, tf.GradientTape):
            text = f"got {brief(tape)} to wrap, which is no tf.GradientTape"
            raise ConfigError(text, remedy="Pass one, or nothing to have one made.")
        if compression == "int8" or isinstance(compression, PowerSGD):
            raise ConfigError(
                f"got compression={compression!r} for a tape, which keeps nothing for the next "
                "step",
                remedy="Use DistributedOptimizer with a plain tape, or 'bf16'.",
            )
        self._tape, self._communicator = tape, communicator
        self._op, self._local = gradient_op(op), LocalVariables(local_variables)
        self._scale_local = scale_local_gradients
        self._options = bucket_bytes, check_numerics, compression, sparse_as_dense
        # Used unless an earlier tape had the same options.
        self._bridge = GradientBridge(*self._options)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tape.__exit__(*exception)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """`tf.GradientTape.gradient`, with the gradients averaged over all ranks.

        Collective: all ranks must call it at the same point. `target` is each rank's own loss; the
        structure of `sources` is equal on all ranks, with equal shapes and dtypes. Raises as
        `DistributedOptimizer.apply`; ConfigError also if a gradient has no fixed shape.

        Returns:
            Gradients in the structure of `sources`, equal on all ranks to the last bit; None where
                `target` does not depend on a source, which must be so on all ranks.
        """
        nested = self._tape.gradient(target, sources, output_gradients, unconnected_gradients)
        flat = tf.nest.flatten(sources)
        gradients = list(map(as_gradient, tf.nest.flatten(nested), flat))
        kinds = list(map(self._kind_of, flat))
        ring = self._communicator or default_communicator()
        if is_repeating(ring):
            refuse(ring, {"op": self._op, "local_variables": len(self._local)})
        shared_by_all = kept(ring, _Shared)
        means = [source for source, kind in zip(flat, kinds, strict=True) if kind is Averaging.MEAN]
        shared = [one for one in means if isinstance(one, (tf.Variable, keras.Variable))]
        is_first = not shared_by_all.initial.are_given
        gradients = shared_by_all.initial.give(shared, gradients, kinds, ring)
        bridge = shared_by_all.bridges.setdefault(self._options, self._bridge)
        if is_first:
            compare_rows(bridge, ring)
        weighting.refuse_local(kinds, ring)
        recorder = recorder_of_tapes(ring, self._op is ReduceOp.SUM, bool(len(self._local)))
        if recorder is not None:
            recorder.note_own(gradients, flat)
        reducer = Reducer(bridge, ring, self._op, self._scale_local)
        reduced = reducer.reduce(gradients, flat, kinds, weighting.current())
        if recorder is not None:
            reduced = recorder.note_means(reduced, flat, kinds, [None] * len(flat))
        draws.end_apart()  # Noise of the plain optimizer must be equal.
        return tf.nest.pack_sequence_as(nested, reduced)

    def _kind_of(self, source: Any) -> Averaging:
        if is_own_piece(source):
            raise ConfigError(
                f"got {path_of(source)} as a source, of which this rank has a piece: a plain "
                "optimizer would not know that",
                remedy="Use DistributedOptimizer with a plain tape; it works in loops too.",
            )
        return Averaging.LOCAL if source in self._local else Averaging.MEAN

    def register_local_source(self, source: Any) -> None:
        """Add a variable to `local_variables`."""
        self._local.add(source)

    def __getattr__(self, name: str) -> Any:
        # Python calls this for what the class lacks: watch, stop_recording, reset, jacobian.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._tape, name)


class _Shared:
    """State that all tapes of a communicator share, since each step makes a new one."""

    def __init__(self) -> None:
        self.initial = InitialValues()
        # Keyed by their options; they keep the plans that ranks agreed on.
        self.bridges: dict[tuple[Any, ...], GradientBridge] = {}
