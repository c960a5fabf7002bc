"""Why a rank aborts, as bytes for the others, and the errors they raise for that or a leave."""

from typing import Any

import msgspec

from ringreduce.vocabulary import errors

ABORT_BYTES_MAX = 16384  # longer text of an error is cut off
_MESSAGES = {"send": "recv", "recv": "send"}  # what the rank at the other end of a message calls


class _Cause(msgspec.Struct):
    error: str
    origin: int
    text: str
    peer: int | None


def encode_abort(cause: errors.RingReduceError, rank: int) -> bytes:
    """Why rank `rank` gives up; a cause that came from another rank keeps that rank as origin."""
    text = str(cause) if cause.origin is None else cause.message.partition(": ")[2]
    # A file name in it may contain lone surrogates, which cannot be encoded.
    text = text.encode(errors="replace").decode()
    report = _Cause(
        error=type(cause).__name__,
        origin=rank if cause.origin is None else cause.origin,
        # A character takes at most four bytes, and the other fields take a few.
        text=text[: ABORT_BYTES_MAX // 8],
        peer=cause.peer,
    )
    return msgspec.msgpack.encode(report)


def abort_error(payload: bytes, **where: Any) -> errors.RingReduceError:
    """The error to raise for another rank's abort; `where` has the fields of this rank's error."""
    try:
        cause = msgspec.msgpack.decode(payload, type=_Cause)
    # Text that is not UTF-8 raises Python's ValueError; endless nesting, a RecursionError.
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        broken = errors.ProtocolError("received an abort that cannot be read", **where)
        broken.__cause__ = error
        return broken
    kind = getattr(errors, cause.error, None) if cause.error in errors.__all__ else None
    report = f"was told by rank {cause.origin}: {cause.text.removesuffix('.')}"
    return (kind or errors.ProtocolError)(
        report, **{**where, "peer": cause.peer, "origin": cause.origin}
    )


def left_error(peer: int, calls: int, why: str, **where: Any) -> errors.RingReduceError:
    """The error of a rank that is in, or begins, a call which rank `peer` will never make.

    `peer` closed its communicator after `calls` calls because of the exception `why` (empty: there
    was none). `where` has fields of the error: rank and size at least.
    """
    where = {**where, "peer": peer}
    if why:
        return errors.PeerLostError(
            f"was left by rank {peer}, which ended with {why.removesuffix('.')}",
            **where,
            remedy=f"Read rank {peer}'s log first.",
        )
    if (operation := where.get("operation")) in _MESSAGES:
        return errors.MismatchError(
            f"was left by rank {peer}, which has closed its communicator",
            **where,
            remedy=f"Let rank {peer} call {_MESSAGES[operation]} before it closes: every send "
            "needs a recv.",
        )
    after = f" after {calls} call{'' if calls == 1 else 's'}"
    remedy = (
        f"All ranks must make equally many calls, and rank {peer} has made fewer: it had less data "
        "(ringreduce.keras has shard and join for that), or something has ended its training alone "
        "(callbacks.Together ends it on all)."
    )
    if operation == "split":
        remedy = "All ranks must call split, with None as color on those that take no part."
    return errors.MismatchError(
        f"was left by rank {peer}, which closed its communicator{after} and makes no more",
        **where,
        remedy=remedy,
    )
