"""Makes a tensor's collective of a Python function and its gradient, and numbers it.

A gradient names the forward call by its number. The numbers count calls as they run, not as they
are traced: the n-th call is the n-th on every rank. A gradient's number follows from that of its
collective alone, since TensorFlow may run several gradients in any order.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import check, explain_by
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow import xla
from ringreduce.tensorflow.control_flow import is_in_loop
from ringreduce.tensorflow.kept import kept
from ringreduce.tensorflow.python_calls import call
from ringreduce.vocabulary.errors import ArrayError, MismatchError
from ringreduce.vocabulary.types import DTYPE_NAMES

# Makes the signature of a call from all that must be equal on all ranks.
Sign = Callable[..., int]
# In place of a forward call's number: there is no such call, or its number is not known.
NONE, UNKNOWN = 0, -1
# Numbers of the n-th forward call, its gradient, that one's: n, n + _DEGREE, n + 2 * _DEGREE.
_DEGREE = 1 << 48


class Numbers:
    """The numbers of a communicator's calls. Several threads may compute gradients at a time."""

    def __init__(self) -> None:
        self.begin_anew()
        self._calling = threading.local()

    def begin_anew(self) -> None:
        """The next call is the first."""
        self._next = itertools.count(1)

    def next(self, origin: int) -> tuple[int, Callable[..., int]]:
        """The number of the call that begins, a gradient of `origin`, and what signs it."""

        def sign(*parts: object) -> int:
            signature = signature_of(*parts, origin)
            self._calling.signature, self._calling.origin = signature, origin
            return signature

        if origin == NONE:
            return next(self._next), sign
        return (UNKNOWN if origin == UNKNOWN else origin + _DEGREE), sign

    def explain(self, error: MismatchError) -> MismatchError | None:
        """The error for ranks that compute gradients of different collectives, if they do."""
        origin = getattr(self._calling, "origin", NONE)
        if origin in (NONE, UNKNOWN) or error.signatures[0] != self._calling.signature:
            return None
        return replace(
            error,
            message=f"takes the gradient of its tensor collective number {origin % _DEGREE} while "
            f"rank {error.peer} is in another call of that length",
            sequence=None,
            step=None,
            remedy="Ask the tape for the gradients of one loss, the sum of several if need be, "
            "within the function that computes it, and let every rank record the same on it.",
        )


def begin_anew(ring: Communicator) -> None:
    """Count calls from the first on, on all ranks, as one that has just joined does."""
    kept(ring, Numbers).begin_anew()


def collective(
    ring: Communicator,
    what: str,
    run: Callable[..., Any],
    gradient: Callable[..., Any],
    value: Any,
    shape: Any,
    *others: Any,
    more: Sequence[tuple[Any, Any]] = (),
    of: Any = NONE,
    numbers: Numbers | None = None,
) -> Any:
    """The result of `run`, of `shape`, as a tensor with a gradient; `value` where a rank is alone.

    Args:
        run: gets the arrays of `value` and of `others`, and a function that makes the signature.
        gradient: of `value`, from the upstream gradient and the number that it is to name: an int64
            scalar, or UNKNOWN; and from the results in `more`.
        more: static shape and dtype of further results, without gradients. With any, `run` returns
            a tuple, and this a list.
        of: number of the collective whose gradient this is, a tensor or UNKNOWN; NONE: it is none.
        numbers: those of its kind; by default those of the communicator's collectives.
    """
    if ring.size == 1 and not more:
        return tf.identity(value)
    if numbers is None:
        numbers = kept(ring, Numbers)
        explain_by(ring, numbers)

    def numbered(*arrays: np.ndarray) -> tuple[Any, ...]:
        *inputs, origin = arrays
        check(ring)  # A call that is refused here, as in a trial, takes no number.
        number, sign = numbers.next(int(origin))
        # Copies, since TensorFlow's arrays may be shared. Scalars come as numpy's.
        outputs = run(*map(np.array, inputs), sign)
        return (*(outputs if more else [outputs]), np.int64(number))

    @tf.custom_gradient
    def called(*inputs: Any) -> Any:
        arguments = [*inputs, tf.convert_to_tensor(of, tf.int64)]
        results = [(shape, value.dtype), *more, ((), tf.int64)]
        of_gradient = of is not NONE
        result, *further, number = call(
            ring, what, numbered, arguments, results, of_gradient=of_gradient
        )
        if xla.is_compiling() and is_in_loop():
            # XLA cannot pass on what a loop keeps for its gradient; and there the order of a
            # backward pass follows from that of the forward pass.
            number = UNKNOWN

        @xla.compiled_alike
        def back(upstream: Any, *_: Any) -> Any:
            return gradient(upstream, number, *further), *(None for _ in others)

        return ([result, *further] if more else result), back

    return called(value, *others)


def checked(tensor: Any) -> Any:
    """`tensor` converted to a tensor of a dtype that can travel."""
    value = tf.convert_to_tensor(tensor)
    if value.dtype.name not in DTYPE_NAMES:
        remedy = f"Convert it with tf.cast to one of {', '.join(DTYPE_NAMES)}."
        raise ArrayError(f"cannot send a tensor of dtype {value.dtype.name}", remedy=remedy)
    return value
