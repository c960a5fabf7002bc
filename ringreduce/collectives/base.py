"""What every way of doing the collectives offers the communicator."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ringreduce.pure.wire import Kind
from ringreduce.transport.base import Flow, Traffic
from ringreduce.vocabulary.errors import RingReduceError
from ringreduce.vocabulary.types import ReduceOp

__all__ = ["Collectives"]


class Collectives(Protocol):
    """The collectives of one rank, on arrays that are taken as checked.

    Arrays are one-dimensional, contiguous, and equal on all ranks where they must be. Every
    rank makes the same calls in the same order. After any exception nothing here works any
    more: `abort`, then `close`.

    `signature` is 64 bits that must agree on all ranks, on top of kind, dtype, length and op.
    """

    @property
    def sequence(self) -> int:
        """Number of the next call, for messages."""

    def all_reduce(self, flat: np.ndarray, op: ReduceOp, signature: int = 0) -> None:
        """Reduce `flat`, shape (n,), over all ranks, in place."""

    def reduce_scatter(self, flat: np.ndarray, op: ReduceOp, signature: int = 0) -> np.ndarray:
        """Reduce `flat`, shape (n,); return the view of it that holds this rank's chunk."""

    def all_gather(
        self, kind: Kind, flat: np.ndarray, bounds: tuple[int, ...], signature: int = 0
    ) -> None:
        """Fill `flat` with every rank's chunk; ``flat[bounds[r]:bounds[r + 1]]`` is rank r's."""

    def broadcast(self, kind: Kind, flat: np.ndarray, root: int, signature: int = 0) -> None:
        """Fill `flat` on every rank with that of `root`."""

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def empty(self, nbytes: int) -> np.ndarray | None:
        """Registered memory, dtype uint8, that is reduced where it lies; None for none."""

    def abort(self, cause: RingReduceError) -> None:
        """Tell the other ranks why this one gives up; at most about a second. Never raises."""

    def interrupt(self, cause: RingReduceError | None = None) -> None:
        """Have a call that runs in another thread raise soon: `cause`, or that this rank closed."""

    def close(self, word: bytes = b"") -> None:
        """Say goodbye with `word` and free everything; at most about a second. Never raises."""

    def traffic(self) -> Traffic:
        """What this rank has sent and received so far."""

    def flow(self) -> Flow:
        """Where the call under way stands; from any thread."""
