"""One entry for each collective: its call, its expected result, and its bus bandwidth.

Bandwidths are those of nccl-tests (doc/PERFORMANCE.md): algbw = S / t and busbw = algbw *
factor, where the factor makes busbw the speed that each link needs. S is the size of the
result for all_gather and of the input for the others.
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
        run: one call on this rank's buffer of `count` elements.
        expected: what `run` returns on a rank, from all ranks' inputs, shape (size, count).
        bus_factor: busbw / algbw for a ring of that size.
        reduces: whether the operator matters.
    """

    run: Callable[[Communicator, np.ndarray, str], np.ndarray]
    expected: Callable[[np.ndarray, int, str], np.ndarray]
    bus_factor: Callable[[int], float]
    reduces: bool


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


COLLECTIVES = {
    "all_reduce": Collective(
        run=lambda comm, buffer, op: comm.all_reduce(buffer, op),
        expected=lambda inputs, rank, op: _reduced(inputs, op),
        bus_factor=lambda size: 2 * (size - 1) / size,
        reduces=True,
    ),
    "reduce_scatter": Collective(
        run=lambda comm, buffer, op: comm.reduce_scatter(buffer, op),
        expected=lambda inputs, rank, op: _own_chunk(_reduced(inputs, op), len(inputs), rank),
        bus_factor=lambda size: (size - 1) / size,
        reduces=True,
    ),
    "all_gather": Collective(
        run=lambda comm, buffer, op: comm.all_gather(_own_chunk(buffer, comm.size, comm.rank)),
        expected=lambda inputs, rank, op: np.concatenate(
            [_own_chunk(row, len(inputs), r) for r, row in enumerate(inputs)]
        ),
        bus_factor=lambda size: (size - 1) / size,
        reduces=False,
    ),
    "broadcast": Collective(
        run=lambda comm, buffer, op: comm.broadcast(buffer, root=0),
        expected=lambda inputs, rank, op: inputs[0],
        bus_factor=lambda size: 1.0,
        reduces=False,
    ),
}
