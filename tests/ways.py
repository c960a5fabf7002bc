"""Functions run eagerly, in a graph, and compiled by XLA, which may call the ring."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringreduce.effects import native
from tests.ranks import on_ranks

__all__ = ["WAYS", "assert_equal", "by", "needs_xla", "outcomes", "plain", "wrapped"]

# XLA is given the ring by the native library.
needs_xla = pytest.mark.skipif(native.library() is None, reason="without the native library")
WAYS = ("eager", "graph", pytest.param("jit", marks=needs_xla))


def by(
    *ways: str,
    sizes: Sequence[int] = (1, 3),
    full: Sequence[str] = (),
    rare: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a function of `how` a test that runs in each of the ways on 2 ranks.

    In `make test-full` also on those `sizes`, and on them in the ways of `full` too; there alone in
    those of `rare`.
    """
    marks_of = {how: (pytest.mark.full,) if how in rare else () for how in ways}
    chosen = [(2, how, marks_of[how]) for how in ways]
    chosen += [(size, how, (pytest.mark.full,)) for size in sizes for how in (*ways, *full)]
    cases = [
        pytest.param(size, how, marks=(*marks, needs_xla) if how == "jit" else marks)
        for size, how, marks in chosen
    ]
    return lambda test: pytest.mark.parametrize(("size", "how"), cases)(on_ranks()(test))


def wrapped(how: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `function` eagerly, in a graph, or compiled.

    Without AutoGraph, which takes a tenth of a second for each.
    """
    if how == "eager":
        return function
    made: Callable[..., Any] = tf.function(function, autograph=False, jit_compile=how == "jit")
    return made


def outcomes(how: str, *actions: Callable[[], Any]) -> list[Any]:
    """Run the actions in one function, twice; return the results of the second run, as lists.

    The second run is from its trace. One function, since to trace each takes long.
    """
    step = wrapped(how, lambda: [action() for action in actions])
    step()
    return [plain(result) for result in step()]


def assert_equal(how: str, *cases: tuple[Callable[[], Any], Any]) -> None:
    """Compare what actions return with the numbers beside them, in float32 if those are not exact.

    Actions and numbers are those of this rank.
    """
    wanted = [np.float32(numbers).tolist() for _, numbers in cases]
    assert outcomes(how, *(action for action, _ in cases)) == wanted


def plain(value: Any) -> Any:
    """Tensors and variables as lists of floats, in the structure that they are in."""
    if isinstance(value, tf.IndexedSlices):
        value = tf.convert_to_tensor(value)
    if isinstance(value, tf.Tensor | tf.Variable | keras.Variable):
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        return value.astype(np.float64).tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value
