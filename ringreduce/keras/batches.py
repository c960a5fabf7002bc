"""This rank's part of global batches, whatever form the data has.

To train, every rank takes its rows of each batch; a rank's part of a short batch may be empty. To
evaluate, batch i goes to rank i mod size, so that batches are those of one process.

    arrays              this rank's rows are copied, and nothing else is read
    PyDataset           every rank makes each batch and takes its rows, or makes its own batches
    generator, loader   every rank makes each batch
    tf.data.Dataset     the same, in its graph
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.arrays import FORMS, Arrays, are_arrays, compare_arrays, weights_of
from ringreduce.keras.data_fingerprint import FingerprintedPasses, Reads, passing
from ringreduce.keras.rows import count_of, element_of, tensor_of
from ringreduce.keras.shares import Shares
from ringreduce.pure.epochs import Order
from ringreduce.tensorflow.private import ops_in
from ringreduce.vocabulary.errors import ConfigError

BATCH_SIZE = 32
# So many small batches are copied at a time, since each call of Python costs as much as a step of a
# small model.
_GROUP_BATCHES = 64
_AHEAD = 4  # batches that are ready
REMEDY = (
    "Give every rank the same data in the same order: pass a seed to shuffle, seed other random "
    "numbers alike, and sort lists of files. check=False leaves this check out."
)


class Feed:
    """Data of one form, divided among ranks."""

    # A tf.data.Dataset of this rank's parts; a new pass reads the epoch that was begun.
    dataset: Any
    is_even = False  # whether every rank surely has equally many rows of each batch
    # Whether an element is a pair: this rank's part, and the number of rows of the whole batch.
    is_counted = False
    may_be_empty = True  # whether this rank's part of a batch may have no rows
    # Whether passes are the same by one iterator over `dataset.repeat()` as by one for each.
    can_repeat = False
    # A tf.data.Dataset as it was given, if it may be shuffled: each iterator takes a seed of it.
    source: Any = None
    # What the user's generator or PyDataset raised; TensorFlow shows only its text.
    failure: Exception | None = None
    is_empty: bool | None = None  # whether this rank has no batch; None: its cardinality says so
    # The first rows of all data, or the first batch; of a tf.data.Dataset once it was read.
    first: Any = None

    @property
    def spec(self) -> Any:
        """The `element_spec` of this rank's part of a batch."""
        spec = self.dataset.element_spec
        return spec[0] if self.is_counted else spec

    def begin(self, epoch: int) -> None:
        """The next pass over `dataset` is that epoch, counted from 0."""

    def end(self) -> None:
        """The epoch has ended."""

    def note_first(self, rows: Any) -> None:
        """Keep the first rows of a pass as `first`."""
        self.first = rows


