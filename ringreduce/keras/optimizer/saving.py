"""Loads a model and wraps its optimizer, so that training continues over the ring.

Files of models trained under `DistributedOptimizer` hold the wrapped optimizer, and beside it what
plain Keras passes over: they load where ringreduce is not installed, and those of Keras load here.
"""

import contextlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.layers.normalization import SyncBatchNormalization
from ringreduce.keras.layers.part_layer import PartLayer
from ringreduce.keras.optimizer.distributed import DistributedOptimizer
from ringreduce.keras.strategies.base import Accumulate, EveryStep
from ringreduce.keras.strategies.local_sgd import DiLoCo, LocalSGD
from ringreduce.tensorflow.low_rank import PowerSGD
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import brief

# Classes of options, besides numbers and texts, that a file can restore.
_CLASSES = {kind.__name__: kind for kind in (Accumulate, EveryStep, DiLoCo, LocalSGD, PowerSGD)}


def load_model(
    path: Any,
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    communicator: Communicator | None = None,
    sync_batch_normalization: bool = False,
    replace: Mapping[Any, Any] | None = None,
    **options: Any,
) -> Any:
    """Load a model with `keras.models.load_model` and wrap its optimizer.

    Training continues as if it had not been interrupted: the optimizer keeps its state, which
    `keras.models.load_model` gives to a plain one. At the next step all ranks receive rank 0's
    weights and state. So a file that only some ranks have must be loaded by all, or by rank 0 into
    a model that the others built alike.

    Args:
        path, custom_objects, compile, safe_mode: as for `keras.models.load_model`; with
            ``compile=False`` nothing is wrapped.
        sync_batch_normalization: short for ``replace={keras.layers.BatchNormalization:
            rr.SyncBatchNormalization}``, which is saved under that name.
        replace: by the name of a layer in the file, or a class of Keras's for all of that class,
            what to load it as: `ShardedEmbedding`, `SyncBatchNormalization` or another subclass of
            its class; or a `functools.partial` of one, such as ``partial(rr.ColumnParallelDense,
            communicator=model_group)``. With parts, all ranks must load the file: each takes its
            pieces. Meanwhile there is a copy of the file in the folder of temporary files.
        communicator: of the optimizer, and of the layers in `replace` that say no other.
        options: further arguments of `DistributedOptimizer`; those left out are as in training, if
            the file is no ``.h5``, which keeps none.

    Returns:
        The model. Its optimizer is a `DistributedOptimizer`, or None where the file has none.

    Raises:
        ValueError: Keras's, for a file that holds no model.
        ConfigError: as `DistributedOptimizer`; the file has no layer that `replace` names; the
            model was trained with an option that a file cannot keep, such as a `Strategy` of one's
            own, and none is passed.
    """
    replaced = dict(replace or {})
    if sync_batch_normalization:
        replaced[keras.layers.BatchNormalization] = SyncBatchNormalization
    with _weights_in(str(path)) as file:
        options = _options_in(file, options) if compile else options
        # In a file they are numbers, since the variables are made only now.
        local = options.pop("local_variables", ())
        loading = _Loading(replaced, communicator, options)
        stand_ins = loading.stand_ins()
        objects = {**stand_ins, **(custom_objects or {})}
        with _named_in(path, stand_ins) as named:
            model = keras.models.load_model(named, objects, compile, safe_mode)
        loading.require_all()
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None:
            return model
        # A model's own `compile_from_config` may have wrapped it.
        if not isinstance(optimizer, DistributedOptimizer):
            model.optimizer = DistributedOptimizer(optimizer, communicator, **options)
            if (state := model.optimizer.strategy_state) is not None:
                state.load_own_variables(file.get("optimizer/strategy_state/vars", {}))
    for entry in local:
        trained = private.trained_variables(model.optimizer)
        model.optimizer.register_local_var(trained[entry] if isinstance(entry, int) else entry)
    return model


@contextlib.contextmanager
def _weights_in(path: str) -> Iterator[Mapping[str, Any]]:
    """Open the weights in the file of a saved model; empty where it is none."""
    file: Mapping[str, Any] = {}
    with contextlib.ExitStack() as opened:
        # Keras says what is wrong after an error on the way.
        with contextlib.suppress(KeyError, OSError, zipfile.BadZipFile, tf.errors.OpError):
            weights: Any = f"{path}/model.weights.h5"
            if not tf.io.gfile.isdir(path):
                packed = opened.enter_context(tf.io.gfile.GFile(path, "rb"))
                archive = opened.enter_context(zipfile.ZipFile(packed))
                weights = opened.enter_context(archive.open("model.weights.h5"))
            file = opened.enter_context(h5py.File(weights, "r"))
        yield file


@contextlib.contextmanager
def _named_in(path: Any, classes: Mapping[str, Any]) -> Iterator[Any]:
    """A copy of a saved model that asks for `classes` by name; `path` where that does.

    Keras looks for `custom_objects` by registered names, which its own classes have not in a file.
    """
    with contextlib.ExitStack() as opened:
        file = None
        if classes:
            # One of another kind goes to Keras, which says what is wrong with it.
            with contextlib.suppress(OSError, zipfile.BadZipFile, tf.errors.OpError):
                file = opened.enter_context(_members_of(str(path)))
        if file is None:
            yield path
            return
        copy = Path(opened.enter_context(tempfile.TemporaryDirectory())) / "model.keras"
        with zipfile.ZipFile(copy, "w") as target:
            for name, open_member in file.items():
                with open_member() as source, target.open(name, "w", force_zip64=True) as member:
                    if name == "config.json":
                        text = json.dumps(_with_names(json.load(source), classes))
                        member.write(text.encode())
                    else:
                        shutil.copyfileobj(source, member, 1 << 20)
        yield copy


