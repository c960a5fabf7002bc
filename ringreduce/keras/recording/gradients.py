"""Gradients of an optimizer's steps, as it gets them, for ``ringreduce verify``.

    this rank's gradients --note_own: norms--> reduction --note_means: copies--> the update

They are copied into variables, also within a graph that XLA compiles, and read after the step. A
switch leaves that out of steps whose time is taken.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ringreduce.keras.layers.part import Part
from ringreduce.keras.weighting import Averaging
from ringreduce.tensorflow.variables import lasting, path_of
from ringreduce.vocabulary.words import is_unchanged

HALVES = {"float16", "bfloat16"}
OF_LOCAL = "each rank trains local variables of its own, on its own rows"
OF_SUMS = 'op="sum" makes gradients as many times as large as there are ranks'


class Noted(NamedTuple):
    """A step's gradients of one set of variables."""

    names: list[str]  # without those of local variables
    calls: list[int]  # how often the optimizer got each in the step
    # Those of the first call, this rank's pieces in a whole of zeros; None: other ranks have it.
    means: list[np.ndarray | None]
    own: np.ndarray  # (variables, 2): norm and largest magnitude of this rank's, before the mean


class GradientRecord:
    """Notes the steps of one optimizer; `is_first`: this rank keeps what is equal on all."""

    def __init__(self, name: str, is_first: Callable[[Part | None], bool]) -> None:
        self._name, self._is_first = name, is_first
        self._is_on = lasting(True)
        # By the identities of the variables: an optimizer may be applied to several sets.
        self._sets: dict[tuple[int, ...], _Set] = {}
        self.has_local = False  # whether some variables are local: each rank has its own

    def switch(self, is_on: bool) -> None:
        """Note the next steps, or leave that out."""
        self._is_on.assign(is_on)
        for noted in self._sets.values():
            noted.calls.assign(tf.zeros_like(noted.calls))

    def note_own(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Note this rank's gradients, in the step that is computed or traced."""
        noted = self._set_of(variables)

        def assign() -> None:
            noted.own.assign(norms_and_largest(gradients))

        _if(self._is_on, assign)

    def note_means(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        kinds: Sequence[Averaging],
        parts: Sequence[Part | None],
    ) -> Sequence[Any]:
        """Note the gradients that are applied; `parts` of them are this rank's pieces."""
        noted = self._set_of(variables)
        noted.parts = list(parts)
        noted.is_local = [kind is Averaging.LOCAL for kind in kinds]
        self.has_local |= any(noted.is_local)
        chosen = [
            number
            for number, gradient in enumerate(gradients)
            if gradient is not None and not noted.is_local[number]
        ]
        here = [number for number in chosen if self._is_first(parts[number])]
        with tf.init_scope():
            for number in here:
                if noted.means[number] is None:
                    part, variable = parts[number], variables[number]
                    shape = tuple(variable.shape) if part is None else part.own_shape
                    noted.means[number] = lasting(tf.zeros(shape, tf.float32))
        counts = [float(number in chosen) for number in range(len(variables))]

        def assign() -> None:
            for number in here:
                value = tf.convert_to_tensor(gradients[number])
                noted.means[number].assign(
                    tf.reshape(tf.cast(value, tf.float32), noted.means[number].shape)
                )

        _if(tf.logical_and(self._is_on, tf.reduce_all(noted.calls == 0)), assign)
        noted.calls.assign_add(tf.constant(counts))
        return gradients

    def read(self) -> list[Noted]:
        """Those of the last step, eagerly."""
        return [self._read(noted) for noted in self._sets.values() if noted.is_local]

    def _read(self, noted: "_Set") -> Noted:
        shared = [number for number, is_local in enumerate(noted.is_local) if not is_local]
        calls, own = noted.calls.numpy(), noted.own.numpy()
        return Noted(
            [f"{self._name}: {noted.names[number]}" for number in shared],
            [int(calls[number]) for number in shared],
            [noted.whole(number) if calls[number] else None for number in shared],
            own[shared],
        )

    def _set_of(self, variables: Sequence[Any]) -> "_Set":
        key = tuple(map(id, variables))
        if key not in self._sets:
            self._sets[key] = _Set(variables)
        return self._sets[key]


class _Set:
    """Variables of TensorFlow's for the gradients of a set of variables."""

    def __init__(self, variables: Sequence[Any]) -> None:
        count = len(variables)
        self.kept = list(variables)  # Their identities stay theirs.
        self.names = [path_of(v) if hasattr(v, "name") else "" for v in variables]
        self.calls = lasting(np.zeros(count, np.float32))
        self.own = lasting(np.zeros((count, 2), np.float32))
        self.means: list[Any] = [None] * count
        # Once there are means.
        self.parts: list[Part | None] = []
        self.is_local: list[bool] = []

    def whole(self, number: int) -> np.ndarray | None:
        mean, part = self.means[number], self.parts[number]
        if mean is None:
            return None
        return in_whole(mean.numpy(), part)


def facts_of(wrapper: Any) -> tuple[dict[str, str], list[str]]:
    """The settings of a `DistributedOptimizer`, and what ranks do differently with gradients."""
    rate = np.asarray(wrapper.learning_rate)
    settings = {f"{wrapper.name}: learning_rate": f"{rate:g}"}
    for what, texts, _ in wrapper.settings():
        which = what.removeprefix("models: ").replace("optimizers", wrapper.name)
        settings |= {f"{which}: {name}": text for name, text in texts.items()}
    if is_unchanged():  # Where a trial has chosen it.
        settings.pop(f"{wrapper.name}: gradients", None)
    options, texts = wrapper.settings()[0].found, []
    if "SUM" in options["op"]:
        texts.append(OF_SUMS)
    if wrapper.recorder.has_local:
        texts.append(OF_LOCAL)
    if wrapper.is_alone:
        texts.append(f"strategy={options['strategy']}: ranks step alone between meetings")
    return settings, texts


def in_whole(value: np.ndarray, part: Part | None) -> np.ndarray:
    """`value`, this rank's piece of it, among zeros: the sum over all ranks is the whole."""
    if part is None:
        return value
    whole = np.zeros(part.cut_shape, value.dtype)
    whole[part.place(part.communicator.rank)] = value
    return whole.reshape(part.shape)


def _if(condition: Any, then: Callable[[], None]) -> None:
    if tf.executing_eagerly():
        if bool(condition):
            then()
        return

    def branch() -> Any:
        then()
        return tf.constant(0)

    tf.cond(condition, branch, lambda: tf.constant(0))


def norms_and_largest(gradients: Sequence[Any]) -> Any:
    """A tensor (gradients, 2): the norm and the largest magnitude of each; 0 where it is None."""
    return tf.stack([_norm_and_largest(_values(gradient)) for gradient in gradients])


def _values(gradient: Any) -> Any:
    if gradient is None:
        return None
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.cast(values, tf.float32)


def _norm_and_largest(values: Any) -> Any:
    if values is None:
        return tf.zeros(2)
    return tf.stack([tf.norm(values), tf.reduce_max(tf.abs(values))])
