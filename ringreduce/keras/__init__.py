"""Data-parallel training for Keras 3 on TensorFlow: wrap the optimizer, shard the data.

import keras, ringreduce.keras as rr

comm = rr.init()
model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss=...)
model.fit(rr.shard(dataset))

Where something takes a `communicator`, the default is the process's, which `init` makes.
"""

import atexit
from typing import NoReturn

import keras

from ringreduce.commands.launch.function import launch
from ringreduce.communicator.process import (
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ringreduce.communicator.rank_zero import on_rank_zero
from ringreduce.effects.notice import leave
from ringreduce.keras import callbacks, elastic, parts
from ringreduce.keras.advice import advice_on_name
from ringreduce.keras.callbacks.profile import warn_of_no_profile
from ringreduce.keras.checks.seeds import fold_seeds
from ringreduce.keras.checks.users_line import DataWarning, ParityWarning
from ringreduce.keras.checks.warnings import warn_of_ranks_apart
from ringreduce.keras.data.shard import shard
from ringreduce.keras.data.uneven import joined
from ringreduce.keras.layers.attention import ParallelMultiHeadAttention
from ringreduce.keras.layers.embedding import ShardedEmbedding
from ringreduce.keras.layers.normalization import SyncBatchNormalization
from ringreduce.keras.layers.split import ColumnParallelDense, RowParallelDense
from ringreduce.keras.optimizer.distributed import DistributedOptimizer
from ringreduce.keras.optimizer.first_step import broadcast_variables
from ringreduce.keras.optimizer.saving import load_model
from ringreduce.keras.optimizer.tape import DistributedGradientTape
from ringreduce.keras.pipeline.pipeline import Pipeline
from ringreduce.keras.strategies.base import Strategy
from ringreduce.keras.strategies.local_sgd import DiLoCo, LocalSGD
from ringreduce.keras.tensors import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    recv,
    reduce_scatter,
    send,
)
from ringreduce.keras.training.evaluate import evaluate, predict
from ringreduce.keras.training.fit import fit
from ringreduce.keras.weighting import step_weight
from ringreduce.tensorflow.low_rank import PowerSGD
from ringreduce.tensorflow.variables import verify_replicas
from ringreduce.vocabulary.errors import ConfigError

__all__ = ["init", "is_initialized", "launch", "leave", "local_rank", "local_size", "on_rank_zero"]
__all__ += ["rank", "shutdown", "size"]
__all__ += ["evaluate", "fit", "joined", "predict", "shard"]
__all__ += ["DistributedGradientTape", "DistributedOptimizer", "SyncBatchNormalization"]
__all__ += ["DiLoCo", "LocalSGD", "PowerSGD", "Strategy"]
__all__ += ["callbacks", "elastic", "fold_seeds"]
__all__ += ["broadcast_variables", "load_model", "step_weight", "verify_replicas"]
__all__ += ["Pipeline", "ShardedEmbedding", "parts"]
__all__ += ["ColumnParallelDense", "ParallelMultiHeadAttention", "RowParallelDense"]
__all__ += ["DataWarning", "ParityWarning"]
__all__ += ["all_gather", "all_reduce", "all_to_all", "broadcast"]
__all__ += ["recv", "reduce_scatter", "send"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(advice_on_name(__name__, name))


if keras.backend.backend() != "tensorflow":
    raise ConfigError(
        f"ringreduce.keras works on the TensorFlow backend, not on {keras.backend.backend()}",
        remedy="Set KERAS_BACKEND=tensorflow, or use ringreduce.Communicator directly.",
    )

atexit.register(warn_of_ranks_apart)
atexit.register(warn_of_no_profile)
