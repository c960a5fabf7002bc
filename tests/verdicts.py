"""What the trial of a step says of each of Keras's losses, metrics and layers, and what is so.

    python -m tests.verdicts [losses metrics layers]

Each is alone in a small model, which one rank and three train for one step on the same rows. Where
the three get what one gets nothing may be said by the trial, else something must. What draws random
numbers the three cannot have of one: nothing may be said of it, unless it is listed in `_MIXING`.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import ringreduce.keras as rr
from ringreduce.keras.checks.warnings import differences
from ringreduce.keras.model.building import build
from ringreduce.keras.model.trial import Verdict, try_step
from ringreduce.testing import ring_of_threads

ROWS = 12
X = np.random.default_rng(7).normal(size=(ROWS, 5)).astype("float32")
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
_OF_FACTORS = (
    *("Brightness", "ColorDegeneration", "Contrast", "Hue", "Rotation"),
    *("Saturation", "Sharpness", "Zoom"),
)
_OF_RATES = ("AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise")
_OF_WORDS = ("Embedding", "Encoding", "Hash", "IntegerLookup")
_OF_TEXTS = ("StringLookup", "TextVectorization")
_OTHERS = "is of another framework, or of a saved model"
_LAYERS: dict[str, Callable[[], Any] | str] = {
    "Dense": lambda: layers.Dense(3),
    "EinsumDense": lambda: layers.EinsumDense("ab,bc->ac", 3),
    "Embedding": lambda: layers.Embedding(9, 3),
    "ReversibleEmbedding": lambda: layers.ReversibleEmbedding(9, 3),
    "Activation": lambda: layers.Activation("tanh"),
    "Lambda": lambda: layers.Lambda(lambda x: x * 2),
    "Dot": lambda: layers.Dot(1),
    "MultiHeadAttention": lambda: layers.MultiHeadAttention(2, 3),
    "GroupQueryAttention": lambda: layers.GroupQueryAttention(3, 2, 1),
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
    "CategoryEncoding": lambda: layers.CategoryEncoding(9),
    "Discretization": lambda: layers.Discretization([-0.5, 0.0, 0.5]),
    "Hashing": lambda: layers.Hashing(4),
    "IntegerLookup": lambda: layers.IntegerLookup(vocabulary=[1, 2, 3]),
    "StringLookup": lambda: layers.StringLookup(vocabulary=["0", "1"]),
    "TextVectorization": lambda: layers.TextVectorization(
        vocabulary=["0", "1"], output_sequence_length=3
    ),
    "CenterCrop": lambda: layers.CenterCrop(2, 2),
    "RandomCrop": lambda: layers.RandomCrop(2, 2),
    "Resizing": lambda: layers.Resizing(3, 3),
    "Rescaling": lambda: layers.Rescaling(2.0),
    "RandomPosterization": lambda: layers.RandomPosterization(3),
    "RandomTranslation": lambda: layers.RandomTranslation(0.3, 0.3),
    "Pipeline": lambda: layers.Pipeline([layers.Rescaling(2.0)]),
    "MelSpectrogram": lambda: layers.MelSpectrogram(4, 2, sampling_rate=8, num_mel_bins=2),
    "STFTSpectrogram": lambda: layers.STFTSpectrogram(frame_length=4, frame_step=2, fft_length=4),
    "Equalization": "Keras makes no functional model of it",
    "HashedCrossing": "is of two inputs of one number",
    "MaxNumBoundingBoxes": "is of bounding boxes",
    "InputLayer": "has no input",
    **dict.fromkeys(("Layer", "Wrapper"), "is a base class"),
    **dict.fromkeys(("GRUCell", "LSTMCell", "SimpleRNNCell", "StackedRNNCells"), "is part of RNN"),
    **dict.fromkeys(("FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper"), _OTHERS),
    **{
        f"Random{kind}": (lambda kind=kind: getattr(layers, f"Random{kind}")(0.3))
        for kind in _OF_FACTORS
    },
    **{name: (lambda name=name: getattr(layers, name)(0.3)) for name in _OF_RATES},
    **{
        f"SpatialDropout{n}D": (lambda n=n: getattr(layers, f"SpatialDropout{n}D")(0.3))
        for n in (1, 2, 3)
    },
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
        f"{kind}Pooling{n}D": (lambda kind=kind, n=n: getattr(layers, f"{kind}Pooling{n}D")(2))
        for kind in ("Average", "AdaptiveAverage", "AdaptiveMax")
        for n in (1, 2, 3)
        if hasattr(layers, f"{kind}Pooling{n}D")
    },
}
# One of each rank; what a layer takes is found out.
_INPUTS = [(5,), (4, 3), (4, 4, 3), (4, 4, 4, 3), (4, 4, 4, 4, 3)]
_SHAPES = {"MelSpectrogram": [(16,)], "STFTSpectrogram": [(16, 1)], "TextVectorization": [(1,)]}
_OF_TWO = layers.Attention, layers.AdditiveAttention, layers.Dot, type(layers.Add()).__base__
# Which mix a row with others by random numbers.
_MIXING = ("CutMix", "MixUp")
# Ranks are threads here, which share the generators that initial values come from.
_making = threading.Lock()


@dataclass(frozen=True)
class Case:
    """One of Keras's classes, and a model with it; `why` it is not tried, or ""."""

    name: str
    make: Callable[[Any], keras.Model]
    x: Any
    y: Any
    why: str = ""


