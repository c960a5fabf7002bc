"""Fingerprints of a dataset's elements as they pass, for ranks that divide it to compare.

Ranks that each take a part of a dataset must all see the same dataset: unseeded shuffling gives
every rank another order, and then some samples are used twice and others never. Reading ahead to
find out would change what is read, so the elements are fingerprinted on their way:

    dataset -> groups -> fingerprint of all so far -> single elements -> this rank's part
                          `- after each group `Communicator.claim`: the neighbours compare

The last fingerprint stands for all elements before it. Groups of small elements of equal shape are
compared one by one; of other elements the first 64, then every 64th.
"""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ringreduce
from ringreduce.communicator.communicator import Communicator

_PERIOD = 64
# A group of elements that are handled together has at most this many bytes.
_GROUP_BYTES = 1 << 20
_STRING_BYTES = 64  # a guess

_PACKAGES = tuple(str(Path(str(module.__file__)).parent) for module in (ringreduce, keras, tf))


def tapped(
    dataset: Any,
    what: str,
    communicator: Communicator,
    compared: Callable[[Any], Any] = lambda element: element,
) -> Any:
    """`dataset` with the same elements, which ranks compare as they are read.

    Not collective. A difference breaks the ring, with a MismatchError that names `what`, such as
    ``the dataset given to rr.shard``, and the caller's line. Costs a pass over each element's
    memory, and some microseconds for small ones. Elements without a fingerprint (datasets) pass
    unseen. Of each element, what `compared` returns is compared.
    """
    specs = tf.nest.flatten(compared(dataset.element_spec), expand_composites=True)
    if communicator.size == 1 or any(spec.dtype in (tf.variant, tf.resource) for spec in specs):
        return dataset
    passes = _Passes(what, communicator)
    length = _group_length(dataset)
    grouped = dataset if length == 1 else dataset.batch(length)
    zero = np.int64(0)

    def step(state: Any, element: Any) -> Any:
        number, count, fingerprint = state
        parts = tf.nest.flatten(compared(element), expand_composites=True)
        known = [tf.bitcast(fingerprint, tf.uint8), *map(_fingerprint, parts)]
        fingerprint = tf.bitcast(_fingerprint(tf.concat(known, 0)), tf.int64)
        more = 1 if length == 1 else tf.shape(parts[0], out_type=tf.int64)[0]
        total = count + more

        def note() -> Any:
            return tf.numpy_function(passes.note, [number, count, total, fingerprint], tf.int64)

        is_due = (length > 1) | (total <= _PERIOD) | (total % _PERIOD == 0)
        number = tf.cond(is_due, note, lambda: number)
        return (tf.ensure_shape(number, []), total, fingerprint), element

    noted = grouped.scan((zero, zero, zero), step)
    if length == 1:
        return noted
    elements = noted.unbatch()
    count = int(dataset.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        return elements
    return elements.apply(tf.data.experimental.assert_cardinality(count))


def _group_length(dataset: Any) -> int:
    """How many elements to handle at a time: 1 where their shapes may differ."""
    nbytes = 1
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
            return 1
        item = _STRING_BYTES if spec.dtype == tf.string else spec.dtype.size
        nbytes += int(np.prod(spec.shape.as_list())) * item
    return max(1, min(_PERIOD, _GROUP_BYTES // nbytes))


def _fingerprint(tensor: Any) -> Any:
    """The fingerprint of all bytes of `tensor`, uint8 of shape (8,)."""
    row = tf.reshape(tensor, [1, -1])
    if row.dtype.is_bool or row.dtype.is_quantized:
        row = tf.cast(row, tf.uint8)
    return tf.raw_ops.Fingerprint(data=row, method="farmhash64")[0]


# How many datasets each line of a program has tapped, by communicator.
_counts: weakref.WeakKeyDictionary[Communicator, Counter[str]] = weakref.WeakKeyDictionary()


class _Passes:
    """Counts the passes over one dataset and claims their fingerprints; in tf.data's threads."""

    def __init__(self, what: str, communicator: Communicator) -> None:
        line = _callers_line()
        counter = _counts.setdefault(communicator, Counter())
        counter[line] += 1
        self._key = f"{line} #{counter[line]}"
        self._what, self._line, self._communicator = what, line, communicator
        self._numbers = itertools.count(1)

    def note(self, number: Any, before: Any, total: Any, fingerprint: Any) -> Any:
        """Claim the fingerprint of the first `total` elements; return the pass's number."""
        if before == 0:
            number = next(self._numbers)  # Atomic, for threads that begin a pass at once.
        where = f"element {total}" if total == before + 1 else f"elements {before + 1} to {total}"
        often = "" if number == 1 else f" of pass {number}"
        self._communicator.claim(
            f"{self._key}, pass {number}, {total}",
            int(fingerprint).to_bytes(8, "little", signed=True),
            f"and rank {{peer}} read different data: {self._what} ({self._line}) differs in "
            f"{where}{often}, so that samples would be used twice or never",
            "Give every rank the same data in the same order: shuffle after sharding, or pass a "
            "seed to shuffle, and sort lists of files. check=False leaves this check out.",
        )
        return np.int64(number)


def _callers_line() -> str:
    """File and line of the program that is neither ours nor a framework's."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_PACKAGES):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "an unknown line"
