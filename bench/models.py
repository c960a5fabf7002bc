"""The networks that training is measured with, and their input. Imports Keras."""

from __future__ import annotations

import keras
import numpy as np

# Distinct random batches, which are repeated.
BATCHES = 8


def make(name: str) -> keras.Model:
    """An uncompiled model of that name."""
    return MODELS[name]()


def batches(name: str, count: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` random batches for the model: inputs of shape (count, batch, ...), and labels."""
    rng = np.random.default_rng(0)
    shape = make(name).input_shape[1:]
    inputs = rng.normal(size=(count, batch, *shape)).astype(np.float32)
    return inputs, rng.integers(0, 10, size=(count, batch))


def _mlp() -> keras.Model:
    """784-2048-2048-2048-10: 10.0 M parameters, little arithmetic per parameter."""
    layers = [keras.Input((784,))]
    layers += [keras.layers.Dense(2048, activation="relu") for _ in range(3)]
    return keras.Sequential([*layers, keras.layers.Dense(10)])


def _cnn() -> keras.Model:
    """Five 3 x 3 convolutions on 32 x 32 x 3: 0.28 M parameters, much arithmetic per parameter."""
    layers = [keras.Input((32, 32, 3))]
    for block in ((32,), (64, 64), (128, 128)):
        for filters in block:
            layers.append(keras.layers.Conv2D(filters, 3, padding="same", activation="relu"))
        layers.append(keras.layers.MaxPooling2D())
    return keras.Sequential(
        [*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    )


def _transformer(length: int = 64, width: int = 128, heads: int = 4) -> keras.Model:
    """Four pre-norm blocks of `width` on (length, 64): 0.80 M parameters, many small operations.

    Of width 456 10.0 M.
    """
    inputs = keras.Input((length, 64))
    x = keras.layers.Dense(width)(inputs)
    for _ in range(4):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(num_heads=heads, key_dim=width // heads)(y, y)
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * width, activation="gelu")(y)
        x = x + keras.layers.Dense(width)(y)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


MODELS = {
    "mlp": _mlp,
    "cnn": _cnn,
    "transformer": _transformer,
    "wide": lambda: _transformer(8, 456, 8),
}
