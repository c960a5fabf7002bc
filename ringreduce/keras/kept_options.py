"""What the file of a saved model says of a `DistributedOptimizer`'s options: text, never a pickle.

    {"strategy": "LocalSGD(every=50, overlap=0)", "bucket_bytes": "65536"}

It is in the file's `model.weights.h5`, where plain Keras does not look.
"""

import ast
import contextlib
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from ringreduce.keras.meetings import DiLoCo, LocalSGD
from ringreduce.keras.strategies import Accumulate, EveryStep
from ringreduce.tensorflow.low_rank import PowerSGD
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp

_CLASSES = {one.__name__: one for one in (Accumulate, EveryStep, DiLoCo, LocalSGD, PowerSGD)}


def as_array(options: Mapping[str, Any]) -> np.ndarray:
    """`options`, with their values as text, in bytes: Keras's files keep arrays."""
    values = {n: v.name.lower() if isinstance(v, ReduceOp) else v for n, v in options.items()}
    texts = {n: re.sub(" object at 0x[0-9a-f]+", "", repr(v)) for n, v in values.items()}
    return np.frombuffer(json.dumps(texts).encode(), np.uint8)


@contextlib.contextmanager
def weights_in(path: str) -> Iterator[Mapping[str, Any]]:
    """What is in the file of a saved model beside its configuration; empty where that is none."""
    file: Mapping[str, Any] = {}
    with contextlib.ExitStack() as opened:
        # Of an error on the way Keras says what is wrong.
        with contextlib.suppress(KeyError, OSError, zipfile.BadZipFile, tf.errors.OpError):
            weights: Any = f"{path}/model.weights.h5"
            if not tf.io.gfile.isdir(path):
                whole = opened.enter_context(tf.io.gfile.GFile(path, "rb"))
                archive = opened.enter_context(zipfile.ZipFile(whole))
                weights = opened.enter_context(archive.open("model.weights.h5"))
            file = opened.enter_context(h5py.File(weights, "r"))
        yield file


def options_in(file: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, and what else the file of a model keeps; ConfigError where that cannot be made."""
    text = file.get("optimizer/kept_options/vars/text")
    kept: dict[str, str] = {} if text is None else json.loads(bytes(text[()]))
    if "accumulate_steps" in given:
        kept.pop("strategy", None)
    found = dict(given)
    for name, each in ((name, kept[name]) for name in kept if name not in given):
        try:
            found[name] = _value_of(each)
        except (KeyError, SyntaxError, TypeError, ValueError) as error:
            raise ConfigError(
                f"got a model that was trained with {name}={each}, which its file cannot restore",
                remedy=f"Pass it: rr.load_model(path, {name}=...); or compile=False, and compile "
                "the model anew.",
            ) from error
    return found


def _value_of(text: str) -> Any:
    made = ast.parse(text, mode="eval").body
    if isinstance(made, ast.Call) and isinstance(made.func, ast.Name):
        options = {str(each.arg): ast.literal_eval(each.value) for each in made.keywords}
        return _CLASSES[made.func.id](**options)
    return ast.literal_eval(made)
