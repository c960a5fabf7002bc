"""When ranks combine what they learn, and how; for strategies of one's own too."""

from ringreduce.keras.strategies.base import Accumulate, EveryStep, Running, Step, Strategy, Use

__all__ = ["Accumulate", "EveryStep", "Running", "Step", "Strategy", "Use"]
