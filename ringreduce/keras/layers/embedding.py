"""`ShardedEmbedding`: a table of which each rank holds a part of the rows."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.layers.lookup import rows_of_all
from ringreduce.keras.layers.part import Part
from ringreduce.keras.layers.part_layer import Draw, PartLayer
from ringreduce.keras.weighting import in_parts
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import brief

_COMBINERS = ("sum", "mean", "sqrtn")
# So many rows are drawn at a time, each block with a seed of its own.
_BLOCK = 1024
_OF_WHOLE_SHAPES = (keras.initializers.Orthogonal, keras.initializers.Identity)


class ShardedEmbedding(PartLayer, keras.layers.Embedding):
    """`keras.layers.Embedding` whose rows are divided among the ranks: row i is on rank i mod size.

    No rank holds the table, or the optimizer's state for it, whole, and a step costs what its ids
    cost. The table is the same whatever the number of ranks.

    A look-up is collective: in training, `rr.evaluate` and `rr.predict` all ranks take part, also
    one that has no batch left. ``model(x)`` of your own must be called on all ranks equally often.
    Train with a `DistributedOptimizer` over the same communicator, and one that works element by
    element (SGD, Adam, Adagrad, ...).

    It is saved as plain `keras.layers.Embedding` with the whole table (`PartLayer` says how), and
    loads as that without ringreduce; ``rr.load_model(path, replace={"name of the layer":
    rr.ShardedEmbedding})`` divides it again. With a `combiner` it is saved as itself.

    Args:
        input_dim, output_dim, options: as for `keras.layers.Embedding`; no constraint, LoRA or
            quantization. Ids are 0 to ``input_dim - 1``.
        combiner: ``"sum"``, ``"mean"`` or ``"sqrtn"``: add up the vectors along the last dimension
            of the ids, or of ragged ids; divided by the sum of weights, or by the root of the sum
            of their squares. ``layer(ids, weights)`` takes weights of the shape of the ids, by
            default 1; with ``mask_zero=True`` id 0 counts nothing. Without ids the result is 0.
        communicator: as for `PartLayer`.

    Raises:
        ConfigError: an option cannot be had in parts; when it is built: there are fewer rows than
            ranks.
        ArrayError: on all ranks, when it is called: an id is out of range.
    """

    def __new__(cls, *arguments: Any, combiner: str | None = None, **options: Any) -> Any:
        """A layer; one with a combiner is saved under another name, since no plain layer has it."""
        return super().__new__(_Combining if combiner else cls, *arguments, **options)

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *arguments: Any,
        combiner: str | None = None,
        communicator: Communicator | None = None,
        **options: Any,
    ) -> None:
        if combiner not in (None, *_COMBINERS):
            raise ConfigError(f"combiner is {combiner!r}; accepted: {', '.join(_COMBINERS)}")
        weights = options.pop("weights", None)
        super().__init__(input_dim, output_dim, *arguments, communicator=communicator, **options)
        self.combiner = combiner
        # Shapes depend on the ids.
        self.supports_jit = False
        quantization = getattr(self, "quantization_config", None)  # Of later versions.
        if self.lora_rank or quantization or weights is not None:
            raise ConfigError(
                f"got lora_rank, quantization_config or weights for {self.name}, a table in parts",
                remedy="Leave them out; rr.load_model(path, replace=) divides a saved table.",
            )

    def build(self, input_shape: Any = None) -> None:
        """Draw this rank's rows. Collective."""
        if getattr(self, "built", False):
            return
        ring = self.ring()
        if self.input_dim < ring.size:
            text = f"cannot divide the {self.input_dim} rows of {self.name} among {ring.size} ranks"
            remedy = "Use keras.layers.Embedding: so small a table costs nothing whole."
            raise ConfigError(text, **ring.config.who, remedy=remedy)
        initializer = self.embeddings_initializer
        if isinstance(initializer, _OF_WHOLE_SHAPES):
            kind = type(initializer).__name__
            text = f"got the initializer {kind} for a table, which is drawn in blocks"
            remedy = "Use one that draws each element by itself, such as uniform or random_normal."
            raise ConfigError(text, **ring.config.who, remedy=remedy)
        self._embeddings = self._add(
            Part(ring, (self.input_dim, self.output_dim), is_dealt=True),
            _by_blocks,
            initializer,
            name="embeddings",
            regularizer=self.embeddings_regularizer,
            constraint=self.embeddings_constraint,
            trainable=True,
        )
        self.built = True

    def call(self, inputs: Any, weights: Any = None) -> Any:
        """The vectors of `inputs`, ids of any shape; with a combiner their sums. Collective."""
        [vectors] = look_up({self: inputs}).values()
        return vectors if self.combiner is None else self._combined(inputs, vectors, weights)

    def _combined(self, ids: Any, vectors: Any, weights: Any) -> Any:
        flat = _flat(ids)
        scale = tf.cast(tf.ones_like(flat) if weights is None else _flat(weights), vectors.dtype)
        if self.mask_zero:
            scale *= tf.cast(flat != 0, scale.dtype)
        if isinstance(ids, tf.RaggedTensor):
            scale = ids.with_flat_values(scale)
        total = tf.reduce_sum(vectors * tf.expand_dims(scale, -1), -2)
        if self.combiner == "sum":
            return total
        is_mean = self.combiner == "mean"
        by = tf.reduce_sum(scale, -1) if is_mean else tf.sqrt(tf.reduce_sum(scale * scale, -1))
        return tf.math.divide_no_nan(total, by[..., None])

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the plain layer's mask; none of sums."""
        return None if self.combiner else super().compute_mask(inputs, mask)

    def compute_output_shape(self, input_shape: Any, *_: Any) -> Any:
        """Return the plain layer's shape; without the dimension that a combiner adds up."""
        return (*(input_shape[:-1] if self.combiner else input_shape), self.output_dim)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        """A tensor of that shape."""
        shape = self.compute_output_shape(inputs.shape)
        is_ragged = bool(getattr(inputs, "ragged", False)) and not self.combiner
        return keras.KerasTensor(shape, dtype=self.compute_dtype, ragged=is_ragged)

    def get_config(self) -> dict[str, Any]:
        """That of the plain layer, and the combiner where there is one."""
        config: dict[str, Any] = super().get_config()
        return {**config, "combiner": self.combiner} if self.combiner else config


