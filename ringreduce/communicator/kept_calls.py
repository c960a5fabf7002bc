"""What a journal keeps of each call before training: what ranks compare, and what it has given.

A call is kept if what it gives is the same on all ranks but its root, so that a newcomer can have
it from any of them. Those that are not in the table have no such result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ringreduce.pure.payload import checked_root, decode, encode, flat_view
from ringreduce.pure.results import pack, unpack
from ringreduce.pure.wire import signature_of
from ringreduce.vocabulary.types import reduce_op

if TYPE_CHECKING:
    from ringreduce.communicator.communicator import Communicator

Arguments = Mapping[str, Any]  # of a call, by the names of its parameters

_TEXT_MAX = 120  # of what is said of a call's arguments; of more there is a beginning and a hash
_LISTED_MAX = 10_000


class Rule(NamedTuple):
    """How one kind of call is kept.

    Attributes:
        said: what of the arguments must be equal on all ranks, in words. Raises ArrayError where
            the call itself refuses them.
        keep: encodes what the call has given; ArrayError for what cannot be encoded.
        give: what a newcomer's call gives, from that. Raises as the call where that has failed.
        is_kept: whether a call with those arguments gives all ranks but 0 the same.
    """

    said: Callable[[Communicator, Arguments], str]
    keep: Callable[[Arguments, Any], bytes]
    give: Callable[[Communicator, Arguments, bytes], Any]
    is_kept: Callable[[Arguments], bool] = lambda _: True


def described(value: Any) -> str:
    """Arrays, tensors and variables by dtype and shape, plain values as they are, else a type.

    Plain values in lists and dicts are data, whose values are no part of the call.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return _described_data(value)


def _described_data(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{getattr(value.dtype, 'name', value.dtype)} {value.shape}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_described_data(value[key])}' for key in value)}}}"
    if isinstance(value, (list, tuple)) and len(value) <= _LISTED_MAX:
        return f"[{', '.join(map(_described_data, value))}]"
    return type(value).__name__


def _shortened(text: str) -> str:
    if len(text) <= _TEXT_MAX:
        return text
    return f"{text[:_TEXT_MAX]}... (hash {signature_of(text):016x})"


def _joined(*parts: str) -> str:
    return _shortened(", ".join(filter(None, parts)))


def _signed(arguments: Arguments) -> str:
    signature = arguments["signature"]
    return f"signature {signature:#x}" if signature else ""


def _rooted(ring: Communicator, arguments: Arguments) -> str:
    return f"root {checked_root(arguments['root'], ring.size, ring.config.who)}"


def _rows(array: Any) -> str:
    """An array of which only the first dimension may differ between ranks."""
    if not isinstance(array, np.ndarray):
        return described(array)
    return f"{array.dtype.name} ({', '.join(['*', *map(str, array.shape[1:])])})"


def _said_of_all_reduce(_: Communicator, arguments: Arguments) -> str:
    coding, how = arguments["coding"], reduce_op(arguments["op"]).name.lower()
    encoding = "" if coding is None else coding.encoding.name
    return _joined(described(arguments["array"]), how, encoding, _signed(arguments))


def _said_of_broadcast(ring: Communicator, arguments: Arguments) -> str:
    root = _rooted(ring, arguments)
    return _joined(described(arguments["array"]), root, _signed(arguments))


def _said_of_gather(ring: Communicator, arguments: Arguments) -> str:
    return _joined(_rows(arguments["array"]), _rooted(ring, arguments), _signed(arguments))


def _named(*names: str) -> Callable[[Communicator, Arguments], str]:
    """What is said of calls of which those arguments are compared; None is not mentioned."""

    def said(_: Communicator, arguments: Arguments) -> str:
        given = {name: arguments[name] for name in names if arguments[name] is not None}
        return _joined(*(f"{name} {described(value)}" for name, value in given.items()))

    return said


def _fill(operation: str) -> Callable[[Communicator, Arguments, bytes], np.ndarray]:
    def give(ring: Communicator, arguments: Arguments, kept: bytes) -> np.ndarray:
        array: np.ndarray = arguments["array"]
        # A root's array may be read-only, and then has what others received: or it fails here.
        result = unpack(kept)
        is_root = "root" in arguments and operator.index(arguments["root"]) == ring.rank
        if not is_root or array.tobytes() != result.tobytes():
            flat_view(array, operation)[:] = result.reshape(-1)
        return array

    return give


