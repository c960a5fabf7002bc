"""Which gradients travel together: a static plan that every rank makes alike. Pure.

Gradients are packed into buckets of one dtype, in reverse order of the variables, because
backpropagation finishes the last layer first. The plan follows from shapes and dtypes alone, so
ranks need no coordinator; they compare its signature with every reduction.

    bucket   | gradient 9 | pad | gradient 8 | pad | ...     starts at multiples of 64 bytes

With the padding, the framework can use a gradient's slice of the bucket without copying it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ringreduce.pure.wire import signature_of

# Large enough for the ring's full bandwidth, small enough that a step has several. Within a host
# sizes from 1 to 64 MiB make no difference beyond noise (docs/performance.md); rings of more than
# about 50 hosts need larger ones (docs/scaling.md).
BUCKET_BYTES = 4 << 20
# The last layers' gradients come first; the sooner they travel, the more is hidden.
FIRST_BUCKET_BYTES = 256 << 10
ALIGNMENT = 64  # TensorFlow copies what is not aligned to this many bytes; it is also a cache line

INDEX_BYTES = 8  # the index of a sparse gradient's row is int64

# Automatic names are numbered by what else a process has created: `dense_1/kernel` here may be
# `dense/kernel` there, also within `adam/sequential_dense_1_kernel_momentum`.
_NUMBERING = re.compile(r"_\d+(?=[_/:]|$)")


@dataclass(frozen=True)
class GradientSpec:
    """A gradient as all ranks must see it."""

    path: str  # the variable's name, compared without the numbers of automatic names
    shape: tuple[int, ...]
    dtype: str
    present: bool = True  # False: the variable has none
    sparse: bool = False  # it consists of some rows of the whole and is in no bucket

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def essence(self) -> tuple[object, ...]:
        """The part that must be equal on all ranks."""
        return _NUMBERING.sub("", self.path), self.shape, self.dtype, self.present, self.sparse

    def describe(self) -> str:
        """``dense/kernel: float32 of shape (784, 10)``, or ``sparse ...``, or that it has none."""
        kind = f"{self.dtype} of shape {self.shape}" if self.present else "no gradient (None)"
        return f"{self.path}: {'sparse ' * self.sparse}{kind}"


@dataclass(frozen=True)
class Slot:
    """A gradient's slice of its bucket: elements ``[start, start + count)``."""

    gradient: int
    start: int
    count: int


@dataclass(frozen=True)
class Bucket:
    """Gradients in one contiguous buffer of `count` elements of `dtype`, padding included."""

    dtype: str
    count: int
    slots: tuple[Slot, ...]
    in_place: bool = False  # it is one gradient, reduced in the memory that it has already


