"""Loads a model and wraps its optimizer, so that training continues over the ring.

A model trained under `DistributedOptimizer` is saved by Keras's own means: ``model.save``,
``model.save_weights``, `tf.train.Checkpoint`, `keras.callbacks.ModelCheckpoint`. The files hold the
wrapped optimizer with its state, and nothing of ours, so they load where ringreduce is not
installed, and those of plain Keras load here.
"""

from __future__ import annotations

from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.normalization import SyncBatchNormalization
from ringreduce.keras.optimizer import DistributedOptimizer


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

    Training continues as if it had not been interrupted: the optimizer keeps its state. At the next
    step all ranks receive rank 0's weights and state. So a file that only some ranks have must be
    loaded by all, or by rank 0 into a model that the others built alike.

    `keras.models.load_model`, `keras.models.clone_model` and copies of a model give the plain
    optimizer; trained like that, ranks would drift apart.

    Args:
        path, custom_objects, compile, safe_mode: as for `keras.models.load_model`; with
            ``compile=False`` nothing is wrapped.
        sync_batch_normalization: load the file's BatchNormalization layers as
            `SyncBatchNormalization`, which is saved under that name.
        communicator: of the optimizer, and of layers that are `SyncBatchNormalization`.
        options: further arguments of `DistributedOptimizer`.

    Returns:
        The model. Its optimizer is a `DistributedOptimizer`, or None where the file has none.

    Raises:
        ValueError: Keras's, for a file that holds no model.
        ConfigError: as `DistributedOptimizer`.
    """
    if sync_batch_normalization:
        custom_objects = {"BatchNormalization": SyncBatchNormalization, **(custom_objects or {})}
    model = keras.models.load_model(
        path, custom_objects=custom_objects, compile=compile, safe_mode=safe_mode
    )
    for layer in private.layers_of(model):
        if isinstance(layer, SyncBatchNormalization):
            layer.communicator = communicator
    optimizer = getattr(model, "optimizer", None)
    # A model's own `compile_from_config` may have wrapped it.
    if optimizer is not None and not isinstance(optimizer, DistributedOptimizer):
        model.optimizer = DistributedOptimizer(optimizer, communicator, **options)
    return model
