"""What is learned: a network, batches of data, and an accuracy on data that it has not seen.

Beside the bench's networks on random data, for speed (`models`): scikit-learn's digits, and the
next character of the text that Python's ``help()`` shows. Imports Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data import topics
from typing import NamedTuple

import keras
import numpy as np

from bench import models
from bench.train import GLOBAL_BATCH

_TEXT_CHARACTERS, _TEXT_TESTED, _WINDOW = 400_000, 40_000, 48


class Data(NamedTuple):
    """Arrays of shape (batches, global batch, ...), and what is tested, of shape (samples, ...)."""

    inputs: np.ndarray
    labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray


@dataclass(frozen=True)
class Task:
    """A network and how it is trained.

    Attributes:
        make: returns it, not compiled.
        data: for a seed and a number of steps.
        optimizer: sgd or adam.
    """

    make: Callable[[], keras.Model]
    data: Callable[[int, int], Data]
    optimizer: str = "adam"


def task(name: str) -> Task:
    """A task that is learned, or the training of a model of `models` on random data."""
    if name in LEARNED:
        return LEARNED[name]

    def random(seed: int, steps: int) -> Data:
        inputs, labels = models.batches(name, models.BATCHES, GLOBAL_BATCH)
        return Data(inputs, labels, inputs[0], labels[0])

    return Task(lambda: models.make(name), random, "sgd")


def optimizer(name: str) -> keras.optimizers.Optimizer:
    """A Keras optimizer as all ways use it; `served` updates weights like it."""
    if name == "sgd":
        return keras.optimizers.SGD(0.01, momentum=0.9)
    return keras.optimizers.Adam(1e-3)


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """The share of labels for which the greatest logit is right."""
    return float(np.mean(np.argmax(logits, axis=-1) == labels))


def _digits_mlp() -> keras.Model:
    """64-512-512-10: 0.30 M parameters."""
    layers = [keras.Input((64,))]
    layers += [keras.layers.Dense(512, activation="relu") for _ in range(2)]
    return keras.Sequential([*layers, keras.layers.Dense(10)])


def _digits(seed: int, steps: int) -> Data:
    """1,200 images of 8 x 8 to learn from, and 597 others; which ones depends on the seed."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels / 16).astype(np.float32)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    learned, tested = order[:1200], order[1200:]
    # Epoch after epoch, without a gap between them.
    count = steps * GLOBAL_BATCH
    epochs = [rng.permutation(learned) for _ in range(-(-count // len(learned)))]
    taken = np.concatenate(epochs)[:count].reshape(steps, GLOBAL_BATCH)
    return Data(pixels[taken], labels[taken], pixels[tested], labels[tested])


class Causal(keras.layers.Layer):
    """A pre-norm block of width 128 in which a place sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.attention = keras.layers.MultiHeadAttention(num_heads=4, key_dim=32)
        self.wide = keras.layers.Dense(512, activation="gelu")
        self.narrow = keras.layers.Dense(128)

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.narrow(self.wide(self.norms[1](x)))


class Places(keras.layers.Layer):
    """Adds a learned vector for each place.

    Its name becomes one of operations, which may not begin with an underscore.
    """

    def build(self, shape: tuple[int, ...]) -> None:
        self.places = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return x + self.places


def _text_transformer() -> keras.Model:
    """Two blocks of width 128 on 48 characters: 0.43 M parameters."""
    inputs = keras.Input((_WINDOW,), dtype="int32")
    x = Places()(keras.layers.Embedding(128, 128)(inputs))
    for _ in range(2):
        x = Causal()(x)
    return keras.Model(inputs, keras.layers.Dense(128)(keras.layers.LayerNormalization()(x)))


def _text(seed: int, steps: int) -> Data:
    """Windows at random places; the last tenth of the text is for the test."""
    text = "".join(topics.topics[name] for name in sorted(topics.topics))[:_TEXT_CHARACTERS]
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    learned = _TEXT_CHARACTERS - _TEXT_TESTED
    begins = rng.integers(0, learned - _WINDOW, size=(steps, TEXT_BATCH))
    tested = np.arange(learned, _TEXT_CHARACTERS - _WINDOW - 1, 311)
    window = np.arange(_WINDOW)
    at, test_at = begins[..., None] + window, tested[:, None] + window
    return Data(codes[at], codes[at + 1], codes[test_at], codes[test_at + 1])


TEXT_BATCH = 32
LEARNED = {
    "digits": Task(_digits_mlp, _digits),
    "text": Task(_text_transformer, _text),
}
