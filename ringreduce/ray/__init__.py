"""Ray starts the ranks: `RingReduceTrainer` for Ray Train, `run` for a function on a cluster.

from ringreduce.ray import RingReduceTrainer

def train():
    import ringreduce.keras as rr

    comm = rr.init()
    ...

RingReduceTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=4)).fit()
"""

from typing import Any

try:
    import ray.train  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"ringreduce.ray needs Ray, and {error.name} is not installed: "
        'pip install "ringreduce[ray]"',
        name=error.name,
    ) from error

from ringreduce.ray.function import run
from ringreduce.ray.trainer import RingReduceConfig, RingReduceTrainer

__all__ = ["ReportCheckpoint", "RingReduceConfig", "RingReduceTrainer", "run"]


def __getattr__(name: str) -> Any:
    # Of all this, only the callback needs Keras.
    if name == "ReportCheckpoint":
        from ringreduce.ray.checkpoints import ReportCheckpoint

        return ReportCheckpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
