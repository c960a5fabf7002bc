"""Values that variables had at a point, held to find out later which of them were changed.

Holding a value copies nothing: a variable whose value somebody holds is given other memory when it
changes, so where the memory is the same nothing was assigned. Frozen weights cost a look each, not
a hash of all their bytes.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ringreduce.tensorflow.variables import plain_variable, read


class Held:
    """The values of `variables`, `keras.Variable` or `tf.Variable`, as they are now.

    A step must not begin while values of weights are held that it takes from memory which it fills
    again (`tensorflow/sharding.py`).
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        # By identity, since variables compare by value.
        plain = map(plain_variable, variables)
        self._values = {id(variable): (variable, read(variable)) for variable in plain}

    def is_touched(self, variable: Any) -> bool:
        """Whether something was assigned to it since then, be it what it had; also if not held."""
        plain = plain_variable(variable)
        held, before = self._values.get(id(plain), (None, None))
        return held is not plain or _address(before) != _address(read(plain))

    def is_changed(self, variable: Any) -> bool:
        """Whether its bytes are others than then; also of one that is not held."""
        if not self.is_touched(variable):
            return False
        plain = plain_variable(variable)
        held, before = self._values.get(id(plain), (None, None))
        return held is not plain or _bytes(before) != _bytes(read(plain))

    def any_is_changed(self) -> bool:
        """Whether one of those that are held is."""
        return any(self.is_changed(variable) for variable, _ in self._values.values())

    def put_back(self) -> None:
        """Assign these values again to the variables that were touched since then."""
        for variable, value in self._values.values():
            if self.is_touched(variable):
                variable.assign(value)


def _address(value: Any) -> tuple[int, int]:
    """Where a tensor's elements are; of one on another device, of a copy that is made here."""
    array = np.asarray(value)
    return array.__array_interface__["data"][0], array.nbytes


def _bytes(value: Any) -> bytes:
    return np.asarray(value).tobytes()
