"""Elements of data as TensorFlow reads them, without a copy of them in Python."""

import time
from typing import Any, NamedTuple

import tensorflow as tf

from ringreduce.keras.rows import rows_in


class Element(NamedTuple):
    """A batch that was read, or the end of the data."""

    batch: Any  # a tf.experimental.Optional, without a value at the end
    rows: Any  # of it, an integer or an int32 scalar; -1 at the end
    waited_s: Any


def read_now(iterator: Any) -> Element:
    """The next element of a `tf.data.Iterator`, or of what has a ``__next__`` alone, eagerly.

    That is faster than a function which does nothing else.
    """
    began = time.perf_counter()
    if isinstance(iterator, tf.data.Iterator):
        batch = iterator.get_next_as_optional()
    else:
        batch = tf.experimental.Optional.from_value(next(iterator))
    is_there = bool(batch.has_value())
    waited_s = time.perf_counter() - began
    return Element(batch, int(rows_in(batch.get_value())) if is_there else -1, waited_s)


def read_in_graph(iterator: Any) -> Element:
    """The next element of a `tf.data.Iterator`, in the function that is traced."""
    batch, waited_s = read_next(iterator, tf.timestamp())
    rows = tf.cond(batch.has_value(), lambda: rows_in(batch.get_value()), lambda: -1)
    return Element(batch, rows, waited_s)


def read_next(iterator: Any, now: Any) -> tuple[Any, Any]:
    """The next element, if any, and for how many seconds after `now` it was waited for."""
    with tf.control_dependencies([now]):
        element = iterator.get_next_as_optional()
    with tf.control_dependencies([element.has_value()]):
        return element, tf.timestamp() - now
