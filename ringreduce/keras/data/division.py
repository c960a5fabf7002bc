"""How data are divided among ranks, and the interface of what divides them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.data.batch_shares import Shares
from ringreduce.keras.data.fingerprint import FingerprintedPasses, Noting, Reads, passing
from ringreduce.keras.rows import from_windows
from ringreduce.pure.epochs import Order
from ringreduce.vocabulary.config import recording_wanted
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import for_rr

BATCH_SIZE = 32
_AHEAD = 4  # batches that are ready
_ALIKE = (
    "Give every rank the same data in the same order: pass a seed to shuffle, seed other random "
    "numbers alike, and sort lists of files."
)
_NO_CHECK = "check=False leaves this check out"


def remedy_of_unlike_data(when: str = "") -> str:
    """What to do where ranks read other data than they should; `when` to leave the check out."""
    return f"{_ALIKE} {for_rr(_NO_CHECK)}{when}."


class Feed:
    """Data of one form, divided among ranks."""

    # A tf.data.Dataset of this rank's parts; a new pass reads the epoch that was begun.
    dataset: Any
    rows: int | None = None  # of a global batch; None: they are not known before it is read
    is_even = False  # whether every rank surely has equally many rows of each batch
    # Whether an element is a pair: this rank's part, and the number of rows of the whole batch.
    is_counted = False
    may_be_empty = True  # whether this rank's part of a batch may have no rows
    # Whether passes are the same by one iterator over `dataset.repeat()` as by one for each.
    can_repeat = False
    # A tf.data.Dataset as it was given, if it may be shuffled: each iterator takes a seed of it.
    # All ranks must make as many as Keras does, since other data may come from the same shuffle.
    source: Any = None
    # Whether batches are so cheap that a newcomer may read those of an epoch that were made.
    is_cheap = False
    has_places = True  # whether a pass can go on after any batch, once those before were read again
    # The user's object whose attributes say what the next epoch is, such as an order; or None.
    owner: Any = None
    # The exception of the user's generator or PyDataset; TensorFlow shows only its text.
    failure: Exception | None = None
    is_empty: bool | None = None  # whether this rank has no batch; None: its cardinality says so
    _first: Any = None
    _noted: Callable[[], Any] | None = None
    # What the steps of an epoch follow from, by name as text; nothing where that is not known.
    facts: Callable[[], Mapping[str, str]] = dict

    @property
    def spec(self) -> Any:
        """The `element_spec` of this rank's part of a batch."""
        spec = self.dataset.element_spec
        return spec[0] if self.is_counted else spec

    def begin(self, epoch: int) -> None:
        """The next pass over `dataset` is that epoch, counted from 0."""

    def end(self) -> None:
        """The epoch has ended."""

    def pass_by(self, epochs: int) -> None:
        """So many epochs have begun and ended, as other ranks have seen."""

    @property
    def first(self) -> Any:
        """The first rows of all data, or the first batch; of a tf.data.Dataset once it was read."""
        if self._noted is not None:
            self._first, self._noted = self._noted(), None
        return self._first

    @first.setter
    def first(self, rows: Any) -> None:
        self._first, self._noted = rows, None

    def note_first(self, rows: Callable[[], Any]) -> None:
        """Keep what makes the first rows of a pass, for `first`: most passes need none."""
        self._noted = rows


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

    def divide(self, batches: Any, counts: bool = False, first: Noting | None = None) -> Any:
        """This rank's part of a tf.data.Dataset of global batches; with `counts` in pairs.

        `first` gets what makes the first rows of the whole's first batch when they have passed.
        """
        ring, readers = self.ring, self.readers or self.ring
        if isinstance(self.check, Reads):
            if first is not None:
                batches = passing(batches, lambda _, batch: batch, None, first)
            part = self.check.noted(batches).shard(ring.size, ring.rank)
            # With one ahead, so that a rank whose batches end has read those of others too.
            return from_windows(part, 2, 0, shift=1)
        if readers.size == 1:
            # `ringreduce verify` wants the first rows of one process too.
            is_noted = first is not None and recording_wanted() is not None
            return passing(batches, lambda _, batch: batch, None, first) if is_noted else batches
        passes = (
            FingerprintedPasses(self.what, remedy_of_unlike_data(), readers) if self.check else None
        )
        if passes is not None and not passes.can_compare(batches.element_spec):
            passes = None
        if ring.size == 1 or self.deal or self.is_elastic:
            if passes is not None or first is not None:
                batches = passing(batches, lambda _, batch: batch, passes, first)
            if ring.size == 1 or not self.deal:
                return batches
            return self.dealt(batches) if self.is_elastic else batches.shard(ring.size, ring.rank)
        return passing(batches, partial(self.sharing.own, counts=counts), passes, first)

    def dealt(self, batches: Any) -> Any:
        """Select the global batches whose turn is this rank's when they are read."""

        def is_own(number: Any) -> Any:
            return np.bool_(number % self.ring.size == self.ring.rank)

        numbered = batches.enumerate()
        part = numbered.filter(lambda number, _: tf.numpy_function(is_own, [number], tf.bool))
        return part.map(lambda _, batch: batch)

    def fed(
        self, batches: Any, count: int | None, ahead: Callable[[Any], Any], *options: Any
    ) -> Any:
        """`divide` for a pass, or a validation's steps; `count` is that of batches, if known.

        `ahead` makes of the part one whose batches are read ahead.
        """
        if self.deal and self.steps is not None:
            batches = batches.take(self.run_steps)
            count = min(self.run_steps, count or self.run_steps)
        part = self.divide(batches, *options)
        part = ahead(begun_when_read(part) if self.deal else part)
        return part if count is None else counted(part, partial(self.own_steps, count))

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


def begun_when_read(dataset: tf.data.Dataset) -> Any:
    """`dataset`, which begins a pass, and draws its seeds, when the first element is asked for."""
    return dataset.take(0).concatenate(dataset)


def tuned(dataset: tf.data.Dataset) -> Any:
    """`dataset`, of which TensorFlow reads as many elements ahead as it finds best."""
    return dataset.prefetch(tf.data.AUTOTUNE)


def on_one_thread(dataset: tf.data.Dataset) -> Any:
    """`dataset`, of which few elements are read ahead; all functions in it run on one thread.

    Of small elements that takes two thirds of a processor's time: what cuts a batch takes less than
    to hand it to TensorFlow's threads. The thread that tunes buffers, which it does without, may
    keep an iterator from ending for a second.
    """
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.autotune.enabled = False
    return dataset.prefetch(_AHEAD).with_options(options)


def counted(dataset: tf.data.Dataset, count: Callable[[], int]) -> Any:
    """`dataset`, for which Keras expects `count` batches; it begins anew where there are fewer."""
    dataset.cardinality = lambda: tf.constant(count(), tf.int64)
    return dataset
