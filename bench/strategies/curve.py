"""How accurate a model becomes while it trains; the time of the tests is not counted."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from bench.strategies.tasks import Data, accuracy


class Curve:
    """(step, seconds of training, accuracy), after every so many steps.

    Time begins at the end of the first step, in which the training is compiled.

    Args:
        predict: from inputs to logits, with the weights of now.
        data: what is tested.
        every, offset: it tests after the steps whose number modulo `every` is `offset`.
        together: returns once all ranks have tested, so that none has a start.
    """

    def __init__(
        self,
        predict: Callable[[np.ndarray], np.ndarray],
        data: Data,
        every: int,
        offset: int = 0,
        together: Callable[[], None] = lambda: None,
    ) -> None:
        self._predict, self._data = predict, data
        self._every, self._offset, self._together = every, offset % every, together
        self._seconds = self._since = 0.0
        self.points: list[tuple[int, float, float]] = []

    def after(self, step: int) -> None:
        """To be called at the end of each step; the first is 1."""
        if step == 1:
            self._since = time.perf_counter()
        elif step % self._every == self._offset:
            self._seconds += time.perf_counter() - self._since
            self.points.append((step, self._seconds, self.tested()))
            self._together()
            self._since = time.perf_counter()

    def tested(self) -> float:
        """The accuracy now."""
        return accuracy(self._predict(self._data.test_inputs), self._data.test_labels)
