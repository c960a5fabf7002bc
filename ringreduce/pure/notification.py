"""Words a rank's abort for the others, and the errors they raise for that or a leave."""

from typing import Any

from ringreduce.pure.flight import cut
from ringreduce.pure.watcher_messages import FORMS_ANEW, TEXT_MAX, Abort
from ringreduce.vocabulary import errors
from ringreduce.vocabulary.words import for_rr

_MESSAGES = {"send": "recv", "recv": "send"}  # what the rank at the other end of a message calls


def abort_for(cause: errors.RingReduceError, rank: int) -> Abort:
    """Why rank `rank` gives up; a cause that came from another rank keeps that rank as origin."""
    text = str(cause) if cause.origin is None else cause.message.partition(": ")[2]
    origin = rank if cause.origin is None else cause.origin
    return Abort(**errors.record_fields(cause) | {"origin": origin}, text=cut(text, TEXT_MAX))


def abort_error(abort: Abort, **where: Any) -> errors.RingReduceError:
    """The error to raise for another rank's abort; `where` has the fields of this rank's error."""
    name = abort.kind if abort.kind in errors.__all__ else "ProtocolError"
    report = f"was told by rank {abort.origin}: {abort.text.removesuffix('.')}"
    where |= {"peer": abort.peer, "origin": abort.origin}
    error: errors.RingReduceError = getattr(errors, name)(report, **where)
    return error


def left_error(peer: int, calls: int, why: str, **where: Any) -> errors.RingReduceError:
    """The error of a rank that is in, or begins, a call which rank `peer` will never make.

    `peer` closed its communicator after `calls` calls because of the exception `why` (empty: there
    was none). `where` has fields of the error: rank and size at least.
    """
    where = {**where, "peer": peer}
    after = f" after {calls} call{'' if calls == 1 else 's'}"
    less_data = "it had less data"
    less_data += for_rr(", for which ringreduce.keras has shard and joined", "")
    if why == FORMS_ANEW:
        return errors.PeerLostError(f"was left by rank {peer}: {why} there{after}", **where)
    if why:
        remedy = f"Read rank {peer}'s log first."
        if why.startswith("SystemExit"):
            remedy += f" Its program ended alone, as by a handler of SIGTERM, or {less_data}."
        text = f"was left by rank {peer}, which ended with {why.removesuffix('.')}{after}"
        return errors.PeerLostError(text, **where, remedy=remedy)
    if (operation := where.get("operation")) in _MESSAGES:
        return errors.MismatchError(
            f"was left by rank {peer}, which has closed its communicator",
            **where,
            remedy=f"Let rank {peer} call {_MESSAGES[operation]} before it closes: every send "
            "needs a recv.",
        )
    remedy = (
        f"All ranks must make equally many calls, and rank {peer} has made fewer: {less_data}, or "
        "something has ended its program, or its training, alone (callbacks.Together ends that on "
        "all)."
    )
    if operation == "split":
        remedy = "All ranks must call split, with None as color on those that take no part."
    text = f"was left by rank {peer}, which closed its communicator{after} and makes no more"
    return errors.MismatchError(text, **where, remedy=remedy)
