"""Finds ranks that compute the same gradients step by step, since they read the same rows.

Equal weights and equal rows give equal gradients, to the last bit. So ranks compare a digest of
those of some early steps: once, beside the calls, and later steps do not know of it. Nothing is
found where a random layer draws other numbers on each rank.
"""

import hashlib

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import claim
from ringreduce.pure.claims import Claim

# In an eager loop ranks may have other weights in the first step. One batch, or a few, may be equal
# by right: zeros that build the model, a shared warm-up.
_FIRST, _LAST = 2, 9
# Rows that differ show in the first ones of so many bytes.
_BYTES = 1 << 16


class SameRows:
    """Looks at one plan's gradients in the first steps of the loop at `line`, as train.py:12."""

    def __init__(self, ring: Communicator, line: str) -> None:
        self._ring, self._line = ring, line
        self._step, self._digest = 0, hashlib.blake2b(digest_size=16)

    def see(self, values: np.ndarray) -> bool:
        """Note a step's gradients, not reduced yet; return whether it has seen enough."""
        self._step += 1
        if self._step < _FIRST:
            return False
        head = values.view(np.uint8)[:_BYTES]
        if not head.any():
            return True  # Such as of a loss that is 0, whatever the rows are.
        self._digest.update(head.data)
        if self._step < _LAST:
            return False
        equal = Claim(
            f"rows of {self._line}",
            self._digest.digest(),
            f"this rank and rank {{peer}} have computed the same gradients in steps {_FIRST} to "
            f"{_LAST} of the loop at {self._line}, to the last bit: they train on the same rows, "
            f"so that {self._ring.size} ranks do the work of one.",
            "Give each rank its own rows, by rr.shard(dataset) before batching; or call rr.fit. If "
            "the rows are equal on purpose, ignore this.",
            finds_equals=True,
        )
        claim(self._ring, equal)
        return True
