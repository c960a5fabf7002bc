"""Why a call on a pair of ranks over ZeroMQ is stuck: the error to raise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce.pure import wire
from ringreduce.pure.membership import Membership
from ringreduce.pure.networks import Unreached
from ringreduce.pure.notification import goodbye_error, left_error
from ringreduce.pure.patience import Limit, Patience
from ringreduce.transport import records
from ringreduce.transport.diagnosis import format_bytes, frame_error
from ringreduce.transport.others import Others, explain_timeout
from ringreduce.transport.pair_ends import Receiving, Sending
from ringreduce.transport.stalls import Stall, mismatch_error, timeout_error
from ringreduce.vocabulary.errors import PeerLostError, RingReduceError


class Wait:
    """A call in progress: what errors say of it, and for how long it may wait.

    Args:
        operation: ``send``, ``recv`` or the name of a collective.
        patience: makes the limits of its waits, if it has to wait.
    """

    def __init__(
        self,
        operation: str,
        header: wire.Header,
        sequence: int,
        patience: Callable[[], Patience],
    ) -> None:
        self.operation, self.header, self.sequence = operation, header, sequence
        self._patience = patience

    @functools.cached_property
    def stall(self) -> Stall:
        """For how long it has made no progress."""
        return Stall(self._patience())

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a recv, not a part of a collective."""
        return self.header.kind in wire.SENDS


class PairDiagnosis:
    """Finds the errors of a rank's pairs; `others` is set before the first call."""

    others: Others

    def __init__(self, rank: int, size: int, membership: Membership) -> None:
        self._rank, self._size, self._membership = rank, size, membership

    def where(self, end: Sending | Receiving, wait: Wait) -> dict[str, Any]:
        """The fields that every error of a call has."""
        return {
            "rank": self._rank,
            "size": self._size,
            "peer": end.peer,
            "operation": wait.operation,
            "sequence": wait.sequence,
            "step": f"tag {wait.header.signature}" if wait.is_message else f"with rank {end.peer}",
        }

    def timed_out(self, end: Sending | Receiving, wait: Wait, limit: Limit) -> RingReduceError:
        """The error of a call that has made no progress up to `limit`."""
        nbytes, peer, at = format_bytes(end.transfer.nbytes), end.peer, _at(end)
        is_sending = isinstance(end, Sending)
        due = (
            f"rank {peer}{at} to receive {nbytes}"
            if is_sending
            else f"{nbytes} from rank {peer}{at}"
        )
        error = timeout_error(due, wait.stall.waited_s, limit, **self.where(end, wait))
        if wait.is_message:
            explain_timeout(error, self.others, peer, sends=is_sending)
        return error

    def unreached(self, end: Sending, wait: Wait, failed: Sequence[Unreached]) -> RingReduceError:
        """The error of a call whose peer listens where this rank cannot connect."""
        tried = "; ".join(f"{each.address}: {each.why}" for each in failed)
        return PeerLostError(
            f"cannot connect to rank {end.peer} ({tried})",
            **self.where(end, wait),
            remedy="Let these hosts connect to each other at all ports of RINGREDUCE_PORTS, or at "
            "any.",
        )

    def lost(self, end: Sending | Receiving, wait: Wait) -> RingReduceError:
        """The error of a call whose peer has gone."""
        where, left = self.where(end, wait), self.others.left(end.peer)
        if left is not None:
            del where["peer"]
            return left_error(left.rank, left.calls, left.why, **where)
        return PeerLostError(
            f"lost the connection with rank {end.peer}{_at(end)}: it died, or closed its "
            "communicator early",
            **where,
            remedy=f"Read rank {end.peer}'s log first.",
        )

    def error(
        self, status: int, sending: Sending | None, receiving: Receiving | None, wait: Wait
    ) -> RingReduceError:
        """The error for a status that the loop has returned."""
        is_sending = status in (records.UNSENDABLE, records.KEY_ENDED) or (
            sending is not None and sending.record.errno != 0
        )
        end = sending if is_sending or receiving is None else receiving
        assert end is not None
        where = self.where(end, wait)
        if status == records.UNSENDABLE:
            return self.lost(end, wait)
        if status == records.CONTROL:
            return goodbye_error(bytes(end.record.control[: end.record.control_bytes]), **where)
        if status == records.MISMATCH:
            received, expected = wire.decode(end.record.received), wire.decode(end.transfer.header)
            return mismatch_error(received, expected, self._name, **where)
        return frame_error(status, end.record, end.peer, end.address, end.address, where)

    def _name(self, place: int) -> str:
        """Name, for errors, of the rank with index `place` in this group, as in a header."""
        if place < len(self._membership.members):
            return f"rank {self._membership.members[place]}"
        return f"a rank at place {place}, which is beyond this group,"


def _at(end: Sending | Receiving) -> str:
    return f" ({end.address})" if end.address else ""
