"""Data-parallel training for Keras 3 on TensorFlow: wrap the optimizer, shard the data.

import keras, ringreduce.keras as rr

comm = rr.init()
model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss=...)
model.fit(rr.shard(dataset))
"""

import keras

from ringreduce.errors import ConfigError
from ringreduce.keras import callbacks
from ringreduce.keras.callbacks import verify_replicas
from ringreduce.keras.data import shard
from ringreduce.keras.optimizer import DistributedOptimizer, broadcast_variables
from ringreduce.keras.saving import load_model
from ringreduce.process import (
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "DistributedOptimizer",
    "broadcast_variables",
    "callbacks",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "shard",
    "shutdown",
    "size",
    "verify_replicas",
]

if keras.backend.backend() != "tensorflow":
    raise ConfigError(
        f"ringreduce.keras works on the TensorFlow backend, not on {keras.backend.backend()}",
        remedy="Set KERAS_BACKEND=tensorflow, or use ringreduce.Communicator directly.",
    )