def losses(names: Sequence[str] = ()) -> Iterator[Case]:
    """Every loss, or those, after a dense layer."""
    yield from _of_targets(names, keras.losses, keras.losses.Loss, lambda one, _: {"loss": one})


def metrics(names: Sequence[str] = ()) -> Iterator[Case]:
    """Every metric, or those, beside a loss that is a mean."""

    def options(one: Any, y: Any) -> dict[str, Any]:
        return {
            "loss": "mse" if y.ndim > 1 else "sparse_categorical_crossentropy",
            "metrics": [one],
        }

    yield from _of_targets(names, keras.metrics, keras.metrics.Metric, options)


def _of_targets(
    names: Sequence[str], module: Any, kind: type, options: Callable[[Any, Any], dict[str, Any]]
) -> Iterator[Case]:
    for name, one in _classes(names, module, kind):
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


def every_layer(names: Sequence[str] = ()) -> Iterator[Case]:
    """Every layer, or those; what has several inputs gets the same twice."""
    for name, one in _classes(names, layers, layers.Layer):
        made = _LAYERS.get(name, one)
        why, kind = made if isinstance(made, str) else "", "float32"
        if any(word in name for word in _OF_WORDS) or name in _OF_TEXTS:
            kind = "int32" if name not in _OF_TEXTS else "string"
        # With fewer axes a batch is one image.
        is_of_images = "image_preprocessing" in one.__module__
        shapes = _SHAPES.get(name, [(8, 8, 3)] if is_of_images else _INPUTS)
        for shape in () if why else shapes:
            x = np.random.default_rng(7).normal(size=(ROWS, *shape)).astype("float32")
            x = x if kind == "float32" else np.abs(x).astype("int32")
            x = x.astype("str").astype(object) if kind == "string" else x
            make = _maker(made, shape, kind)
            try:
                # Keras warns of a mask that ends at Flatten.
                with warnings.catch_warnings(action="ignore"):
                    make(None)(tf.constant(x))
            except Exception as error:
                why = f"ERROR {type(error).__name__}: {error}".replace("\n", " ")[:100]
                continue
            yield Case(name, make, x, _PARTS[:, :1])
            break
        else:
            yield Case(name, lambda _: keras.Sequential(), X, _PARTS, why)


def _classes(names: Sequence[str], module: Any, kind: type) -> Iterator[tuple[str, type]]:
    """The classes of a kind, or those of these names; what has two names is once there."""
    listed = vars(module)
    for name, one in listed.items():
        if not (inspect.isclass(one) and issubclass(one, kind)):
            continue
        is_second = one.__name__ != name and one.__name__ in listed
        if not is_second and (not names or name in names):
            yield name, one


def _maker(made: Any, shape: tuple[int, ...], kind: str) -> Callable[[Any], keras.Model]:
    def make(ring: Any) -> keras.Model:
        inputs = keras.Input(shape, dtype=kind)
        # One before it, so that gradients pass it.
        before = layers.Dense(shape[-1])(inputs) if kind == "float32" else inputs
        layer = made()
        try:
            after = layer(before)
        except (TypeError, ValueError):
            called = layer if isinstance(layer, _OF_TWO) else lambda both: layer(*both)
            after = called([before, inputs])
        model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(after)))
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
    apart: tuple[str, ...]  # names in logs that differ
    texts: tuple[str, ...]  # that three ranks were warned of
    known: tuple[str, ...]  # that `fit` says without a trial
    is_random: bool
    is_mixing: bool

    @property
    def is_right(self) -> bool:
        """Whether the verdict, and what ranks were warned of, are what was measured."""
        verdict = self.verdict
        says_equal = bool(verdict.why) or verdict.fit in ("mean", "nothing")
        found = [text for text in self.texts if not self._is_known(text)]
        if self.is_random:
            return says_equal != self.is_mixing == bool(found)
        is_equal = self.weights < 1e-4
        if is_equal or verdict.why or self.known:
            return says_equal and not found and (self.known or self._has_named(verdict))
        return not says_equal and bool(found) and self._has_named(verdict)

    def _has_named(self, verdict: Verdict) -> bool:
        return bool(verdict.why) or set(self.apart) == set(verdict.apart)

    def _is_known(self, text: str) -> bool:
        """Whether a warning has nothing but static notes."""
        return text.endswith("; ".join(self.known) + ".") and bool(self.known)


