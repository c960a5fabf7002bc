"""Other packages and backends, with which N ranks would train apart, are refused."""

import sys
from collections.abc import Callable
from typing import Any

from ringreduce.unchanged.job import job
from ringreduce.unchanged.written import alone_on_host
from ringreduce.vocabulary.errors import ConfigError

WITHOUT = "Start it without --unchanged, and"
# By package: the class, its methods, and the remedy; without any, the import is refused.
PACKAGES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "horovod": ("", (), f"{WITHOUT} import ringreduce.keras.horovod in place of horovod."),
    "tf_keras": ("Model", ("fit", "train_on_batch"), "Use Keras 3: without TF_USE_LEGACY_KERAS."),
    "keras_tuner": (
        "Tuner",
        ("search",),
        f"{WITHOUT} call rr.fit in the model's own fit; or search in one process.",
    ),
}


def refuse(what: str, remedy: str) -> None:
    """ConfigError on several ranks: each would do `what` by itself."""
    config = job()
    if config.size > 1:
        text = f"{what}, which trains a model on each of {config.size} ranks apart"
        raise ConfigError(text, **config.who, remedy=remedy)


def require_tensorflow(keras: Any) -> None:
    """ConfigError on several ranks unless Keras has TensorFlow for its backend."""
    if (backend := keras.backend.backend()) != "tensorflow":
        refuse(f"has Keras on {backend}", "Set KERAS_BACKEND=tensorflow.")


def replace_in(package: str) -> None:
    """Refuse the training of a package that has been imported."""
    owner, methods, remedy = PACKAGES[package]
    if not owner:
        refuse(f"imports {package}", remedy)
    for name in methods:
        cls = getattr(sys.modules[package], owner)
        what = f"calls {package}.{owner}.{name}"
        setattr(cls, name, _refused(getattr(cls, name), what, remedy))


def download_once() -> None:
    """Have one process of a host at a time download by tensorflow_datasets."""
    builder = sys.modules["tensorflow_datasets"].core.DatasetBuilder
    builder.download_and_prepare = alone_on_host()(builder.download_and_prepare)


def _refused(original: Callable[..., Any], what: str, remedy: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        refuse(what, remedy)
        return original(*arguments, **options)

    return call
