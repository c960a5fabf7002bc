"""What a watcher decides to do; `ringreduce.engine.watch` does it."""

from typing import NamedTuple

from ringreduce.pure.watcher_messages import Listening
from ringreduce.vocabulary.errors import RingReduceError


class Send(NamedTuple):
    """Send `message` to the neighbours, except to those of `but`."""

    message: bytes
    but: frozenset[int] = frozenset()


class Log(NamedTuple):
    """Warn with `text` about this rank."""

    text: str


class Ended(NamedTuple):
    """Notify the communicator that `error` has ended the ring."""

    error: RingReduceError


class Found(NamedTuple):
    """Notify the links that another rank listens for this one."""

    listening: Listening


Action = Send | Log | Ended | Found