@dataclass(frozen=True)
class Plan:
    """How to divide data among the ranks of `ring`."""

    ring: Communicator
    what: str  # names the data in errors, such as ``the data given to rr.fit``
    batch_size: int | None = None  # rows of a global batch; None for a batched tf.data.Dataset
    steps: int | None = None  # global batches of an epoch; None: one pass
    at_once: int = 1  # steps of each execution; an epoch has whole ones
    first: int = 0  # the first epoch, with which passes begin
    shuffle: Any = False  # or True; ``"batch"``, the order of rows in each batch, changes no result
    seed: int = 0  # of all shuffling
    class_weight: Any = None  # weights of classes, for what is not a tf.data.Dataset
    deal: bool = False  # give whole batches to ranks in turn, instead of each rank its rows
    # Compare what ranks read, as they read it; or have all of each pass noted.
    check: bool | Reads = True
    # The number of ranks may change: training gets global batches whole, and validation is dealt
    # among those that there are when it is read.
    is_elastic: bool = False
    shares: Shares | None = None  # of each rank in a global batch; None: equal ones
    readers: Communicator | None = None  # the ranks that read the same data; None: those of `ring`
    counts: bool = False  # whether parts of batches carry the whole's number of rows, if uneven

    @property
    def sharing(self) -> Shares:
        """The shares of each rank."""
        return self.shares or Shares(self.ring)

    def divide(
        self, whole: Any, counts: bool = False, first: Callable[[Any], None] | None = None
    ) -> Any:
        """This rank's part of a tf.data.Dataset of global batches; with `counts` in pairs.

        `first` gets the first rows of the whole's first batch when they have passed.
        """
        ring, readers = self.ring, self.readers or self.ring
        if isinstance(self.check, Reads):
            own = self.check.noted(whole).shard(ring.size, ring.rank)
            # With one ahead, so that a rank whose batches end has read those of others too.
            return own.window(2, shift=1).flat_map(partial(element_of, 0))
        if readers.size == 1:
            return whole
        passes = FingerprintedPasses(self.what, REMEDY, readers) if self.check else None
        if passes is not None and not passes.can_compare(whole.element_spec):
            passes = None
        if ring.size == 1 or self.deal or self.is_elastic:
            if passes is not None or first is not None:
                whole = passing(whole, lambda _, batch: batch, passes, first)
            if ring.size == 1 or not self.deal:
                return whole
            return self.dealt(whole) if self.is_elastic else whole.shard(ring.size, ring.rank)
        sharing = self.sharing

        def own_rows(index: Any, batch: Any) -> Any:
            return sharing.own(index, batch, counts)

        return passing(whole, own_rows, passes, first)

    def dealt(self, whole: Any) -> Any:
        """Of global batches those whose turn is this rank's when they are read."""

        def is_own(number: Any) -> Any:
            return np.bool_(number % self.ring.size == self.ring.rank)

        numbered = whole.enumerate()
        own = numbered.filter(lambda number, _: tf.numpy_function(is_own, [number], tf.bool))
        return own.map(lambda _, batch: batch)

    def fed(self, whole: Any, count: int | None, ahead: int, *options: Any) -> Any:
        """`divide` for a pass, or a validation's steps; `count` is that of batches, if known."""
        if self.deal and self.steps is not None:
            whole = whole.take(self.run_steps)
            count = min(self.run_steps, count or self.run_steps)
        own = self.divide(whole, *options).prefetch(ahead)
        return own if count is None else _counted(own, partial(self.own_steps, count))

    @property
    def run_steps(self) -> int:
        """`steps` in whole executions; 0: one pass."""
        return -(-(self.steps or 0) // self.at_once) * self.at_once

    def order(self, count: int, unit: int, steps: int) -> Order:
        """The order of that many rows or batches."""
        is_shuffled = self.shuffle and self.shuffle != "batch"
        return Order(count, unit, steps, self.seed if is_shuffled else None, self.first)

    def own_steps(self, steps: int) -> int:
        """How many batches this rank gets of `steps`."""
        ring = self.ring
        return len(range(ring.rank, steps, ring.size)) if self.deal else steps

    def require_rows(self, rows: int, name: str) -> None:
        """Raise unless a global batch has a row for each rank; `name` is what to raise."""
        ring = self.ring
        if rows < ring.size and not self.deal:
            text = f"got a global batch of {rows} samples, fewer than the {ring.size} ranks"
            remedy = f"Raise the {name}: batches are those of all ranks together."
            raise ConfigError(text, **ring.config.who, remedy=remedy)


def feed_of(parts: Sequence[Any], plan: Plan) -> Feed:
    """The feed of (x, y, sample_weight), of which y and more may lack. Collective for arrays.

    ConfigError if the form is unknown, or does not go with an argument, or a batch has fewer rows
    than there are ranks; MismatchError if ranks were given different data, also when it is read.
    """
    x, y, sample_weight = (*parts, None, None)[:3]
    if are_arrays(x):
        return _ArrayFeed(Arrays(x, y, sample_weight, plan.class_weight), plan)
    feeds = ((tf.data.Dataset, _DatasetFeed), (keras.utils.PyDataset, _PyDatasetFeed))
    kinds: Any = (*feeds, (Iterable, _StreamFeed))
    feed = next((feed for form, feed in kinds if isinstance(x, form)), None)
    if feed is None or isinstance(x, (list, tuple, dict, str, bytes)):
        raise ConfigError(f"cannot share out {type(x).__name__} among ranks", remedy=FORMS)
    if y is not None or sample_weight is not None:
        text = f"got y or sample_weight beside a {type(x).__name__}"
        raise ConfigError(text, remedy="Let it yield them: (x, y) or (x, y, sample_weight).")
    found: Feed = feed(x, plan)
    return found


class _ArrayFeed(Feed):
    can_repeat = True

    def __init__(self, arrays: Arrays, plan: Plan) -> None:
        steps, size = plan.steps, plan.ring.size
        unit = plan.batch_size or (-(-arrays.count // steps) if steps else BATCH_SIZE)
        plan.require_rows(min(unit, arrays.count), "batch_size")
        self.first = arrays.first()
        if plan.check:
            compare_arrays(arrays, plan.what, plan.readers or plan.ring)
        passed = -(-arrays.count // unit)
        self._order = plan.order(arrays.count, unit, plan.run_steps or passed)
        self._plan, self._shares = plan, plan.sharing
        is_even = unit % size == 0 and arrays.count % unit % size == 0
        self.is_even = is_even and self._shares.is_equal
        self.begin(plan.first)
        steps = self._order.steps
        whole = min(steps, passed)
        # Where shares are measured, few batches are made ahead with the old ones.
        most = 1 if self._shares.is_measured else _GROUP_BATCHES
        rows = unit if plan.deal or plan.is_elastic else -(-unit // size)
        count = whole if plan.is_elastic else plan.own_steps(whole)
        self.is_counted = plan.counts and not self.is_even
        self.may_be_empty = not plan.deal and 0 < arrays.count % unit < size
        wholes = self._wholes if self.is_counted else None
        batches = arrays.batches(self._own, count, rows, most, wholes)
        if plan.is_elastic and plan.deal:
            batches = plan.dealt(batches)
        # The thread that tunes buffers may keep an iterator from ending for a second.
        fixed = tf.data.Options()
        fixed.autotune.enabled = False
        self.dataset = _counted(batches.prefetch(_AHEAD).with_options(fixed), self._left)

    def begin(self, epoch: int) -> None:
        self._batches = [
            np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            for rows in self._order.of_epoch(epoch)
        ]
        if self._plan.deal and not self._plan.is_elastic:
            self._batches = self._batches[self._plan.ring.rank :: self._plan.ring.size]

    def _left(self) -> int:
        """How many batches this rank gets in the epoch: of a pass no more than are left."""
        own, plan = len(self._batches), self._plan
        return plan.own_steps(own) if plan.is_elastic else own

    def _wholes(self, first: int, end: int) -> list[int]:
        """The numbers of rows of global batches `first` to `end` of the epoch."""
        return list(map(len, self._batches[first:end]))

    def _own(self, first: int, end: int) -> list[np.ndarray]:
        """The indices of this rank's rows in batches `first` to `end` of the epoch."""
        batches = self._batches[first:end]
        if self._plan.deal or self._plan.is_elastic:
            return batches
        numbered = enumerate(batches, first)
        return [rows[slice(*self._shares.rows(n, len(rows)))] for n, rows in numbered]


class _DatasetFeed(Feed):
    def __init__(self, dataset: Any, plan: Plan) -> None:
        if plan.steps is None and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise _endless(plan, "tf.data.Dataset")
        whole = dataset if plan.batch_size is None else dataset.batch(plan.batch_size)
        specs = tf.nest.flatten(whole.element_spec)
        shapes = [getattr(spec, "shape", tf.TensorShape(None)) for spec in specs]
        rows = {shape.as_list()[0] for shape in shapes if shape.rank}
        if None in (ranks := {shape.rank for shape in shapes}):
            raise ConfigError(
                f"cannot divide {whole.element_spec}, elements of {plan.what}, by rows",
                remedy="Give it tensors of known rank; or use rr.shard before batching, and "
                "model.fit.",
            )
        if 0 in ranks or len(rows) > 1:
            remedy = "Batch it by the global batch size, or pass that as batch_size."
            raise ConfigError(f"got a dataset of single samples as {plan.what}", remedy=remedy)
        if (known := rows.pop()) is not None:
            plan.require_rows(known, "batch size")
            self.is_even = known % plan.ring.size == 0 and plan.sharing.is_equal
        count = int(whole.cardinality())
        if plan.class_weight is not None:
            whole = whole.map(private.with_class_weights(plan.class_weight))
        self.may_be_empty = known is None
        self.is_counted = plan.counts and not self.is_even
        ops = ops_in(whole)
        if ops is None or any("Shuffle" in op or "Random" in op for op in ops):
            self.source = dataset
        # Random ops in a function begin anew with each iterator.
        is_fixed = ops is not None and not any(ops.values())
        self.can_repeat = count >= 0 and plan.steps is None and is_fixed
        fed = whole, count if count >= 0 else None, tf.data.AUTOTUNE
        self.dataset = plan.fed(*fed, self.is_counted, self.note_first)


class _PyDatasetFeed(Feed):
    def __init__(self, dataset: Any, plan: Plan) -> None:
        if plan.steps is None and dataset.num_batches is None:
            raise _endless(plan, "PyDataset")
        if dataset.num_batches == 0:
            raise ConfigError(f"got an empty PyDataset as {plan.what}")
        self._ordered = _Ordered(dataset, plan, self)
        self.first = self._ordered.batch(0)
        plan.require_rows(_rows_in(self.first), "size of its batches")
        self._adapter = private.adapter_of_py_dataset(self._ordered)
        if self._ordered.num_batches:
            whole = self._adapter.get_tf_dataset()
        else:
            spec = private.spec_of_batches([self.first])
            whole = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=spec)
        self.is_counted = plan.counts
        if not plan.deal:
            whole = plan.divide(whole, plan.counts)
        elif plan.check is True and (readers := plan.readers or plan.ring).size > 1:
            FingerprintedPasses(plan.what, REMEDY, readers).claim_batch(self.first)
        if plan.deal:
            self.dataset = _counted(whole, lambda: self._ordered.num_batches)
        else:  # As Keras does, which asks before the first epoch alone.
            count = self._ordered.num_batches
            self.dataset = _counted(whole, lambda: count)
        self._is_new, self._deals = True, plan.deal

    def begin(self, epoch: int) -> None:
        # First: processes that make batches are copies from then on.
        self._ordered.epoch = epoch
        if self._is_new:  # As Keras does.
            self._adapter.on_epoch_end()
        self._is_new = self._deals
        self._adapter.on_epoch_begin()

    def end(self) -> None:
        self._adapter.on_epoch_end()


class _Ordered(keras.utils.PyDataset):
    """The batches of another PyDataset that this rank makes, in the order of an epoch."""

    def __init__(self, dataset: Any, plan: Plan, feed: Feed) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._plan, self._feed, self.epoch = dataset, plan, feed, plan.first
        self._known: tuple[Any, list[int]] = ((), [])

    @property
    def num_batches(self) -> int:
        return len(self._indices())

    def __getitem__(self, index: int) -> Any:
        return self.batch(self._indices()[index])

    def batch(self, index: int) -> Any:
        try:
            return _standard(self._dataset[index], self._plan.class_weight)
        except Exception as error:
            self._feed.failure = error
            raise

    def _indices(self) -> list[int]:
        # The dataset may change its length when an epoch ends.
        plan, count = self._plan, self._dataset.num_batches
        known = self.epoch, count, plan.ring.members
        if self._known[0] != known:
            steps = plan.run_steps or int(count)
            if count is None:
                begin = (self.epoch - plan.first) * steps
                found = list(range(begin, begin + steps))
            else:
                order = plan.order(count, 1, steps)
                found = [int(np.arange(count)[one][0]) for one in order.of_epoch(self.epoch)]
            if plan.deal:
                found = found[plan.ring.rank :: plan.ring.size]
            self._known = known, found
        return self._known[1]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


class _StreamFeed(Feed):
    """Of a generator, or of what yields batches in each pass, such as torch's DataLoader."""

    def __init__(self, source: Any, plan: Plan) -> None:
        batches = (_standard(batch, plan.class_weight) for batch in source)
        # Two, as Keras does: where their shapes differ, those of others may. Or one for each rank.
        first = list(itertools.islice(batches, max(2, plan.ring.size if plan.deal else 0)))
        if not first:
            raise ConfigError(f"got an empty {type(source).__name__} as {plan.what}")
        self.first = first[0]
        plan.require_rows(_rows_in(self.first), "size of its batches")
        self._source, self._plan = source, plan
        self._first, self._rest = first, batches
        self.is_empty = plan.own_steps(len(first)) == 0
        self._all = itertools.chain(first, batches)
        spec = private.spec_of_batches(first)
        whole = tf.data.Dataset.from_generator(self._pass, output_signature=spec)
        count = None
        with suppress(TypeError):  # Also torch's loader of an IterableDataset has a `__len__`.
            count = len(source)
        self.is_counted = plan.counts
        self.dataset = plan.fed(whole, count, 1, plan.counts)

    def _pass(self) -> Iterator[Any]:
        try:
            if not isinstance(self._source, Iterator):
                for batch in self._source:
                    yield _standard(batch, self._plan.class_weight)
            elif self._plan.deal and self._plan.steps is not None:
                # None of those of the next evaluation, which goes on from there.
                yield from itertools.islice(self._all, self._plan.run_steps)
            else:
                # As Keras does, which reads the first two again in each pass.
                first, self._first = self._first, self._first[:2]
                yield from itertools.chain(first, self._rest)
        except Exception as error:
            self.failure = error
            raise


def _counted(dataset: Any, count: Callable[[], int]) -> Any:
    """`dataset`, for which Keras expects `count` batches; it begins anew where there are fewer."""
    dataset.cardinality = lambda: tf.constant(count(), tf.int64)
    return dataset


def _endless(plan: Plan, kind: str) -> ConfigError:
    return ConfigError(
        f"got an endless {kind} as {plan.what}",
        remedy="Pass steps_per_epoch, or validation_steps for validation data.",
    )


def _rows_in(batch: Any) -> int:
    first = keras.tree.flatten(batch)[0]
    if not len(first.shape):
        raise ConfigError(f"got a batch that begins with {first!r}", remedy="Yield arrays.")
    return int(count_of(first))


def _standard(batch: Any, class_weight: Any) -> Any:
    """A batch of a PyDataset or generator as a dict, or a tuple of at most x, y, sample_weight."""
    if isinstance(batch, dict):
        return batch
    parts = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
    if not 1 <= len(parts) <= 3:
        remedy = "Yield (x, y) or (x, y, sample_weight)."
        raise ConfigError(f"got a batch of {len(parts)} parts", remedy=remedy)
    if len(parts) == 3 and parts[1] is None and parts[2] is not None:
        raise ConfigError("got a batch with sample_weight and no y", remedy="Yield x, or (x, y).")
    parts = tuple(part for part in parts if part is not None)
    if class_weight is not None:
        if (count := len(parts)) != 2:
            raise ConfigError(
                f"got class_weight for batches of {count} parts", remedy="Yield (x, y)."
            )
        parts = (*parts, weights_of(parts[1], class_weight))
    return keras.tree.map_structure(tensor_of, keras.tree.lists_to_tuples(parts))
