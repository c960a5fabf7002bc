"""What the trial of a step says of each of Keras's losses, metrics and layers, and what is so.

    python -m tests.verdicts [losses metrics layers]

Each is alone in a small model, which one rank and three train for one step on the same rows. For
what draws random numbers the three cannot have those of one: it is only tried.
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import ringreduce.keras as rr
from ringreduce.keras.join import build
from ringreduce.keras.mistakes import differences
from ringreduce.keras.trial import Verdict, try_step
from ringreduce.testing import ring_of_threads

ROWS = 12
_GENERATOR = np.random.default_rng(7)
X = _GENERATOR.normal(size=(ROWS, 5)).astype("float32")
_PARTS = np.linspace(0.1, 0.9, ROWS * 4, dtype="float32").reshape(ROWS, 4)
_BITS = (np.arange(ROWS * 4).reshape(ROWS, 4) % 5 == 1).astype("float32")
_CLASSES = np.arange(ROWS) % 4
_SIGNS = 2 * _BITS - 1
_ONE_HOT = np.eye(4, dtype="float32")[_CLASSES]
# By what a name says, the activation of the output and the targets.
_TARGETS: list[tuple[str, str, Any]] = [
    ("SparseTopK", "softmax", _CLASSES),
    ("GeneralizedCross", "softmax", _CLASSES),
    ("Sparse", "softmax", _CLASSES),
    ("Circle", "l2", _CLASSES),
    ("Categorical", "softmax", _ONE_HOT),
    ("OneHot", "softmax", _ONE_HOT),
    ("TopK", "softmax", _ONE_HOT),
    ("KL", "softmax", _ONE_HOT),
    ("F1", "softmax", _ONE_HOT),
    ("FBeta", "softmax", _ONE_HOT),
    ("Hinge", "tanh", _SIGNS),
    ("IoU", "sigmoid", _BITS),
]
# Those that need more than defaults; None: why it is not tried.
_MADE: dict[str, Callable[[], Any] | str] = {
    "CTC": "its targets are sequences",
    "IoU": lambda: keras.metrics.IoU(2, [0, 1], sparse_y_pred=True),
    "MeanIoU": lambda: keras.metrics.MeanIoU(2),
    "OneHotIoU": lambda: keras.metrics.OneHotIoU(4, [0, 1]),
    "OneHotMeanIoU": lambda: keras.metrics.OneHotMeanIoU(4),
    "PrecisionAtRecall": lambda: keras.metrics.PrecisionAtRecall(0.5),
    "RecallAtPrecision": lambda: keras.metrics.RecallAtPrecision(0.5),
    "SensitivityAtSpecificity": lambda: keras.metrics.SensitivityAtSpecificity(0.5),
    "SpecificityAtSensitivity": lambda: keras.metrics.SpecificityAtSensitivity(0.5),
    "MeanMetricWrapper": lambda: keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error),
    "Mean": "is not of targets and outputs",
    "Sum": "is not of targets and outputs",
    "Metric": "is a base class",
    "Loss": "is a base class",
}
_LAYERS: dict[str, Callable[[], Any] | str] = {
    "Dense": lambda: layers.Dense(3),
    "EinsumDense": lambda: layers.EinsumDense("ab,bc->ac", 3),
    "Embedding": lambda: layers.Embedding(9, 3),
    "ReversibleEmbedding": lambda: layers.ReversibleEmbedding(9, 3),
    "Activation": lambda: layers.Activation("tanh"),
    "Lambda": lambda: layers.Lambda(lambda x: x * 2),
    "ActivityRegularization": lambda: layers.ActivityRegularization(0.1),
    "Bidirectional": lambda: layers.Bidirectional(layers.LSTM(3)),
    "TimeDistributed": lambda: layers.TimeDistributed(layers.Dense(3)),
    "RNN": lambda: layers.RNN(layers.SimpleRNNCell(3)),
    "SpectralNormalization": lambda: layers.SpectralNormalization(layers.Dense(3)),
    "RepeatVector": lambda: layers.RepeatVector(3),
    "Reshape": lambda: layers.Reshape((-1, 1)),
    "Permute": lambda: layers.Permute((2, 1)),
    "UnitNormalization": lambda: layers.UnitNormalization(),
    "GroupNormalization": lambda: layers.GroupNormalization(1),
    **{
        f"{kind}{n}D": (lambda kind=kind, n=n: getattr(layers, f"{kind}{n}D")(3, 2))
        for kind in ("Conv", "SeparableConv", "ConvLSTM")
        for n in (1, 2, 3)
        if hasattr(layers, f"{kind}{n}D")
    },
    **{
        f"Conv{n}DTranspose": (lambda n=n: getattr(layers, f"Conv{n}DTranspose")(3, 2))
        for n in (1, 2, 3)
    },
    **{
        f"DepthwiseConv{n}D": (lambda n=n: getattr(layers, f"DepthwiseConv{n}D")(2)) for n in (1, 2)
    },
    **{name: (lambda name=name: getattr(layers, name)(3)) for name in ("GRU", "LSTM", "SimpleRNN")},
    **{
        f"Adaptive{kind}Pooling{n}D": (
            lambda kind=kind, n=n: getattr(layers, f"Adaptive{kind}Pooling{n}D")(2)
        )
        for kind in ("Average", "Max")
        for n in (1, 2, 3)
        if hasattr(layers, f"Adaptive{kind}Pooling{n}D")
    },
}
# One of each rank; what a layer takes is found out.
_INPUTS = [(5,), (4, 3), (4, 4, 3), (4, 4, 4, 3), (4, 4, 4, 4, 3)]


@dataclass(frozen=True)
class Case:
    """One of Keras's classes, and a model with it; `why` it is not tried, or ""."""

    name: str
    make: Callable[[Any], keras.Model]
    x: Any
    y: Any
    why: str = ""