def _give_rows_of_root(_: Communicator, arguments: Arguments, kept: bytes) -> np.ndarray:
    array: np.ndarray = arguments["array"]
    flat_view(array, "gather", writable=False)
    return np.empty((0, *array.shape[1:]), array.dtype)


def _give_object_of_root(ring: Communicator, arguments: Arguments, kept: bytes) -> Any:
    """A decoded copy; the root has its own object, unless the job's root had another one."""
    own = arguments["value"]
    if operator.index(arguments["root"]) == ring.rank and encode(own).tobytes() == kept:
        return own
    return _decoded(ring, arguments, kept)


def _decoded(ring: Communicator, _: Arguments, kept: bytes) -> Any:
    return decode(np.frombuffer(kept, np.uint8), ring.config.who)


def _give_objects(ring: Communicator, arguments: Arguments, kept: bytes) -> list[Any]:
    """Those of all ranks, with this one's own in its place: so comparisons find what differs."""
    every = _decoded(ring, arguments, kept)
    every[ring.config.rank] = decode(encode(arguments["value"]), ring.config.who)
    return [every[rank] for rank in ring.members]


def _nothing(*_: Any) -> None:
    return None


def _keep_nothing(*_: Any) -> bytes:
    return b""


def _keep_object(_: Arguments, result: Any) -> bytes:
    return encode(result).tobytes()


def _keep_outcome(_: Arguments, outcome: tuple[Any, Exception | str]) -> bytes:
    """A function's result, and its error in words, as ranks get it that wait for rank 0."""
    result, error = outcome
    text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else error
    return encode([result, text]).tobytes()


def _is_of_rank_0(arguments: Arguments) -> bool:
    return operator.index(arguments["root"]) == 0


def _unpacked(_: Communicator, __: Arguments, kept: bytes) -> Any:
    return unpack(kept)


def _keep_result(_: Arguments, result: Any) -> bytes:
    return pack(result)


def _no_words(*_: Any) -> str:
    return ""


_DATA: Sequence[str] = ("x", "y", "sample_weight", "batch_size", "steps", "return_dict")
RULES = {
    "all_reduce": Rule(_said_of_all_reduce, _keep_result, _fill("all_reduce")),
    "all_gather": Rule(
        lambda _, arguments: _joined(_rows(arguments["array"]), _signed(arguments)),
        _keep_result,
        _unpacked,
    ),
    "broadcast": Rule(_said_of_broadcast, _keep_result, _fill("broadcast")),
    "barrier": Rule(_no_words, _keep_nothing, _nothing),
    # On ranks that are not the root these give nothing.
    "gather": Rule(_said_of_gather, _keep_nothing, _give_rows_of_root, _is_of_rank_0),
    "gather_object": Rule(_rooted, _keep_nothing, _nothing, _is_of_rank_0),
    "broadcast_object": Rule(_rooted, _keep_object, _give_object_of_root),
    "all_gather_object": Rule(
        lambda _, arguments: _joined(_signed(arguments)), _keep_object, _give_objects
    ),
    # No exchange: what ranks have found to be equal by its hash, for one that has another.
    "comparison": Rule(_no_words, _keep_object, _decoded),
    "on_rank_zero": Rule(lambda _, arguments: arguments["name"], _keep_outcome, _decoded),
    "evaluate": Rule(_named(*_DATA), _keep_result, _unpacked),
    "predict": Rule(_named("x", "batch_size", "steps"), _keep_result, _unpacked),
    "verify_replicas": Rule(_named("variables"), _keep_nothing, _nothing),
    # Without the values: a newcomer gets those of now; see `Replay`.
    "broadcast_variables": Rule(_named("variables", "state", "root"), _keep_nothing, _nothing),
}
# Those of a Communicator, with what has no result that all ranks have.
OF_A_RING = (
    *("all_reduce", "all_gather", "broadcast", "barrier", "gather", "gather_object"),
    *("broadcast_object", "all_gather_object", "reduce_scatter", "all_to_all", "scatter"),
    *("scatter_object", "send", "recv", "send_object", "recv_object", "split"),
)
