"""The communicator, as the threads that work for it see it."""

from __future__ import annotations

from typing import Protocol

from ringreduce.vocabulary.errors import RingReduceError

__all__ = ["Owner"]


class Owner(Protocol):
    """Whom the engine and the watcher notify of a failure; from their own threads."""

    def fail(self, error: RingReduceError) -> object:
        """This rank has failed with `error`: all ranks must learn it."""

    def ring_ended(self, error: RingReduceError) -> None:
        """The ring has ended with `error`, and the other ranks know. Takes no lock."""
