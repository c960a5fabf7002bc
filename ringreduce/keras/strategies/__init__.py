"""When gradients are communicated, and when the wrapped optimizer applies the result."""

from ringreduce.keras.strategies.accumulate import Accumulate
from ringreduce.keras.strategies.every_step import EveryStep
from ringreduce.keras.strategies.step import Reducer, Step, Strategy

__all__ = ["Accumulate", "EveryStep", "Reducer", "Step", "Strategy"]
