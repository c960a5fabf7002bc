"""`model.evaluate` and `model.predict` with the data divided among all ranks.

Only metric states, or predictions, travel. Shares may differ in length and be empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.outermost import outermost
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import metric_states
from ringreduce.keras.checks.models import (
    fixed_rows,
    refuse_states_of_rows,
    refuse_strategy,
    require_model,
)
from ringreduce.keras.checks.settings import Settings, require_same_settings
from ringreduce.keras.checks.warnings import warn_of_last_batches, warn_of_metrics
from ringreduce.keras.data.adapters import feed_of
from ringreduce.keras.data.arrays import Arrays, are_arrays
from ringreduce.keras.data.division import BATCH_SIZE, Feed, Plan, remedy_of_unlike_data
from ringreduce.keras.data.fingerprint import Reads, compare_reads, numbers_of, passing
from ringreduce.keras.layers.groups import training_ranks
from ringreduce.keras.model.averages import is_average, untrained
from ringreduce.keras.model.metric_trial import names_apart, try_metrics
from ringreduce.keras.optimizers_in import settle
from ringreduce.keras.rows import slice_rows
from ringreduce.keras.training.answering import Answering
from ringreduce.keras.training.overridden import is_overridden, through_own
from ringreduce.tensorflow.variables import broadcast_variables, differing
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import for_rr

_WHAT = "data to evaluate or predict"
_IF_RANDOM = ", for x that is random on purpose"


@outermost
def evaluate(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    communicator: Communicator | None = None,
    return_dict: bool = False,
    verbose: Any = 0,
    steps: int | None = None,
    callbacks: Any = None,
    check: bool = True,
) -> Any:
    """The result of ``model.evaluate`` on the whole data, of which each rank computes a share.

    Collective: all ranks must call it at the same point, with the same data and weights. Meanwhile
    moving averages, and whatever else is not trained and differs between ranks, are rank 0's on all
    ranks. Metrics are computed from the sum of the ranks' states, as in one process.

    Args:
        model: a compiled model. An `evaluate` of its own class gets the whole data, of which what
            it passes to ``super().evaluate`` is divided.
        x, y, sample_weight: as for ``model.evaluate``, equal on all ranks. Arrays or tensors, in
            lists or dicts too: rank r takes the r-th of `size` slices of whole batches, so data of
            one batch are rank 0's. Or, as `x`, what yields batches, of which batch i goes to rank
            i mod size: a `tf.data.Dataset`; a `keras.utils.PyDataset`, of which each rank makes its
            own; or a generator, or torch's DataLoader, of which every rank makes all.
        batch_size: samples in a batch (32), the same ones as in one process; only for arrays.
        return_dict: return a dict by metric name.
        verbose: shows the progress of rank 0's share.
        steps: use only this many batches of the whole.
        callbacks: called for this rank's share, and not at all if it is empty. They must not make
            collective calls.
        check: compare what the ranks have read: arrays by their values, y of all batches (of a
            PyDataset of the first), and the order of x. x that differs, such as augmented images,
            is compared only where there is no y.

    Returns:
        As ``model.evaluate``, equal on all ranks: the loss, a list, or a dict. A number that a
            custom `test_step` returns beside metrics is the mean over ranks that had data. A
            metric of your own whose states do not combine is NaN in a list, and not in a dict.

    Raises:
        ConfigError: the data are of no such form, or `model` is a `Pipeline`.
        MismatchError: the ranks read different data, or compiled different metrics.
    """
    options = dict(locals())
    require_model(model, "evaluate")
    ring = communicator or default_communicator()
    if ring.size > 1:
        refuse_strategy(model)
        refuse_states_of_rows(model, ring)
    settle(model)
    if is_overridden(model, "evaluate"):
        del options["model"]
        return through_own(model, "evaluate", evaluate, options)
    share = _Share(model, (x, y, sample_weight), batch_size, steps, ring, check)
    shown = verbose if training_ranks(model.weights, ring).rank == 0 else 0
    run = partial(model.evaluate, batch_size=batch_size, callbacks=callbacks)
    inputs = dict(zip(("x", "y", "sample_weight"), share.parts, strict=True))
    if share.is_whole:
        return run(**inputs, steps=steps, verbose=shown, return_dict=return_dict)
    logs: dict[str, Any] = {}
    states = metric_states.MetricStates()
    answering = Answering(model, ring, share.example)
    with _averages_of_rank_0(model, ring), share.being_read():
        # Keras cannot evaluate an empty share; the metrics may not even be built.
        results: dict[str, Any] = {}
        try:
            if not share.is_empty:
                results = run(**inputs, verbose=shown, return_dict=True)
        except ValueError:  # As Keras raises where it turns out to be empty.
            if not share.was_empty():
                raise
        if share.was_empty():
            model.reset_metrics()
        else:
            logs = results
            # It matters only that the number of batches is not 0.
            states = metric_states.states_of(model, 1)
            try_metrics(model, share.feed.first, ring)
        answering.finish(with_losses=True)
    names = [] if share.is_empty else in_order(model, logs)
    entries = metric_states.entries_of(logs, states.results)
    gathered = ring.all_gather_object([entries, names, names_apart(model), share.is_empty])
    if all(is_empty for *_, is_empty in gathered):
        # Of data whose length was not known; what Keras gives for that.
        values = [results[name] for name in in_order(model, results)]
        return results if return_dict else values[0] if len(values) == 1 else values
    gathered = [row[:3] for row in gathered]
    apart = {name for *_, names_there in gathered for name in names_there}
    warn_of_metrics(apart, ring)
    every = [names_there for names_there, *_ in gathered]
    warn_of_last_batches(every, ring)
    together = metric_states.combined_results(model, states, ring)
    result = {**logs, **metric_states.merged(every, together)}
    result |= dict.fromkeys(apart & result.keys(), math.nan)
    if return_dict:
        return {name: result[name] for name in sorted(result.keys() - apart)}
    names = next((names_there for _, names_there, _ in gathered if names_there), [])
    values = [result[name] for name in names if name in result]
    return values[0] if len(values) == 1 else values


@outermost
def predict(
    model: Any,
    x: Any,
    batch_size: int | None = None,
    communicator: Communicator | None = None,
    verbose: Any = 0,
    steps: int | None = None,
    check: bool = True,
) -> Any:
    """The result of ``model.predict`` on the whole data, of which each rank computes a share.

    Collective; data, weights and moving averages are as in `evaluate`.

    Args:
        model: need not be compiled. A `predict` of its own class is as an `evaluate` of its own.
        x, batch_size, steps, check: as for `evaluate`. With random x pass ``check=False``.
        verbose: shows the progress of rank 0's share of arrays; nothing is shown for datasets.

    Returns:
        As ``model.predict``: an array, or arrays in the model's structure, with a row for each
            sample in the order of `x`; equal on all ranks, the caller's own.

    Raises:
        ConfigError: as `evaluate`, or an output does not have rows of equal shape.
        MismatchError: the ranks read different data, or their models differ.
    """
    options = dict(locals())
    require_model(model, "predict")
    ring = communicator or default_communicator()
    if ring.size > 1:
        refuse_strategy(model)
        refuse_states_of_rows(model, ring)
    settle(model)
    if is_overridden(model, "predict"):
        del options["model"]
        return through_own(model, "predict", predict, options)
    share = _Share(model, (x, None, None), batch_size, steps, ring, check)
    shown = verbose if training_ranks(model.weights, ring).rank == 0 else 0
    if share.is_whole:
        return model.predict(x, batch_size=batch_size, verbose=shown, steps=steps)
    with _averages_of_rank_0(model, ring), share.being_read():
        answering = Answering(model, ring, share.example)
        batches = _predicted(model, share, batch_size, shown)
        answering.finish(with_losses=False)
    flat = [keras.tree.flatten(batch) for batch in batches]
    joined = [
        _gathered([batch[i] for batch in flat], ring, share.rows) for i in range(len(flat[0]))
    ]
    return keras.tree.pack_sequence_as(batches[0], joined)


def _predicted(model: Any, share: _Share, batch_size: int | None, verbose: Any) -> list[Any]:
    """The outputs for this rank's share: for each batch of a dataset, or for all rows."""
    own_x = share.parts[0]
    if not share.is_empty:
        if not isinstance(own_x, tf.data.Dataset):
            return [model.predict(own_x, batch_size=batch_size, verbose=verbose)]
        # Batch by batch, to know which rows belong to which batch.
        outputs = [model.predict_on_batch(_inputs_of(element)) for element in own_x]
        if not share.was_empty():
            return outputs
    # Predict anyway, for the outputs' structure, dtypes and shapes.
    outputs = model.predict_on_batch(share.example())
    return [keras.tree.map_structure(_none_of, outputs)]


