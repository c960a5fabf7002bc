"""`PartLayer`: the base of layers with parts, and how their pieces get initial values."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras.layers.part import Part, load_wholes, mark, parts_in, save_wholes
from ringreduce.pure.seeds import folded
from ringreduce.tensorflow.collectives import all_reduce
from ringreduce.vocabulary.errors import ConfigError

# Makes an initializer with the seed of a number, or its own for None.
Draw = Callable[[int | None], Any]
_REGULARIZERS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class PartLayer(keras.layers.Layer):
    """A layer with parts: variables of which each rank of a group holds a piece.

    A subclass makes them with `add_part`, and exchanges rows within `in_parts`::

        class Experts(rr.parts.PartLayer):
            def build(self, shape):
                self.kernel = self.add_part((experts, shape[-1], shape[-1]))

    Each rank's optimizer trains its piece, with the gradients of the mean over the whole batch. A
    model is saved with wholes, by ``rr.on_rank_zero(lambda: model.save(path))`` or a
    `keras.callbacks.ModelCheckpoint`, and loads into groups of any size that divides them.

    Args:
        communicator: the group, by default the process's, which must exist when the layer is built.
            It is no part of the layer's configuration.
        options: those of `keras.layers.Layer`.
    """

    def __init__(
        self, *arguments: Any, communicator: Communicator | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.communicator = communicator

    def ring(self) -> Communicator:
        """The group that holds the pieces."""
        return self.communicator or default_communicator()

    def add_part(
        self, shape: Sequence[int], initializer: Any = "glorot_uniform", **options: Any
    ) -> Any:
        """This rank's piece of a variable of `shape`, cut along axis 0 into equal ranges.

        Collective. Each index of that is drawn by itself, as a variable of the rest of the shape,
        so that the whole is the same whatever the number of ranks.

        Args:
            initializer: Keras's, its name, or a function of shape and dtype; a random one without a
                seed gets rank 0's.
            options: of `add_weight`.

        Raises:
            ConfigError: the ranks cannot have equal ranges.
        """
        part = Part(self.ring(), tuple(shape))
        part.require_divisible(f"dimension 0 of {self.name}")
        return self._add(part, by_index, initializer, **options)

    def _add(
        self, part: Part, draw_piece: Callable[..., Any], initializer: Any, **options: Any
    ) -> Any:
        """A weight that is this rank's piece, as `draw_piece` draws it. Collective."""
        draw = _seeded(initializer, part.communicator)
        if options.get("constraint") is not None:
            text = f"got a constraint for {self.name}, which would see a piece of the whole"
            raise ConfigError(text, **part.communicator.config.who, remedy="Leave it out.")
        if (regularizer := keras.regularizers.get(options.get("regularizer"))) is not None:
            options["regularizer"] = _of_wholes(regularizer, part.communicator)

        def initialize(_: Any, dtype: Any) -> Any:
            with tf.init_scope():  # In a function that Keras traces there are no values.
                return draw_piece(draw, part, dtype)

        piece = super().add_weight(shape=part.own_shape, initializer=initialize, **options)
        return mark(piece, part)

    def save_own_variables(self, store: Any) -> None:
        """Save wholes, as Keras's layer saves its variables."""
        save_wholes(_own_variables(self), store)

    def load_own_variables(self, store: Any) -> None:
        """Take this rank's pieces of the wholes in a file."""
        self._check_load_own_variables(store)
        load_wholes(_own_variables(self), store)

    def _trackable_children(self, *arguments: Any, **options: Any) -> Any:
        # TensorFlow asks for what tf.train.Checkpoint and SavedModels hold.
        if parts_in(self.weights):
            text = f"cannot save {self.name} with TensorFlow's checkpoints: ranks have pieces of it"
            remedy = (
                "Use Keras's files: rr.on_rank_zero(lambda: model.save(path)) on all ranks, or "
                "rr.callbacks.OnRankZero around a callback that saves."
            )
            raise ConfigError(text, **self.ring().config.who, remedy=remedy)
        return super()._trackable_children(*arguments, **options)


def _own_variables(layer: keras.Layer) -> list[Any]:
    """The variables that Keras's layers save themselves, in its order."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def by_index(draw: Draw, part: Part, dtype: Any) -> Any:
    """Draw this rank's piece: each index of axis 0 of the whole by itself."""
    rows = range(part.shape[0])[part.place(part.communicator.rank)[0]]
    return np.stack([draw(row)(part.shape[1:], dtype) for row in rows])


def as_whole(draw: Draw, part: Part, dtype: Any) -> Any:
    """Draw this rank's piece of what the unsplit layer has with the same seed."""
    return part.piece(np.asarray(draw(None)(part.shape, dtype)))


def _seeded(initializer: Any, ring: Communicator) -> Draw:
    """Make `initializer` with another seed for each number; None: with its own. Collective."""
    chosen = keras.initializers.get(initializer)
    if not hasattr(chosen, "seed"):
        return lambda _: chosen
    # Keras draws one where none was given; a generator is used once.
    seed = chosen.seed if isinstance(chosen.seed, int) else int(np.asarray(chosen.seed.next())[0])
    seed = ring.broadcast_object(seed) if ring.size > 1 else seed

    def numbered(number: int | None) -> Any:
        folded_seed = seed if number is None else folded(seed, number)
        return type(chosen).from_config({**chosen.get_config(), "seed": folded_seed})

    return numbered


def _of_wholes(regularizer: Any, ring: Communicator) -> Any:
    """The regularizer of the whole, called with a piece: on each rank the sum over all pieces."""
    if ring.size == 1:
        return regularizer
    if not isinstance(regularizer, _REGULARIZERS):
        text = f"got the regularizer {type(regularizer).__name__} for a variable in pieces"
        remedy = "Use L1, L2 or L1L2, which are sums over elements."
        raise ConfigError(text, **ring.config.who, remedy=remedy)

    @tf.custom_gradient
    def total(part: Any) -> Any:
        return all_reduce(part, ring), lambda upstream: upstream

    return lambda piece: total(regularizer(piece))
