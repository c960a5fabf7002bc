"""Training that goes on when ranks are lost: loops of one's own, and what ranks do together."""

from ringreduce.keras.elastic.loops import KerasState, State, run

__all__ = ["KerasState", "State", "run"]
