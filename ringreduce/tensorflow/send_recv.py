"""Sends and receives tensors between two ranks, with gradients.

The gradient of a send is a receive from that rank, that of a receive a send to it. Backward passes
of the two may come to the tensors between them in other orders. So both count these tensors; a
gradient travels with the number of its tensor, and one that comes too early is kept.
"""

import threading
from collections import defaultdict, deque
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import fail
from ringreduce.tensorflow.differentiable import Numbers, Sign, checked, collective
from ringreduce.tensorflow.kept import kept
from ringreduce.vocabulary.errors import ConfigError, MismatchError
from ringreduce.vocabulary.types import dtype_named

# Tag of all gradients: the largest that there is.
_GRADIENT = (1 << 63) - 1


class _Peer:
    def __init__(self) -> None:
        # They number the tensors that go there, and those that come from there.
        self.sent, self.received = Numbers(), Numbers()
        # Gradients that came before they were asked for, by the number of the tensor.
        self.gradients: defaultdict[int, deque[np.ndarray]] = defaultdict(deque)


class _Peers(dict[int, _Peer]):
    """The peers of one communicator, by rank; each is made on demand."""

    def __missing__(self, group_rank: int) -> _Peer:
        return self.setdefault(group_rank, _Peer())


_anchors: list[Any] = []
_lock = threading.Lock()


def send(tensor: Any, ring: Communicator, to: int, tag: int) -> Any:
    """`ringreduce.keras.send`."""
    group_rank, given_tag = ring._checked(to, tag)
    value = checked(tensor)

    def run(array: np.ndarray, _: Sign) -> Any:
        ring.send(array, group_rank, tag=given_tag)
        return np.zeros((), array.dtype)

    def gradient(_: Any, number: Any) -> Any:
        return _gradient_from(group_rank, value, ring, number)

    numbers = kept(ring, _Peers)[group_rank].sent
    return collective(ring, "send a tensor", run, gradient, value, (), numbers=numbers)


def receive(like: Any, ring: Communicator, source: int, tag: int) -> Any:
    """`ringreduce.keras.recv`."""
    group_rank, given_tag = ring._checked(source, tag)
    value = checked(like)

    def run(array: np.ndarray, _: np.ndarray, __: Sign) -> Any:
        return ring.recv(array, group_rank, tag=given_tag)

    def gradient(upstream: Any, number: Any) -> Any:
        # Zeros, which come after the send.
        return tf.zeros_like(upstream) * _gradient_to(group_rank, upstream, ring, number)

    what, shape, numbers = "receive a tensor", value.shape, kept(ring, _Peers)[group_rank].received
    return collective(ring, what, run, gradient, value, shape, _anchor(), numbers=numbers)


def _gradient_to(group_rank: int, gradient: Any, ring: Communicator, number: Any) -> Any:
    """Send the gradient of the tensor with that number; return 0."""

    def run(array: np.ndarray, number: np.ndarray, _: Sign) -> Any:
        described = [int(number), array.dtype.name, array.shape]
        ring.send_object(described, group_rank, tag=_GRADIENT)
        ring.send(array, group_rank, tag=_GRADIENT)
        return np.zeros((), array.dtype)

    what, number64 = "send a gradient", tf.convert_to_tensor(number, tf.int64)
    return collective(ring, what, run, _refused, gradient, (), number64, of=number)


def _gradient_from(group_rank: int, like: Any, ring: Communicator, number: Any) -> Any:
    """The gradient of the tensor `like`, which has that number."""
    early = kept(ring, _Peers)[group_rank].gradients

    def run(array: np.ndarray, number: np.ndarray, _: Sign) -> Any:
        while not early[int(number)]:
            received, dtype, shape = ring.recv_object(group_rank, tag=_GRADIENT)
            gradient = np.empty(shape, dtype_named(dtype))
            early[received].append(ring.recv(gradient, group_rank, tag=_GRADIENT))
        gradient = early[int(number)].popleft()
        if (gradient.shape, gradient.dtype) != (array.shape, array.dtype):
            error = MismatchError(
                f"sent a tensor of {array.dtype.name} {array.shape}, and received a gradient "
                f"of {gradient.dtype.name} {gradient.shape}",
                **ring.config.who,
                peer=ring.members[group_rank],
                remedy="Receive with the shape and dtype of what is sent.",
            )
            raise fail(ring, error)
        return gradient

    what, number64 = "receive a gradient", tf.convert_to_tensor(number, tf.int64)
    return collective(ring, what, run, _refused, like, like.shape, number64, of=number)


def _anchor() -> Any:
    """The value of a variable: the tape records only what depends on one."""
    with _lock:
        if not _anchors:
            with tf.init_scope(), tf.device("CPU:0"):
                _anchors.append(tf.Variable(0.0, name="anchor of what ringreduce receives"))
    return _anchors[0].read_value()


def _refused(*_: Any) -> Any:
    text = "was asked for a gradient of a gradient of send or recv, which has none"
    raise ConfigError(text, remedy="Use all_to_all, gather or scatter.")
