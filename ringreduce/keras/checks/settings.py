"""Settings that must be equal on all ranks, and the first of them that are not."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from inspect import isfunction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import keras
import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.journal import compared
from ringreduce.keras import private
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow.agreement import Difference, agree, refuse

# Of Keras's configurations. Names are numbered anew in each process. Batches may have other shapes
# on each rank. How layers are connected is told by their names.
_OF_NO_EFFECT = {
    *("name", "module", "registered_name", "build_config", "compile_config", "batch_shape"),
    *("build_input_shape", "inbound_nodes", "input_layers", "output_layers"),
}
_SHOWN = 3
# For a longer list, such as a vocabulary, only a hash is compared.
_LISTED_MAX = 64
_SAME = "Pass the same on every rank."
_SAME_MODEL = (
    "Build the same model on every rank, and adapt layers to the same data; leave out of a layer's "
    "get_config what is to differ."
)


class Settings(NamedTuple):
    """Settings that must be equal on all ranks."""

    what: str  # names them in an error, such as ``arguments of rr.fit``; may differ between ranks
    found: Mapping[str, str]  # settings as text, by name
    remedy: str = _SAME


def require_same_settings(listed: Sequence[Settings], ring: Communicator) -> None:
    """MismatchError, on all ranks, unless `listed` are equal. Collective; a hash of equal ones.

    After the first there may be none on some ranks: these do not know the model.
    """
    if ring.size > 1:
        refuse_unlike(listed, ring.all_gather_object(digest_of(listed)), ring)


def digest_of(listed: Sequence[Settings]) -> int:
    """A hash of `listed`."""
    return signature_of(*(sorted(settings.found.items()) for settings in listed))


def refuse_unlike(listed: Sequence[Settings], digests: Sequence[int], ring: Communicator) -> None:
    """MismatchError, on all ranks, if the `digests` of all differ; `listed` has this rank's.

    Collective only then. At a newcomer it is raised there alone.
    """
    of_job = compared(ring, [list(settings) for settings in listed])
    if len(set(digests)) > 1:
        what, first = "comparison of settings", ring.members[0]
        refuse(ring, _difference(first, of_job, ring.config.rank, listed), what)
        agree(ring, listed, _difference, what)


def _difference(first: int, ours: Any, rank: int, theirs: Any) -> Difference | None:
    missing: Any = (None, {}, _SAME_MODEL)
    pairs = list(itertools.zip_longest(ours, theirs, fillvalue=missing))
    known = len(pairs) if min(len(ours), len(theirs)) > 1 else 1
    for (what, here, remedy), (other, there, _) in pairs[:known]:
        names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if names:
            unequal = [(n, here.get(n, "absent"), there.get(n, "absent")) for n in names[:_SHOWN]]
            differ = [f"{n} is {a} on rank {first} and {b} on rank {rank}" for n, a, b in unequal]
            text = f"found different {what or other}: {'; '.join(differ)}"
            return Difference(rank, text, remedy)
    return None


def settings_in(value: Any, name: str = "") -> dict[str, str]:
    """The numbers and texts in `value`, as text, by where they are: ``{"momentum": "0.9"}``."""
    # All of what is nested, or has a `get_config`; only the name or type of other objects.
    if value is None or isinstance(value, (bool, int, float, str, np.generic)):
        plain = value.item() if isinstance(value, np.generic) else value
        return {name: repr(plain)}
    if isinstance(value, Mapping):
        kind = str(value.get("class_name"))
        if kind == "__lambda__":
            return {name: "a lambda"}  # Its code has the path of its file.
        if kind.endswith("DTypePolicy"):
            return {name: repr(value["config"].get("name", value["config"]))}
        parts = {str(key): part for key, part in value.items() if key not in _OF_NO_EFFECT}
    elif isinstance(value, (list, tuple)):
        if len(value) > _LISTED_MAX and not isinstance(value[0], (Mapping, list, tuple)):
            return {name: f"{len(value)} values ({signature_of(*value):x})"}
        parts = {str(index): part for index, part in enumerate(value)}
    elif hasattr(value, "get_config"):
        own = {name: type(value).__name__}
        try:
            return {**settings_in(value.get_config(), name), **own}
        except Exception:  # The user's own class may have none that works.
            return own
    else:
        return {name: getattr(value, "__name__", type(value).__name__)}
    texts: dict[str, str] = {}
    for key, part in parts.items():
        texts |= settings_in(part, f"{name}.{key}" if name else key)
    return texts


def settings_of_optimizer(optimizer: keras.Optimizer) -> dict[str, str]:
    """Describe a Keras optimizer, without a constant learning rate, which ranks copy."""
    if isfunction(private.learning_rate_of(optimizer)):
        return {"optimizer": type(optimizer).__name__}  # Keras warns where a lambda is described.
    texts = settings_in(optimizer, "optimizer").items()
    kept = [(name, text) for name, text in texts if name.rpartition(".")[2] != "learning_rate"]
    return {name.removeprefix("optimizer."): text for name, text in kept}


def settings_of_model(model: keras.Model) -> list[Settings]:
    """Describe a built model's configuration, layer by layer: by their order, not their names.

    Of a layer whose `get_config` does not work there is the class alone. Seeds are left out:
    initial weights are rank 0's anyway, and random layers are to differ
    (`ringreduce.keras.checks.seeds`).
    """
    layers = [model, *private.layers_of(model)]
    # First those without others in them, which tell best where a difference is.
    return [_settings_of_layer(layer) for layer in sorted(layers, key=private.has_layers)]


def _settings_of_layer(layer: keras.Layer) -> Settings:
    texts = {"class": type(layer).__name__}
    if not any(map(_is_unwieldy, (layer, *private.layers_of(layer)))):
        with contextlib.suppress(Exception):  # A user's class may have none that works.
            texts |= settings_in(layer.get_config())
    texts |= saved_beside_weights(layer, by_keras=True)
    kept = {name: text for name, text in texts.items() if "seed" not in name.rpartition(".")[2]}
    return Settings(f"models: layer {layer.name!r}", kept, _SAME_MODEL)


def saved_beside_weights(layer: keras.Layer, *, by_keras: bool) -> dict[str, str]:
    """A hash of each file and array that `layer` saves and that is no variable, by name.

    Such as an adapted vocabulary. Of Keras's own layers, where it must be equal, or of others.
    """
    kind = type(layer)
    methods = [getattr(kind, "save_assets", None), kind.save_own_variables]
    is_known = all(m is None or private.is_of_keras(m) for m in methods)
    # Known ones that have variables save these alone.
    is_plain = methods == [None, keras.Layer.save_own_variables] or (is_known and layer.variables)
    if is_plain or is_known != by_keras:
        return {}
    store: dict[str, Any] = {}
    with contextlib.suppress(Exception), TemporaryDirectory() as folder:  # It may not be adapted.
        layer.save_own_variables(store)
        store = {n: np.asarray(v).tobytes() for n, v in store.items() if not hasattr(v, "path")}
        if methods[0] is not None:
            layer.save_assets(folder)
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        store |= {str(file.relative_to(folder)): file.read_bytes() for file in files}
    return {name: f"{len(data)} bytes ({signature_of(data):x})" for name, data in store.items()}


def _is_unwieldy(layer: keras.Layer) -> bool:
    """Whether its configuration lists a table of initial values, or has a lambda."""
    # Keras would warn of them. To ignore that would make Python repeat others that it shows once.
    parts, constant = vars(layer).values(), keras.initializers.Constant
    tables = [part for part in parts if isinstance(part, constant)]
    has_lambda = any(isfunction(part) and part.__name__ == "<lambda>" for part in parts)
    return has_lambda or any(np.size(table.value) > _LISTED_MAX for table in tables)
