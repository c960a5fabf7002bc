"""Data-parallel training over a ring of processes; see README.md.

Importing this starts and prints nothing, and imports neither TensorFlow nor Keras (see
`ringreduce.keras`). The ring, with numba, is imported on first use: the command line starts fast.
"""

import importlib
from typing import TYPE_CHECKING

from ringreduce._version import __version__
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import (
    ArrayError,
    ClosedError,
    ConfigError,
    CorruptionError,
    MismatchError,
    NativeError,
    NumericsError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    RendezvousError,
    RingReduceError,
    WorkerError,
)

if TYPE_CHECKING:
    from ringreduce.commands.launch.function import launch
    from ringreduce.communicator.communicator import Communicator
    from ringreduce.communicator.process import (
        default_communicator,
        init,
        is_initialized,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
    )
    from ringreduce.communicator.rank_zero import on_rank_zero
    from ringreduce.communicator.statistics import Statistics
    from ringreduce.effects.notice import leave
    from ringreduce.vocabulary.types import ReduceOp

__all__ = [
    "ArrayError",
    "ClosedError",
    "Communicator",
    "Config",
    "ConfigError",
    "CorruptionError",
    "MismatchError",
    "NativeError",
    "NumericsError",
    "PeerError",
    "PeerLostError",
    "PeerTimeoutError",
    "ProtocolError",
    "ReduceOp",
    "RendezvousError",
    "RingReduceError",
    "Statistics",
    "WorkerError",
    "__version__",
    "default_communicator",
    "init",
    "is_initialized",
    "launch",
    "leave",
    "local_rank",
    "local_size",
    "on_rank_zero",
    "rank",
    "shutdown",
    "size",
]

# The other names are imported on first use: these from here, all others from `process`.
_LATER = {
    "Communicator": "ringreduce.communicator.communicator",
    "Statistics": "ringreduce.communicator.statistics",
    "ReduceOp": "ringreduce.vocabulary.types",
    "launch": "ringreduce.commands.launch.function",
    "leave": "ringreduce.effects.notice",
    "on_rank_zero": "ringreduce.communicator.rank_zero",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _LATER.get(name, "ringreduce.communicator.process")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value
