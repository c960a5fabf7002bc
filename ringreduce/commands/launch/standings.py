"""What ranks have come to, in memory that outlives them (`pure.views.Standing`).

Nameless files: a rank has one of its own, which the ranks of its host that share memory have open
too; a launcher has one with a row for each rank of the job, which its workers have open. What
stands there can be read when the rank that it is about has ended, without an answer from anybody.

Where a rank was lost and another process has taken its place, a row counts which of its lives are
over; the numbers in it are of all of them, since a later life never stands before an earlier one.
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

    def write(self, standing: Standing, row: int = 0, life: int = 0) -> None:
        """Add what is new of that life; what stands there already stays."""
        (ring, ended, _), over = newest(standing, self.read(row)), self._over(row)
        at = row * _ROW_BYTES
        os.pwrite(self.descriptor, _NUMBERS.pack(ring, ended), at)
        over = max(over, life + 1) if standing.is_gone else over
        os.pwrite(self.descriptor, _GONE.pack(over), at + _NUMBERS.size)

    def read(self, row: int = 0, life: int = 0) -> Standing:
        """That of a life which is the last, or over; OSError if it is no such file."""
        # First whether it is gone: the rest is whole then.
        over = self._over(row)
        numbers = os.pread(self.descriptor, _NUMBERS.size, row * _ROW_BYTES)
        ring, ended = _NUMBERS.unpack(numbers)
        return Standing(ring, ended, over > life)

    def _over(self, row: int) -> int:
        """The number of the first life that is not over."""
        over = os.pread(self.descriptor, _GONE.size, row * _ROW_BYTES + _NUMBERS.size)
        if len(over) < _GONE.size:
            raise OSError("the file of a rank's standing is too short")
        return int(_GONE.unpack(over)[0])


def newest(*standings: Standing) -> Standing:
    """What several sources say of one rank together."""
    rings, ended, gone = zip(*standings, strict=True)
    return Standing(max(rings), max(ended), any(gone))
