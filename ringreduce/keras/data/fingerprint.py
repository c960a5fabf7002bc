"""Fingerprints of a dataset's elements as they pass, for ranks that divide it to compare.

Unseeded shuffling gives every rank another order, and then some samples are used twice and others
never. Reading ahead to find out would change what is read, so elements are looked at on their way:

    dataset -> fingerprint of all so far -> this rank's part
                `- sometimes a `Claim`: the neighbours compare

The last fingerprint stands for all elements before it. It is compared after each of the first 64
elements; in later passes, where it is not known which is the last, after the 1st, 2nd, 4th and so
on of them; then after every 64th, and after the last if known. Single samples are handled, and
compared, in groups. What `rr.evaluate` and `rr.predict` have read is compared when they end:
`Reads`.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import claim
from ringreduce.keras.checks.users_line import DataWarning, users_frame, warn_at_users_line
from ringreduce.keras.data.arrays import Arrays
from ringreduce.keras.repeating import told_by_ranks
from ringreduce.keras.rows import components, first_rows, is_absent, packed
from ringreduce.pure.claims import Claim
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow.kept import kept
from ringreduce.vocabulary.errors import MismatchError
from ringreduce.vocabulary.words import named

_PERIOD = 64
_LOOKUP = (
    "If a lookup layer in dataset.map, such as StringLookup or TextVectorization, was adapted to "
    "each rank's part of the data, it numbers words differently: adapt it to the same data on all "
    "ranks, or give it rank 0's vocabulary. Ignore this if x is random on purpose."
)
_SAME = "Give random numbers in dataset.map a seed; sort lists of files."
compares_all_inputs = False  # whether x is compared whatever it holds: unchanged programs
# A group of elements that are handled together has at most this many bytes.
_GROUP_BYTES = 1 << 20
_STRING_BYTES = 64  # a guess
Noting = Callable[[Callable[[], Any]], None]


def fingerprinted(dataset: Any, what: str, remedy: str, ring: Communicator) -> Any:
    """`dataset` with the same samples, whose `targets` ranks compare as they are read.

    Not collective. A difference breaks the ring, with a MismatchError that names `what`, such as
    ``the dataset given to rr.shard``, the user's line, and `remedy`. Datasets of datasets pass.
    """
    passes = FingerprintedPasses(what, remedy, ring)
    if not passes.can_compare(dataset.element_spec):
        return dataset
    if (length := _group_length(dataset)) == 1:
        return passing(dataset, lambda _, element: element, passes)
    groups = dataset.batch(length)
    elements = passing(groups, lambda _, group: group, passes, are_groups=True).unbatch()
    count = int(dataset.cardinality())
    is_known = count != tf.data.UNKNOWN_CARDINALITY
    return elements.apply(tf.data.experimental.assert_cardinality(count)) if is_known else elements


def passing(
    dataset: tf.data.Dataset,
    then: Callable[[Any, Any], Any],
    passes: "FingerprintedPasses | None" = None,
    first: Noting | None = None,
    are_groups: bool = False,
) -> Any:
    """`dataset` with what `then` makes of each batch, given its number in the pass and itself.

    `passes` compares batches among ranks, or groups of elements; `first`, a method, is called with
    what makes the first rows of each pass, as long as its object lives. All in one function: each
    that tf.data calls costs as much as a step of a small model.
    """
    zero, length, spec = np.int64(0), int(dataset.cardinality()), dataset.element_spec
    if passes is None and first is None:
        return dataset.enumerate().map(then)
    # TensorFlow keeps what it calls from a graph for ever, and a feed has all its data.
    noting = None if first is None else weakref.WeakMethod(first)
    # Steps wait while the first batches of a pass are read. Where the last is known, its claim has
    # all before it.
    is_known = length >= 0

    def see(number: Any, before: Any, total: Any, fingerprint: Any, *rows: Any) -> Any:
        note = None if noting is None or before else noting()
        if note is not None:
            note(lambda: packed(map(tf.convert_to_tensor, rows), spec))
        if passes is None:
            return number
        number = np.int64(passes.next_number()) if before == 0 else number
        is_due = are_groups or number == 1 or total == length or total % _PERIOD == 0
        if is_due or not is_known:
            since = before if are_groups else _compared_before(total, number == 1, is_known)
            passes.claim(int(number), int(since), int(total), int(fingerprint))
        return number

    def step(state: Any, batch: Any) -> Any:
        number, count, fingerprint = state
        many = tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0] if are_groups else 1
        total, is_due = count + many, count == 0
        if passes is not None:
            fingerprint = _joint(components(targets(batch)), fingerprint)
            is_power = tf.bitwise.bitwise_and(total, count) == 0
            is_early = (total <= _PERIOD) & ((number <= 1) | (is_power & (not is_known)))
            is_due = are_groups | is_early | (total % _PERIOD == 0) | (total == length)

        def call() -> Any:
            rows = components(first_rows(batch)) if first is not None else []
            inputs = [number, count, total, fingerprint, *rows]
            return tf.numpy_function(see, inputs, tf.int64)

        number = tf.ensure_shape(tf.cond(is_due, call, lambda: number), [])
        return (number, total, fingerprint), then(count, batch)

    return dataset.scan((zero, zero, zero), step)


def _compared_before(total: Any, is_first: bool, is_known: bool) -> int:
    """How many elements of a pass were compared before the first `total` are, as `passing` does."""
    before = int(total) - 1
    if is_first and total <= _PERIOD:
        return before
    power = 0 if is_known else 1 << before.bit_length() >> 1
    return before // _PERIOD * _PERIOD or power


def _group_length(dataset: tf.data.Dataset) -> int:
    """How many elements to handle at a time: 1 where their shapes may differ."""
    nbytes = 1
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
            return 1
        item = _STRING_BYTES if spec.dtype == tf.string else spec.dtype.size
        nbytes += int(np.prod(spec.shape.as_list())) * item
    return max(1, min(_PERIOD, _GROUP_BYTES // nbytes))


def _fingerprints(tensor: Any, count: Any) -> Any:
    """Fingerprint the `count` rows of `tensor`; return uint8 of shape (count, 8)."""
    rows = tf.reshape(tensor, [count, tf.size(tensor) // tf.maximum(count, 1)])
    if rows.dtype.is_bool or rows.dtype.is_quantized:
        rows = tf.cast(rows, tf.uint8)
    return tf.raw_ops.Fingerprint(data=rows, method="farmhash64")


def _joint(tensors: Iterable[Any], before: Any = None) -> Any:
    """The fingerprint of `tensors`, and of what the one `before` stands for, a scalar int64."""
    parts = [] if before is None else [tf.bitcast(before, tf.uint8)]
    parts += [_fingerprints(tensor, 1)[0] for tensor in tensors]
    return tf.bitcast(_fingerprints(tf.concat(parts, 0), 1)[0], tf.int64)


class _Datasets(Counter[str]):
    """How many each line of a program has fingerprinted."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = weakref.WeakValueDictionary[str, FingerprintedPasses]()


