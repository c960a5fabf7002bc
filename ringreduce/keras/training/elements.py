"""Elements of data as TensorFlow reads them, and for how long they are waited for."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from ringreduce.keras.data.uneven import empty_batch
from ringreduce.keras.rows import rows_in


class Element(NamedTuple):
    """A batch that was read, or the end of the data."""

    batch: Any  # at the end without rows, or None
    rows: Any  # of it, an integer or an int32 scalar; -1 at the end
    waited_s: Any


class Reader:
    """Reads batches of a dataset's `element_spec` eagerly.

    A function that only reads takes longer than that. So does ``next`` of TensorFlow's iterators,
    four times as long as the operation in it, which is called directly where all parts of a batch
    are dense tensors.
    """

    def __init__(self, spec: Any) -> None:
        self._pack = _packing(spec)
        parts = tf.nest.flatten(spec)
        are_dense = all(isinstance(part, tf.TensorSpec) for part in parts)
        # Where TensorFlow computes asynchronously, only its iterators wait for the end of the data.
        self._is_direct = are_dense and tf.config.experimental.get_synchronous_execution()
        self._how = {
            "output_types": [part.dtype for part in parts] if are_dense else [],
            "output_shapes": [part.shape for part in parts] if are_dense else [],
        }
        self._latest: tuple[Any, Any] = (None, None)  # an iterator, and its resource

    def read(self, iterator: Any) -> Element:
        """The next element as `next` gives it, with its rows, or the end of the data."""
        try:
            batch, waited_s = self.next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return Element(None, -1, 0.0)
        part = next(part for part in tf.nest.flatten(batch) if part is not None)
        # Known to Python of dense tensors, without a call of TensorFlow.
        known = part.shape[0] if isinstance(part, tf.Tensor) else None
        return Element(batch, int(rows_in(batch)) if known is None else known, waited_s)

    def next(self, iterator: Any) -> tuple[Any, float]:
        """The next element of a `tf.data.Iterator`, or of what has a ``__next__`` alone.

        With the seconds that it was waited for. StopIteration or `tf.errors.OutOfRangeError` at the
        end of the data.
        """
        began = time.perf_counter()
        batch = self._next(iterator)
        return batch, time.perf_counter() - began

    def forget(self) -> None:
        """Keep the latest iterator, and its data, no longer."""
        self._latest = None, None

    def _next(self, iterator: Any) -> Any:
        if not (self._is_direct and isinstance(iterator, tf.data.Iterator)):
            return next(iterator)
        before, resource = self._latest
        if before is not iterator:
            [resource] = tf.nest.flatten(iterator, expand_composites=True)
            self._latest = iterator, resource
        tensors = tf.raw_ops.IteratorGetNext(iterator=resource, **self._how)
        return self._pack(iter(tensors))


def _packing(spec: Any) -> Callable[[Iterator[Any]], Any]:
    """A function that makes of the tensors of an element of `spec` that element.

    Of tuples, the most frequent, it does so in a tenth of the time that TensorFlow takes.
    """
    if type(spec) is tuple:
        packs = [_packing(part) for part in spec]
        return lambda tensors: tuple([pack(tensors) for pack in packs])
    if isinstance(spec, tf.TypeSpec):
        return next
    count = len(tf.nest.flatten(spec))
    return lambda tensors: tf.nest.pack_sequence_as(spec, [*itertools.islice(tensors, count)])


def read_in_graph(iterator: Any) -> Element:
    """The next element of a `tf.data.Iterator`, in the function that is traced."""
    read, waited_s = read_next(iterator, tf.timestamp())

    def there() -> Any:
        batch = read.get_value()
        return batch, rows_in(batch)

    def ended() -> Any:
        return empty_batch(read.element_spec), -1

    batch, rows = tf.cond(read.has_value(), there, ended)
    return Element(batch, rows, waited_s)


def read_next(iterator: Any, now: Any) -> tuple[Any, Any]:
    """The next element, if any, and for how many seconds after `now` it was waited for."""
    with tf.control_dependencies([now]):
        element = iterator.get_next_as_optional()
    with tf.control_dependencies([element.has_value()]):
        return element, tf.timestamp() - now
