"""Brings rows of tables that other ranks hold to this rank, and their gradients back.

    ids of this rank -> each once, in the order of their owners
        ids to their owners         counts of all tables travel ahead, once
        rows to those who asked     by the same counts
        gradients to the owners     by the same counts, when the tape asks for them

Tables of one exchange may differ in width; they share one message per rank and direction.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import fail
from ringreduce.tensorflow import xla
from ringreduce.tensorflow.differentiable import NONE, Sign, collective
from ringreduce.tensorflow.python_calls import call
from ringreduce.vocabulary.errors import ArrayError, ConfigError

_WIDE = (tf.float32, tf.float64)


def rows_of_all(layers: Sequence[Any], ids: Sequence[Any]) -> list[Any]:
    """Return the rows with `ids`, int tensors of any shape, of the tables of `ShardedEmbedding`s.

    Collective. The layers have one communicator, and one compute dtype, in which rows travel. The
    results have the shapes of `ids` and a row, and gradients that are the tables' slices.
    ArrayError, on all ranks and before anything is used, if an id is outside of a table;
    ConfigError under ``jit_compile=True``.
    """
    ring, dtype = layers[0].ring(), layers[0].compute_dtype
    if xla.is_compiling():
        raise ConfigError(
            f"cannot look up rows of {layers[0].name} inside a function compiled with "
            "jit_compile=True, which fixes all shapes: how many ids go to each rank is known only "
            "when it runs",
            **ring.config.who,
            remedy="Compile the model with jit_compile=False.",
        )
    tables = [layer._embeddings.value for layer in layers]
    once = [tf.unique(tf.reshape(tf.cast(table_ids, tf.int64), [-1])) for table_ids in ids]
    *told, counts = _exchange_ids([unique.y for unique in once], layers, ring)
    positions, places = told[: len(ids)], told[len(ids) :]
    answers = []
    for table, place in zip(tables, places, strict=True):
        answers.append(tf.cast(tf.gather(table, place), dtype))
        # Else TensorFlow would copy the table with each later assignment (keras#15376). Where Keras
        # learns shapes before it makes variables, it gives values in their place.
        if isinstance(table, tf.Variable):
            tf.raw_ops.DisableCopyOnRead(resource=table.handle)
    came = _exchange_rows(answers, counts, ring)
    results = []
    by_table = zip(came, positions, once, ids, tables, strict=True)
    for values, position, unique, table_ids, table in by_table:
        rows_of_own = _spread(values, tf.gather(position, unique.idx))
        vectors = tf.reshape(rows_of_own, tf.concat([tf.shape(table_ids), table.shape[1:]], 0))
        results.append(tf.ensure_shape(vectors, table_ids.shape.concatenate(table.shape[1:])))
    return results


def _exchange_ids(ids: Sequence[Any], layers: Sequence[Any], ring: Communicator) -> list[Any]:
    """Exchange ids; return by table where each one's row will be, rows asked of this rank, counts.

    Counts have the shape (ranks, ranks, tables): the ids that each rank sends to each.
    """
    size, tables = ring.size, len(ids)

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        owners = [ids_here % size for ids_here in arrays]
        # The last two numbers are an id that is in no table, and which one lacks it.
        bad = [
            [int(ids_here[(ids_here < 0) | (ids_here >= layer.input_dim)][0]), number]
            for number, (ids_here, layer) in enumerate(zip(arrays, layers, strict=True))
            if ids_here.size and (ids_here.min() < 0 or ids_here.max() >= layer.input_dim)
        ]
        told = np.zeros((size, size * tables + 2), np.int64)
        asked = np.stack([np.bincount(owner, minlength=size) for owner in owners], 1)
        told[ring.rank, :-2] = asked.reshape(-1)
        told[ring.rank, -2:] = bad[0] if bad else (0, -1)
        # One meeting, where an all-gather takes two.
        ring.all_reduce(told)
        _refuse_bad(told[:, -2:], layers, ring)
        counts = told[:, :-2].reshape(size, size, tables)
        orders = [np.argsort(owner, kind="stable") for owner in owners]
        by_owner = [ids_here[order] for ids_here, order in zip(arrays, orders, strict=True)]
        sent = _by_rank(by_owner, counts[ring.rank])
        came, _ = ring.all_to_all(sent, counts.sum(2))
        asked_of_us = _by_table(came, counts[:, ring.rank])
        return [*map(np.argsort, orders), *(part // size for part in asked_of_us), counts]

    results: list[Any] = [*[((None,), tf.int64)] * (2 * tables), ((size, size, tables), tf.int64)]
    return call(ring, "look up rows", run, list(ids), results)


def _refuse_bad(bad: np.ndarray, layers: Sequence[Any], ring: Communicator) -> None:
    """ArrayError on all ranks if one has an id of no row; `bad`: by rank, the id and its table."""
    for rank, (value, number) in zip(ring.members, bad.tolist(), strict=True):
        if number >= 0:
            error = ArrayError(
                f"takes part in a look-up in which rank {rank} asks for id {value} of "
                f"{layers[number].name}, whose ids are 0 to {layers[number].input_dim - 1}",
                **ring.config.who,
                remedy="Look at what the model is fed; values that are in no vocabulary need "
                "a row of their own.",
            )
            raise fail(ring, error)


def _exchange_rows(values: Sequence[Any], counts: Any, ring: Communicator) -> list[Any]:
    """The rows for which this rank asked, by table, from `values`, for which the others asked."""
    widths = np.array([math.prod(value.shape[1:]) for value in values], np.int64)

    def exchange(flat: Any, elements: Any, of: Any) -> Any:
        def run(array: np.ndarray, elements: np.ndarray, sign: Sign) -> Any:
            sent, came = elements[ring.rank], elements[:, ring.rank]
            by_rank = _by_rank(np.split(array, np.cumsum(sent.sum(0))[:-1]), sent)
            signature = sign("rows of tables", *widths.tolist())
            received, _ = ring.all_to_all(by_rank, elements.sum(2), signature=signature)
            by_table = _by_table(received, came)
            return by_table[0] if len(by_table) == 1 else np.concatenate(by_table)

        def gradient(upstream: Any, number: Any) -> Any:
            return exchange(upstream, tf.transpose(elements, [1, 0, 2]), number)

        return collective(ring, "look up rows", run, gradient, flat, (None,), elements, of=of)

    flat = tf.concat([tf.reshape(rows, [-1]) for rows in values], 0)
    # The ranks that were asked now send.
    came = exchange(flat, tf.transpose(counts, [1, 0, 2]) * widths, NONE)
    ends = tf.reduce_sum(counts[ring.rank], 0) * widths
    pieces = zip(tf.split(came, ends, num=len(values)), values, strict=True)
    return [tf.reshape(piece, [-1, *value.shape[1:]]) for piece, value in pieces]


def _by_rank(tables: Sequence[np.ndarray], counts: np.ndarray) -> np.ndarray:
    """Order elements by rank, then by table; `counts` of elements have shape (ranks, tables)."""
    if len(tables) == 1:
        return tables[0]
    cut = [np.split(rows, np.cumsum(counts[:-1, n])) for n, rows in enumerate(tables)]
    return np.concatenate([parts[rank] for rank in range(len(counts)) for parts in cut])


def _by_table(came: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """The reverse, of what came from each rank: by table, rank after rank."""
    if (tables := counts.shape[1]) == 1:
        return [came]
    pieces = np.split(came, np.cumsum(counts.reshape(-1))[:-1])
    return [np.concatenate(pieces[number::tables]) for number in range(tables)]


@tf.custom_gradient
def _spread(values: Any, places: Any) -> Any:
    """``tf.gather(values, places)``; its gradient adds up in float32 at least, and is dense."""

    def gradient(upstream: Any) -> Any:
        wide = upstream.dtype if upstream.dtype in _WIDE else tf.float32
        total = tf.math.unsorted_segment_sum(tf.cast(upstream, wide), places, tf.shape(values)[0])
        return tf.cast(total, values.dtype), None

    return tf.gather(values, places), gradient