@contextlib.contextmanager
def _members_of(path: str) -> Iterator[dict[str, Callable[[], Any]]]:
    """What opens each file in that of a saved model, or in its folder."""
    if tf.io.gfile.isdir(path):
        found = [
            f"{folder}/{name}" for folder, _, names in tf.io.gfile.walk(path) for name in names
        ]
        yield {
            name.removeprefix(f"{path}/"): partial(tf.io.gfile.GFile, name, "rb") for name in found
        }
        return
    with tf.io.gfile.GFile(path, "rb") as packed, zipfile.ZipFile(packed) as archive:
        yield {name: partial(archive.open, name) for name in archive.namelist()}


def _with_names(config: Any, classes: Mapping[str, Any]) -> Any:
    """`config` with the names of `classes` as registered ones, but within one of those."""
    if isinstance(config, list):
        return [_with_names(each, classes) for each in config]
    if not isinstance(config, dict):
        return config
    name, is_of_keras = config.get("class_name"), str(config.get("module")).startswith("keras.")
    if is_of_keras and name in classes and config.get("registered_name") is None:
        return {**config, "registered_name": name}
    return {key: _with_names(value, classes) for key, value in config.items()}


def _options_in(file: Mapping[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    """`passed`, and what else the file of a model keeps; ConfigError where that cannot be made."""
    text = file.get("optimizer/kept_options/vars/text")
    kept: dict[str, Any] = {}
    try:
        if text is not None:
            kept = dict(json.loads(bytes(text[()])))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"got a model whose file is damaged where it keeps ringreduce's options: {error}",
            remedy="Save the model again; or rr.load_model(path, compile=False), and compile the "
            "model anew.",
        ) from error
    if "gradient_accumulation_steps" in passed:
        kept.pop("strategy", None)
    options = dict(passed)
    for name in [name for name in kept if name not in passed]:
        try:
            options[name] = _made(kept[name])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"got a model that was trained with {name}={kept[name]}, which its file cannot "
                "restore",
                remedy=f"Pass it: rr.load_model(path, {name}=...); or compile=False, and compile "
                "the model anew.",
            ) from error
    return options


def _made(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    [(name, settings)] = value.items()
    return _CLASSES[name](**{key: _made(each) for key, each in settings.items()})


class _Loading:
    def __init__(
        self, replaced: Mapping[Any, Any], ring: Communicator | None, options: Mapping[str, Any]
    ) -> None:
        # A class and options for it, by name or class.
        self._replaced = {
            key: (maker.func, maker.keywords) if isinstance(maker, partial) else (maker, {})
            for key, maker in replaced.items()
        }
        self._communicator, self._options = ring, options
        self._found: set[Any] = set()

    def stand_ins(self) -> dict[str, Any]:
        """The classes that Keras is to use, by the names that a file has."""
        classes: dict[str, Any] = {}
        for replacement, _ in self._replaced.values():
            # The class that it replaces has its name: its own is that of the plain one.
            bases = replacement.__mro__[1:] if isinstance(replacement, type) else ()
            plain = next((base for base in bases if base.__name__ == replacement.__name__), None)
            if plain is None:
                text = f"got {brief(replacement)} in replace, no subclass of a layer of Keras's"
                remedy = "Pass rr.ShardedEmbedding, rr.SyncBatchNormalization or the like."
                raise ConfigError(text, remedy=remedy)
            # Keras exports some under another name, which it writes into files.
            exported = {name for name in dir(keras.layers) if getattr(keras.layers, name) is plain}
            classes.update(dict.fromkeys({plain.__name__, *exported}, _making(plain, self._layer)))
        has_parts = any(issubclass(kind, PartLayer) for kind, _ in self._replaced.values())
        if has_parts:
            # Its state is in pieces, so it is wrapped before that is loaded.
            for name, kind in vars(keras.optimizers).items():
                is_class = isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)
                if is_class and name not in ("Optimizer", "LossScaleOptimizer"):
                    classes[name] = _making(kind, self._optimizer)
        return classes

    def require_all(self) -> None:
        names = sorted({key for key in self._replaced if isinstance(key, str)} - self._found)
        if names:
            text = f"found no layer {', '.join(names)} of the class that replaces it in the file"
            remedy = "Name layers as the file does: model.summary() lists them."
            raise ConfigError(text, remedy=remedy)

    def _layer(self, plain: Any, config: Any, *arguments: Any) -> Any:
        for key in (config.get("name"), plain):
            replacement, options = self._replaced.get(key, (None, {}))
            if replacement is not None and issubclass(replacement, plain):
                self._found.add(key)
                layer = replacement.from_config({**config, **options}, *arguments)
                layer.communicator = options.get("communicator", self._communicator)
                return layer
        return plain.from_config(config, *arguments)

    def _optimizer(self, plain: Any, *arguments: Any, **options: Any) -> Any:
        inner = plain.from_config(*arguments, **options)
        return DistributedOptimizer(inner, self._communicator, **self._options)


def _making(plain: Any, make: Callable[..., Any]) -> Any:
    """A stand-in for `plain`, of which `make` returns what a configuration is for."""
    from_config = classmethod(lambda _, *args, **options: make(plain, *args, **options))
    return type(plain.__name__, (plain,), {"from_config": from_config})
