"""Makes a tensor's collective of a Python function and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.tensorflow import numbering, xla
from ringreduce.tensorflow.control_flow import is_in_loop
from ringreduce.tensorflow.python_calls import call
from ringreduce.vocabulary.errors import ArrayError
from ringreduce.vocabulary.types import DTYPE_NAMES

# Makes the signature of a call from all that must be equal on all ranks.
Sign = Callable[..., int]


def collective(
    communicator: Communicator,
    what: str,
    run: Callable[..., Any],
    gradient: Callable[..., Any],
    value: Any,
    shape: Any,
    *others: Any,
    more: Sequence[tuple[Any, Any]] = (),
    of: Any = numbering.NONE,
    numbers: numbering.Numbers | None = None,
) -> Any:
    """The result of `run`, of `shape`, as a tensor with a gradient.

    Args:
        run: gets the arrays of `value` and of `others`, and a function that makes the signature.
        gradient: of `value`, from the upstream gradient and the number that it is to name: an int64
            scalar, or UNKNOWN; and from the results in `more`.
        more: static shape and dtype of further results, without gradients. With any, `run` returns
            a tuple, and this a list.
        of: number of the collective whose gradient this is, a tensor or UNKNOWN; NONE: it is none.
        numbers: those of its kind; by default those of the communicator's collectives.
    """
    numbers = numbers or numbering.of(communicator)

    def numbered(*arrays: np.ndarray) -> tuple[Any, ...]:
        *given, origin = arrays
        number, sign = numbers.next(int(origin))
        # Copies, since TensorFlow's arrays may be shared. Scalars come as numpy's.
        found = run(*map(np.array, given), sign)
        return (*(found if more else [found]), np.int64(number))

    @tf.custom_gradient
    def called(*given: Any) -> Any:
        arguments = [*given, tf.convert_to_tensor(of, tf.int64)]
        results = [(shape, value.dtype), *more, ((), tf.int64)]
        of_gradient = of is not numbering.NONE
        result, *further, number = call(
            communicator, what, numbered, arguments, results, of_gradient=of_gradient
        )
        if xla.is_compiling() and is_in_loop():
            # XLA cannot pass on what a loop keeps for its gradient; and there the order of a
            # backward pass follows from that of the forward pass.
            number = numbering.UNKNOWN

        @xla.compiled_alike
        def back(upstream: Any, *_: Any) -> Any:
            return gradient(upstream, number, *further), *(None for _ in others)

        return ([result, *further] if more else result), back

    return called(value, *others)


def checked(tensor: Any) -> Any:
    """`tensor` converted to a tensor of a dtype that can travel."""
    value = tf.convert_to_tensor(tensor)
    if value.dtype.name not in DTYPE_NAMES:
        raise ArrayError(
            f"cannot send a tensor of dtype {value.dtype.name}",
            remedy=f"Convert it with tf.cast to one of {', '.join(DTYPE_NAMES)}.",
        )
    return value