def look_up(ids: Mapping[Any, Any]) -> dict[Any, Any]:
    """The vectors of the ids of several `ShardedEmbedding` layers, in one exchange. Collective.

    In a layer or model with several tables it saves the latency of an exchange for each::

        vectors = rr.parts.look_up({self.users: users, self.items: items})

    Args:
        ids: by layer, tensors of ids, ragged ones too. Combiners are not applied.

    Raises:
        ConfigError: the layers have different communicators or compute dtypes; or as `call`.
    """
    layers = list(ids)
    for layer in layers:
        if not isinstance(layer, ShardedEmbedding):
            raise ConfigError(f"got {brief(layer)} to look up in, which is no ShardedEmbedding")
        if not layer.built:
            layer.build()
    ring, dtype = layers[0].ring(), layers[0].compute_dtype
    for layer in layers:
        if list(layer.ring().members) != list(ring.members) or layer.compute_dtype != dtype:
            raise ConfigError(
                f"got {layers[0].name} and {layer.name} to look up in at once, which have "
                "different communicators or compute dtypes",
                remedy="Look them up apart.",
            )
    flat = [tf.convert_to_tensor(_flat(value)) for value in ids.values()]
    vectors = in_parts(lambda *arrays: rows_of_all(layers, arrays), *flat, communicator=ring)
    for place, value in enumerate(ids.values()):
        if isinstance(value, tf.RaggedTensor):
            vectors[place] = value.with_flat_values(vectors[place])
    return dict(zip(layers, vectors, strict=True))


def _flat(ids: Any) -> Any:
    return ids.flat_values if isinstance(ids, tf.RaggedTensor) else ids


def _by_blocks(draw: Draw, part: Part, dtype: Any) -> Any:
    """Draw this rank's rows, of which never more than a block is whole."""
    size, rank, (count, *rest) = part.communicator.size, part.communicator.rank, part.shape
    piece = np.empty(part.own_shape, tf.as_dtype(dtype).as_numpy_dtype)
    for first in range(0, count, _BLOCK):
        initializer, rows = draw(first // _BLOCK), min(_BLOCK, count - first)
        drawn = np.asarray(initializer((rows, *rest), dtype))
        drawn = drawn * _fan_ratio(initializer, rows, part.shape)
        skipped = (rank - first) % size
        at = (first + skipped) // size
        piece[at : at + len(drawn[skipped::size])] = drawn[skipped::size]
    return piece


def _fan_ratio(initializer: Any, rows: int, shape: tuple[int, ...]) -> float:
    """The factor by which a block of `rows` varies like a whole of `shape`."""
    if not isinstance(initializer, keras.initializers.VarianceScaling):
        return 1.0
    add = {"fan_in": 0, "fan_avg": shape[-1]}.get(initializer.mode)
    return 1.0 if add is None else float(np.sqrt((rows + add) / (shape[0] + add)))


# It has this name too, by which Keras names layers.
_Combining = keras.saving.register_keras_serializable("ringreduce")(
    type("ShardedEmbedding", (ShardedEmbedding,), {"__module__": __name__})
)
private.save_as(ShardedEmbedding, keras.layers.Embedding)
