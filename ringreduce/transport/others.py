"""What a message between two ranks needs to know of other ranks, over sockets and in memory."""

from __future__ import annotations

from typing import Protocol

from ringreduce.pure.cycles import Waits, describe
from ringreduce.pure.liveness import Doing
from ringreduce.pure.messages import Left, Listening, Pending
from ringreduce.pure.patience import Patience
from ringreduce.vocabulary.errors import PeerTimeoutError


class Others(Protocol):
    """What is known of the other ranks; from any thread."""

    def listen(self, listening: Listening) -> None:
        """Notify a rank that this one listens for it."""

    def left(self, rank: int) -> Left | None:
        """The message of a rank that has closed its communicator; None if it has not."""

    def doing(self, rank: int) -> Doing:
        """What a rank does."""


class PeerPatience(Patience):
    """The limits of `patience` for a message of rank `peer`, whatever holds up this rank's calls.

    `peer` is busy while it is alive, unless it waits for this rank, or for one that does.
    """

    def __init__(self, patience: Patience, others: Others, peer: int) -> None:
        super().__init__(patience.timeout_s, patience.busy_timeout_s)
        self._others, self._peer = others, peer

    def look(self) -> None:
        """Note whether the rank that is waited for is busy now."""
        self.is_busy = self._others.doing(self._peer).is_busy


def explain_timeout(error: PeerTimeoutError, others: Others, peer: int, *, sends: bool) -> None:
    """Add to the error of a message what `peer` does; `sends`: the message was for it."""
    doing = others.doing(peer)
    if error.rank is not None and doing.waits:
        own = Waits(error.rank, Pending(sends, peer, 0))
        if (text := describe([own, *doing.waits])) is not None:
            error.remedy = text
            return
    error.remedy = f"{doing.text[0].upper()}{doing.text[1:]}. {error.remedy}"
