"""The gradient plan: complete, aligned, and the same on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure.buckets import (
    ALIGNMENT,
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


def plan_of(*gradients: GradientSpec, bucket_bytes: int = 1 << 20) -> BucketPlan:
    return BucketPlan.make(gradients, ITEMSIZES, bucket_bytes)


@given(plans)
def test_every_present_gradient_has_exactly_one_slot_or_is_sparse(plan):
    placed = sorted(slot.gradient for bucket in plan.buckets for slot in bucket.slots)
    assert tuple(placed) == plan.present
    assert not set(plan.present) & set(plan.sparse)
    there = [i for i, gradient in enumerate(plan.gradients) if gradient.present]
    assert sorted(plan.present + plan.sparse) == there
    assert all(plan.gradients[index].sparse for index in plan.sparse)


@given(plans)
def test_slot_has_the_size_and_dtype_of_its_gradient(plan):
    for bucket in plan.buckets:
        for slot in bucket.slots:
            gradient = plan.gradients[slot.gradient]
            assert (slot.count, bucket.dtype) == (gradient.count, gradient.dtype)


@given(plans)
def test_slots_start_at_multiples_of_64_bytes(plan):
    for bucket in plan.buckets:
        assert all(slot.start * ITEMSIZES[bucket.dtype] % ALIGNMENT == 0 for slot in bucket.slots)


@given(plans)
def test_slots_lie_one_after_the_other_within_their_bucket(plan):
    for bucket in plan.buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.start >= end
            end = slot.start + slot.count
        assert end <= bucket.count


@given(plans)
def test_bucket_holds_no_more_padding_than_alignment_needs(plan):
    for bucket in plan.buckets:
        wasted = bucket.count - sum(slot.count for slot in bucket.slots)
        assert wasted * ITEMSIZES[bucket.dtype] < ALIGNMENT * max(1, len(bucket.slots))


@given(plans)
def test_gradients_of_a_dtype_are_placed_in_reverse_order(plan):
    """Backpropagation finishes the last one first."""
    for dtype in ITEMSIZES:
        placed = [
            slot.gradient
            for bucket in plan.buckets
            if bucket.dtype == dtype
            for slot in bucket.slots
        ]
        assert placed == sorted(placed, reverse=True)


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


def test_next_bucket_is_opened_when_the_next_gradient_would_not_fit():
    spec = GradientSpec("w", (16,), "float32")  # 64 bytes
    plan = plan_of(spec, spec, spec, spec, spec, bucket_bytes=128)
    placed = [[slot.gradient for slot in bucket.slots] for bucket in plan.buckets]
    assert placed == [[4, 3], [2, 1], [0]]


def test_layout_in_words_of_elements():
    plan = plan_of(GradientSpec("a", (3,), "float32"), GradientSpec("b", (17,), "float32"))
    (bucket,) = plan.buckets
    assert [(slot.gradient, slot.start, slot.count) for slot in bucket.slots] == [
        (1, 0, 17),
        (0, 32, 3),
    ]
    assert bucket.count == 48


@pytest.mark.parametrize("change", [{"present": False}, {"sparse": True}], ids=str)
def test_model_without_dense_gradients_has_no_bucket(change):
    assert plan_of(GradientSpec("a", (3,), "float32", **change)).buckets == ()


@given(models, bucket_sizes)
def test_signature_is_the_same_for_equal_models(gradients, bucket_bytes):
    copies = [replace(gradient) for gradient in gradients]
    one = BucketPlan.make(gradients, ITEMSIZES, bucket_bytes)
    assert one.signature == BucketPlan.make(copies, ITEMSIZES, bucket_bytes).signature


@given(models, st.integers(0, 99))
def test_signature_ignores_the_numbers_of_automatic_names(gradients, number):
    renamed = [replace(gradient, path=f"{gradient.path}_{number}") for gradient in gradients]
    assert plan_of(*gradients).signature == plan_of(*renamed).signature


@pytest.mark.parametrize(
    ("ours", "theirs", "agree"),
    [
        ("dense/kernel", "dense_1/kernel", True),
        ("sequential_3/dense_12/kernel", "sequential/dense/kernel", True),
        ("adam/sequential_dense_1_kernel_momentum", "adam/sequential_dense_kernel_momentum", True),
        ("kernel:0", "kernel_1:0", True),
        ("dense/kernel", "dense/bias", False),
        ("encoder/dense/kernel", "decoder/dense/kernel", False),
        ("conv2d/kernel", "conv3d/kernel", False),
        ("block1/kernel", "block2/kernel", False),
    ],
)
def test_names_agree_but_for_automatic_numbers(ours, theirs, agree):
    one, other = (GradientSpec(path, (3,), "float32") for path in (ours, theirs))
    assert (one.essence == other.essence) is agree
    assert (plan_of(one).signature == plan_of(other).signature) is agree


BASE = (GradientSpec("a", (2, 3), "float32"), GradientSpec("b", (4,), "float32"))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (3, 2)},
        {"shape": (6,)},
        {"dtype": "float64"},
        {"present": False},
        {"sparse": True},
        {"path": "z"},
    ],
    ids=str,
)
@pytest.mark.parametrize("index", [0, 1])
def test_signature_reacts_to_a_gradients_kind(change, index):
    changed = list(BASE)
    changed[index] = replace(changed[index], **change)
    assert plan_of(*BASE).signature != plan_of(*changed).signature


@pytest.mark.parametrize("other", [BASE[::-1], BASE[:1], (*BASE, BASE[0])])
def test_signature_reacts_to_order_and_number(other):
    assert plan_of(*BASE).signature != plan_of(*other).signature


def test_signature_reacts_to_the_size_of_buckets():
    assert plan_of(*BASE).signature != plan_of(*BASE, bucket_bytes=64).signature


def test_signature_reacts_to_whether_the_step_is_compiled():
    compiled = BucketPlan.make(BASE, ITEMSIZES, 1 << 20, compiled=True)
    assert compiled.signature != plan_of(*BASE).signature
    assert compiled.describe_buckets().endswith("float32, with jit_compile=True")


def test_signature_reacts_to_the_compression():
    encoded = BucketPlan.make(BASE, ITEMSIZES, 1 << 20, compression="bf16")
    assert encoded.signature != plan_of(*BASE).signature
    assert encoded.describe_buckets().endswith("float32, with compression 'bf16'")


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


def test_buckets_are_described_by_number_and_first():
    assert plan_of(*BASE, bucket_bytes=64).describe_buckets() == (
        "2 buckets, the first of 16 float32"
    )
    assert plan_of(*BASE).describe_buckets() == "1 bucket, the first of 32 float32"
    assert plan_of().describe_buckets() == "0 buckets"


def test_signature_is_the_same_in_every_process():
    assert plan_of(*BASE).signature == 9758025106526364707


@given(models)
def test_first_difference_of_equal_models_is_none(gradients):
    assert first_difference(gradients, [replace(g, path=f"{g.path}_7") for g in gradients]) is None


def test_first_difference_describes_both_sides():
    theirs = (BASE[0], replace(BASE[1], path="c", shape=(5,)))
    assert first_difference(BASE, theirs) == (
        "b: float32 of shape (4,)",
        "c: float32 of shape (5,)",
    )


def test_first_difference_says_which_side_is_sparse():
    theirs = (replace(BASE[0], sparse=True), BASE[1])
    assert first_difference(BASE, theirs) == (
        "a: float32 of shape (2, 3)",
        "a: sparse float32 of shape (2, 3)",
    )


@given(
    st.lists(st.integers(0, 50), min_size=2, max_size=6),
    st.integers(0, 60),
    st.integers(0, 20),
    st.sampled_from([2, 4, 8]),
)
def test_rows_are_gathered_where_a_rank_receives_no_more_than_of_the_table(
    rows, table_rows, width, itemsize
):
    """What all ranks receive together, as each collective moves it."""
    size = len(rows)
    gathered = sum(sum(rows) - own for own in rows) * (width * itemsize + 8)
    reduced = size * 2 * (size - 1) / size * table_rows * width * itemsize
    spec = GradientSpec("e", (table_rows, width), "float32", sparse=True)
    assert gathers_rows(rows, spec, itemsize) is (gathered <= reduced + 1e-6)


def test_where_both_ways_cost_the_same_rows_are_gathered():
    spec = GradientSpec("e", (10, 2), "float32", sparse=True)  # 2 x 80 bytes, or 16 for each row
    assert gathers_rows([5, 5], spec, 4)
    assert not gathers_rows([5, 6], spec, 4)


def test_rows_of_several_dimensions_count_whole():
    spec = GradientSpec("e", (10, 2, 3), "float64", sparse=True)  # 2 x 480 bytes, or 56
    assert gathers_rows([17, 0], spec, 8)
    assert not gathers_rows([17, 1], spec, 8)


def test_first_difference_says_when_a_gradient_is_missing():
    theirs = (replace(BASE[0], present=False), BASE[1])
    assert first_difference(BASE, theirs) == (
        "a: float32 of shape (2, 3)",
        "a: no gradient (None)",
    )


def test_first_difference_counts_when_one_model_is_longer():
    assert first_difference(BASE, BASE[:1]) == (
        "2 gradients, one of them b: float32 of shape (4,)",
        "1 gradients",
    )
    assert first_difference(BASE[:1], BASE, "variables") == (
        "1 variables",
        "2 variables, one of them b: float32 of shape (4,)",
    )


def test_first_difference_finds_layers_of_one_shape_in_another_order():
    first, second = (GradientSpec(f"{name}/kernel", (2, 2), "float32") for name in ("q", "k"))
    assert first_difference((first, second), (second, first)) == (
        "q/kernel: float32 of shape (2, 2)",
        "k/kernel: float32 of shape (2, 2)",
    )


def test_first_difference_prefers_the_first_to_the_count():
    ours, theirs = first_difference(BASE, (replace(BASE[0], dtype="float64"),))
    assert (ours, theirs) == ("a: float32 of shape (2, 3)", "a: float64 of shape (2, 3)")


def test_first_bucket_has_a_limit_of_its_own():
    spec = GradientSpec("v", (16,), "float32")  # 64 bytes
    plan = BucketPlan.make([spec] * 9, ITEMSIZES, 256, 128)
    assert [len(bucket.slots) for bucket in plan.buckets] == [2, 4, 3]


def test_first_bucket_has_no_limit_of_its_own_by_default():
    spec = GradientSpec("v", (16,), "float32")
    assert BucketPlan.make([spec] * 9, ITEMSIZES, 256) == BucketPlan.make(
        [spec] * 9, ITEMSIZES, 256, 256
    )
