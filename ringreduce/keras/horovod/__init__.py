"""Horovod's names with Horovod's meaning: ``import ringreduce.keras.horovod as hvd``.

It has everything of `ringreduce.keras` too. Collectives on tensors average by default, take
factors, and have Horovod's gradients, which are scaled differently (docs/from-horovod.md). With a
`process_set` this is about its ranks, which take part alone. A `root_rank` is always a rank of the
job. A `name` is not used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import (
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ringreduce.keras.advice import ABSENT, OPTIONS
from ringreduce.keras.horovod import callbacks, elastic
from ringreduce.keras.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
    with_id,
)
from ringreduce.keras.horovod.stand_in import install_as_horovod
from ringreduce.keras.weighting import times_back
from ringreduce.pure.payload import checked_counts
from ringreduce.tensorflow import xla
from ringreduce.tensorflow.codecs import Compression
from ringreduce.tensorflow.sparse import map_values
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp, reduce_op

__all__ = [
    "Compression",
    "callbacks",
    "elastic",
    "install_as_horovod",
    "remove_process_set",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    *("Average", "Max", "Min", "Product", "Sum", "init"),
    *("DistributedGradientTape", "DistributedOptimizer", "SyncBatchNormalization"),
    *("ProcessSet", "add_process_set", "global_process_set"),
    *("allgather", "allgather_object", "allreduce", "alltoall", "barrier", "reducescatter"),
    *("broadcast", "broadcast_", "broadcast_object", "broadcast_object_fn", "broadcast_variables"),
    *("grouped_allgather", "grouped_allreduce", "grouped_reducescatter"),
    *("local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"),
]

Average, Sum = ReduceOp.MEAN, ReduceOp.SUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def init(process_sets: Sequence[ProcessSet] = (), **settings: Any) -> Communicator:
    """`ringreduce.init`, then `add_process_set` of each of `process_sets`."""
    ring = rr.init(**settings)
    for process_set in process_sets:
        add_process_set(process_set)
    return ring


_ALL = global_process_set
# Options of Horovod's that are of no effect here, with their defaults.
_OF_NO_EFFECT = {"device_dense": "", "device_sparse": "", "gradient_predivide_factor": 1.0}
_OF_NO_EFFECT |= {"groups": None, "num_groups": 0}


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    *,
    process_set: ProcessSet = _ALL,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    **options: Any,
) -> Any:
    """`ringreduce.keras.DistributedOptimizer` with its `options`, and Horovod's at their defaults.

    Args:
        backward_passes_per_step: `gradient_accumulation_steps`; more than 1 only with
            `average_aggregated_gradients`.
        average_aggregated_gradients: apply the mean of the accumulated steps; there is no sum.
        options: `scale_local_gradients` is True by default: gradients of local variables are
            divided by the number of ranks.

    Raises:
        ConfigError: an option of Horovod's has a value that is not supported; says what to use.
        TypeError: there is no such option.
    """
    if backward_passes_per_step != 1:
        if not average_aggregated_gradients:
            raise ConfigError(
                f"got backward_passes_per_step={backward_passes_per_step}, whose gradients would "
                "be added up",
                remedy="Pass average_aggregated_gradients=True too, and multiply the learning rate "
                "by the number of passes.",
            )
        options["gradient_accumulation_steps"] = backward_passes_per_step
    return rr.DistributedOptimizer(optimizer, _unless_global(process_set), **_translated(options))


def DistributedGradientTape(
    tape: Any = None, *, process_set: ProcessSet = _ALL, **options: Any
) -> Any:
    """`ringreduce.keras.DistributedGradientTape` with its `options`, as `DistributedOptimizer`."""
    return rr.DistributedGradientTape(tape, _unless_global(process_set), **_translated(options))


def SyncBatchNormalization(*, process_set: ProcessSet = _ALL, **options: Any) -> Any:
    """`ringreduce.keras.SyncBatchNormalization` with its `options`."""
    return rr.SyncBatchNormalization(communicator=_unless_global(process_set), **options)


def allreduce(
    tensor: Any,
    *,
    average: bool | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = _ALL,
) -> Any:
    """Reduce a tensor over all ranks, by default to the mean; `ringreduce.keras.all_reduce`.

    Args:
        tensor: as there; `tf.IndexedSlices` stay sparse, and means of integers there are floats.
        average: Horovod's old argument; True for `Average`, False for `Sum`.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`; of `tf.IndexedSlices` the first two.
        prescale_factor, postscale_factor: multiply each rank's tensor, and the result, integers in
            float64. What is no integer then, a mean too, is rounded towards zero.
    """
    ring = process_set.communicator
    if op is None:
        op = Sum if average is False else Average
    elif average is not None:
        raise ConfigError(f"got average={average} and op={op!r}", remedy="Pass op alone.")
    scaled = _scaled(tensor, prescale_factor)
    return _reduced(rr.all_reduce, scaled, reduce_op(op), postscale_factor, ring)


def allgather(tensor: Any, name: str | None = None, *, process_set: ProcessSet = _ALL) -> Any:
    """Join the tensors of all ranks along the first dimension; `ringreduce.keras.all_gather`."""
    ring = process_set.communicator
    return rr.all_gather(_with_gradient_times(tensor, 1 / ring.size), ring)


def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, *, process_set: ProcessSet = _ALL
) -> Any:
    """Send a part of `tensor` to each rank; `ringreduce.keras.all_to_all`.

    Args:
        splits: rows for each rank, as `counts` there. None: each rank divides its own rows equally,
            and ranks may have different numbers of them, except under ``jit_compile=True``.

    Returns:
        The rows that came; with `splits` also how many came from each rank, int32.
    """
    ring = process_set.communicator
    if splits is not None:
        rows, received = rr.all_to_all(tensor, splits, communicator=ring)
        return rows, tf.cast(received, tf.int32)
    value = tf.convert_to_tensor(tensor)
    if value.shape.rank == 0 or xla.is_compiling():
        return rr.all_to_all(value, communicator=ring)
    if value.shape.rank and value.shape[0] is not None:
        checked_counts(None, value.shape[0], ring.size, ring.config.who)
    equal = tf.fill((ring.size,), tf.shape(value)[0] // ring.size)
    return rr.all_to_all(value, equal, communicator=ring)[0]


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet = _ALL
) -> Any:
    """The tensor that rank `root_rank` passed, on every rank; `ringreduce.keras.broadcast`."""
    ring = process_set.communicator
    root = _root_in(process_set, root_rank)
    return rr.broadcast(_with_gradient_times(tensor, 1 / ring.size), root, ring)


def reducescatter(
    tensor: Any,
    *,
    op: ReduceOp | str = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = _ALL,
) -> Any:
    """Reduce as `allreduce`; each rank gets its rows; `ringreduce.keras.reduce_scatter`."""
    ring = process_set.communicator
    scaled = _with_gradient_times(_scaled(tensor, prescale_factor), float(ring.size))
    return _reduced(rr.reduce_scatter, scaled, reduce_op(op), postscale_factor, ring)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int = 0, *, process_set: ProcessSet = _ALL
) -> None:
    """Give `variables` rank `root_rank`'s values; `ringreduce.keras.broadcast_variables`."""
    ring = process_set.communicator
    rr.broadcast_variables(variables, _root_in(process_set, root_rank), ring)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    *,
    process_set: ProcessSet = _ALL,
) -> list[Any]:
    """Give `variables` rank `root_rank`'s values; return these."""
    broadcast_variables(variables, root_rank, process_set=process_set)
    return [tf.convert_to_tensor(variable) for variable in variables]


