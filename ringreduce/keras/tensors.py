"""Collectives on tensors for users: in layers, losses, metrics and custom loops."""

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras.weighting import across_ranks, moved_across_ranks
from ringreduce.tensorflow import collectives, send_recv
from ringreduce.vocabulary.errors import ArrayError
from ringreduce.vocabulary.types import ReduceOp, reduce_op

# Dtypes that cannot travel, and those, with all their values, in which they do. A sum of uint16
# that is too large wraps in the cast back, as other integers do.
_CARRIERS = {"uint16": tf.int32, "bool": tf.uint8}


def all_reduce(
    tensor: Any, op: ReduceOp | str = ReduceOp.SUM, communicator: Communicator | None = None
) -> Any:
    """Reduce a tensor, or each of a structure, over all ranks; all get the same result.

    Works eagerly and inside `tf.function`, `tf.while_loop` included. All ranks must call it at the
    same point, and either all ask for its gradient or none. The gradient of a sum is the sum of all
    ranks' gradients, that of a mean their mean; in a step that `rr.fit` or
    `step_weight` weights, each with its rank's weight. Results are bit-identical on all ranks.

    Args:
        tensor: anything `tf.convert_to_tensor` takes, or a nested structure of such: a list, a
            tuple or a dict is reduced leaf by leaf. Shapes and dtypes are equal on all ranks;
            dtypes are integers and floats up to 64 bits, bfloat16 included, but not uint32 and
            uint64; bool for min, max and product. `tf.IndexedSlices` stay sparse, for sums and
            means: the result has the rows of all ranks.
        op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"product"``.

    Returns:
        New tensors of the same shapes and dtypes, in the same structure.

    Raises:
        ArrayError: a dtype cannot travel, or there is no such operator.
        ConfigError: inside a branch of `tf.cond`, where not all ranks could take part;
            ``jit_compile=True`` where XLA cannot call the ring, does not know the shape, or in the
            condition of a loop; in a graph of TensorFlow 1; when the gradient of min, max or
            product is asked for.
        MismatchError: the ranks make different calls, or pass different shapes or dtypes; or reach
            the gradients of several targets of a tape in different orders.
        PeerError: another rank failed, or did not make the call in time.
        ClosedError: `init` was not called.
    """
    ring = communicator or default_communicator()

    def reduced(leaf: Any) -> Any:
        if isinstance(leaf, tf.IndexedSlices):
            return _reduced_slices(leaf, ring, op)
        return _carried(leaf, ring, partial(collectives.all_reduce, op=op), op)

    return tf.nest.map_structure(reduced, tensor)


def _reduced_slices(slices: Any, ring: Communicator, op: ReduceOp | str) -> Any:
    """All ranks' rows in rank order; for means divided by the number of ranks."""
    how = reduce_op(op)
    if how not in (ReduceOp.SUM, ReduceOp.MEAN):
        text = f"cannot reduce tf.IndexedSlices with op={how.name.lower()!r}"
        remedy = "Use sum or mean, or tf.convert_to_tensor first."
        raise ArrayError(text, **ring.config.who, remedy=remedy)
    values = all_gather(slices.values, ring)
    if how is ReduceOp.MEAN:
        values = values / tf.cast(ring.size, values.dtype)
    indices = all_gather(slices.indices, ring)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _carried(
    tensor: Any,
    communicator: Communicator | None,
    collective: Callable[[Any, Communicator], Any],
    op: ReduceOp | str = "max",
    across: Callable[[Any, Callable[[Any], Any]], Any] = across_ranks,
) -> Any:
    """The result of `collective` on `tensor`; uint16 and bool travel in another dtype."""
    ring, value = communicator or default_communicator(), tf.convert_to_tensor(tensor)
    carrier = _CARRIERS.get(value.dtype.name)
    if carrier is None:
        return across(value, lambda sent: collective(sent, ring))
    if value.dtype == tf.bool and reduce_op(op) in (ReduceOp.SUM, ReduceOp.MEAN):
        text = f"cannot reduce a tensor of dtype bool with op={reduce_op(op).name.lower()!r}"
        remedy = 'Use op="max" for any, op="min" for all, or count with tf.cast.'
        raise ArrayError(text, remedy=remedy)
    return tf.cast(collective(tf.cast(value, carrier), ring), value.dtype)


_moved = partial(_carried, across=moved_across_ranks)


def all_gather(tensor: Any, communicator: Communicator | None = None) -> Any:
    """Join the tensors of all ranks along the first dimension, in rank order; equal on all ranks.

    Tensors are as for `all_reduce`. First dimensions may be zero, and differ between ranks except
    under ``jit_compile=True``; the others and the dtype may not. A tensor without dimensions counts
    as one of shape (1,). The result is new, of shape (sum of first dimensions, ...). The gradient
    of a rank's rows is the sum of all ranks' gradients of them. Raises as `all_reduce`.
    """
    return _carried(tensor, communicator, collectives.all_gather)


