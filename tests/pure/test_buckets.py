"""The gradient plan: complete, aligned, and the same on every rank."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure.buckets import (
    ALIGNMENT,
    FIRST_BUCKET_BYTES,
    BucketPlan,
    GradientSpec,
    first_difference,
    gathers_rows,
)

ITEMSIZES = {"float16": 2, "float32": 4, "float64": 8, "int8": 1}

specs = st.builds(
    GradientSpec,
    path=st.text("abc/", max_size=5),
    shape=st.lists(st.integers(0, 20), max_size=3).map(tuple),
    dtype=st.sampled_from(sorted(ITEMSIZES)),
    present=st.booleans(),
    sparse=st.booleans(),
)
models = st.lists(specs, max_size=30)
bucket_sizes = st.integers(1, 5000)
plans = st.builds(BucketPlan.make, models, st.just(ITEMSIZES), bucket_sizes)


def plan_of(*gradients: GradientSpec, bucket_bytes: int = 1 << 20, **options: Any) -> BucketPlan:
    return BucketPlan.make(gradients, ITEMSIZES, bucket_bytes, **options)


@given(plans)
def test_every_present_gradient_has_exactly_one_slot_or_is_sparse(plan):
    placed = sorted(slot.gradient for bucket in plan.buckets for slot in bucket.slots)
    assert tuple(placed) == plan.present
    assert not set(plan.present) & set(plan.sparse)
    there = [i for i, gradient in enumerate(plan.gradients) if gradient.present]
    assert sorted(plan.present + plan.sparse) == there
    assert all(plan.gradients[index].sparse for index in plan.sparse)


@given(plans)
def test_slots_are_aligned_one_after_the_other_and_as_large_as_their_gradients(plan):
    for bucket in plan.buckets:
        itemsize, end = ITEMSIZES[bucket.dtype], 0
        for slot in bucket.slots:
            gradient = plan.gradients[slot.gradient]
            assert (slot.count, bucket.dtype) == (gradient.count, gradient.dtype)
            assert slot.start * itemsize % ALIGNMENT == 0
            assert slot.start >= end
            end = slot.start + slot.count
        assert end <= bucket.count
        padding = bucket.count - sum(slot.count for slot in bucket.slots)
        assert padding * itemsize < ALIGNMENT * max(1, len(bucket.slots))


@given(plans)
def test_gradients_of_a_dtype_are_placed_in_reverse_order(plan):
    """Backpropagation finishes the last one first."""
    placed: dict[str, list[int]] = {}
    for bucket in plan.buckets:
        placed.setdefault(bucket.dtype, []).extend(slot.gradient for slot in bucket.slots)
    for gradients in placed.values():
        assert gradients == sorted(gradients, reverse=True)


@given(models, bucket_sizes)
def test_bucket_exceeds_its_size_only_for_a_gradient_alone(gradients, bucket_bytes):
    plan = BucketPlan.make(gradients, ITEMSIZES, bucket_bytes)
    for bucket in plan.buckets:
        alone = sum(1 for slot in bucket.slots if slot.count) <= 1
        assert alone or bucket.count * ITEMSIZES[bucket.dtype] <= bucket_bytes


@given(models)
def test_large_enough_bucket_takes_all_gradients_of_a_dtype(gradients):
    plan = BucketPlan.make(gradients, ITEMSIZES, 1 << 40)
    assert len(plan.buckets) == len({g.dtype for g in gradients if g.present and not g.sparse})


SPEC = GradientSpec("w", (FIRST_BUCKET_BYTES // 8,), "float32")  # half of the first bucket


@pytest.mark.parametrize(("share", "slots"), [(0.5, [1] * 9), (1, [2, 2, 2, 2, 1]), (2, [2, 4, 3])])
def test_next_bucket_is_opened_when_the_next_gradient_would_not_fit(share, slots):
    """The first one has a limit of its own, so that it starts early."""
    plan = BucketPlan.make([SPEC] * 9, ITEMSIZES, int(share * FIRST_BUCKET_BYTES))
    assert [len(bucket.slots) for bucket in plan.buckets] == slots


@given(models, st.integers(1, 4096))
def test_large_gradients_are_alone_and_in_place(gradients, limit):
    plan = BucketPlan.make(gradients, ITEMSIZES, 1 << 20, in_place_bytes=limit)
    placed = sorted(slot.gradient for bucket in plan.buckets for slot in bucket.slots)
    assert tuple(placed) == plan.present
    for bucket in plan.buckets:
        sizes = [slot.count * ITEMSIZES[bucket.dtype] for slot in bucket.slots]
        if bucket.in_place:
            [slot] = bucket.slots
            assert (slot.start, slot.count) == (0, bucket.count)
            assert sizes[0] >= limit
        else:
            assert max(sizes) < limit


@given(models, bucket_sizes, st.integers(0, 99))
def test_models_agree_whose_automatic_names_alone_differ(gradients, bucket_bytes, number):
    renamed = [replace(gradient, path=f"{gradient.path}_{number}") for gradient in gradients]
    one, other = (BucketPlan.make(g, ITEMSIZES, bucket_bytes) for g in (gradients, renamed))
    assert one.signature == other.signature
    assert first_difference(gradients, renamed) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "agree"),
    [
        ("dense/kernel", "dense_1/kernel", True),
        ("sequential_3/dense_12/kernel", "sequential/dense/kernel", True),
        ("adam/sequential_dense_1_kernel_momentum", "adam/sequential_dense_kernel_momentum", True),
        ("kernel:0", "kernel_1:0", True),
        ("encoder/dense/kernel", "decoder/dense/kernel", False),
        ("conv2d/kernel", "conv3d/kernel", False),
        ("block1/kernel", "block2/kernel", False),
    ],
)
def test_names_agree_but_for_automatic_numbers(ours, theirs, agree):
    one, other = (GradientSpec(path, (3,), "float32") for path in (ours, theirs))
    assert (one.essence == other.essence) is agree
    assert (plan_of(one).signature == plan_of(other).signature) is agree


A, B = BASE = (GradientSpec("a", (2, 3), "float32"), GradientSpec("b", (4,), "float32"))


def test_signature_is_the_same_in_every_process():
    assert plan_of(*BASE).signature == 9758025106526364707


CHANGES: list[dict[str, Any]] = [{"shape": (3, 2)}, {"shape": (6,)}, {"dtype": "float64"}]
CHANGES += [{"present": False}, {"sparse": True}, {"path": "z"}]
OPTIONS = {"bucket_bytes": 64, "compiled": True, "compression": "bf16"}


@pytest.mark.parametrize(
    ("gradients", "options"),
    [
        *(((replace(A, **change), B), {}) for change in CHANGES),
        *(((A, replace(B, **change)), {}) for change in CHANGES),
        *((other, {}) for other in (BASE[::-1], BASE[:1], (*BASE, A))),
        *((BASE, {name: value}) for name, value in OPTIONS.items()),
    ],
    ids=str,
)
def test_signature_reacts_to_what_must_be_alike(gradients, options):
    assert plan_of(*BASE).signature != plan_of(*gradients, **options).signature


ONE = "1 bucket, the first of 32 float32"


@pytest.mark.parametrize(
    ("gradients", "options", "text"),
    [
        (BASE, {"bucket_bytes": 64}, "2 buckets, the first of 16 float32"),
        (BASE, {"compiled": True}, f"{ONE}, with jit_compile=True"),
        (BASE, {"compression": "bf16"}, f"{ONE}, with compression 'bf16'"),
        ((replace(A, present=False), replace(B, sparse=True)), {}, "0 buckets"),
    ],
)
def test_buckets_are_described_by_number_and_first(gradients, options, text):
    assert plan_of(*gradients, **options).describe_buckets() == text


Q, K = (GradientSpec(f"{name}/kernel", (2, 2), "float32") for name in "qk")


@pytest.mark.parametrize(
    ("ours", "theirs", "first", "second"),
    [
        (BASE, (A, replace(B, path="c", shape=(5,))), "b: float32 of shape (4,)", "c: float32 of"),
        (BASE, (replace(A, sparse=True), B), "a: float32 of", "a: sparse float32 of shape (2, 3)"),
        (BASE, (replace(A, present=False), B), "a: float32 of", "a: no gradient (None)"),
        (BASE, BASE[:1], "2 gradients, one of them b: float32 of shape (4,)", "1 gradients"),
        (BASE[:1], BASE, "1 gradients", "2 gradients, one of them b: float32 of shape (4,)"),
        # Layers of one shape in another order; a difference before the number of gradients.
        ((Q, K), (K, Q), "q/kernel: float32", "k/kernel: float32"),
        (BASE, (replace(A, dtype="float64"),), "a: float32", "a: float64"),
    ],
)
def test_the_first_difference_is_described_as_each_side_has_it(ours, theirs, first, second):
    difference = first_difference(ours, theirs)
    assert difference is not None
    assert difference[0].startswith(first)
    assert difference[1].startswith(second)
    of_variables = tuple(text.replace("gradients", "variables") for text in difference)
    assert first_difference(ours, theirs, "variables") == of_variables


some_rows = st.lists(st.integers(0, 50), min_size=2, max_size=6)


@given(some_rows, st.integers(0, 60), st.integers(0, 20), st.sampled_from([2, 4, 8]))
def test_rows_are_gathered_where_a_rank_receives_no_more(rows, table_rows, width, itemsize):
    """Than of the whole table: what all receive together, as each collective moves it."""
    size = len(rows)
    gathered = sum(sum(rows) - own for own in rows) * (width * itemsize + 8)
    reduced = size * 2 * (size - 1) / size * table_rows * width * itemsize
    spec = GradientSpec("e", (table_rows, width), "float32", sparse=True)
    assert gathers_rows(rows, spec, itemsize) is (gathered <= reduced + 1e-6)


@pytest.mark.parametrize(
    ("shape", "itemsize", "rows"),
    [((10, 2), 4, 10), ((10, 2, 3), 8, 17)],  # 2 x 80 bytes, or 16 a row; 2 x 480, or 56
)
def test_where_both_ways_cost_the_same_rows_are_gathered(shape, itemsize, rows):
    spec = GradientSpec("e", shape, "float32", sparse=True)
    assert gathers_rows([rows - 5, 5], spec, itemsize)
    assert not gathers_rows([rows - 5, 6], spec, itemsize)
