"""The weight of this rank's gradients in the mean over all ranks; usually all are equal.

Where ranks exchange rows for the sake of their parts, gradients mean something else:

    a rank's own rows | rows of all ranks, at the parts that they use | its own rows
                    enter                                           leave

Outside, a gradient is of this rank's loss, the mean over its rows, and is weighted at the end of
the step. Inside it is of all ranks' mean loss, whatever the shares of the batch are: a part whose
rank has an empty share still learns from the rows of others.
"""

import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.tensorflow.python_calls import call
from ringreduce.tensorflow.sparse import map_values
from ringreduce.tensorflow.xla import is_compiling
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp, reduce_op


class Averaging(enum.Enum):
    """How a variable's gradients of several steps, and of all ranks, become one."""

    MEAN = enum.auto()
    # This rank's own, not shared.
    LOCAL = enum.auto()
    # The gradient of a piece, which all ranks' rows use: it is that of all ranks' mean loss.
    PART = enum.auto()


@dataclass(frozen=True)
class Weight:
    """A rank's weight in a step, 0 or more, and the mean of all, more than 0: float32 scalars."""

    own: Any
    mean: Any

    @property
    def factor(self) -> Any:
        """Gradients times this factor have the weighted mean as their plain mean over all ranks."""
        return tf.math.divide_no_nan(self.own, self.mean)


class _Local(threading.local):
    """The weights of what this thread computes or traces."""

    weight: Weight | None = None
    kept: Weight | None = None
    has_moved = False  # whether rows were sent between ranks
    is_in_parts = False  # whether gradients are those of all ranks' mean loss, and not weighted


_local = _Local()


def weighted(gradient: Any, weight: Any) -> Any:
    """`gradient` times `weight`; with 0 it is left out, even if it is NaN."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return map_values(lambda values: weighted(values, weight), gradient)

    def product() -> Any:
        return tf.math.multiply_no_nan(gradient, tf.cast(weight, gradient.dtype))

    if tf.executing_eagerly() or is_compiling():
        return product()
    # Mostly it is 1, and reading all gradients once more takes longer than to ask.
    return tf.cond(tf.equal(weight, 1.0), lambda: gradient, product)


def gradient_op(op: ReduceOp | str) -> ReduceOp:
    """How gradients of all ranks combine; ConfigError unless by a mean or a sum."""
    how = reduce_op(op)
    if how not in (ReduceOp.MEAN, ReduceOp.SUM):
        raise ConfigError(f"op is {how.name.lower()!r}; accepted for gradients: mean, sum")
    return how


def across_ranks(value: Any, collective: Callable[[Any], Any]) -> Any:
    """The result of `collective`, which has a gradient, on `value` in the present step.

    A rank's loss counts with that rank's weight, also in the gradients that it sends to others;
    those it receives are multiplied by its own weight later, with all its gradients.
    """
    weight = current()
    if weight is None or _local.is_in_parts or not value.dtype.is_floating:
        return collective(value)
    value = times_back(value, tf.math.divide_no_nan(weight.mean, weight.own))
    return times_back(collective(value), weight.factor)


def moved_across_ranks(value: Any, collective: Callable[[Any], Any]) -> Any:
    """`across_ranks` for what sends rows to other ranks, whose local variables may use them."""
    if current() is not None and not _local.is_in_parts and value.dtype.is_floating:
        _local.has_moved = True
    return across_ranks(value, collective)


def refuse_unknown_gradients(gradients: str, is_scaled: bool) -> None:
    """ConfigError unless `gradients` is a mode, and goes with the optimizer's other options."""
    if gradients not in ("tried", "mean", "sum"):
        raise ConfigError(f"gradients is {gradients!r}; accepted: 'tried', 'mean', 'sum'")
    if gradients == "sum" and is_scaled:
        raise ConfigError(
            'got gradients="sum" with op="sum" or scale_local_gradients, which scale means',
            remedy="Leave them out: sums are added up as they are.",
        )


def refuse_sums(kinds: Sequence[Averaging]) -> None:
    """ConfigError if gradients that are to be added up may be of other ranks' batches."""
    if Averaging.PART in kinds or _local.has_moved:
        what = "layers in pieces" if Averaging.PART in kinds else "steps that send rows to ranks"
        raise ConfigError(
            f'got gradients="sum" with {what}, whose gradients are of the mean over all rows',
            remedy="Divide by this rank's rows, tf.shape(x)[0], and leave gradients out.",
        )


def refuse_local(kinds: Sequence[Averaging], ring: Communicator) -> None:
    """ConfigError if gradients of local variables may have come from other ranks' batches."""
    # How much those count is not known here: a rank without rows would count them not at all.
    if Averaging.LOCAL in kinds and _local.has_moved:
        raise ConfigError(
            "has local variables and sends rows between ranks (all_to_all, gather, scatter, send) "
            "in steps whose batches differ in length: gradients would count wrongly",
            **ring.config.who,
            remedy="Make the variables with rr.parts.PartLayer.add_part and send within "
            "rr.parts.in_parts (docs/guides/groups.md), or give all ranks equally many rows.",
        )


