"""Training that goes on when ranks are lost: loops of one's own, and what ranks do together."""

from typing import NoReturn

from ringreduce.keras.advice import advice_on_name
from ringreduce.keras.elastic.leaving import Stopped
from ringreduce.keras.elastic.loops import KerasState, State, run

__all__ = ["KerasState", "State", "Stopped", "run"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(advice_on_name(__name__, name))
