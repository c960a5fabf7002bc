"""Loading a model so that it trains on over the ring.

A model that was trained under `DistributedOptimizer` is saved by Keras's own means:
``model.save``, ``model.save_weights``, `tf.train.Checkpoint`, `keras.callbacks.ModelCheckpoint`.
The files hold the optimizer that was wrapped, with its state, and nothing of ours, so they load
where ringreduce is not installed, and those of plain Keras load here.
"""

from __future__ import annotations

from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.normalization import SyncBatchNormalization
from ringreduce.keras.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    path: Any,
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    communicator: Communicator | None = None,
    sync_batch_normalization: bool = False,
    **options: Any,
) -> Any:
    """Load a model with `keras.models.load_model` and wrap its optimizer.

    Training goes on as if it had not been interrupted: the optimizer comes with its state. At
    the next step all ranks receive rank 0's weights and state, so a file that only some of them
    have must be loaded by all, or by rank 0 into a model that the others built alike.

    What `keras.models.load_model`, `keras.models.clone_model` or a copy of a model have is the
    plain optimizer: trained like that, ranks would drift apart. Wrap it, as this function does.

    Args:
        path: as Keras takes it: a ``.keras`` file, however the model was trained.
        custom_objects: names and classes or functions that the file mentions and Keras does not
            know, a custom optimizer's too.
        compile: False: without loss and optimizer; nothing is wrapped.
        safe_mode: False: code that the file contains (lambdas) may run.
        communicator: whose ranks; the process's default by default.
        sync_batch_normalization: make `SyncBatchNormalization` of the file's BatchNormalization
            layers, as which they are saved.
        options: further arguments of `DistributedOptimizer`.

    Returns:
        The model. Its optimizer is a `DistributedOptimizer`, or None where the file has none.

    Raises:
        ValueError: the file is none, as Keras says it.
        ConfigError: as `DistributedOptimizer`.
    """
    if sync_batch_normalization:
        custom_objects = {"BatchNormalization": SyncBatchNormalization, **(custom_objects or {})}
    model = keras.models.load_model(
        path, custom_objects=custom_objects, compile=compile, safe_mode=safe_mode
    )
    optimizer = getattr(model, "optimizer", None)
    # A model's own `compile_from_config` may have wrapped it.
    if optimizer is not None and not isinstance(optimizer, DistributedOptimizer):
        model.optimizer = DistributedOptimizer(optimizer, communicator, **options)
    return model
