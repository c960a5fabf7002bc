"""Attention of whose heads each rank of a model group computes a range.

The projections to queries, keys and values are cut by heads, like a `ColumnParallelDense`, that of
the output like a `RowParallelDense`: one sum forward and one backward.
"""

from functools import wraps
from inspect import signature
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.layers.part import require_multiple
from ringreduce.keras.layers.split import SplitLayer, entering, leaving


class _IntoHeads(SplitLayer, keras.layers.EinsumDense):
    """A projection to queries, keys or values, in place of the plain one, which is not built."""

    cut = {"kernel": 1, "bias": 0}  # noqa: RUF012

    def __init__(self, plain: Any, communicator: Communicator | None) -> None:
        # These very initializers: others would draw further seeds.
        drawing = ("kernel_initializer", "bias_initializer")
        attributes = {name: getattr(plain, name) for name in drawing}
        super().__init__(communicator=communicator, **{**plain.get_config(), **attributes})


class _OutOfHeads(_IntoHeads):
    cut = {"kernel": 0}  # noqa: RUF012

    def call(self, inputs: Any, training: Any = None) -> Any:
        value = leaving(keras.ops.einsum(self.equation, inputs, self.kernel), self.ring())
        return value if self.bias is None else keras.ops.add(value, self.bias)


class _OfHeads(keras.random.SeedGenerator):
    """The state is equal on all ranks, as that of any generator; the numbers are not."""

    rank: int

    def next(self, ordered: bool = True) -> Any:
        drawn = super().next(ordered)
        return drawn + keras.ops.convert_to_tensor([1_000_003 * self.rank, 0], drawn.dtype)


class _Attention(SplitLayer):
    cut: dict[str, int] = {}  # noqa: RUF012
    heads: dict[str, str]  # by attributes with their numbers, what errors call them

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # They would see a piece. Keras's layers have them under one of these names.
        kinds = ("kernel_constraint", "bias_constraint", "activity_regularizer")
        self.refuse(**{k: getattr(self, k, None) or getattr(self, f"_{k}", None) for k in kinds})

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras's `build` makes a projection, assigns it and then builds it.
        if type(value) is keras.layers.EinsumDense:
            kind = _OutOfHeads if name == "_output_dense" else _IntoHeads
            value = kind(value, self.communicator)
        super().__setattr__(name, value)

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        for name, what in self.heads.items():
            count = getattr(self, name)
            require_multiple(count, f"the {count} {what} of {self.name}", self.ring())
        super().build(query_shape, value_shape, key_shape)
        if generator := getattr(self._dropout_layer, "seed_generator", None):
            generator.__class__ = _OfHeads
            generator.rank = self.ring().rank

    # Keras passes the masks, and `training`, that it finds in the signature.
    @wraps(keras.layers.MultiHeadAttention.call)
    def call(self, *arguments: Any, **options: Any) -> Any:
        bound = signature(super().call).bind(*arguments, **options).arguments
        self.refuse(return_attention_scores=bound.get("return_attention_scores"))
        # A tensor passed twice enters once, and its gradients are added up once.
        names = [name for name in ("query", "value", "key") if bound.get(name) is not None]
        entered = {id(bound[name]): entering(bound[name], self.ring()) for name in names}
        return super().call(**bound | {name: entered[id(bound[name])] for name in names})


class ParallelGroupQueryAttention(_Attention, keras.layers.GroupQueryAttention):
    """`keras.layers.GroupQueryAttention` of whose heads each rank of a group computes a range.

    As `ParallelMultiHeadAttention`, with the arguments of that layer; both numbers of heads must
    divide by the size of the group.
    """

    heads = {"num_query_heads": "query heads", "num_key_value_heads": "key and value heads"}  # noqa: RUF012


class ParallelMultiHeadAttention(_Attention, keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` of whose heads each rank of a group computes a range.

    All ranks of the group have the same inputs, and get the same output. Drawn, saved, loaded and
    trained as `ColumnParallelDense` is.

    Args:
        num_heads, key_dim, arguments, options: as for `keras.layers.MultiHeadAttention`; no
            constraint or activity regularizer.
        num_key_value_heads: makes a `ParallelGroupQueryAttention`, with so many heads of keys and
            values, and `key_dim` as the width of all.
        communicator: the group.

    Raises:
        ConfigError: an option cannot be had in pieces; when it is built: the heads do not divide;
            when it is called: attention scores are asked for, of which each rank has a part.
    """

    heads = {"num_heads": "heads"}  # noqa: RUF012

    def __new__(
        cls,
        num_heads: int,
        key_dim: int,
        *arguments: Any,
        num_key_value_heads: int | None = None,
        **options: Any,
    ) -> Any:
        """The layer, or one with fewer heads of keys and values."""
        if num_key_value_heads is None:
            return super().__new__(cls, num_heads, key_dim, *arguments, **options)
        heads = num_heads, num_key_value_heads
        return ParallelGroupQueryAttention(key_dim, *heads, *arguments, **options)


private.save_as(ParallelMultiHeadAttention, keras.layers.MultiHeadAttention)
private.save_as(ParallelGroupQueryAttention, keras.layers.GroupQueryAttention)