@dataclass(frozen=True)
class BucketPlan:
    """All buckets of one step, in the order in which every rank reduces them."""

    gradients: tuple[GradientSpec, ...]
    buckets: tuple[Bucket, ...]
    compiled: bool = False
    compression: str = "none"

    @classmethod
    def make(
        cls,
        gradients: Sequence[GradientSpec],
        itemsizes: dict[str, int],
        bucket_bytes: int,
        compiled: bool = False,
        in_place_bytes: int | None = None,
        compression: str = "none",
        ranks: int = 1,
    ) -> BucketPlan:
        """Pack `gradients`, in the order of the variables, into buckets of about `bucket_bytes`.

        Sparse or absent ones take no room; a larger one has its own bucket. The first bucket has
        `FIRST_BUCKET_BYTES`, so that it starts early. Gradients of at least `in_place_bytes`, if
        that is given, are reduced in place. Buckets are padded so that the chunks of `ranks` begin
        at multiples of 64 bytes: a sharded update has the same sums. Steps that XLA compiles round
        differently, so `compiled` is part of the signature, as `compression` between hosts is.
        """
        done: list[Bucket] = []
        open_slots: dict[str, list[Slot]] = {}
        ends: dict[str, int] = {}

        def close(dtype: str) -> None:
            if slots := open_slots.pop(dtype, None):
                unit = ALIGNMENT // itemsizes[dtype] * ranks
                count = -(-ends.pop(dtype) // unit) * unit
                done.append(Bucket(dtype, count, tuple(slots)))

        for index in reversed(range(len(gradients))):
            spec = gradients[index]
            if not spec.present or spec.sparse:
                continue
            if in_place_bytes is not None and spec.count * itemsizes[spec.dtype] >= in_place_bytes:
                alone = Slot(index, 0, spec.count)
                done.append(Bucket(spec.dtype, spec.count, (alone,), in_place=True))
                continue
            per_line = ALIGNMENT // itemsizes[spec.dtype]
            room = -(-spec.count // per_line) * per_line
            start = ends.get(spec.dtype, 0)
            limit = bucket_bytes if done else min(bucket_bytes, FIRST_BUCKET_BYTES)
            if start and (start + room) * itemsizes[spec.dtype] > limit:
                close(spec.dtype)
                start = 0
            open_slots.setdefault(spec.dtype, []).append(Slot(index, start, spec.count))
            ends[spec.dtype] = start + room
        for dtype in list(open_slots):
            close(dtype)
        return cls(tuple(gradients), tuple(done), compiled, compression)

    @cached_property
    def present(self) -> tuple[int, ...]:
        """Indices of the gradients that are in buckets, in the order of the variables."""
        return tuple(i for i, spec in enumerate(self.gradients) if spec.present and not spec.sparse)

    @cached_property
    def sparse(self) -> tuple[int, ...]:
        """Indices of the sparse gradients, in the order of the variables."""
        return tuple(i for i, spec in enumerate(self.gradients) if spec.present and spec.sparse)

    @cached_property
    def signature(self) -> int:
        """64 bits that differ when plans differ; the numbers of automatic names do not count."""
        essence = tuple(gradient.essence for gradient in self.gradients)
        return signature_of("plan", essence, self.buckets, self.compiled, self.compression)

    def describe_buckets(self) -> str:
        """``3 buckets, the first of 4096 float32``, and whether XLA compiles the step."""
        text = f"{len(self.buckets)} bucket{'s' * (len(self.buckets) != 1)}"
        if self.buckets:
            text += f", the first of {self.buckets[0].count} {self.buckets[0].dtype}"
        if self.compression != "none":
            text += f", with compression {self.compression!r}"
        return text + ", with jit_compile=True" * self.compiled


class Piece(NamedTuple):
    """A rank's range of a variable, flattened: ``[first, first + length)``; `length` may be 0."""

    first: int
    length: int
    start: int  # where it begins in its bucket


def pieces(plan: BucketPlan, shares: Sequence[tuple[int, int]]) -> dict[int, Piece]:
    """What a rank updates of each gradient in `plan`, by its number; `shares` are of the buckets.

        bucket     | gradient 9      | gradient 8 | gradient 7 |
        shares     | rank 0            | rank 1               |
        rank 1's                       | gr. 8    | gradient 7 |

    A rank's share of a bucket is what it completes in an all-reduce (`Collectives.shares`), so sums
    are those of an update that is not divided. Shares begin at multiples of 64 bytes.
    """
    pieces_of = {}
    for bucket, (begin, end) in zip(plan.buckets, shares, strict=True):
        for slot in bucket.slots:
            start = min(max(slot.start, begin), end)
            stop = min(max(slot.start + slot.count, begin), end)
            # Of an empty one `start` is still within the share, so that starts ascend.
            first = start - slot.start if stop > start else 0
            pieces_of[slot.gradient] = Piece(first, stop - start, start)
    return pieces_of


def gathers_rows(rows: Sequence[int], spec: GradientSpec, itemsize: int) -> bool:
    """Whether a sparse gradient is cheaper to gather than to reduce as a whole table.

    `rows` are each rank's numbers of rows. Bytes that each rank receives, for rows of w bytes with
    an index each, or a table of n rows:

        gathered   (size - 1) / size  *  sum(rows) (w + 8)        on average
        reduced    (size - 1) / size  *  2 n w

    The first factor cancels. The rest is known to all ranks, so all choose alike.
    """
    row_bytes = math.prod(spec.shape[1:]) * itemsize
    return sum(rows) * (row_bytes + INDEX_BYTES) <= 2 * spec.shape[0] * row_bytes


def first_difference(
    ours: Sequence[GradientSpec], theirs: Sequence[GradientSpec], what: str = "gradients"
) -> tuple[str, str] | None:
    """The first of two ranks' `what` that differ, as each describes it; None if all agree."""
    for spec, other in zip(ours, theirs, strict=False):
        if spec.essence != other.essence:
            return spec.describe(), other.describe()
    if len(ours) == len(theirs):
        return None
    # The longer list begins with all of the shorter one; `common` indexes its first extra gradient.
    common = min(len(ours), len(theirs))

    def describe(specs: Sequence[GradientSpec]) -> str:
        beyond = f", one of them {specs[common].describe()}" if len(specs) > common else ""
        return f"{len(specs)} {what}{beyond}"

    return describe(ours), describe(theirs)