def broadcast_object(
    value: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    *,
    process_set: ProcessSet = _ALL,
) -> Any:
    """The object that rank `root_rank` passed, on every rank."""
    ring = process_set.communicator
    return ring.broadcast_object(value, _root_in(process_set, root_rank))


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, *, process_set: ProcessSet = _ALL
) -> Callable[[Any], Any]:
    """A function that returns, on every rank, the object that rank `root_rank` passes to it."""
    return lambda value: broadcast_object(value, root_rank, process_set=process_set)


def allgather_object(
    value: Any, name: str | None = None, *, process_set: ProcessSet = _ALL
) -> list[Any]:
    """The objects that all ranks passed, in rank order."""
    return process_set.communicator.all_gather_object(value)


def barrier(process_set: ProcessSet = _ALL) -> None:
    """Return once every rank has called it."""
    process_set.communicator.barrier()


def _grouped(collective: Callable[..., Any]) -> Callable[..., list[Any]]:
    def grouped(tensors: Sequence[Any], *arguments: Any, **options: Any) -> list[Any]:
        return [collective(tensor, *arguments, **options) for tensor in tensors]

    grouped.__name__ = f"grouped_{collective.__name__}"
    grouped.__doc__ = f"`{collective.__name__}` of each of `tensors`, in their order."
    return grouped


