"""Why a rank gave up, as it travels to the others: one error, and who met it first."""

from __future__ import annotations

from typing import Any

import msgspec

from ringreduce import errors
from ringreduce.errors import ProtocolError, RingReduceError

__all__ = ["NEWS_BYTES_MAX", "read_news", "write_news"]

# News carry one error's text; what is longer is cut off.
NEWS_BYTES_MAX = 16384


class _Cause(msgspec.Struct):
    error: str
    origin: int
    text: str
    peer: int | None


def write_news(cause: RingReduceError, rank: int) -> bytes:
    """`cause` as rank `rank` tells it; when it was told itself, it says by whom."""
    text = str(cause) if cause.origin is None else cause.message.partition(": ")[2]
    # A file name in it may hold lone surrogates, which cannot be encoded.
    text = text.encode(errors="replace").decode()
    report = _Cause(
        error=type(cause).__name__,
        origin=rank if cause.origin is None else cause.origin,
        # A character takes at most four bytes, and the other fields need a little.
        text=text[: NEWS_BYTES_MAX // 8],
        peer=cause.peer,
    )
    return msgspec.msgpack.encode(report)


def read_news(payload: bytes, **where: Any) -> RingReduceError:
    """The error to raise for news from another rank; `where` are the fields of this rank's."""
    try:
        cause = msgspec.msgpack.decode(payload, type=_Cause)
    # Text that is no UTF-8 is a ValueError of Python's; depth that has no end, a RecursionError.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        broken = ProtocolError("received an abort that cannot be read", **where)
        broken.__cause__ = error
        return broken
    kind = getattr(errors, cause.error, None) if cause.error in errors.__all__ else None
    report = f"was told by rank {cause.origin}: {cause.text.removesuffix('.')}"
    return (kind or ProtocolError)(report, **{**where, "peer": cause.peer, "origin": cause.origin})
