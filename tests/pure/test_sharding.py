"""The pieces of a sharded update: together they are every gradient, once, and begin at lines."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure.buckets import ALIGNMENT, BucketPlan, GradientSpec, pieces
from ringreduce.pure.schedule import chunk_bounds

ITEMSIZES = {"float32": 4, "float64": 8}
specs = st.builds(
    GradientSpec,
    path=st.just("a"),
    shape=st.integers(0, 300).map(lambda n: (n,)),
    dtype=st.sampled_from(sorted(ITEMSIZES)),
)


@given(st.lists(specs, max_size=20), st.integers(1, 7), st.integers(1, 4000))
def test_every_element_is_in_the_piece_of_one_rank(gradients, size, bucket_bytes):
    plan = BucketPlan.make(gradients, ITEMSIZES, bucket_bytes, ranks=size)
    bounds = [list(itertools.pairwise(chunk_bounds(b.count, size))) for b in plan.buckets]
    found = [pieces(plan, [shares[rank] for shares in bounds]) for rank in range(size)]
    for number, spec in enumerate(gradients):
        ranges = sorted((p.first, p.first + p.length) for p in (own[number] for own in found))
        whole = [element for begin, end in ranges for element in range(begin, end)]
        assert whole == list(range(spec.count))
    for bucket, shares in zip(plan.buckets, bounds, strict=True):
        line = ALIGNMENT // ITEMSIZES[bucket.dtype]
        assert all(begin % line == 0 for begin, _ in shares)
        for own in found:
            starts = [own[slot.gradient].start for slot in bucket.slots]
            assert starts == sorted(starts)
            assert all(own[slot.gradient].start <= bucket.count for slot in bucket.slots)
