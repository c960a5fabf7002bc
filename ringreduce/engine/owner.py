"""The interface of the communicator for its own threads."""

from __future__ import annotations

from typing import Protocol

from ringreduce.vocabulary.errors import RingReduceError


class Owner(Protocol):
    """What the engine and the watcher notify of a failure, from their own threads."""

    def fail(self, error: RingReduceError) -> object:
        """This rank has failed with `error`: notify all ranks."""

    def ring_ended(self, error: RingReduceError) -> None:
        """The ring has ended with `error`, and the other ranks know. Takes no lock."""