def losses() -> Iterator[Case]:
    """Every loss, after a dense layer."""
    yield from _of_targets(keras.losses, keras.losses.Loss, lambda one, _: {"loss": one})


def metrics() -> Iterator[Case]:
    """Every metric, beside a loss that is a mean."""

    def options(one: Any, y: Any) -> dict[str, Any]:
        return {
            "loss": "mse" if y.ndim > 1 else "sparse_categorical_crossentropy",
            "metrics": [one],
        }

    yield from _of_targets(keras.metrics, keras.metrics.Metric, options)


def _of_targets(
    module: Any, kind: type, options: Callable[[Any, Any], dict[str, Any]]
) -> Iterator[Case]:
    for name, one in vars(module).items():
        if not (inspect.isclass(one) and issubclass(one, kind)):
            continue
        made = _MADE.get(name, one)
        activation, y = next(((a, t) for n, a, t in _TARGETS if n in name), ("sigmoid", _PARTS))
        if name in ("BinaryIoU", "IoU", "MeanIoU", "Dice", "Tversky", "AUC") or "Binary" in name:
            activation, y = "sigmoid", _BITS
        if isinstance(made, str):
            yield Case(name, lambda _: keras.Sequential(), X, y, made)
            continue

        def make(
            ring: Any, made: Any = made, activation: str = activation, y: Any = y
        ) -> keras.Model:
            normed = [layers.UnitNormalization()] if activation == "l2" else []
            dense = layers.Dense(4, None if normed else activation, kernel_initializer=_fixed)
            model = keras.Sequential([keras.Input((5,)), dense, *normed])
            _compile(model, ring, **options(made(), y))
            return model

        yield Case(name, make, X, y)


def every_layer() -> Iterator[Case]:
    """Every layer of one input that can be made with defaults, or stands above."""
    for name, one in vars(layers).items():
        if not (inspect.isclass(one) and issubclass(one, layers.Layer)) or one.__name__ != name:
            continue
        made = _LAYERS.get(name, one)
        is_of_words = "Embedding" in name
        for shape in _INPUTS:
            x = _GENERATOR.normal(size=(ROWS, *shape)).astype("float32")
            x = np.abs(x).astype("int32") if is_of_words else x
            make = _maker(made, shape, x.dtype)
            try:
                make(None)
            except Exception as error:
                why = f"{type(error).__name__}: {error}".partition("\n")[0][:60]
                continue
            yield Case(name, make, x, _PARTS[:, :1])
            break
        else:
            yield Case(name, lambda _: keras.Sequential(), X, _PARTS, f"not made here ({why})")


