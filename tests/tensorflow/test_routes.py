"""Gradients through the native ops, in real processes: the same bits as through Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringreduce.effects import native
from tests.rings import Ring
from tests.scope import in_full

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(native.library() is None, reason="needs the native library"),
]

PREAMBLE = """
import gc
import tensorflow as tf
from ringreduce.tensorflow import GradientBridge, bridge, ops

ring = join()
SHAPES = [(0,), (), (1,), (7, 3), (1009,), (64, 64), (2, 0, 3), (100_003,)]
paths = [f"variable {number}" for number in range(len(SHAPES))]

def through_graph(gradients, native, **options):
    '''Means of `gradients` by a fresh bridge, in a function, twice: memory is used again.'''
    bridge.ops = ops if native else NoOps
    made = GradientBridge(1024)
    step = tf.function(lambda *parts: made.mean(ring, list(parts), paths))
    first, again = step(*gradients), step(*gradients)
    assert all(bool(tf.reduce_all(a == b)) for a, b in zip(first, again))
    used = any(op.type == "RingreduceWait" for op in
               step.get_concrete_function(*gradients).graph.get_operations())
    assert used is native
    return [part.numpy() for part in first]

class NoOps:
    are_available = staticmethod(lambda: False)
"""


@pytest.mark.parametrize(
    ("size", "transport"), [(2, "shm"), (2, "zmq"), in_full(3, "shm"), in_full(3, "zmq")]
)
def test_means_of_every_dtype_are_exact_and_alike_through_both_bridges(
    tmp_path: Path, size: int, transport: str
) -> None:
    program = """
for dtype in (tf.float32, tf.float64, tf.float16, tf.bfloat16):
    whole = [
        [tf.cast(tf.reshape(tf.range(int(np.prod(s))) % 7 + 3 * rank, s), dtype) for s in SHAPES]
        for rank in range(SIZE)
    ]
    total = [sum(parts[1:], parts[0]) for parts in zip(*whole)]
    expected = [(tf.cast(t, tf.float64) / SIZE).numpy().astype(dtype.as_numpy_dtype) for t in total]
    means = through_graph(whole[RANK], native=True)
    assert [m.dtype for m in means] == [e.dtype for e in expected]
    assert [m.shape for m in means] == [e.shape for e in expected]
    for mean, due in zip(means, expected):
        assert np.array_equal(mean, due), dtype
    tf.random.set_seed(RANK)
    noise = [tf.cast(tf.random.normal(shape), dtype) for shape in SHAPES]
    one, other = through_graph(noise, native=True), through_graph(noise, native=False)
    assert [a.tobytes() for a in one] == [b.tobytes() for b in other], dtype
say("right")
hold()
"""
    with Ring(tmp_path, size, PREAMBLE + program, transport=transport) as ring:
        ring.wait("right")
        ring.release()


def test_gradients_of_several_dtypes_and_none_travel_in_one_step(tmp_path: Path) -> None:
    program = """
made = GradientBridge(1 << 20)

@tf.function
def step(x):
    parts = [x, None, tf.cast(x, tf.float16), tf.cast(x, tf.float64)]
    return [m for m in made.mean(ring, parts, ["a", "b", "c", "d"]) if m is not None]

for number in range(3):
    means = step(tf.ones(5) * (RANK + number))
    assert [m.dtype for m in means] == [tf.float32, tf.float16, tf.float64]
    assert all(bool(tf.reduce_all(m == 0.5 + number)) for m in means)
statistics = ring.statistics()
assert statistics.reducing_s > 0
say("right")
hold()
"""
    with Ring(tmp_path, 2, PREAMBLE + program, transport="auto") as ring:
        ring.wait("right")
        ring.release()


def test_graph_whose_optimizer_has_gone_says_so(tmp_path: Path) -> None:
    program = """
made = GradientBridge(1 << 20)
concrete = tf.function(
    lambda x: made.mean(ring, [x], ["a"])
).get_concrete_function(tf.TensorSpec([3], tf.float32))
concrete(tf.ones(3))
memory = ring._session.engine._plans
assert len(memory) == 1
made._routes.clear()
gc.collect()
assert len(memory) == 0
attempt("result", lambda: concrete(tf.ones(3)))
hold()
"""
    with Ring(tmp_path, 2, PREAMBLE + program, transport="auto") as ring:
        for fact in ring.wait("result"):
            assert "the plan was given up with the optimizer it was made for" in fact["text"]
