"""All errors, by cause, and the one place that makes their text.

Second bases make ``except TimeoutError`` work too. MismatchError, PeerError, ProtocolError,
NumericsError and their subclasses break the communicator: each later call raises the same error
at once. Close it and form a new one.
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec

_NAME_MAX = 512
# So much of its text tells an error from others.
_TELLING_BYTES = 1000


@dataclass(eq=False, repr=False)
class RingReduceError(Exception):
    """Base of every error that ringreduce raises; never raised itself.

    Attributes:
        rank: the rank that raises it, None before ranks are known.
        size: number of ranks, None before it is known.
        peer: the rank it is about, where one is known.
        host: the name of that rank's host, where the job has several.
        operation: name of the collective, such as ``all_reduce``.
        sequence: number of that collective on this communicator, counted from 0.
        group: what the communicator is called, if it is a group.
        step: where in the collective, such as ``reduce-scatter step 2 of 3``.
        remedy: what to do about it.
        origin: the rank that raised the error first, if that was another one.
    """

    # Else TensorFlow's AutoGraph replaces an error that has an `__init__` by one of its own class.
    ag_pass_through: ClassVar[bool] = True
    # Else Keras replaces one that a layer raises, by one without rank and remedy.
    _keras_call_info_injected: ClassVar[bool] = True

    message: str
    _: KW_ONLY
    rank: int | None = None
    size: int | None = None
    peer: int | None = None
    operation: str | None = None
    sequence: int | None = None
    step: str | None = None
    remedy: str | None = None
    origin: int | None = None
    group: str | None = None
    host: str | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def __str__(self) -> str:
        """Who, what, where, what to do: the same order for every error."""
        where = ""
        if self.operation is not None:
            where = f", in {self.operation}"
            if self.sequence is not None:
                where += f" #{self.sequence}"
            if self.group is not None:
                where += f" of {self.group}"
            if self.step is not None:
                where += f", {self.step}"
        text = self.message
        if self.rank is not None:
            who = f"rank {self.rank}" if self.size is None else f"rank {self.rank} of {self.size}"
            if self.origin is not None and where:
                # For an error that another rank has sent, the operation stands before its text.
                who, where = f"{who}{where},", ""
            text = f"{who} {text}"
        text += where
        if not text.endswith((".", "!", "?", "\n")):
            text += "."
        if self.host is not None:
            text += f" Rank {self.peer} is on {self.host}."
        if self.remedy is not None:
            text += self.remedy if text.endswith("\n") else f" {self.remedy}"  # Below a table.
        return text

    def is_quoted_in(self, text: str) -> bool:
        """Whether `text` has this error's, of which an op of TensorFlow's keeps 2 KiB of UTF-8."""
        return str(self).encode()[:_TELLING_BYTES].decode(errors="ignore") in text


class ConfigError(RingReduceError, ValueError):
    """You configured something impossible; nothing was started."""


class ArrayError(RingReduceError, ValueError):
    """You passed an array whose dtype, layout or shape is not supported. The ring still works."""


class ClosedError(RingReduceError):
    """You used a communicator after ``close()``, or in a child process."""


class MismatchError(RingReduceError):
    """The ranks disagree: operation, dtype, length, order, gradients, version or settings.

    Attributes:
        signatures: this rank's and `peer`'s, if two calls differ; not sent with the error.
    """

    signatures: tuple[int, int] = (0, 0)


class RendezvousError(RingReduceError):
    """The ring did not form in time (the text lists the missing ranks) or this rank was refused."""


class PeerError(RingReduceError):
    """Another rank failed, so the ring is broken. `peer` names it."""


class PeerTimeoutError(PeerError, TimeoutError):
    """A rank made no progress within ``timeout_s``; ``busy_timeout_s`` if it was in user code."""


class PeerLostError(PeerError, ConnectionError):
    """A neighbour's connection ended: it died, or it closed its communicator."""


class ProtocolError(RingReduceError):
    """Bytes arrived that no rank of this ring sends."""


class CorruptionError(ProtocolError):
    """A sealed frame does not open: it, or one before it, was changed, lost or repeated."""


class NumericsError(RingReduceError):
    """A gradient holds NaN or infinity; `peer` is the rank that computed it."""


@dataclass(eq=False, repr=False)
class WorkerError(RingReduceError):
    """A function of `launch` or `on_rank_zero` failed in another process; rings still work.

    Attributes:
        peer: the rank in which it failed first.
        traceback: of `launch`, that rank's traceback if it printed one, and a line for each other
            rank that failed.
    """

    traceback: str = field(default="", kw_only=True)

    def __str__(self) -> str:
        """The error, and below it the other process's traceback."""
        return "\n".join(filter(None, (super().__str__(), self.traceback)))


class NativeError(RingReduceError, ImportError):
    """A native library could not be found, loaded or used."""


class ErrorRecord(msgspec.Struct, frozen=True):
    """An error as other processes and flight records know it: its class and its ranks."""

    # The name of its class; one that is not ringreduce's is the program's own exception.
    kind: Annotated[str, msgspec.Meta(max_length=_NAME_MAX)]
    # peer, origin: as in RingReduceError.
    peer: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)] | None = None
    origin: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)] | None = None


def record_fields(error: BaseException) -> dict[str, Any]:
    """The fields of an `ErrorRecord` of `error`."""
    fields: dict[str, Any] = {"kind": type(error).__name__[:_NAME_MAX]}
    if isinstance(error, RingReduceError):
        fields |= {"peer": error.peer, "origin": error.origin}
    return fields


__all__ = [name for name in vars() if name.endswith("Error")]
for _name in __all__:
    globals()[_name].__module__ = "ringreduce"  # So that a traceback shows the public name.