def passes_begun(ring: Communicator) -> dict[str, int]:
    """How many passes over each dataset have begun that the ranks of `ring` compare."""
    return {key: each.begun for key, each in kept(ring, _Datasets).passes.items()}


def count_passes(ring: Communicator, begun: Mapping[str, int]) -> None:
    """Count the next pass over each dataset, at a newcomer, as the others do."""
    for key, each in kept(ring, _Datasets).passes.items():
        each.count_from(begun.get(key, 0))


class FingerprintedPasses:
    """Counts the passes over one dataset and claims their fingerprints; from any thread."""

    def __init__(self, what: str, remedy: str, ring: Communicator) -> None:
        frame = users_frame()
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        counter = kept(ring, _Datasets)
        counter[line] += 1
        self._key = f"{line} #{counter[line]}"
        self._what, self._line, self._remedy = what, line, remedy
        self._communicator = ring
        self.count_from(0)
        kept(ring, _Datasets).passes[self._key] = self

    def can_compare(self, spec: Any) -> bool:
        """Whether there is another rank, and elements of that `element_spec` have fingerprints."""
        dtypes = {part.dtype for part in components(targets(spec))}
        return self._communicator.size > 1 and dtypes.isdisjoint((tf.variant, tf.resource))

    def count_from(self, begun: int) -> None:
        """The next pass follows so many."""
        self._numbers, self.begun = itertools.count(begun + 1), begun

    def next_number(self) -> int:
        """The number of a new pass, counted from 1."""
        number = next(self._numbers)  # Atomic, for threads that begin a pass at once.
        self.begun = max(self.begun, number)
        return number

    def claim_batch(self, batch: Any) -> None:
        """Claim the targets of the first batch of a new pass over a PyDataset."""
        parts = map(tf.convert_to_tensor, tf.nest.flatten(targets(batch)))
        self.claim(self.next_number(), 0, 1, int(_joint(parts)))

    def claim(self, number: int, before: int, total: int, fingerprint: int) -> None:
        """Claim that of the first `total` elements of a pass; the first `before` were compared."""
        where = f"element {total}" if total == before + 1 else f"elements {before + 1} to {total}"
        often = "" if number == 1 else f" of pass {number}"
        read = Claim(
            f"{self._key}, pass {number}, {total}",
            fingerprint.to_bytes(8, "little", signed=True),
            f"and rank {{peer}} read different data: {self._what} ({self._line}) differs in "
            f"{where}{often}, so that samples would be used twice or never",
            self._remedy,
        )
        claim(self._communicator, read)


