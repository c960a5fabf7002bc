"""Horovod's names for `ringreduce.keras.elastic`."""

from typing import Any

from ringreduce.keras import elastic
from ringreduce.keras.elastic import KerasState, State, Stopped, run

__all__ = ["KerasState", "State", "Stopped", "TensorFlowKerasState", "TensorFlowState", "run"]

TensorFlowKerasState, TensorFlowState = KerasState, State


def __getattr__(name: str) -> Any:
    return getattr(elastic, name)
