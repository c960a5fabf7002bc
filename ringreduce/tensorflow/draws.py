"""What TensorFlow's random ops draw in a training step: other numbers on each rank, or the same.

An op such as that of ``tf.random.normal`` has two seeds, which are fixed when it is traced: that of
its graph, from `tf.random.set_seed`, and its own number there. A program seeds all ranks alike, so
they would draw the same noise for other rows. Within `apart` a graph has another seed on each rank.
Only graphs: what is drawn eagerly, or under `tf.init_scope`, may be weights or an order of data.

Where we do not trace the step, or XLA compiles it, whose draws follow from no seed and begin alike
in every process (`private.XLA_DRAWS_ALIKE`), ranks may draw the same: `drawn` lists what may.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import tensorflow as tf

from ringreduce.pure.seeds import folded
from ringreduce.tensorflow import private

# The seeds that graphs had before `apart`.
_plain: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class _Eager(threading.local):
    began: str | None = None  # what tells the seeds, before the step that is watched


_eager = _Eager()


class Draw(NamedTuple):
    """Random numbers that a step draws.

    Attributes:
        seeds: two ranks with the same draw the same.
        op: that draws them; None: some that were run eagerly.
    """

    seeds: str
    op: Any = None


@contextlib.contextmanager
def apart(rank: int) -> Iterator[None]:
    """Within the block, while tracing, what is traced draws other numbers than on other ranks."""
    graph = tf.compat.v1.get_default_graph()
    if graph.seed is None:  # Nor are there seeds then that ranks could have in common.
        yield
        return
    _plain[graph] = graph.seed
    with _seeded(graph, folded(graph.seed, rank)):
        yield


@contextlib.contextmanager
def alike() -> Iterator[None]:
    """Within the block what is traced draws the same on all ranks, also within `apart`."""
    graphs = private.graphs_being_traced()
    seed = next((_plain[graph] for graph in graphs if graph in _plain), None)
    with _seeded(graphs[0], seed) if seed is not None else contextlib.nullcontext():
        yield


def end_apart() -> None:
    """What is traced from now on in this graph draws the same on all ranks."""
    graphs = private.graphs_being_traced()
    seed = next((_plain[graph] for graph in graphs if graph in _plain), None)
    if seed is not None:
        graphs[0].seed = seed


@contextlib.contextmanager
def _seeded(graph: Any, seed: int) -> Iterator[None]:
    before, graph.seed = graph.seed, seed
    try:
        yield
    finally:
        graph.seed = before


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Within the block, an eager step, `drawn` knows what it draws."""
    _eager.began = private.eager_seeds()
    try:
        yield
    finally:
        _eager.began = None


def drawn() -> list[Draw]:
    """Draws of rows so far: in the functions that are being traced, or in an eager step.

    Only what follows from seeds. Numbers of which there are as many in any batch are left out: one
    process draws them once for all rows, too.
    """
    if tf.executing_eagerly():
        began = _eager.began
        return [] if began in (None, private.eager_seeds()) else [Draw(f"eager {began}")]
    graphs = private.graphs_being_traced()
    seen, draws = set(map(id, graphs)), []
    for graph in graphs:
        # Of a function that is called, it is noted at the graph around it that it is compiled.
        by_xla = bool(private.is_compiled_by_xla(graph.outer_graph))
        draws += _drawn_in(graph, seen, by_xla=by_xla)
    return draws


def _drawn_in(graph: Any, seen: set[int], *, by_xla: bool, is_repeated: bool = False) -> list[Draw]:
    draws = []
    for op in graph.get_operations():
        if _takes_seeds(op.type) and (is_repeated or _is_of_rows(op)):
            is_of_xla = by_xla or private.is_op_of_xla(op)
            seeds = "XLA" if is_of_xla else f"{op.get_attr('seed')} {op.get_attr('seed2')}"
            if is_of_xla and not private.XLA_DRAWS_ALIKE:
                continue
            if seeds != "0 0":  # Of none: each process draws its own.
                draws.append(Draw(seeds, op))
    for inner in private.graphs_in(graph):
        if id(inner) not in seen:
            seen.add(id(inner))
            is_loop = isinstance(inner, private.WhileBodyFuncGraph)
            draws += _drawn_in(inner, seen, by_xla=by_xla, is_repeated=is_loop)
    return draws


@cache
def _takes_seeds(kind: str) -> bool:
    """Whether ops of that type draw random numbers by two seeds."""
    # Candidates, as for a sampled softmax, are drawn once for all rows.
    names = private.attributes_of(kind)
    return {"seed", "seed2"} <= names and "range_max" not in names


def _is_of_rows(op: Any) -> bool:
    shape = op.outputs[0].shape
    return shape.rank is None or (shape.rank > 0 and shape[0] != 1)
