"""This rank's part of global batches, whatever form the data has.

To train, every rank takes its rows of each batch; a rank's part of a short batch may be empty. To
evaluate, batch i goes to rank i mod size, so that batches are those of one process.

    arrays              this rank's rows are copied, and nothing else is read
    PyDataset           every rank makes each batch and takes its rows, or makes its own batches
    generator, loader   every rank makes each batch
    tf.data.Dataset     the same, in its graph
"""

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.keras import private
from ringreduce.keras.data.arrays import FORMS, Arrays, are_arrays, compare_arrays, weights_of
from ringreduce.keras.data.division import (
    BATCH_SIZE,
    Feed,
    Plan,
    counted,
    on_one_thread,
    remedy_of_unlike_data,
    tuned,
)
from ringreduce.keras.data.fingerprint import FingerprintedPasses
from ringreduce.keras.rows import count_of, is_absent, map_arrays, none_for_optionals, tensor_of
from ringreduce.tensorflow.private import ops_in
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import brief

# So many small batches are copied at a time, since each call of Python costs as much as a step of a
# small model.
_GROUP_BATCHES = 64
# Parts of a tf.data.Dataset that call no functions, and use no threads besides.
_PLAIN = re.compile("_?(?!Parallel|Options)[A-Z][A-Za-z]+Dataset(V2)?")


class WholeData(ABC):
    """Data of one form as a rank was given them, before they are divided."""

    spec: Any  # the `element_spec` of their batches

    @abstractmethod
    def divided(self, plan: Plan) -> Feed:
        """Their feed by the `plan`. Collective for arrays. Raises as `feed_of`."""

    def in_short(self) -> str:
        """Text by which other data are recognized; of arrays alone by what they hold."""
        return str(self.spec)


def whole_of(
    parts: Sequence[Any],
    what: str,
    batch_size: int | None = None,
    class_weight: Any = None,
    first: int = 2,
) -> WholeData:
    """Look at (x, y, sample_weight), of which y and more may lack; `what` names them in errors.

    Of a PyDataset that makes one batch, of a generator or loader `first`, which the feed then has.
    ConfigError as `feed_of`.
    """
    x, y, sample_weight = (*parts, None, None)[:3]
    if are_arrays(x):
        return _WholeArrays(Arrays(x, y, sample_weight, class_weight))
    if not isinstance(x, Iterable) or isinstance(x, (list, tuple, dict, str, bytes)):
        problem = f"cannot share out {type(x).__name__} among ranks"
        raise ConfigError("got no data" if x is None else problem, remedy=FORMS)
    if y is not None or sample_weight is not None:
        text = f"got y or sample_weight beside a {type(x).__name__}"
        raise ConfigError(text, remedy="Let it yield them: (x, y) or (x, y, sample_weight).")
    if isinstance(x, tf.data.Dataset):
        return _WholeDataset(x, what, batch_size, class_weight)
    if isinstance(x, keras.utils.PyDataset):
        return _WholePyDataset(x, what, class_weight)
    return _WholeStream(x, what, class_weight, first)


def feed_of(parts: Sequence[Any], plan: Plan) -> Feed:
    """The feed of (x, y, sample_weight), of which y and more may lack. Collective for arrays.

    ConfigError if the form is unknown, or does not go with an argument, or a batch has fewer rows
    than there are ranks; MismatchError if ranks were given different data, also when it is read.
    """
    # Of a stream that is dealt a batch for each rank, so that each knows whether it has any.
    first = max(2, plan.ring.size if plan.deal else 0)
    return whole_of(parts, plan.what, plan.batch_size, plan.class_weight, first).divided(plan)


class _WholeArrays(WholeData):
    def __init__(self, arrays: Arrays) -> None:
        self._arrays, self.spec = arrays, arrays.spec

    def divided(self, plan: Plan) -> Feed:
        return _ArrayFeed(self._arrays, plan)

    def in_short(self) -> str:
        return " ".join(self._arrays.digest())


