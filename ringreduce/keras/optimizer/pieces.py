"""Trains parts: which ones an optimizer can, the norm of all gradients, its own state.

An optimizer sees pieces. So what it computes from whole variables, or from all of them, is computed
here, over the ranks that hold the pieces: norms to clip by, and whether every gradient is finite.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.layers.part import mark, part_of, pieces_in
from ringreduce.keras.optimizer.accepted import require_elementwise
from ringreduce.keras.optimizers_in import all_within, state_for
from ringreduce.tensorflow.collectives import all_reduce
from ringreduce.tensorflow.sparse import map_values
from ringreduce.tensorflow.variables import path_of
from ringreduce.vocabulary.errors import ConfigError


def check_parts(inner: Any, variables: Sequence[Any], ring: Communicator) -> None:
    """ConfigError if `inner`, averaging over `ring`, cannot train those of `variables` in parts."""
    parts = pieces_in(variables)
    for first, _ in parts[:1]:
        require_elementwise(inner, f"has {path_of(first)} in pieces, and {{}}", **ring.config.who)
    for variable, part in parts:
        members, averaging = list(part.communicator.members), list(ring.members)
        if not part.of_same_rows and members != averaging:
            raise ConfigError(
                f"averages over ranks {averaging}, while {path_of(variable)} is in pieces on ranks "
                f"{members}",
                **ring.config.who,
                remedy="Pass the layer and the optimizer one communicator.",
            )
        if part.of_same_rows and len(common := sorted(set(members) & set(averaging))) > 1:
            raise ConfigError(
                f"averages over ranks {averaging}, among which {common} hold different pieces of "
                f"{path_of(variable)}",
                **ring.config.who,
                remedy="Average over ranks with the same pieces: data = comm.split(comm.rank % "
                f"{len(members)}) with {len(members)} pieces in neighbouring ranks, and "
                "DistributedOptimizer(..., communicator=data).",
            )


def mark_state(inner: Any) -> None:
    """Make what `inner`, which is built, keeps for parts, parts as well."""
    for variable, part in pieces_in(private.trained_variables(inner)):
        for state in state_for(inner, variable):
            if part_of(state) is None:
                mark(state, part)


def joint(
    inner: Any, gradients: Sequence[Any], variables: Sequence[Any], apply: Callable[..., None]
) -> None:
    """Have `apply` use `gradients` as if each part were whole: clipped alike, and finite or not."""
    gradients = list(gradients)
    used = [number for number, gradient in enumerate(gradients) if gradient is not None]
    parts = {n: part for n in used if (part := part_of(variables[n])) is not None}
    clips = [held for held in all_within(inner) if held.clipnorm or held.global_clipnorm]
    kind = keras.optimizers.LossScaleOptimizer
    scaled = [optimizer for optimizer in all_within(inner) if isinstance(optimizer, kind)]
    if not parts or not (clips or scaled):
        apply(gradients, variables)
        return
    squares: list[Any] = [_square(g) if n in used else None for n, g in enumerate(gradients)]
    rings = {part.communicator: None for part in parts.values()}
    for ring in rings:
        ours = [number for number, part in parts.items() if part.communicator is ring]
        sums = all_reduce(tf.stack([squares[number] for number in ours]), ring)
        squares = [sums[ours.index(n)] if n in ours else square for n, square in enumerate(squares)]
    # An infinity in one rank's piece makes this so on all ranks, which then skip the step alike.
    gone = tf.add_n([squares[number] * 0 for number in parts])
    if scaled:
        first = used[0]
        gradients[first] = map_values(
            lambda values: values + tf.cast(gone, values.dtype), gradients[first]
        )
    for optimizer in clips:
        gradients = _clipped(optimizer, gradients, squares, scaled)
    with _unclipped(clips):
        apply(gradients, variables)


def _clipped(
    clips: Any, gradients: Sequence[Any], squares: Sequence[Any], scaled: Sequence[Any]
) -> list[Any]:
    """`gradients`, with a loss scale in them, as `clips` would make them of wholes."""
    scale = tf.cast(scaled[0].dynamic_scale, tf.float32) if scaled else tf.constant(1.0)
    most = (clips.clipnorm or clips.global_clipnorm) * scale
    total = None if clips.clipnorm else tf.add_n([part for part in squares if part is not None])

    def clipped(gradient: Any, square: Any) -> Any:
        if gradient is None:
            return None
        factor = most / tf.maximum(tf.sqrt(square if total is None else total), most)
        return map_values(lambda values: values * tf.cast(factor, values.dtype), gradient)

    return list(map(clipped, gradients, squares))


@contextmanager
def _unclipped(clips: Sequence[Any]) -> Iterator[None]:
    """Within the block they do not clip: they would by the norm of this rank's pieces."""
    before = [(optimizer, optimizer.clipnorm, optimizer.global_clipnorm) for optimizer in clips]
    for optimizer in clips:
        optimizer.clipnorm = optimizer.global_clipnorm = None
    try:
        yield
    finally:
        for optimizer, clipnorm, global_clipnorm in before:
            optimizer.clipnorm, optimizer.global_clipnorm = clipnorm, global_clipnorm


def _square(gradient: Any) -> Any:
    """The sum of squares, in float32. Rows of slices are unique here."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))