def in_parts(
    function: Callable[..., Any], *tensors: Any, communicator: Communicator | None = None
) -> Any:
    """Call ``function(*tensors)``, which sends rows to the parts that they use, and back.

    Call it in a layer with parts (`PartLayer`) around what exchanges rows between the ranks of
    `communicator` and uses parts. The gradients of parts are then those of the mean over the whole
    batch, with every way to divide it. Within, use no variable that all ranks share, such as a
    router's weights: pass what is computed from it as one of `tensors`.

    Args:
        function: gets `tensors` and returns a tensor or a structure of them, with what belongs to
            this rank's rows.
        communicator: by default the process's.
    """
    ring = communicator or default_communicator()
    if ring.size == 1 or _local.is_in_parts:
        return function(*tensors)
    weight = current()
    share = tf.constant(1.0) if weight is None else weight.factor
    share /= ring.size
    within = tf.nest.map_structure(lambda value: _scaled(value, 1 / share, share), list(tensors))
    _local.is_in_parts = True
    try:
        result = function(*within)
    finally:
        _local.is_in_parts = False
    return tf.nest.map_structure(lambda value: _scaled(value, share, share), result)


def _scaled(value: Any, factor: Any, share: Any) -> Any:
    """`value`, with its gradient times `factor`; none where this rank has no rows."""
    if not tf.is_tensor(value) or not value.dtype.is_floating:
        return value
    return times_back(value, tf.where(share > 0, factor, tf.zeros_like(share)))


@tf.custom_gradient
def times_back(values: Any, factor: Any) -> Any:
    """`values`, with the gradient multiplied by `factor`; a factor of 0 makes even NaN 0."""

    def gradient(upstream: Any) -> Any:
        return tf.math.multiply_no_nan(upstream, tf.cast(factor, upstream.dtype)), None

    return tf.identity(values), gradient


def current() -> Weight | None:
    """The weight of the step that this thread computes or traces; None: all ranks are equal."""
    return _local.weight


@contextmanager
def using(weight: Weight | None) -> Iterator[None]:
    """Within the block `current` returns `weight`."""
    before = current()
    values = None
    if weight is not None and tf.executing_eagerly():
        kept = _kept()
        values = kept.own.numpy(), kept.mean.numpy()
        kept.own.assign(weight.own)
        kept.mean.assign(weight.mean)
        weight = kept
    _local.weight, _local.has_moved = weight, False
    try:
        yield
    finally:
        _local.weight, _local.has_moved = before, False
        if values is not None:
            kept.own.assign(values[0])
            kept.mean.assign(values[1])


def _kept() -> Weight:
    """This thread's weight as variables: a traced function would keep values as constants."""
    if _local.kept is None:
        own, mean = (tf.Variable(1.0, trainable=False) for _ in range(2))
        _local.kept = Weight(own, mean)
    return _local.kept


@contextmanager
def step_weight(samples: Any, communicator: Communicator | None = None) -> Iterator[None]:
    """Weight the gradients applied within the block by this rank's `samples`.

    For custom loops whose batches differ in length between ranks: `DistributedOptimizer` then
    computes the mean over all samples, not over the ranks::

        with rr.step_weight(len(x)):
            optimizer.apply(gradients, model.trainable_variables)

    Collective: all ranks must enter the block in each step, with `samples`, numbers or scalar
    tensors, that are 0 or more and not 0 on all. Each rank's gradients must be means over its own
    samples, as Keras's are. A rank with 0 samples takes part with any gradients, even NaN, which do
    not count. A `tf.function` that applies gradients must be called within such a block from its
    first call on, or contain the block: how it was traced is how it stays.

    Raises:
        tf.errors.OutOfRangeError: no rank has any sample.
    """
    ring = communicator or default_communicator()
    if ring.size == 1:
        yield
        return
    with using(exchanged(tf.cast(samples, tf.float32), ring)):
        yield


def exchanged(weight: Any, ring: Communicator) -> Weight:
    """The weight of a step from `weight`, a scalar float32 tensor, of each rank.

    Collective, in a graph when it runs. Where all are 0, the op, or eagerly this call, fails with
    `tf.errors.OutOfRangeError`, as an iterator at its end does: nothing that depends on the weight
    is computed, and Keras ends the epoch.
    """

    def mean(value: np.ndarray) -> tuple[Any]:
        total = ring.all_reduce(np.array([value], np.float64), ReduceOp.MEAN)
        if not total[0] > 0:
            raise StopIteration("no rank has any data left")
        return (np.float32(total[0]),)

    what = "exchange how much each rank's batch counts"
    [average] = call(ring, what, mean, [weight], [((), tf.float32)])
    return Weight(weight, average)
