"""The errors of calls that another rank holds up or that do not fit, over whatever link."""

from collections.abc import Sequence
from typing import Any

import zmq

from ringreduce.pure import wire
from ringreduce.pure.wire import Header
from ringreduce.transport import records
from ringreduce.transport.records import LinkRecord
from ringreduce.vocabulary import errors


def lost_error(name: str, **where: Any) -> errors.PeerLostError:
    """The error of a call that needs a rank which is lost; the watcher may know why."""
    text = f"lost the connection with {name}: it died, or closed its communicator early"
    return errors.PeerLostError(text, **where, remedy=f"Read rank {where['peer']}'s log first.")


def mismatch_error(
    received: Header, expected: Header, members: Sequence[int], **where: Any
) -> errors.MismatchError:
    """The error of a call that met another; headers have the places of ranks in `members`."""

    def name(place: int) -> str:
        if place < len(members):
            return f"rank {members[place]}"
        return f"a rank at place {place}, which is beyond this ring,"

    text = wire.disagreement(received, expected, name)
    error = errors.MismatchError(text, remedy=wire.advice(received, expected), **where)
    error.signatures = expected.signature, received.signature
    return error


def frame_error(
    status: int, record: LinkRecord, there: str, here: str, where: dict[str, Any]
) -> errors.RingReduceError:
    """The error for a frame that cannot be sent or read, after which `record` is in this state.

    It is from a rank that listens `there` to this one, which listens `here`.
    """
    received, peer = wire.decode(record.received), where["peer"]
    if status == records.CORRUPT:
        return errors.CorruptionError(
            f"received a frame from rank {peer} ({there}) that does not open with the key of "
            "this connection: it, or one before it, was changed, lost or repeated on the way; "
            "nothing of it was used",
            **where,
            remedy="Start again from the last checkpoint. Should it come back, test the memory and "
            f"the network of the hosts of ranks {peer} and {where['rank']}, and what lies between.",
        )
    if status == records.KEY_ENDED:
        text = "may seal no more frames with the key of this connection"
        return errors.ClosedError(text, **where, remedy="Form a new communicator.")
    if status == records.FAILED:
        text = zmq.strerror(record.errno)
        return errors.ProtocolError(f"got an error from libzmq: {text}", **where)
    if status == records.MISSHAPEN:
        what = f"a frame that says {format_bytes(received.nbytes)} and has another length"
    elif received.magic == wire.MAGIC and received.version != wire.WIRE_VERSION:
        what = f"a frame of wire version {received.version}, not {wire.WIRE_VERSION}"
    elif received.magic == wire.MAGIC:
        what = "a frame of another job"
    else:
        what = "bytes that are no frame"
    remedy = "Keep other programs and jobs away from this port."
    return errors.ProtocolError(f"received {what} on {here}", **where, remedy=remedy)


def format_bytes(nbytes: int) -> str:
    """`nbytes` for people: ``17 bytes``, ``1.0 MiB``."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    units = ("bytes", "KiB", "MiB", "GiB")
    power = min(3, (nbytes.bit_length() - 1) // 10)
    return f"{nbytes / 1024**power:.1f} {units[power]}"
