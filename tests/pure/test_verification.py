"""What ``ringreduce verify`` says of records: each fault is planted as numbers."""

import math

import numpy as np
import pytest

from ringreduce.pure.verification import HEADER, Recorded, Run, compare, reasons, row, verdict

LOSSES = [2.3, 2.1, 1.9]
NAMES = ["conv/kernel", "conv/bias", "norm/moving_mean"]
RANDOM = np.random.default_rng(0)
BEFORE = [RANDOM.normal(size=n) for n in (4000, 4, 4)]
AFTER = [old + 0.001 * RANDOM.normal(size=len(old)) for old in BEFORE]


def recorded(ranks=2, before=BEFORE, after=AFTER, **changes):
    usual = {
        **{"ranks": ranks, "losses": LOSSES, "rows": 64, "step_s": 0.008 / ranks, "threads": 2},
        **{"memory": [800 << 20] * ranks, "names": NAMES, "trained": [True, True, False]},
        **{"is_half": False, "of_batches": [], "of_gradients": []},
        "settings": {"batch_size": "64", "Adam: learning_rate": "0.001"},
    }
    return Recorded(Run(**(usual | changes)), before.__getitem__, after.__getitem__)


ONE = recorded(1)


def changed(number, by):
    """The weights after the first step, one of which differs by a part of what that changed."""
    after = list(AFTER)
    after[number] = AFTER[number] + by * (AFTER[number] - BEFORE[number])
    return after


def losses(*parts):
    return [loss * (1 + part) for loss, part in zip(LOSSES, parts, strict=False)]


SAME = (True, 0, "")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, SAME),
        ({"losses": losses(1e-6, 1e-4, 5e-3)}, SAME),
        # Training ends sooner.
        ({"losses": LOSSES[:2]}, SAME),
        ({"after": changed(0, 0.01)}, SAME),
        # Of a bias before a normalization the gradient is 0, but for rounding.
        ({"after": changed(1, 0.5)}, SAME),
        ({"losses": losses(2e-3, 0, 0)}, (False, 1, "")),
        ({"losses": losses(0, 0, 2e-2)}, (False, 3, "")),
        ({"after": changed(0, 0.1)}, (False, 0, "conv/kernel")),
        # It is not trained, and changes no loss.
        ({"after": changed(2, 0.1)}, (False, 0, "norm/moving_mean")),
        ({"names": ["other", *NAMES[1:]]}, (False, 0, "conv/kernel")),
        ({"names": NAMES[:2]}, (False, 0, "norm/moving_mean")),
    ],
)
def test_the_first_difference_is_named_that_rounding_does_not_explain(changes, found):
    difference = compare(ONE, recorded(**changes))
    weight = "" if difference.agrees else difference.weight
    assert (difference.agrees, difference.step, weight) == found


@pytest.mark.parametrize("one", [math.nan, 2.3])
def test_losses_that_are_not_known_or_not_finite(one):
    unknown = [one, math.nan, math.inf]
    assert compare(recorded(losses=unknown), recorded(losses=unknown)).agrees
    assert compare(recorded(losses=unknown), ONE).step == (1 if math.isnan(one) else 2)


def test_of_16_bit_floats_more_is_rounding():
    half = {"losses": losses(5e-3, 5e-3, 5e-2), "after": changed(0, 0.1), "is_half": True}
    assert compare(recorded(1, is_half=True), recorded(**half)).agrees


LAYER = "drop: each rank draws other random numbers"
STEP = "Own.train_step clips"
OTHER = [old + 1 for old in BEFORE]
FASTER = {"after": changed(0, 1), "settings": ONE.run.settings | {"Adam: learning_rate": "1"}}


@pytest.mark.parametrize(
    ("changes", "again", "first"),
    [
        ({"before": OTHER}, {"before": OTHER}, "The initial weights differ in each run."),
        ({"before": OTHER}, {}, "The initial weights depend on the number of ranks."),
        ({"losses": losses(0.1)}, {"losses": losses(0.2)}, "Two runs with 1 rank differ too"),
        (FASTER, {}, "Adam: learning_rate is 0.001 with 1 rank and 1 with 2 ranks."),
        ({"losses": losses(0.1), "rows": 128}, {}, "A step has 64 samples with 1 rank and 128"),
        ({"losses": losses(0.1)}, {}, LAYER),
        ({"losses": losses(0, 0.1)}, {}, STEP),
    ],
)
def test_the_likeliest_reason_comes_first(changes, again, first):
    other = recorded(**{"of_batches": [LAYER], "of_gradients": [STEP], **changes})
    found = compare(ONE, other), compare(ONE, recorded(1, **again))
    assert not found[0].agrees
    assert next(reasons(ONE.run, other.run, *found)).startswith(first)


def test_all_of_it_fits_80_columns():
    runs = [ONE, recorded(2, losses=losses(0.1, 0.1, 0.1), step_s=0.123456), recorded(16)]
    found = [compare(ONE, each) for each in runs[1:]]
    rows = [row(ONE.run), *(row(each.run, own) for each, own in zip(runs[1:], found, strict=True))]
    assert {len(line) for line in rows} == {len(HEADER)}
    said = "\n".join(verdict([each.run for each in runs], found, compare(ONE, ONE)))
    assert "from step 1 on the loss, which is 2.3 and 2.53\nThe likely reason:\n  1. " in said
    assert "Fastest on this machine: 16 ranks, 246.91 times as fast as 2 ranks." in said