def broadcast(tensor: Any, root: int = 0, communicator: Communicator | None = None) -> Any:
    """The tensor that rank `root` passed, on every rank: new, of the same shape and dtype.

    The tensor is as for `all_reduce`, of equal shape and dtype on all ranks; `root` is equal too.
    The root only sends, and may learn only in its next call that another rank passed a different
    one. The gradient is the sum of all ranks' gradients on `root`, and zeros elsewhere. Raises as
    `all_reduce`; ArrayError also when `root` is no rank.
    """
    return _carried(tensor, communicator, partial(collectives.broadcast, root=root))


def reduce_scatter(
    tensor: Any, op: ReduceOp | str = ReduceOp.SUM, communicator: Communicator | None = None
) -> Any:
    """Reduce a tensor over all ranks and leave each rank its own rows of the result, in new memory.

    Rank r gets the r-th of `size` parts along the first dimension. Their lengths differ by at most
    one, longer ones first; with fewer rows than ranks the last are empty. The tensor is as for
    `all_reduce`, with a dimension or more. The gradient is the gathered gradients of all parts.
    Raises as `all_reduce`; ArrayError also for a tensor without dimensions.
    """
    return _carried(tensor, communicator, partial(collectives.reduce_scatter, op=op), op)


def all_to_all(tensor: Any, counts: Any = None, *, communicator: Communicator | None = None) -> Any:
    """Send a part of `tensor` to each rank, and join the parts that all ranks send to this one.

    The tensor is cut along its first dimension: the first part goes to rank 0, the next to rank 1,
    and so on; the result has the part of rank 0 first. So tokens go to the ranks that have their
    experts, and a second call brings the answers back. The gradient goes the same way back.

    Args:
        tensor: as for `all_reduce`, with a dimension or more. Only first dimensions may differ
            between ranks, and only with `counts`.
        counts: how many rows are for each rank, a list or a tensor of whole numbers that add up to
            the first dimension; then all ranks pass some. None: the same number for each. Under
            ``jit_compile=True``, which fixes all shapes, only None: pad the parts to one length.

    Returns:
        A new tensor of the shape of `tensor`. With `counts` a pair: the tensor, of shape (sum of
            rows, ...), and an int64 tensor of shape (size,), the rows that came from each rank.

    Raises:
        As `all_reduce`; ArrayError also when `counts` do not fit the rows, when it runs in a graph
            that does not know them.
    """
    if counts is None:
        return _moved(tensor, communicator, collectives.all_to_all)
    received = None

    def exchange(value: Any, ring: Communicator) -> Any:
        nonlocal received
        rows, received = collectives.all_to_all_uneven(value, ring, counts)
        return rows

    return _moved(tensor, communicator, exchange), received


def send(tensor: Any, to: int, *, tag: int = 0, communicator: Communicator | None = None) -> Any:
    """Send `tensor` to rank `to`, which calls `recv`; only these two ranks take part.

    Where it stands in a graph, it runs in order with the collectives of this rank. Two ranks that
    both send before they receive may wait for each other: exchange with `all_to_all`.

    Args:
        tensor: as for `all_reduce`.
        tag: a number that the receiver passes too, 0 to 2**63 - 1.

    Returns:
        A scalar 0 of the dtype of `tensor`, for the tape: add it to the loss, or take it as the
            target. Its gradient is what the receiver's backward pass sends back, whatever it is
            multiplied with.

    Raises:
        As `all_reduce`; ArrayError also when `to` is not another rank, MismatchError when that one
            receives another count, dtype or tag next. ConfigError for second derivatives.
    """
    return _moved(tensor, communicator, partial(send_recv.send, to=to, tag=tag))


def recv(like: Any, source: int, *, tag: int = 0, communicator: Communicator | None = None) -> Any:
    """The next tensor that rank `source` sends to this one.

    Its gradient goes back to that rank, which must ask for it, as this one must for that of a loss
    that depends on the tensor. Raises as `send`; ArrayError also when the shape is not known.

    Args:
        like: a tensor of the shape and dtype of the one sent, whose values do not matter; or a
            `tf.TensorSpec` of known shape.
        tag: the number that the sender passes.
    """
    ring = communicator or default_communicator()
    if isinstance(like, tf.TensorSpec):
        if not like.shape.is_fully_defined():
            raise ArrayError(f"cannot receive a tensor of shape {like.shape}", **ring.config.who)
        like = tf.zeros(like.shape, like.dtype)
    return _moved(like, ring, partial(send_recv.receive, source=source, tag=tag))
