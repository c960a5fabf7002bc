"""What ranks have come to, in memory that outlives them (`pure.views.Standing`).

Nameless files: a rank has one of its own, which the ranks of its host that share memory have open
too; a launcher has one with a row for each rank of the job, which its workers have open. What
stands there can be read when the rank that it is about has ended, without an answer from anybody.
"""

from __future__ import annotations

import os
import struct
import weakref

from ringreduce.pure.views import Standing

_NUMBERS, _GONE = struct.Struct("2Q"), struct.Struct("Q")
_ROW_BYTES = _NUMBERS.size + _GONE.size


class Standings:
    """A standing for each row of the file `descriptor`, which this closes when it is dropped."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, rows: int) -> Standings:
        """All zeros; OSError if there is no memory or descriptor."""
        made = cls(os.memfd_create("ringreduce standings"))
        os.ftruncate(made.descriptor, rows * _ROW_BYTES)
        return made

    def write(self, standing: Standing, row: int = 0) -> None:
        """Add what is new; what stands there already stays."""
        ring, ended, is_gone = newest(standing, self.read(row))
        at = row * _ROW_BYTES
        os.pwrite(self.descriptor, _NUMBERS.pack(ring, ended), at)
        os.pwrite(self.descriptor, _GONE.pack(is_gone), at + _NUMBERS.size)

    def read(self, row: int = 0) -> Standing:
        """OSError if it is no such file."""
        at = row * _ROW_BYTES
        # First whether it is gone: the rest is whole then.
        gone = os.pread(self.descriptor, _GONE.size, at + _NUMBERS.size)
        numbers = os.pread(self.descriptor, _NUMBERS.size, at)
        if len(gone) < _GONE.size:
            raise OSError("the file of a rank's standing is too short")
        ring, ended = _NUMBERS.unpack(numbers)
        return Standing(ring, ended, any(gone))


def newest(*standings: Standing) -> Standing:
    """What several sources say of one rank together."""
    rings, ended, gone = zip(*standings, strict=True)
    return Standing(max(rings), max(ended), any(gone))