def _maker(made: Any, shape: tuple[int, ...], dtype: Any) -> Callable[[Any], keras.Model]:
    def make(ring: Any) -> keras.Model:
        inputs = keras.Input(shape, dtype=dtype)
        # One before it, so that gradients pass it.
        before = inputs if dtype == "int32" else layers.Dense(shape[-1])(inputs)
        layer = made()
        try:
            after = layer(before)
        except ValueError:
            after = layer([before, inputs])
        model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(after)))
        # Ranks are threads here, which share a seed.
        for variable in model.trainable_variables:
            variable.assign(_fixed(variable.shape, variable.dtype))
        _compile(model, ring, loss="mse")
        return model

    return make


def _compile(model: keras.Model, ring: Any, **options: Any) -> None:
    inner = keras.optimizers.SGD(0.1)
    optimizer = inner if ring is None else rr.DistributedOptimizer(inner, ring)
    model.compile(optimizer, run_eagerly=True, **options)


def _fixed(shape: Any, dtype: Any = None) -> Any:
    values = np.cos(np.arange(int(np.prod(shape)))).reshape(shape)
    return ops.cast(values / 2, dtype or "float32")


@dataclass(frozen=True)
class Outcome:
    """A verdict, and by how much weights and numbers of three ranks differ from those of one."""

    verdict: Verdict
    weights: float
    apart: tuple[str, ...]
    is_random: bool
    is_known: bool  # whether `fit` says without a trial that it is not as in one process

    @property
    def is_right(self) -> bool:
        """Whether the verdict is what was measured."""
        if self.verdict.why or self.is_random or self.is_known:
            return True
        says_equal = self.verdict.fit in ("mean", "nothing")
        return says_equal == (self.weights < 1e-4) and set(self.apart) == set(self.verdict.apart)


def outcome(case: Case) -> Outcome:
    """Try one, and train it on one rank and on three."""

    def train(ring: Any) -> Any:
        model = case.make(ring)
        verdict = None
        if ring.size == 1:
            build(model, _spec(case))
            verdict = try_step(model, (case.x, case.y), ring)
        options = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "communicator": ring}
        history = rr.fit(model, case.x, case.y, check=False, **options).history
        return verdict, model.get_weights(), history, _is_random(model), bool(differences(model))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [(verdict, weights, logs, is_random, is_known)] = ring_of_threads(1, train)
        _, others, of_all, *_ = ring_of_threads(3, train)[0]
    assert verdict is not None
    pairs = [(a, b) for a, b in zip(weights, others, strict=True) if a.dtype.kind == "f"]
    missed = max((float(np.max(np.abs(a - b), initial=0)) for a, b in pairs), default=0.0)
    names = [name for name in logs if name != "loss"]
    apart = [n for n in names if not np.allclose(logs[n], of_all.get(n, np.nan), 1e-3, 1e-6)]
    return Outcome(verdict, missed, tuple(apart), is_random, is_known)


def _spec(case: Case) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((case.x, case.y)).batch(4).element_spec


def _is_random(model: keras.Model) -> bool:
    return any("seed_generator" in variable.name for variable in model.variables)


KINDS = {"losses": losses, "metrics": metrics, "layers": every_layer}


def main(kinds: list[str]) -> int:
    """Print a line for each, and return how many verdicts are wrong."""
    logging.disable(logging.WARNING)
    wrong = 0
    print(f"{'':32}{'verdict':12}{'misses':>9}{'weights':>10}  numbers apart")
    for kind in kinds or KINDS:
        for case in KINDS[kind]():
            if case.why:
                print(f"{case.name:32}not tried: {case.why}")
                continue
            try:
                found = outcome(case)
            except Exception as error:
                print(f"{case.name:32}ERROR {type(error).__name__}: {str(error)[:100]!r}")
                continue
            verdict = found.verdict
            mark = "" if found.is_right else "  WRONG"
            wrong += not found.is_right
            measured = (
                "known"
                if found.is_known
                else "random"
                if found.is_random
                else f"{found.weights:.1e}"
            )
            fit = f"not tried: {verdict.why[:60]}" if verdict.why else verdict.fit
            columns = f"{case.name:31} {fit:12}{verdict.missed:9.1e}{measured:>10}"
            print(f"{columns}  {', '.join(found.apart)}{mark}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
