"""One entry for each collective: its call, its expected result, and its bus bandwidth.

Bandwidths are those of nccl-tests (doc/PERFORMANCE.md): algbw = S / t and busbw = algbw *
factor, where the factor makes busbw the speed that each link needs. S is the size of the
result for all_gather and gather and of the input for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringreduce import Communicator
from ringreduce.pure.schedule import chunk_bounds


@dataclass(frozen=True)
class Collective:
    """A row of the table.

    Attributes:
        run: one call on this rank's buffer of `count` elements, and an array like it for the result
            of those that can use one.
        expected: what `run` returns on a rank, from all ranks' inputs, shape (size, count).
        bus_factor: busbw / algbw for a ring of that size.
        reduces: whether the operator matters.
        is_even: whether `count` must be a multiple of the ranks.
        in_pairs: whether it needs an even number of ranks.
    """

    run: Callable[[Communicator, np.ndarray, np.ndarray, str], np.ndarray]
    expected: Callable[[np.ndarray, int, str], np.ndarray]
    bus_factor: Callable[[int], float]
    reduces: bool
    is_even: bool = False
    in_pairs: bool = False

    def count(self, nbytes: int, itemsize: int, size: int) -> int:
        """Elements of a buffer of at most about `nbytes`."""
        count = max(1, nbytes // itemsize)
        return max(size, count // size * size) if self.is_even else count


def _reduced(inputs: np.ndarray, op: str) -> np.ndarray:
    if op == "mean":
        total = inputs.sum(axis=0, dtype=inputs.dtype)
        size = inputs.dtype.type(len(inputs))
        return total / size if inputs.dtype.kind not in "iu" else total // size
    ufunc = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    return ufunc.reduce(inputs, axis=0, dtype=inputs.dtype)


def _own_chunk(array: np.ndarray, size: int, rank: int) -> np.ndarray:
    bounds = chunk_bounds(array.size, size)
    return array[bounds[rank] : bounds[rank + 1]]


def _chunk_of(comm: Communicator, buffer: np.ndarray) -> np.ndarray:
    return _own_chunk(buffer, comm.size, comm.rank)


def _joined(inputs: np.ndarray) -> np.ndarray:
    """Every rank's chunk of its own row."""
    return np.concatenate([_own_chunk(row, len(inputs), r) for r, row in enumerate(inputs)])


def _there_and_back(comm: Communicator, buffer: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Both ranks of a pair send and receive, the odd one after it has received."""
    other = comm.rank ^ 1
    if comm.rank < other:
        comm.send(buffer, other)
    comm.recv(out, other)
    if comm.rank > other:
        comm.send(buffer, other)
    return out


COLLECTIVES = {
    "all_reduce": Collective(
        run=lambda comm, buffer, out, op: comm.all_reduce(buffer, op),
        expected=lambda inputs, rank, op: _reduced(inputs, op),
        bus_factor=lambda size: 2 * (size - 1) / size,
        reduces=True,
    ),
    "reduce_scatter": Collective(
        run=lambda comm, buffer, out, op: comm.reduce_scatter(buffer, op),
        expected=lambda inputs, rank, op: _own_chunk(_reduced(inputs, op), len(inputs), rank),
        bus_factor=lambda size: (size - 1) / size,
        reduces=True,
        is_even=True,
    ),
    "all_gather": Collective(
        run=lambda comm, buffer, out, op: comm.all_gather(_chunk_of(comm, buffer)),
        expected=lambda inputs, rank, op: _joined(inputs),
        bus_factor=lambda size: (size - 1) / size,
        reduces=False,
        is_even=True,
    ),
    "broadcast": Collective(
        run=lambda comm, buffer, out, op: comm.broadcast(buffer, root=0),
        expected=lambda inputs, rank, op: inputs[0],
        bus_factor=lambda size: 1.0,
        reduces=False,
    ),
    "all_to_all": Collective(
        run=lambda comm, buffer, out, op: comm.all_to_all(buffer, out=out),
        expected=lambda inputs, rank, op: np.concatenate(
            [_own_chunk(row, len(inputs), rank) for row in inputs]
        ),
        bus_factor=lambda size: (size - 1) / size,
        reduces=False,
        is_even=True,
    ),
    "gather": Collective(
        run=lambda comm, buffer, out, op: comm.gather(_chunk_of(comm, buffer)),
        expected=lambda inputs, rank, op: _joined(inputs) if rank == 0 else inputs[0, :0],
        bus_factor=lambda size: (size - 1) / size,
        reduces=False,
    ),
    "scatter": Collective(
        run=lambda comm, buffer, out, op: comm.scatter(buffer),
        expected=lambda inputs, rank, op: _own_chunk(inputs[0], len(inputs), rank),
        bus_factor=lambda size: (size - 1) / size,
        reduces=False,
        is_even=True,
    ),
    "sendrecv": Collective(
        run=lambda comm, buffer, out, op: _there_and_back(comm, buffer, out),
        expected=lambda inputs, rank, op: inputs[rank ^ 1],
        bus_factor=lambda size: 2.0,
        reduces=False,
        in_pairs=True,
    ),
}
