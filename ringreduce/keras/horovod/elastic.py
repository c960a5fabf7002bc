"""Horovod's names for `ringreduce.keras.elastic`."""

from ringreduce.keras.elastic import KerasState, State, run

__all__ = ["KerasState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

TensorFlowKerasState, TensorFlowState = KerasState, State