class _ArrayFeed(Feed):
    can_repeat = is_cheap = True

    def __init__(self, arrays: Arrays, plan: Plan) -> None:
        steps, size = plan.steps, plan.ring.size
        unit = plan.batch_size or (-(-arrays.count // steps) if steps else BATCH_SIZE)
        plan.require_rows(min(unit, arrays.count), "batch_size")
        self.first, self.rows = arrays.first(), min(unit, arrays.count)
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
        elif plan.deal:
            # A model's own `evaluate` may make another dataset of it, which is as long.
            batches = batches.apply(tf.data.experimental.assert_cardinality(self._left()))
        self.dataset = counted(on_one_thread(batches), self._left)

    def begin(self, epoch: int) -> None:
        self._batches = [
            np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            for rows in self._order.of_epoch(epoch)
        ]
        if self._plan.deal and not self._plan.is_elastic:
            self._batches = self._batches[self._plan.ring.rank :: self._plan.ring.size]

    def _left(self) -> int:
        """How many batches this rank gets in the epoch: of a pass no more than are left."""
        batches, plan = len(self._batches), self._plan
        return plan.own_steps(batches) if plan.is_elastic else batches

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


class _WholeDataset(WholeData):
    def __init__(
        self, dataset: tf.data.Dataset, what: str, batch_size: int | None, class_weight: Any
    ) -> None:
        self.given = none_for_optionals(dataset)
        batches = self.given if batch_size is None else self.given.batch(batch_size)
        specs = [s for s in tf.nest.flatten(batches.element_spec) if not is_absent(s)]
        shapes = [getattr(spec, "shape", tf.TensorShape(None)) for spec in specs]
        rows = {shape.as_list()[0] for shape in shapes if shape.rank}
        if None in (ranks := {shape.rank for shape in shapes}):
            raise ConfigError(
                f"cannot divide {batches.element_spec}, elements of {what}, by rows",
                remedy="Give it tensors of known rank; or use rr.shard before batching, and "
                "model.fit.",
            )
        if 0 in ranks or len(rows) > 1:
            remedy = "Batch it by the global batch size, or pass that as batch_size."
            raise ConfigError(f"got a dataset of single samples as {what}", remedy=remedy)
        self.rows: int | None = rows.pop()  # of every batch, if that is known
        if class_weight is not None:
            batches = batches.map(private.with_class_weights(class_weight))
        self.batches, self.spec = batches, batches.element_spec

    def divided(self, plan: Plan) -> Feed:
        return _DatasetFeed(self, plan)

    def in_short(self) -> str:
        return f"{self.spec}, {int(self.batches.cardinality())} batches"


class _DatasetFeed(Feed):
    def __init__(self, whole: _WholeDataset, plan: Plan) -> None:
        dataset, global_batches, known = whole.given, whole.batches, whole.rows
        if plan.steps is None and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise _endless(plan, "tf.data.Dataset")
        self.rows = plan.batch_size or known
        if known is not None:
            plan.require_rows(known, "batch size")
            self.is_even = known % plan.ring.size == 0 and plan.sharing.is_equal
        count = int(global_batches.cardinality())
        self.may_be_empty = known is None
        # With steps a pass may have begun in an epoch before, at a place that a backup has not.
        self.has_places = plan.steps is None
        self.is_counted = plan.counts and not self.is_even
        ops = ops_in(global_batches)
        if ops is None or any("Shuffle" in op or "Random" in op for op in ops):
            self.source = dataset
        # Random ops in a function begin anew with each iterator.
        is_fixed = ops is not None and not any(ops.values())
        self.can_repeat = count >= 0 and plan.steps is None and is_fixed
        # The user's functions may take many threads, and their options may ask for some.
        is_plain = ops is not None and all(map(_PLAIN.fullmatch, ops))
        ahead = on_one_thread if is_plain else tuned
        fed = global_batches, count if count >= 0 else None, ahead
        self.dataset = plan.fed(*fed, self.is_counted, self.note_first)
        # Keras's evaluation makes one more where it has read to a known end.
        is_read_out = count > 0 and (plan.steps is None or plan.run_steps >= count)
        self._more_at_end = plan.deal and is_read_out and self.source is not None

    def end(self) -> None:
        # An iterator of a dealt part takes no seed by itself, since ranks may have no batch.
        if self._more_at_end:
            iter(self.source)


class _WholePyDataset(WholeData):
    def __init__(self, dataset: Any, what: str, class_weight: Any) -> None:
        if dataset.num_batches == 0:
            raise ConfigError(f"got an empty PyDataset as {what}")
        self.given, self.first = dataset, _standard(dataset[0], class_weight)
        several = dataset.num_batches is None or dataset.num_batches > 1
        # Two, as Keras does: where their shapes differ, those of others may.
        shown = [self.first, *([_standard(dataset[1], class_weight)] if several else [])]
        self.rows, self.spec = _rows_in(self.first), _spec_of(shown)

    def divided(self, plan: Plan) -> Feed:
        return _PyDatasetFeed(self, plan)

    def in_short(self) -> str:
        return f"{self.spec}, {self.given.num_batches} batches"


class _PyDatasetFeed(Feed):
    def __init__(self, whole: _WholePyDataset, plan: Plan) -> None:
        if plan.steps is None and whole.given.num_batches is None:
            raise _endless(plan, "PyDataset")
        self._ordered = _Ordered(whole.given, plan, self)
        self.first, self.rows = whole.first, whole.rows
        plan.require_rows(self.rows, "size of its batches")
        self._adapter = private.adapter_of_py_dataset(self._ordered)
        if self._ordered.num_batches:
            divided = none_for_optionals(self._adapter.get_tf_dataset())
        else:
            divided = _batches_of(lambda: iter(()), [self.first])
        self.is_counted = plan.counts
        if not plan.deal:
            divided = plan.divide(divided, plan.counts)
        elif plan.check is True and (readers := plan.readers or plan.ring).size > 1:
            FingerprintedPasses(plan.what, remedy_of_unlike_data(), readers).claim_batch(self.first)
        if plan.deal:
            self.dataset = counted(divided, lambda: self._ordered.num_batches)
        else:  # As Keras does, which asks before the first epoch alone.
            count = self._ordered.num_batches
            self.dataset = counted(divided, lambda: count)
        self._is_new, self._deals = True, plan.deal
        self.owner = whole.given

    def begin(self, epoch: int) -> None:
        # First: processes that make batches are copies from then on.
        self._ordered.epoch = epoch
        if self._is_new:  # As Keras does.
            self._adapter.on_epoch_end()
        self._is_new = self._deals
        self._adapter.on_epoch_begin()

    def end(self) -> None:
        self._adapter.on_epoch_end()

    def pass_by(self, epochs: int) -> None:
        for _ in range(epochs):
            if self._is_new:
                self._ordered.on_epoch_end()
            self._is_new = self._deals
            self._ordered.on_epoch_begin()
            self._ordered.on_epoch_end()


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
                indices = list(range(begin, begin + steps))
            else:
                order = plan.order(count, 1, steps)
                indices = [int(np.arange(count)[row][0]) for row in order.of_epoch(self.epoch)]
            if plan.deal:
                indices = indices[plan.ring.rank :: plan.ring.size]
            self._known = known, indices
        return self._known[1]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


class _WholeStream(WholeData):
    def __init__(self, source: Any, what: str, class_weight: Any, first: int) -> None:
        self.given = source
        self.rest = (_standard(batch, class_weight) for batch in source)
        # Two, as Keras does: where their shapes differ, those of others may.
        self.first = list(itertools.islice(self.rest, first))
        if not self.first:
            raise ConfigError(f"got an empty {type(source).__name__} as {what}")
        self.rows, self.spec = _rows_in(self.first[0]), _spec_of(self.first)

    def divided(self, plan: Plan) -> Feed:
        return _StreamFeed(self, plan)


class _StreamFeed(Feed):
    """Feeds from a generator, or from what yields batches in each pass, as torch's DataLoader."""

    has_places = False  # It may give other batches when it begins anew.

    def __init__(self, whole: _WholeStream, plan: Plan) -> None:
        source, first = whole.given, whole.first
        self.first, self.rows = first[0], whole.rows
        plan.require_rows(self.rows, "size of its batches")
        self._source, self._plan = source, plan
        self._first, self._rest = first, whole.rest
        self.is_empty = plan.own_steps(len(first)) == 0
        self._all = itertools.chain(first, self._rest)
        batched = _batches_of(self._pass, first)
        count = None
        with suppress(TypeError):  # Also torch's loader of an IterableDataset has a `__len__`.
            count = len(source)
        self.is_counted = plan.counts
        self.dataset = plan.fed(batched, count, lambda part: part.prefetch(1), plan.counts)

    def _pass(self) -> Iterator[Any]:
        try:
            if not isinstance(self._source, Iterator):
                for batch in self._source:
                    yield _with_optionals(_standard(batch, self._plan.class_weight))
            elif self._plan.deal and self._plan.steps is not None:
                # None of those of the next evaluation, which goes on from there.
                steps = itertools.islice(self._all, self._plan.run_steps)
                yield from map(_with_optionals, steps)
            else:
                # As Keras does, which reads the first two again in each pass.
                first, self._first = self._first, self._first[:2]
                yield from map(_with_optionals, itertools.chain(first, self._rest))
        except Exception as error:
            self.failure = error
            raise


def _endless(plan: Plan, kind: str) -> ConfigError:
    return ConfigError(
        f"got an endless {kind} as {plan.what}",
        remedy="Pass steps_per_epoch, or validation_steps for validation data.",
    )


def _batches_of(make: Callable[[], Iterator[Any]], first: list[Any]) -> Any:
    """A tf.data.Dataset of the batches that `make` makes in each pass, like the `first` ones."""
    spec = private.spec_of_batches(first)
    return none_for_optionals(tf.data.Dataset.from_generator(make, output_signature=spec))


def _spec_of(first: list[Any]) -> Any:
    """The `element_spec` of such a dataset."""
    return _batches_of(lambda: iter(()), first).element_spec


def _rows_in(batch: Any) -> int:
    first = next(part for part in keras.tree.flatten(batch) if part is not None)
    if not len(first.shape):
        raise ConfigError(f"got a batch that begins with {brief(first)}", remedy="Yield arrays.")
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
    return map_arrays(tensor_of, keras.tree.lists_to_tuples(parts))


def _with_optionals(batch: Any) -> Any:
    """`batch`, in which what is None may pass through `from_generator`."""
    empty = tf.experimental.Optional.empty
    return keras.tree.map_structure(lambda p: empty(None) if p is None else p, batch)
