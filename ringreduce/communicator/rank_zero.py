"""`on_rank_zero`: one rank does what must be done once, and the others wait for it.

A function and not a context manager: Python runs the body of a `with` on every rank, so that a
forgotten `if` would do the work once per rank without an error.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.journal import passed
from ringreduce.communicator.process import default_communicator
from ringreduce.pure.payload import encode
from ringreduce.vocabulary.errors import ArrayError, ConfigError, WorkerError
from ringreduce.vocabulary.words import brief

_Result = TypeVar("_Result")

# Functions by name, which waiting ranks run when rank 0's function needs them.
assistants: dict[str, Callable[[Any], None]] = {}
_asking = threading.local()


def waiting_ranks() -> Communicator | None:
    """The ranks that wait while this thread of rank 0 runs `on_rank_zero`; None: nobody does."""
    return getattr(_asking, "ring", None)


def assisted_call(name: str, argument: Any) -> None:
    """Have all `waiting_ranks` call the assistant `name`; rank 0 itself makes its part then."""
    ring = waiting_ranks()
    assert ring is not None
    ring.broadcast_object([name, argument])


def on_rank_zero(
    function: Callable[..., _Result],
    *args: Any,
    communicator: Communicator | None = None,
    **kwargs: Any,
) -> _Result:
    """Call ``function(*args, **kwargs)`` on rank 0 alone; return its result on every rank.

    Collective: the other ranks wait until rank 0 is done, as in any call (`Config` has the limits),
    and evaluate the arguments too::

        path = ringreduce.on_rank_zero(download, url)  # a str, on all ranks
        ringreduce.on_rank_zero(os.makedirs, "runs", exist_ok=True)
        ringreduce.on_rank_zero(lambda: model.save("model.keras"))

    The function must not call collectives, which need all ranks. Saving a model with parts, of
    which each rank has a piece, works: the ranks that wait give theirs.

    Args:
        function: what to call.
        communicator: by default the process's.

    Returns:
        The function's result, which must be None or what `Communicator.broadcast_object` takes:
            numbers, text, bytes, lists and dicts. Ranks other than 0 get a decoded copy.

    Raises:
        ConfigError: `function` is none, such as the result of a call.
        Exception: on rank 0, what the function raised.
        WorkerError: on the other ranks, with the text of that. The ring still works.
        ArrayError: on rank 0, the result cannot be sent; the others raise WorkerError.
        RingReduceError: as `Communicator.broadcast_object`.
    """
    ring = communicator or default_communicator()
    if not callable(function):
        raise ConfigError(
            f"got {brief(function)} to call on rank 0, which is no function",
            **ring.config.who,
            remedy="Each rank has called what stands in the parentheses; pass it without them, or "
            "on_rank_zero(lambda: ...).",
        )
    if ring.size == 1:
        return function(*args, **kwargs)
    name = getattr(function, "__qualname__", None) or repr(function)
    run = partial(_outcome, ring, name, partial(function, *args, **kwargs))
    known = {"name": getattr(function, "__qualname__", "") or type(function).__name__}
    result, error = passed(ring, "on_rank_zero", known, run)
    if isinstance(error, Exception):
        raise error
    if error:
        raise WorkerError(
            f"waited for {name} on rank {ring.members[0]}, which raised {error}",
            **ring.config.who,
            peer=ring.members[0],
            remedy=f"Read rank {ring.members[0]}'s log first.",
        )
    return result


def _outcome(
    ring: Communicator, name: str, function: Callable[[], _Result]
) -> tuple[_Result, Exception | str]:
    """The result of `function` on all ranks, and its exception, in words but on rank 0."""
    ring._session.check()  # Before the function: a child of rank 0 must not call it too.
    if ring.rank != 0:
        asked, told = ring.broadcast_object(None)
        while asked:
            assistants[asked](told)
            asked, told = ring.broadcast_object(None)
        return told  # type: ignore[no-any-return]
    before, _asking.ring = waiting_ranks(), ring
    try:
        result = function()
        _check_sendable(result, name)
    except Exception as error:
        ring.broadcast_object(["", (None, f"{type(error).__name__}: {error}")])
        return None, error  # type: ignore[return-value]
    finally:
        _asking.ring = before
    ring.broadcast_object(["", (result, "")])
    return result, ""


def _check_sendable(result: Any, name: str) -> None:
    try:
        encode(["", (result, "")])
    except ArrayError as error:
        raise ArrayError(
            f"cannot send the result of {name}, a {type(result).__name__}, to the other ranks",
            remedy="Let the function return None, or numbers, text, bytes, lists and dicts; "
            "put what they need into a file.",
        ) from error
