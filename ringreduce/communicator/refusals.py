"""Errors of calls that may not begin, or end without a fault of the ring; copies to raise."""

import copy
import sys
import threading

from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import (
    ClosedError,
    MismatchError,
    PeerLostError,
    RingReduceError,
)


def closed(config: Config) -> ClosedError:
    """The error of a call after `close`."""
    return ClosedError("made a call after close()", **config.who)


def forked(config: Config) -> ClosedError:
    """The error of a call in a child process, forked or spawned."""
    return ClosedError(
        "made a call in a child process, and only its parent is that rank",
        **config.who,
        remedy="Make it in the parent, in a file that spawned children import below `if __name__ "
        "== '__main__':`. `ringreduce run -n 1` starts a child that is a job of its own.",
    )


def not_joined(config: Config) -> MismatchError:
    """The error of a call of a newcomer that the other ranks do not make with it."""
    return MismatchError(
        "made a call before it has joined the job that it comes to, which nobody else makes",
        **config.who,
        remedy="Between its start and its first step a rank that comes back gets only what the "
        "others' calls have given before they began to train.",
    )


def interrupted(config: Config, error: BaseException, call: str) -> PeerLostError:
    """The error when something such as Ctrl-C ends a call: ranks are out of step."""
    return PeerLostError(
        f"was interrupted in {call} by {type(error).__name__}",
        **config.who,
        peer=config.rank,
        remedy="Form a new communicator.",
    )


def again(error: RingReduceError) -> RingReduceError:
    """A copy of `error` to raise, so that tracebacks do not pile up on one object."""
    anew = copy.copy(error)
    anew.__cause__ = error
    return anew


def ending_error() -> BaseException | None:
    """The exception that makes the caller leave: the handled one, or the one that ends Python."""
    error = sys.exc_info()[1]
    if error is None and not threading.main_thread().is_alive():
        # Only when Python ends: before, an interactive session may have left an old one.
        error = getattr(sys, "last_value", None)
    return error


def described(error: BaseException) -> str:
    """An exception in one line, for a record or another rank."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
