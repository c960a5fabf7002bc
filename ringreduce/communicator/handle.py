"""What every part of a `Communicator` has: its session, and this rank's number in it."""

from __future__ import annotations

from ringreduce.communicator.session import Session


class Handle:
    """A rank's handle on a session, without any calls."""

    def _use(self, session: Session) -> None:
        self._session, self._config = session, session.config
        self._rank, self._size = session.group_rank, session.size

    @property
    def rank(self) -> int:
        """This process's number in this communicator, 0 to size - 1."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size
