"""The generators of random numbers that Python and NumPy have for a whole process."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np


def random_states() -> list[Any]:
    """The states of both, in plain types."""
    version, numbers, following = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [[version, list(numbers), following], [kind, [int(key) for key in keys], *rest]]


def set_random_states(of_python: Sequence[Any], of_numpy: Sequence[Any]) -> None:
    """Go on with what `random_states` has given elsewhere."""
    version, numbers, following = of_python
    random.setstate((version, tuple(numbers), following))
    kind, keys, *rest = of_numpy
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
