"""What a step gives for parts of rows, against what it gives for all of them."""

import numpy as np
import pytest

from ringreduce.pure.parity import Fit, chosen_rows, compare, compare_each, gravest

ROWS = [4, 8]
OF_A, OF_B = np.array([1.0, -2.0]), np.array([4.0, 1.0])
MEAN, SUM = (4 * OF_A + 8 * OF_B) / 12, OF_A + OF_B


def compared(whole, of_a=OF_A, of_b=OF_B, tolerance=1e-3):
    return compare([whole], [[of_a], [of_b]], ROWS, tolerance)


@pytest.mark.parametrize(
    ("whole", "fit"),
    [
        (MEAN, Fit.MEAN),
        (MEAN * (1 + 9e-4), Fit.MEAN),
        (SUM, Fit.SUM),
        (MEAN * 1.05, Fit.NEITHER),
        (SUM * 1.05, Fit.NEITHER),
        (np.array([np.nan, 1.0]), Fit.NOTHING),
    ],
)
def test_the_whole_is_the_mean_or_the_sum_of_its_parts_or_neither(whole, fit):
    assert compared(whole).fit is fit


def test_a_part_that_is_not_finite_is_found_where_the_whole_is():
    found = compare([MEAN, MEAN], [[OF_A, OF_A], [OF_B, OF_B * np.nan]], ROWS, 1e-3)
    assert (found.fit, found.place) == (Fit.NOT_FINITE, 1)


def test_gradients_of_zero_tell_nothing():
    assert compared(0 * MEAN, 0 * OF_A, 0 * OF_B).fit is Fit.NOTHING
    assert compare([], [[], []], ROWS, 1e-3).fit is Fit.NOTHING


def test_what_is_small_beside_other_gradients_is_noise():
    noise = np.array([1e-6])
    found = compare([MEAN, noise], [[OF_A, -noise], [OF_B, noise]], ROWS, 1e-3)
    assert found.fit is Fit.NEITHER  # 1e-6 of 4 is above what is called small: 1e-4 of a thousandth
    found = compare([MEAN, noise / 1e3], [[OF_A, -noise / 1e3], [OF_B, noise / 1e3]], ROWS, 1e-3)
    assert found.fit is Fit.MEAN


def test_the_place_that_misses_most_is_named_with_its_share():
    found = compare([MEAN, MEAN * 1.5], [[OF_A] * 2, [OF_B] * 2], ROWS, 1e-3)
    assert found.place == 1
    assert found.missed == pytest.approx(0.5 * 3 / 4.5)


def test_parts_that_add_up_but_hardly_miss_the_mean_are_no_sum():
    """Where the parts are 0 the mean is near too: it takes ten times the tolerance."""
    whole, near = np.array([1.0]), np.array([1.0 + 5e-3])
    assert compare([near], [[whole], [near - whole]], [999, 1], 1e-3).fit is not Fit.SUM


def test_each_owner_has_its_own_fit_and_places_are_those_among_all():
    parts = [[OF_A] * 4, [OF_B] * 4]
    each = compare_each([MEAN, SUM, MEAN, MEAN * 1.5], parts, ROWS, 1e-3, [0, 1, 0, 2])
    assert [one.fit for one in each] == [Fit.MEAN, Fit.SUM, Fit.NEITHER]
    assert [one.place for one in each] == [0, 1, 3]
    each = compare_each([MEAN, SUM * np.inf], [[OF_A] * 2, [OF_B] * 2], ROWS, 1e-3, [0, 2])
    assert [one.fit for one in each] == [Fit.MEAN, Fit.NOTHING, Fit.NOTHING]
    assert compare_each([], [[], []], ROWS, 1e-3, []) == []


def test_what_is_small_beside_another_owners_is_noise():
    noise = np.array([1e-9])
    parts = [[OF_A, -noise], [OF_B, noise]]
    assert [one.fit for one in compare_each([MEAN, noise], parts, ROWS, 1e-3, [0, 1])] == [
        Fit.MEAN,
        Fit.MEAN,
    ]
    assert compare([noise], [[-noise], [noise]], ROWS, 1e-3).fit is Fit.NEITHER


def test_what_no_rank_can_use_is_said_before_what_misses_the_mean():
    assert gravest([Fit.MEAN, Fit.NOTHING, Fit.SUM]) is Fit.SUM
    assert gravest([Fit.NEITHER, Fit.NOT_FINITE, Fit.SUM]) is Fit.NOT_FINITE
    assert gravest([]) is Fit.NOTHING


@pytest.mark.parametrize("count", [1, 6, 12])
def test_all_rows_are_chosen_where_there_are_no_more(count):
    assert sorted(chosen_rows(np.arange(count)[::-1], 12)) == list(range(count))


def test_rows_with_the_smallest_and_the_largest_counts_are_chosen_in_their_order():
    counts = np.array([5, 0, 3, 9, 1, 3, 8, 2])
    assert list(chosen_rows(counts, 4)) == [1, 4, 6, 3]
