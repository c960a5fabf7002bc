"""Callbacks for `model.fit` that make all ranks act alike; begin with `Together`."""

from typing import NoReturn

from ringreduce.keras.advice import advice_on_callback
from ringreduce.keras.callbacks.broadcast import (
    Broadcast,
    BroadcastGlobalVariablesCallback,
    VerifyReplicas,
)
from ringreduce.keras.callbacks.learning_rate import (
    LearningRateSchedule,
    LearningRateWarmup,
    linear_scaling,
)
from ringreduce.keras.callbacks.metric_average import MetricAverage
from ringreduce.keras.callbacks.profile import Profile
from ringreduce.keras.callbacks.together import OnRankZero, StopTogether, Together

__all__ = ["Broadcast", "LearningRateSchedule", "LearningRateWarmup", "MetricAverage"]
__all__ += ["OnRankZero", "Profile", "StopTogether", "Together", "VerifyReplicas"]
__all__ += ["BroadcastGlobalVariablesCallback", "LearningRateScheduleCallback"]
__all__ += ["LearningRateWarmupCallback", "MetricAverageCallback", "linear_scaling"]

# Horovod's names, so that its users' programs need only another import.
LearningRateScheduleCallback = LearningRateSchedule
LearningRateWarmupCallback = LearningRateWarmup
MetricAverageCallback = MetricAverage


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(advice_on_callback(name))
