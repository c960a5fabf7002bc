"""Bucket memory that TensorFlow may keep views of, and that is used again when it does not."""

from __future__ import annotations

import sys

import numpy as np

from ringreduce.pure.buckets import ALIGNMENT

__all__ = ["Memory"]


class Memory:
    """Buffers that are handed out again once nobody refers to them."""

    def __init__(self) -> None:
        self._buffers: dict[int, list[np.ndarray]] = {}

    def take(self, nbytes: int) -> np.ndarray:
        """A buffer of `nbytes`, dtype uint8, aligned; contents undefined.

        It belongs to the caller and to all views made of it: while any of them lives, the
        memory is not handed out again.
        """
        buffers = self._buffers.setdefault(nbytes, [])
        for whole in buffers:
            # Views refer to the array that owns the memory. Nobody holds one when the list,
            # the loop's name and the call's own argument are all that is counted.
            if sys.getrefcount(whole) <= _UNUSED_REFERENCES:
                return _aligned(whole, nbytes)
        whole = np.empty(nbytes + ALIGNMENT, np.uint8)
        buffers.append(whole)
        return _aligned(whole, nbytes)


def _aligned(whole: np.ndarray, nbytes: int) -> np.ndarray:
    start = -whole.__array_interface__["data"][0] % ALIGNMENT
    return whole[start : start + nbytes]


def _count_references() -> int:
    """What `sys.getrefcount` says in `Memory.take` of a buffer that nobody else holds."""
    buffers = [np.empty(0, np.uint8)]
    for whole in buffers:
        return sys.getrefcount(whole)
    raise AssertionError


_UNUSED_REFERENCES = _count_references()