def targets(element: Any) -> Any:
    """The part of an element that ranks compare: y, since x may be random; without y all."""
    part = element[1] if isinstance(element, (tuple, list)) and len(element) > 1 else element
    return part if components(part) else element


class Reads:
    """Notes this rank's reads of batches that all ranks read, in each pass anew.

    x may be random on purpose. If it only has another order, its rows have the same sum.
    """

    def __init__(self) -> None:
        # For each pass and batch its `numbers_of`.
        self._passes: list[list[Any]] = []

    def noted(self, dataset: tf.data.Dataset) -> Any:
        """`dataset` with the same elements, of which each is noted as it is read."""

        def step(number: Any, element: Any) -> Any:
            number = tf.numpy_function(self._note, [number, *numbers_of(element)], tf.int64)
            return tf.ensure_shape(number, []), element

        return dataset.scan(np.int64(-1), step)

    def _note(self, number: Any, *of_batch: Any) -> Any:
        if number < 0:
            number = np.int64(len(self._passes))
            self._passes.append([])
        self._passes[number].append(of_batch)
        return number

    def last(self) -> Any:
        """Return the last pass as `compare_reads` takes it; None without any."""
        if not self._passes:
            return None
        compared, inputs, rows = np.array(self._passes[-1]).T
        order = signature_of(inputs.tolist())
        return len(rows), signature_of(compared.tolist()), order, int(rows.sum())


def compare_reads(last: Any, what: str, remedy: str, ring: Communicator) -> None:
    """MismatchError, on all ranks, if some have read other data; the ring stays whole. Collective.

    `last`: what was read, its size first, then what must be equal, the order and the sum of x; None
    on a rank that has read nothing.
    """
    every = zip(ring.members, map(tuple, ring.all_gather_object(last or ())), strict=True)
    (first, expected), *others = [pair for pair in every if pair[1]] or [(0, ())]
    for rank, read in others:
        is_reordered = read[::3] == expected[::3] and read[2] != expected[2]
        if is_reordered or read[:2] != expected[:2]:
            which = "the samples of rank {} in another order"
            which = (which if is_reordered else "other samples than rank {}").format(first)
            raise MismatchError(
                f"found different {what}: rank {rank} has read {which}, so that some would be "
                "used twice or never",
                **ring.config.who,
                peer=rank,
                operation="comparison of data",
                remedy=remedy,
            )


def compare_codes(batch: Any, ring: Communicator) -> None:
    """Warn on rank 0 if ranks have other numbers of words, or words, in x. Collective.

    Of other types x is often random on purpose, of pixels too; in unchanged programs it is not.
    """
    inputs = keras.utils.unpack_x_y_sample_weight(first_rows(batch))[0]
    flat = [part for part in tf.nest.flatten(inputs) if not is_absent(part)]
    kinds = (tf.int32, tf.int64, tf.string)
    codes = [part for part in flat if compares_all_inputs or tf.as_dtype(part.dtype) in kinds]
    digest = Arrays(codes).digest() if codes else None
    (first, ours), *others = (told_by_ranks(ring, digest) if codes else {0: digest}).items()
    other = [rank for rank, code in others if code != ours]
    if other and ring.rank == 0:
        what, remedy = ("values", _SAME) if compares_all_inputs else ("integers or words", _LOOKUP)
        warn_at_users_line(
            f"the ranks have read other {what} in x of the first batch: on {named('rank', other)} "
            f"not those of rank {first}. {remedy}",
            DataWarning,
        )


def numbers_of(element: Any) -> list[Any]:
    """Fingerprint y (or x), and x, and add up x's rows': three scalar int64 tensors."""
    inputs = keras.utils.unpack_x_y_sample_weight(element)[0]
    flat = [part for part in tf.nest.flatten(inputs) if not is_absent(part)]
    is_dense = all(isinstance(part, tf.Tensor) for part in flat)
    parts = components(inputs)
    count = tf.shape(parts[0])[0] if is_dense else 1
    by_row = _fingerprints(tf.concat([_fingerprints(part, count) for part in parts], 1), count)
    known = _joint(components(targets(element)))
    return [known, _joint([by_row]), tf.reduce_sum(tf.bitcast(by_row, tf.int64))]