def outcome(case: Case) -> Outcome:
    """Try one, and train it on one rank and on three."""

    def train(ring: Any) -> Any:
        with _making:
            keras.utils.set_random_seed(3)
            model = case.make(ring)
        verdict = None
        if ring.size == 1:
            build(model, _spec(case))
            verdict = try_step(model, (case.x, case.y), ring)
        options = {"batch_size": ROWS, "shuffle": False, "verbose": 0, "communicator": ring}
        history = rr.fit(model, case.x, case.y, check="step", **options).history
        return verdict, model.get_weights(), history, differences(model, knows_losses=True)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        [(verdict, weights, logs, known)] = ring_of_threads(1, train)
        _, others, of_all, _ = ring_of_threads(3, train)[0]
    assert verdict is not None
    texts = tuple(str(each.message) for each in shown if each.category is rr.ParityWarning)
    pairs = [(a, b) for a, b in zip(weights, others, strict=True) if a.dtype.kind == "f"]
    missed = max((float(np.max(np.abs(a - b), initial=0)) for a, b in pairs), default=0.0)
    largest = max((float(np.max(np.abs(a), initial=0)) for a, _ in pairs), default=0.0)
    names = [name for name in logs if name != "loss"]
    apart = [n for n in names if not np.allclose(logs[n], of_all.get(n, np.nan), 1e-3, 1e-6)]
    is_random = case.name in _MIXING or any("random numbers" in text for text in known)
    is_mixing = case.name in _MIXING
    return Outcome(
        verdict, missed / max(largest, 1.0), tuple(apart), texts, tuple(known), is_random, is_mixing
    )


def _spec(case: Case) -> Any:
    return tf.data.Dataset.from_tensor_slices((case.x, case.y)).batch(4).element_spec


KINDS: dict[str, Callable[..., Iterator[Case]]] = {
    "losses": losses,
    "metrics": metrics,
    "layers": every_layer,
}
_LISTED: dict[str, tuple[Any, type]] = {
    "losses": (keras.losses, keras.losses.Loss),
    "metrics": (keras.metrics, keras.metrics.Metric),
    "layers": (layers, layers.Layer),
}


def names_of(kind: str) -> list[str]:
    """The names of all classes that are listed as of a kind."""
    module, base = _LISTED[kind]
    return [name for name, _ in _classes((), module, base)]


def main(kinds: list[str]) -> int:
    """Print a line for each, then those that are wrong, and return how many."""
    logging.disable(logging.WARNING)
    print(f"{'':45}{'verdict':12}{'misses':>9}{'weights':>10}  numbers apart")
    wrong = [line for kind in kinds or KINDS for case in KINDS[kind]() if (line := shown(case))]
    print(f"\n{len(wrong)} do not fit", *wrong, sep="\n")
    return len(wrong)


def shown(case: Case) -> str:
    """Print the line of one; it is returned if verdict and measurement do not fit."""
    if case.why:
        line, is_wrong = f"{case.name:44} not tried: {case.why}", case.why.startswith("ERROR")
    else:
        try:
            found = outcome(case)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " ")[:100]
            line, is_wrong = f"{case.name:44} ERROR {text}", True
        else:
            line, is_wrong = f"{case.name:44} {_line(found)}", not found.is_right
    print(line, flush=True)
    return line if is_wrong else ""


def _line(found: Outcome) -> str:
    verdict = found.verdict
    measured = "random" if found.is_random else "known" if found.known else f"{found.weights:.1e}"
    fit = f"not tried: {verdict.why[:60]}" if verdict.why else verdict.fit
    return f"{fit:12}{verdict.missed:9.1e}{measured:>10}  {', '.join(found.apart)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
