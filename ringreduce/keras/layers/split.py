"""Dense layers of which each rank of a model group computes a piece, as in Megatron-LM.

    the same rows on all ranks
    entering   x           -> x                      gradient: added up over the ranks
    column     x  -> x A_r -> this rank's units      A is cut by columns
    row        h_r -> h_r B_r                        B is cut by rows
    leaving    h_r B_r     -> added up over the ranks; gradient: as it comes

So a pair of them sends one sum forward and one backward. `rr.all_reduce` would not do: its gradient
is that of the sum of all ranks' losses, and here all ranks compute the same loss.

See: Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053.
"""

from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.layers.part import Part
from ringreduce.keras.layers.part_layer import PartLayer, as_whole
from ringreduce.tensorflow.collectives import all_gather, all_reduce
from ringreduce.tensorflow.differentiable import UNKNOWN
from ringreduce.tensorflow.xla import compiled_alike
from ringreduce.vocabulary.errors import ConfigError

# They look at all units of a row, or at some in both halves.
_OF_WHOLE_ROWS = ("softmax", "log_softmax", "sparsemax", "glu", "sparse_plus")


def entering(value: Any, group: Communicator) -> Any:
    """`value`, equal on all ranks, whose gradient is the sum of theirs: each has a part of it."""

    @tf.custom_gradient
    def enter(tensor: Any) -> Any:
        return tf.identity(tensor), compiled_alike(lambda back: leaving(back, group, UNKNOWN))

    return value if group.size == 1 else enter(tf.convert_to_tensor(value))


def leaving(value: Any, group: Communicator, of: Any = None) -> Any:
    """The sum of all ranks' `value`, whose gradient is equal on all ranks already."""
    named = {} if of is None else {"of": of}

    @tf.custom_gradient
    def leave(tensor: Any) -> Any:
        return all_reduce(tensor, group, **named), lambda back: entering(back, group)

    return value if group.size == 1 else leave(tf.convert_to_tensor(value))


def joined(value: Any, group: Communicator) -> Any:
    """All ranks' `value`, one after the other along the last axis; its gradient is cut again."""
    count, last = value.shape[-1], value.shape.rank - 1

    @tf.custom_gradient
    def join(piece: Any) -> Any:
        rows = tf.transpose(piece, [last, *range(last)])
        gathered = all_gather(rows, group, counts=[count] * group.size)
        begin = [0] * last + [group.rank * count]
        back = lambda upstream: tf.slice(upstream, begin, [-1] * last + [count])  # noqa: E731
        return tf.transpose(gathered, [*range(1, last + 1), 0]), back

    return value if group.size == 1 else join(value)


class SplitLayer(PartLayer):
    """Interface: a layer of Keras's some of whose weights are cut, and drawn as the whole ones.

    Its `build` makes the weights of the whole layer; `cut` has, by their names, the axis of those
    of which a rank has a piece.
    """

    cut: dict[str, int]

    def add_weight(self, shape: Any = None, initializer: Any = None, **options: Any) -> Any:
        """Add a weight as Keras does; of one in `cut`, this rank's piece."""
        axis = self.cut.get(options.get("name", ""))
        if axis is None:
            return super().add_weight(shape=shape, initializer=initializer, **options)
        part = Part(self.ring(), tuple(shape), axis, of_same_rows=True)
        part.require_divisible(f"dimension {axis} of the {options['name']} of {self.name}")
        return self._add(part, as_whole, initializer, **options)

    def refuse(self, **options: Any) -> None:
        """ConfigError if one of `options` is set, which would need or see the whole layer."""
        if refused := [name for name, value in options.items() if value]:
            text = f"got {', '.join(refused)} for {self.name}, of which each rank has a piece"
            raise ConfigError(text, remedy="Leave it out, or use Keras's layer.")


