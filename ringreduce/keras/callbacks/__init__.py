"""Callbacks for `model.fit` that make all ranks act alike; begin with `Together`."""

from typing import NoReturn

from ringreduce.keras.advice import advice_on_name
from ringreduce.keras.callbacks.profile import Profile
from ringreduce.keras.callbacks.rank_zero import OnRankZero
from ringreduce.keras.callbacks.replicas import VerifyReplicas
from ringreduce.keras.callbacks.together import Together

__all__ = ["OnRankZero", "Profile", "Together", "VerifyReplicas"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(advice_on_name(__name__, name))