grouped_allreduce, grouped_allgather = _grouped(allreduce), _grouped(allgather)
grouped_reducescatter = _grouped(reducescatter)


def _as_op(number: Callable[[], int]) -> Callable[..., Any]:
    def op(name: str | None = None) -> Any:
        return tf.constant(number(), name=name)

    op.__name__ = f"{number.__name__}_op"
    op.__doc__ = f"`ringreduce.keras.{number.__name__}`, as a scalar int32 tensor."
    return op


rank_op = _as_op(rr.rank)
local_rank_op, local_size_op = _as_op(rr.local_rank), _as_op(local_size)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks in a process set, by default of the job, as a scalar int32 tensor."""
    return tf.constant(with_id(process_set_id).size(), name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 on the ranks in a process set, 0 on others, as a scalar int32 tensor."""
    return tf.constant(int(with_id(process_set_id).included()), name=name)


def __getattr__(name: str) -> Any:
    # Such as `nccl_built`: ringreduce is built with none of Horovod's transports.
    return (lambda: False) if name in ABSENT else getattr(rr, name)


def _unless_global(process_set: ProcessSet) -> Communicator | None:
    """The group; None for all ranks, whose communicator need not exist yet."""
    return None if process_set is global_process_set else process_set.communicator


def _root_in(process_set: ProcessSet, root_rank: int) -> int:
    if root_rank not in process_set.ranks:
        text = f"got root_rank {root_rank}, which is not in {process_set}"
        remedy = "Pass a rank of the job that is in it."
        raise ConfigError(text, **process_set.communicator.config.who, remedy=remedy)
    return process_set.ranks.index(root_rank)


def _translated(options: dict[str, Any]) -> dict[str, Any]:
    """`options` without those of Horovod's that are of no effect; ConfigError if one would be."""
    for name, default in _OF_NO_EFFECT.items():
        if (value := options.pop(name, default)) != default:
            raise ConfigError(f"got {name}={value!r}", remedy=f"{OPTIONS[name]}.".capitalize())
    return {"scale_local_gradients": True, **options}


def _reduced(
    collective: Callable[..., Any], scaled: Any, op: ReduceOp, factor: float, ring: Communicator
) -> Any:
    """Reduce `scaled`, times `factor`; a mean of integers is rounded once, to 0."""
    if op is not Average or isinstance(scaled, tf.IndexedSlices) or scaled.dtype.is_floating:
        return _scaled(collective(scaled, op, ring), factor)
    total = collective(scaled, Sum, ring)
    if factor == 1.0:
        return tf.truncatediv(total, tf.cast(ring.size, total.dtype))
    return tf.cast(tf.cast(total, tf.float64) * factor / ring.size, total.dtype)


def _scaled(tensor: Any, factor: float) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        return map_values(lambda values: _scaled(values, factor), tensor)
    tensor = tf.convert_to_tensor(tensor)
    if factor == 1.0:
        return tensor
    wide = tf.float32 if tensor.dtype.is_floating and tensor.dtype.size < 8 else tf.float64
    return tf.cast(tf.cast(tensor, wide) * factor, tensor.dtype)


def _with_gradient_times(tensor: Any, factor: float) -> Any:
    return times_back(tf.convert_to_tensor(tensor), tf.constant(factor, tf.float64))
