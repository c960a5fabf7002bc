"""What a call needs to know of other ranks besides what their links show."""

from __future__ import annotations

from typing import Protocol

from ringreduce.pure.cycles import Waits, describe
from ringreduce.pure.liveness import Doing
from ringreduce.pure.timeouts import Timeouts
from ringreduce.pure.watcher_messages import Left, Listening, Pending
from ringreduce.vocabulary.errors import PeerTimeoutError


class PeerStates(Protocol):
    """What is known of the other ranks; from any thread."""

    def listen(self, listening: Listening) -> None:
        """Notify a rank that this one listens for it."""

    def left(self, rank: int) -> Left | None:
        """The message of a rank that has closed its communicator; None if it has not."""

    def doing(self, rank: int) -> Doing:
        """What a rank does."""


class PeerTimeouts(Timeouts):
    """The limits of `timeouts` for a message to or from rank `peer`, whatever else holds this up.

    `peer` is busy while it is alive, unless it waits for this rank, or for one that does.
    """

    def __init__(self, timeouts: Timeouts, peers: PeerStates, peer: int, *, sends: bool) -> None:
        super().__init__(timeouts.timeout_s, timeouts.busy_timeout_s)
        self._peers, self._peer, self._sends = peers, peer, sends

    def look(self) -> None:
        """Note whether the rank that is waited for is busy now."""
        self.is_busy = self._peers.doing(self._peer).is_busy

    def explain(self, error: PeerTimeoutError) -> None:
        """Say in `error` what the rank does."""
        doing = self._peers.doing(self._peer)
        if error.rank is not None and doing.waits:
            own = Waits(error.rank, Pending(self._sends, self._peer, 0))
            if (text := describe([own, *doing.waits])) is not None:
                error.remedy = text
                return
        error.remedy = f"{doing.text[0].upper()}{doing.text[1:]}. {error.remedy}"
