"""Random numbers that eager ops draw: noted once for some rows, and given again by rows.

TensorFlow tells what each op of this thread gives, when it has been computed and before anything
has used it. There the numbers that a random op has drawn are written over, in memory that is the
op's own. So whatever draws gets the same number for a row, alone or with others: Keras's layers,
`tf.random`, generators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.tensorflow import private

_BFLOAT16 = tf.bfloat16.as_numpy_dtype

# Which make a key of a seed, and draw nothing.
_KEYS = ("GetKeyCounter", "GetAlg", "ReadAndSkip", "SeedGenerator")
_OTHERS = ("Multinomial", "TruncatedNormal", "StatefulUniform", "StatefulStandardNormal")
# Functions, which TensorFlow names with underscores, and ops that call some: others may be in them.
_CALLS = ("__", "Call", "PyFunc", "Launch", "While", "If", "Case")
# What puts rows into another order gives each a place among those that are there.
_ORDERS = ("Shuffle",)


class Draws:
    """The draws of a run on `rows` rows; `unfit` names an op whose numbers are not by rows."""

    def __init__(self, rows: int) -> None:
        self._rows, self._drawn = rows, list[tuple[str, np.ndarray]]()
        self.unfit = ""

    def made(self) -> AbstractContextManager[None]:
        """Note what ops in the block draw of all rows; have it drawn again if it was noted."""
        return self.given(np.arange(self._rows)) if self._drawn else self._noted()

    @contextmanager
    def _noted(self) -> Iterator[None]:

        def note(kind: str, numbers: np.ndarray) -> None:
            if not (numbers.ndim and len(numbers) == self._rows):
                # No rows of this batch: one number for all of them.
                numbers[...] = numbers.reshape(-1)[:1]
            self._drawn.append((kind, numbers.copy()))

        with self._intercepted(note):
            yield

    @contextmanager
    def given(self, rows: np.ndarray) -> Iterator[None]:
        """Have ops in the block draw what was noted, of those of the `rows`."""
        left = iter(self._drawn)

        def give(kind: str, numbers: np.ndarray) -> None:
            known, whole = next(left, ("", numbers))
            is_alike = whole.ndim == numbers.ndim and whole.shape[1:] == numbers.shape[1:]
            if known != kind or not is_alike:
                self.unfit = self.unfit or kind
            elif whole.ndim and (len(whole), len(numbers)) == (self._rows, len(rows)):
                numbers[...] = whole[rows]
            elif whole.shape == numbers.shape:
                numbers[...] = whole
            else:
                numbers[...] = whole.reshape(-1)[:1]

        with self._intercepted(give):
            yield

    @contextmanager
    def _intercepted(self, see: Any) -> Iterator[None]:
        def called(
            op: Any, _: Any, __: Any, outputs: Any, op_name: Any = None, graph: Any = None
        ) -> None:
            kind = private.kind_of(op)
            if graph is not None or not _is_random(kind):
                return
            if any(order in kind for order in _ORDERS):
                self.unfit = self.unfit or kind
            for output in outputs:
                see(kind, _memory_of(output))

        private.add_op_callback(called)
        try:
            yield
        finally:
            private.remove_op_callback(called)


@contextmanager
def seen() -> Iterator[list[str]]:
    """The kinds of ops that the block runs eagerly and that may go on with random numbers later.

    Such an op's kernel, which TensorFlow keeps for the next with that seed, has a place in them.
    Stateless ops, such as those of Keras, have none.
    """
    kinds: list[str] = []

    def called(op: Any, _: Any, __: Any, ___: Any, op_name: Any = None, graph: Any = None) -> None:
        kind = private.kind_of(op)
        keeps_place = _is_random(kind) and not kind.startswith("Stateless")
        if graph is None and (keeps_place or any(name in kind for name in _CALLS)):
            kinds.append(kind)

    private.add_op_callback(called)
    try:
        yield kinds
    finally:
        private.remove_op_callback(called)


def _is_random(kind: str) -> bool:
    draws = "Random" in kind or any(name in kind for name in (*_OTHERS, *_ORDERS))
    return draws and not any(name in kind for name in _KEYS)


def _memory_of(tensor: Any) -> np.ndarray:
    """The numbers of a tensor that nothing has used yet, to write into; on the CPU alone."""
    kind = tensor.dtype.as_numpy_dtype
    # Python knows no bfloat16, but its bits, which are not copied.
    view = np.asarray(memoryview(tf.bitcast(tensor, tf.uint16) if kind is _BFLOAT16 else tensor))
    if view.size == 0:
        return np.empty(view.shape, kind)
    memory = (ctypes.c_char * view.nbytes).from_address(view.ctypes.data)
    numbers: np.ndarray = np.frombuffer(memory, kind)  # type: ignore[call-overload]
    return numbers.reshape(view.shape)
