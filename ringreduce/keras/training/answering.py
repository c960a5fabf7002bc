"""Ranks that have no batch left answer the look-ups of those that have, in evaluation.

    rank 0   meet batch  meet batch  meet batch  meet
    rank 1   meet batch  meet answer meet answer meet      answer: the model on a row of zeros

They meet within the step, since only there a rank knows that it has another batch. In training a
step needs no more: one without data runs on zeros too (`join.weighed`).
"""

import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.layers.part import is_own_piece
from ringreduce.keras.rows import rows_in
from ringreduce.tensorflow.agreement import count_true
from ringreduce.tensorflow.kept import kept
from ringreduce.tensorflow.python_calls import call


class _Meets:
    """The ranks that meet in a model's evaluation."""

    ring: Communicator | None = None


class Answering(keras.callbacks.Callback):
    """Makes ranks meet before each batch of an evaluation; answers the others at its end."""

    def __init__(self, model: Any, ring: Communicator, example: Callable[[], Any]) -> None:
        super().__init__()
        self._model, self._ring, self._example = model, ring, example
        self._is_needed = ring.size > 1 and any(map(is_own_piece, model.weights))
        if self._is_needed and (meets := kept(model, _Meets)).ring is not ring:
            meets.ring = ring
            for name in ("test_step", "predict_step"):
                setattr(model, name, _meeting(getattr(type(model), name), model, ring))
            # Functions traced before do not meet.
            model.test_function = model.predict_function = None

    def finish(self, *, with_losses: bool) -> None:
        """Answer until no rank has a batch; `with_losses`: also what regularizers ask for."""
        if not self._is_needed:
            return
        example = None
        while count_true(self._ring, False):
            example = self._example() if example is None else example
            self._model(example, training=False)
            if with_losses:
                _ = self._model.losses

    def on_test_end(self, logs: Any = None) -> None:
        self.finish(with_losses=True)


def _meeting(step: Callable[..., Any], model: Any, ring: Communicator) -> Callable[[Any], Any]:
    owner = weakref.ref(model)

    def meet(_: Any) -> list[Any]:
        return [np.int32(count_true(ring, True))]

    def met(data: Any) -> Any:
        # It waits for the batch, and the step's own calls follow in order.
        call(ring, "begin a batch", meet, [rows_in(data)], [((), tf.int32)])
        return step(owner(), data)

    return met