class _SplitDense(SplitLayer, keras.layers.Dense):
    def __init__(self, units: int, *arguments: Any, **options: Any) -> None:
        super().__init__(units, *arguments, **options)
        self.refuse(
            kernel_constraint=self.kernel_constraint,
            bias_constraint=self.bias_constraint,
            lora_rank=self.lora_rank,
            quantization=getattr(self, "quantization_config", None) or self.quantization_mode,
        )


class ColumnParallelDense(_SplitDense):
    """`keras.layers.Dense` of whose units each rank of a group computes a range.

    All ranks of the group have the same input. The output is this rank's units, for a
    `RowParallelDense`; between the two may be what works on each unit by itself. It is drawn as the
    unsplit layer with the same seed, saved as `keras.layers.Dense` with the whole weights, and
    `rr.load_model` divides it again. Train with ``DistributedOptimizer(..., communicator=data)``,
    where `data` are the ranks with the same piece (docs/guides/groups.md).

    Args:
        units, arguments, options: as for `keras.layers.Dense`; no constraint, LoRA or quantization.
        gather_output: return all units, on all ranks.
        communicator: the group.

    Raises:
        ConfigError: an option cannot be had in pieces; when it is built: the units do not divide.
    """

    cut = {"kernel": 1, "bias": 0}  # noqa: RUF012

    def __init__(
        self, units: int, *arguments: Any, gather_output: bool = False, **options: Any
    ) -> None:
        super().__init__(units, *arguments, **options)
        self.gather_output = gather_output
        activation = keras.activations.serialize(self.activation)
        if not gather_output:
            self.refuse(activity_regularizer=self.activity_regularizer)
            self.refuse(**{f"activation={activation!r}": activation in _OF_WHOLE_ROWS})

    def call(self, inputs: Any, training: Any = None) -> Any:
        """This rank's units, or all. Collective in the backward pass, and to gather."""
        value = keras.ops.matmul(entering(inputs, self.ring()), self.kernel)
        if self.bias is not None:
            value = keras.ops.add(value, self.bias)
        value = joined(value, self.ring()) if self.gather_output else value
        return value if self.activation is None else self.activation(value)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """That of the plain layer, or of this rank's units."""
        units = self.units if self.gather_output else self.units // self.ring().size
        return (*input_shape[:-1], units)


class RowParallelDense(_SplitDense):
    """`keras.layers.Dense` to whose sums over inputs each rank of a group adds a range.

    Its input is this rank's range, as `ColumnParallelDense` returns it; its output is whole, on all
    ranks. Drawn, saved, loaded and trained as that layer.

    Args:
        units, arguments, options: as for `keras.layers.Dense`; no constraint, LoRA or quantization.
        communicator: the group.

    Raises:
        ConfigError: an option cannot be had in pieces.
    """

    cut = {"kernel": 0}  # noqa: RUF012

    def build(self, input_shape: Any) -> None:
        """Draw this rank's rows. Collective."""
        super().build((*input_shape[:-1], input_shape[-1] * self.ring().size))
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: input_shape[-1]})

    def call(self, inputs: Any, training: Any = None) -> Any:
        """All units. Collective."""
        value = leaving(keras.ops.matmul(inputs, self.kernel), self.ring())
        if self.bias is not None:
            value = keras.ops.add(value, self.bias)
        return value if self.activation is None else self.activation(value)

    def get_build_config(self) -> Any:
        """That of the plain layer, whose input is whole."""
        return _with_last(super().get_build_config(), lambda count: count * self.ring().size)

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Build it as a file says, which has the shape of the plain layer's input."""
        super().build_from_config(_with_last(config, lambda count: count // self.ring().size))


def _with_last(config: Any, change: Any) -> Any:
    if not config or "input_shape" not in config:
        return config
    *rest, last = config["input_shape"]
    return {**config, "input_shape": (*rest, change(last))}


private.save_as(ColumnParallelDense, keras.layers.Dense)
private.save_as(RowParallelDense, keras.layers.Dense)
