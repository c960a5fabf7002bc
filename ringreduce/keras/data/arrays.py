"""Arrays with a row for each sample, as `model.fit` takes them: checked, sliced and compared."""

import hashlib
import math
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.rows import (
    FIRST_ROWS,
    Rows,
    as_tensor,
    components,
    is_uneven,
    map_arrays,
    packed,
    slice_rows,
)
from ringreduce.tensorflow.agreement import Difference, agree
from ringreduce.vocabulary.errors import ConfigError

FORMS = (
    "Pass arrays with a row for each sample (numpy, tensors, scipy or pandas; in tuples, lists or "
    "dicts), a tf.data.Dataset, a keras.utils.PyDataset, a generator, or what yields batches in "
    "each pass, such as torch's DataLoader."
)
# Arrays up to this size are compared whole, others by as many evenly spaced rows.
_WHOLE_BYTES = 64 << 20
_ROWS = 1024
# Bytes of batches that are copied together.
_GROUP_BYTES = 1 << 20


def are_arrays(*parts: Any) -> bool:
    """Whether all leaves of `parts` are arrays, or None."""
    leaves = [leaf for leaf in keras.tree.flatten(parts) if leaf is not None]
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves)


class Arrays:
    """The arrays of a call of `model.fit` or the like, with equally many rows.

    They stay the caller's and are not copied, a `numpy.memmap` is not read: `take` copies rows.
    `class_weight` has a weight for each class, by which `sample_weight` is made of `y`. ConfigError
    if something is no array, or the numbers of rows differ.
    """

    def __init__(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None
    ) -> None:
        if class_weight is not None:
            if sample_weight is not None:
                raise ConfigError("got class_weight and sample_weight; pass one of them")
            if y is None or keras.tree.is_nested(y):
                text = "got class_weight for data without exactly one array of classes as y"
                raise ConfigError(text)
            sample_weight = weights_of(_as_numpy(y), class_weight)
        elif keras.tree.is_nested(y) and hasattr(sample_weight, "shape"):
            # One array, for all outputs.
            sample_weight = keras.tree.map_structure(lambda _: sample_weight, y)
        # Keras takes no weights without targets.
        passed = [part for part in (x, y, None if y is None else sample_weight) if part is not None]
        as_tuples = keras.tree.lists_to_tuples(passed)
        # An optional input may be None.
        parts = map_arrays(lambda array: Rows(_as_numpy(array)), as_tuples)
        # A list of inputs without y must not look like x and y.
        is_tuple = len(parts) > 1 or isinstance(parts[0], tuple)
        # x, (x, y) or (x, y, sample_weight), in tuples and dicts, as `Rows`.
        self.parts: Any = tuple(parts) if is_tuple else parts[0]
        counts = sorted({len(array) for array in self._arrays})
        if len(counts) != 1:
            raise ConfigError(f"got arrays of {counts} rows; all need equally many")
        self.count: int = counts[0]  # of rows

    @property
    def spec(self) -> Any:
        """The `tf.TensorSpec` of any number of rows, in the structure of `parts`."""
        return map_arrays(lambda array: array.spec, self.parts)

    @property
    def _arrays(self) -> list[Rows]:
        return [array for array in keras.tree.flatten(self.parts) if array is not None]

    def take(self, rows: np.ndarray) -> Any:
        """Take the `rows`, indices, of all arrays; floats get Keras's float type."""
        return map_arrays(lambda array: array[rows], self.parts)

    def first(self) -> Any:
        """Take the first rows."""
        return self.take(np.arange(min(FIRST_ROWS, self.count)))

    def batches(
        self,
        indices: Callable[[int, int], list[np.ndarray]],
        count: int,
        rows: int,
        most: int,
        wholes: Callable[[int, int], list[int]] | None = None,
    ) -> Any:
        """A tf.data.Dataset of `count` batches of about `rows` rows.

        `indices` returns those of the rows of some batches, given the first and the end; it is
        called in each pass, for at most `most` batches at a time. So is `wholes`, whose numbers
        then make pairs with the batches.
        """
        row_bytes = sum(array.nbytes // self.count for array in self._arrays)
        length = max(1, min(most, _GROUP_BYTES // max(1, rows * row_bytes)))
        specs = components(self.spec)

        def take(number: int) -> list[np.ndarray]:
            ends = number * length, min(count, (number + 1) * length)
            group = indices(*ends)
            bounds = np.cumsum([0, *map(len, group)], dtype=np.int64)
            none = np.zeros(0, np.int64)  # Where an epoch is short.
            beside = np.array([] if wholes is None else wholes(*ends), np.int64)
            taken = components(self.take(np.concatenate([*group, none])))
            return [bounds, beside, *map(np.asarray, taken)]

        # TensorFlow keeps what it calls from a graph for ever; a dataset keeps the arrays instead.
        kept = weakref.ref(take)

        def call(number: Any) -> Any:
            if (taking := kept()) is None:
                raise StopIteration  # It reads ahead while the last iterator ends.
            return taking(int(number))

        def group(number: Any) -> Any:
            dtypes = [tf.int64, tf.int64, *(spec.dtype for spec in specs)]
            bounds, beside, *parts = tf.numpy_function(call, [number], dtypes)
            shaped = [tf.ensure_shape(p, s.shape) for p, s in zip(parts, specs, strict=True)]
            rows = packed(shaped, self.spec)
            return tf.ensure_shape(bounds, [None]), tf.ensure_shape(beside, [None]), rows

        def apart(bounds: Any, beside: Any, rows: Any) -> Any:
            def one(i: Any) -> Any:
                batch = slice_rows(rows, bounds[i], bounds[i + 1])
                return batch if wholes is None else (batch, beside[i])

            return tf.data.Dataset.range(tf.shape(bounds, out_type=tf.int64)[0] - 1).map(one)

        # Not `from_generator`: its kernel makes malloc return freed memory to the system at once.
        grouped = tf.data.Dataset.range(-(-count // length)).map(group)
        grouped.ringreduce_takes = take
        return grouped.prefetch(1).flat_map(apart)

    def digest(self) -> list[str]:
        """Describe the arrays by shapes, dtypes, and a hash of the rows, or of some."""
        arrays = self._arrays
        hashed = hashlib.blake2b(digest_size=8)
        for array in arrays:
            few = self.count <= _ROWS or array.nbytes <= _WHOLE_BYTES
            rows = slice(None) if few else np.linspace(0, self.count - 1, _ROWS).astype(np.int64)
            for chosen in map(np.asarray, components(array[rows])):
                if chosen.dtype.hasobject:
                    hashed.update(repr(chosen.tolist()).encode())
                else:
                    hashed.update(np.ascontiguousarray(chosen).reshape(-1).view(np.uint8).data)
        shapes = [f"{array.dtype.name} {tuple(array.shape)}" for array in arrays]
        return [", ".join(shapes), hashed.hexdigest()]


def split(parts: Any, fraction: float) -> tuple[Any, Any]:
    """All but the last `fraction` of the rows of (x, y, sample_weight), and these."""
    if not are_arrays(parts[0]):
        text = f"cannot take a validation_split of {type(parts[0]).__name__}"
        remedy = "Pass validation_data, such as dataset.take(n) and dataset.skip(n)."
        raise ConfigError(text, remedy=remedy)
    count = Arrays(*parts).count
    at = math.floor(count * (1.0 - fraction))
    if not 0 < at < count:
        text = f"cannot split {count} samples with validation_split={fraction}"
        raise ConfigError(text, remedy="Pass a fraction that leaves samples on both sides.")
    return slice_rows(parts, 0, at), slice_rows(parts, at, count)


def _as_numpy(array: Any) -> Any:
    """`array` as numpy's, without a copy where that is possible; ragged and sparse ones stay."""
    array = as_tensor(array)
    if is_uneven(array):
        return array
    if isinstance(array, tf.Tensor):
        array = array.numpy()
    elif hasattr(array, "iloc"):  # pandas, whose Series are columns for Keras
        values = array.to_numpy()
        array = values if values.ndim > 1 else values[:, None]
    elif hasattr(array, "__array__") and not isinstance(array, np.ndarray):
        array = np.asarray(array)
    if not isinstance(array, np.ndarray) or not array.ndim:
        raise ConfigError(f"cannot share out {type(array).__name__} among ranks", remedy=FORMS)
    if array.dtype.kind == "O" and array.size and not isinstance(array.flat[0], (str, bytes)):
        raise ConfigError(
            f"got an array of Python objects ({type(array.flat[0]).__name__} first)",
            remedy='Convert it to numbers, such as with astype("float32"). pandas makes objects of '
            "columns whose types have no common one, such as numbers and bool.",
        )
    return array


def weights_of(y: Any, class_weight: Any) -> np.ndarray:
    """The weight of each row's class, float32 of shape (rows,); 1 for classes not named."""
    classes = np.asarray(y)
    if classes.ndim > 1:
        classes = classes.argmax(-1) if classes.shape[-1] != 1 else classes[..., 0]
    weights = np.ones(len(classes), keras.config.floatx())
    classes = np.round(classes).astype(np.int64)
    for number, weight in class_weight.items():
        weights[classes == number] = weight
    return weights


def compare_arrays(arrays: Arrays, what: str, ring: Communicator) -> None:
    """Raise unless all ranks have the same arrays. Collective."""
    if ring.size == 1:
        return

    def difference(first: int, ours: Any, rank: int, theirs: Any) -> Difference | None:
        if theirs == ours:
            return None
        differ = f"rank {first} has {ours[0]}, rank {rank} {theirs[0]}"
        if theirs[0] == ours[0]:
            differ = f"rank {rank} has other values than rank {first}, or another order"
        return Difference(
            rank,
            f"found different arrays as {what}: {differ}",
            "Pass the same whole arrays on every rank, loaded and shuffled alike (with a "
            "seed); each rank takes its own rows.",
        )

    agree(ring, arrays.digest(), difference, "sharing out of data")
