"""Which variables eager ops of this thread write to, told by TensorFlow with each op.

It costs nothing where no op runs, whatever the number of variables; to find it out by looking at
all of them before and after takes 30 us for each.
"""

from collections.abc import Iterable
from typing import Any

from ringreduce.tensorflow import private
from ringreduce.tensorflow.variables import plain_variable

_READS = ("ReadVariableOp", "VarIsInitializedOp", "VariableShape")
_GATHERS = "ResourceGather"


class Written:
    """Which of `variables`, `keras.Variable` or `tf.Variable`, are written to in ``with`` blocks.

    An op that reads only is known by name; all others that get a variable count as writing it, and
    so does a function that uses it.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        self._handles = {id(plain_variable(variable).handle) for variable in variables}
        self._written: set[int] = set()

    def __enter__(self) -> None:
        """Notice from now on, in this thread; what was noticed before is forgotten."""
        self._written.clear()
        private.add_op_callback(self._see)

    def __exit__(self, *_: object) -> None:
        private.remove_op_callback(self._see)

    def _see(
        self, op: Any, inputs: Any, _: Any, __: Any, op_name: Any = None, graph: Any = None
    ) -> None:
        kind = private.kind_of(op)
        if graph is None and kind not in _READS and not kind.startswith(_GATHERS):
            self._written |= self._handles.intersection(map(id, inputs))

    def is_touched(self, variable: Any) -> bool:
        """Whether something was assigned to it, be it what it had."""
        return id(plain_variable(variable).handle) in self._written

    def is_changed(self, variable: Any) -> bool:
        """The same: what it had is not known."""
        return self.is_touched(variable)

    def any_is_changed(self) -> bool:
        """Whether one of them is."""
        return bool(self._written)
