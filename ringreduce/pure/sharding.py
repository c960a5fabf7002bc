"""Which range of each gradient's bucket a rank updates, if ranks divide the update. Pure.

    bucket     | gradient 9      | gradient 8 | gradient 7 |
    shares     | rank 0            | rank 1               |
    rank 1's                       | gr. 8    | gradient 7 |

A rank's share of a bucket is what it completes in an all-reduce (`Collectives.shares`), so sums are
those of an update that is not divided. Shares begin at multiples of 64 bytes (`BucketPlan.make`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from ringreduce.pure.buckets import BucketPlan


class Piece(NamedTuple):
    """A rank's range of a variable, flattened: ``[first, first + length)``; `length` may be 0."""

    first: int
    length: int
    start: int  # where it begins in its bucket


def pieces(plan: BucketPlan, shares: Sequence[tuple[int, int]]) -> dict[int, Piece]:
    """A rank's piece of each gradient in `plan`, by its number; `shares` are of the buckets."""
    pieces_of = {}
    for bucket, (begin, end) in zip(plan.buckets, shares, strict=True):
        for slot in bucket.slots:
            start = min(max(slot.start, begin), end)
            stop = min(max(slot.start + slot.count, begin), end)
            # Of an empty one `start` is still within the share, so that starts ascend.
            first = start - slot.start if stop > start else 0
            pieces_of[slot.gradient] = Piece(first, stop - start, start)
    return pieces_of