def _none_of(output: Any) -> Any:
    return output if _count_of(output) is None else output[:0]


@contextmanager
def _averages_of_rank_0(model: Any, ring: Communicator) -> Iterator[None]:
    """Within the block all ranks evaluate the model that rank 0 would save. Collective."""
    # None differ where a rank with an empty share has a model that is not built, and needs none.
    unlike = differing(list(filter(is_average, untrained(model))), ring)
    with metric_states.restored(unlike):
        broadcast_variables(unlike, ring)
        yield


class OutputsError(ConfigError):
    """Outputs cannot be joined, of the same kind on all ranks."""


class _Share:
    """This rank's part of the data to evaluate or predict, of which all pass as much. Collective.

    `parts` are its x, y and sample_weight, of which there may be none (`is_empty`; of data of
    unknown length that is known after it was read). With `is_whole` leave all to Keras: with one
    rank or no data on any. All ranks make as many iterators of the data as Keras.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        rows: int | None,
        steps: int | None,
        ring: Communicator,
        check: bool,
    ) -> None:
        x = data[0]
        self.parts, self.is_empty, self.is_whole = data, False, True
        self.feed = Feed()  # Which does nothing, for arrays.
        self._ring, self._has_batch = ring, True
        self.rows: list[int] | None = None  # of each rank, of arrays
        self._reads = Reads() if check and not are_arrays(data) else None
        if ring.size == 1:
            return
        if are_arrays(data):
            count = (arrays := Arrays(*data)).count
            if steps is not None:
                at_once = model.steps_per_execution
                count = min(count, -(-steps // at_once) * at_once * (rows or BATCH_SIZE))
            # Whole batches, the same as one process's: what mixes rows gets the same ones.
            unit = fixed_rows(model) or rows or BATCH_SIZE
            units = -(-count // unit)
            bounds = [min(count, -(-units * r // ring.size) * unit) for r in range(ring.size + 1)]
            self.rows = np.diff(bounds).tolist()
            first, end = bounds[ring.rank : ring.rank + 2]
            self.parts, self.is_empty = slice_rows(data, first, end), first == end
            self.feed.first = arrays.first()
            size = {"rows": str(count)}
        else:
            plan = Plan(
                ring,
                f"the {_WHAT}",
                steps=steps,
                at_once=model.steps_per_execution,
                deal=True,
                check=self._reads or False,
            )
            feed = self.feed = feed_of(data, plan)
            is_dataset = isinstance(x, tf.data.Dataset)
            known = x.cardinality() if is_dataset else getattr(x, "num_batches", -1)
            self.parts = feed.dataset, None, None
            self.is_empty = bool(feed.is_empty)
            if feed.is_empty is None:
                count = int(feed.dataset.cardinality())
                self.is_empty = count == 0
                if count == tf.data.UNKNOWN_CARDINALITY:
                    self.parts = self._noting(feed.dataset), None, None
            size = {"batches": str(steps or int(known))}
        remedy = "Pass the same whole data on every rank; each takes its own share."
        require_same_settings([Settings("data", size, remedy)], ring)
        if check and are_arrays(data):
            compare_reads((*arrays.digest(), 0, 0), _WHAT, remedy_of_unlike_data(_IF_RANDOM), ring)
        elif check and isinstance(x, keras.utils.PyDataset):
            numbers = map(int, numbers_of(feed.first))
            compare_reads((1, *numbers), _WHAT, remedy_of_unlike_data(_IF_RANDOM), ring)
        self.is_whole = all(ring.all_gather_object(self.is_empty))

    def _noting(self, dataset: Any) -> Any:
        """`dataset`, of which is noted whether it has any batch."""
        self._has_batch = False
        return passing(dataset, lambda _, batch: batch, None, self._note)

    def _note(self, _: Any) -> None:
        self._has_batch = True

    def was_empty(self) -> bool:
        """Whether it is empty, which is known for sure after it was read."""
        self.is_empty = self.is_empty or not self._has_batch
        return self.is_empty

    @contextmanager
    def being_read(self) -> Iterator[None]:
        """Raises MismatchError at the end if ranks have read different batches. Collective."""
        self.feed.begin(0)
        try:
            if self.is_empty and isinstance(self.parts[0], tf.data.Dataset):
                # The batches of others, of which the first is an example.
                list(self.parts[0])
            yield
        finally:
            self.feed.end()
        if self._reads is not None:
            compare_reads(self._reads.last(), _WHAT, remedy_of_unlike_data(_IF_RANDOM), self._ring)

    def example(self) -> Any:
        """Some inputs, for a rank that has no share."""
        if self.feed.first is None:
            raise ConfigError(
                f"got a dataset without any batch as {_WHAT}", **self._ring.config.who
            )
        return _inputs_of(self.feed.first)


def _inputs_of(element: Any) -> Any:
    return keras.utils.unpack_x_y_sample_weight(element)[0]


def in_order(model: Any, logs: dict[str, Any]) -> list[str]:
    """The names in `logs` as `evaluate` lists their values: by metric, others by name."""
    names = [metric.name for metric in metric_states.metrics_in(model)]
    known = [name for name in names if name in logs]
    return known + sorted(logs.keys() - known)


def _gathered(batches: Sequence[Any], ring: Communicator, rows: list[int] | None) -> np.ndarray:
    """All ranks' batches of one output; batch i is the next of rank i mod size.

    OutputsError on all ranks unless these are arrays; with as many rows for each of the `rows` of
    all ranks, if these are known.
    """
    counts = ring.all_gather_object([_count_of(batch) for batch in batches])
    is_joinable = not any(None in lengths for lengths in counts)
    if is_joinable and rows is not None:
        rows_of_batch = max(1, sum(map(sum, counts)) // sum(rows))
        is_joinable = counts == [[count * rows_of_batch] for count in rows]
    if not is_joinable:
        raise OutputsError(
            f"cannot join outputs of type {type(batches[0]).__name__}",
            **ring.config.who,
            remedy="Ragged and sparse outputs, and numbers that are not one per sample, are not "
            "supported: "
            + for_rr("use model.predict.", "pass what can be read twice, such as arrays."),
        )
    rest, dtype = batches[0].shape[1:], batches[0].dtype
    width = math.prod(rest) * dtype.itemsize
    rows_here = np.ascontiguousarray(np.concatenate(batches))
    # As bytes, so that every dtype travels.
    as_bytes = rows_here.reshape(-1).view(np.uint8).reshape(len(rows_here), width)
    joined = ring.all_gather(as_bytes).reshape(-1).view(dtype).reshape(sum(map(sum, counts)), *rest)
    pieces = np.split(joined, np.cumsum([n for lengths in counts for n in lengths])[:-1])
    # By the number of the turn, then by rank.
    turns = np.concatenate([np.arange(len(lengths)) for lengths in counts])
    return np.concatenate([pieces[number] for number in np.argsort(turns, kind="stable")])


def _count_of(output: Any) -> int | None:
    """How many rows it has; None: it is no array of rows."""
    return len(output) if isinstance(output, np.ndarray) and output.ndim else None
