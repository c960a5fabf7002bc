"""What a watcher decides to do; `ringreduce.engine.watch` does it."""

from dataclasses import dataclass

from ringreduce.pure.watcher_messages import Listening
from ringreduce.vocabulary.errors import RingReduceError


@dataclass(frozen=True)
class Send:
    """Send `message` to the neighbours, except to those of `but`."""

    message: bytes
    but: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Log:
    """Log `text` about this rank."""

    text: str
    is_warning: bool = True


@dataclass(frozen=True)
class Ended:
    """Notify the communicator that `error` has ended the ring."""

    error: RingReduceError


@dataclass(frozen=True)
class Found:
    """Notify the links that another rank listens for this one."""

    listening: Listening


Action = Send | Log | Ended | Found
