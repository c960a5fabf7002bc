"""What ``ringreduce verify`` says of records: each fault is planted as numbers."""

import math

import numpy as np
import pytest

from ringreduce.pure.sketch import LENGTH
from ringreduce.pure.verification import Arrays, Recorded, Run, Tried, compare
from ringreduce.pure.verification_words import HEADER, reasons, row, verdict

LOSSES = [2.3, 2.1, 1.9]
NAMES = ["conv/kernel", "conv/bias", "norm/moving_mean"]
RANDOM = np.random.default_rng(0)
SIZES = np.array([1.0, 0.03, 0.1])[:, None]
BEFORE = SIZES * RANDOM.normal(size=(3, LENGTH))
CHANGES = 0.001 * SIZES * np.cumsum(RANDOM.normal(size=(3, 3, LENGTH)), 0)
GRADIENTS = SIZES[:2] * RANDOM.normal(size=(2, 2, LENGTH))
OWN = 1 + RANDOM.random((17, 2, 2, 2))  # Of up to 17 ranks; no norm twice.
OUTPUTS = RANDOM.normal(size=(1, LENGTH))


def recorded(ranks=2, **changes):
    usual = {
        **{"ranks": ranks, "returned": {"loss": LOSSES}, "loss": "loss", "rows": 64},
        **{"step_s": 0.008 / ranks, "threads": 2, "memory": [800 << 20] * ranks, "steps": 3},
        **{"names": NAMES, "trained": [True, True, False], "gradient_names": NAMES[:2]},
        **{"is_half": False, "skips": False, "own_step": "", "clips": ""},
        **{"of_batches": [], "of_gradients": [], "rows_of_outputs": "1234"},
        "settings": {"batch_size": "64", "Adam: learning_rate": "0.001"},
    }
    arrays = {
        **{"before": BEFORE, "changes": CHANGES, "gradients": GRADIENTS, "outputs": OUTPUTS},
        **{"calls": np.ones((2, 2), int), "own": OWN[ranks % 16 :][:ranks]},
    }
    arrays |= {name: changes.pop(name) for name in list(changes) if name in arrays}
    return Recorded(Run(**(usual | changes)), Arrays(**arrays))


ONE = recorded(1)


def moved(array, place, by):
    """A copy that differs at a place by a part of itself."""
    changed = array.copy()
    norm = np.linalg.norm(array[place])
    changed[place] += by * norm / math.sqrt(LENGTH) * (-1) ** np.arange(LENGTH)
    return changed


def losses(*parts):
    return {"loss": [loss * (1 + part) for loss, part in zip(LOSSES, parts, strict=False)]}


def renamed(*names):
    return {"names": list(names), "gradient_names": list(names[:2])}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"returned": losses(1e-6, 1e-4, 5e-3)},
        # Training ends sooner.
        {"returned": {"loss": LOSSES[:2]}, "changes": CHANGES[:2]},
        {"changes": moved(CHANGES, (0, 0), 0.01)},
        {"gradients": moved(GRADIENTS, (0, 0), 1e-4)},
        # Of a bias before a normalization the gradient is 0, but for rounding.
        {"changes": moved(CHANGES, (0, 1), 0.5)},
    ],
)
def test_rounding_is_no_difference(changes):
    found = compare(ONE, recorded(**changes))
    assert found.agrees
    assert not found.is_open


@pytest.mark.parametrize(
    ("changes", "what", "step", "name"),
    [
        ({"returned": losses(2e-3, 0, 0)}, "loss", 1, ""),
        ({"returned": losses(0, 0, 2e-2)}, "loss", 3, ""),
        ({"returned": {}}, "loss", 1, "which a step returns with 1 rank alone"),
        ({"returned": losses(0, math.nan, 0)}, "loss", 2, ""),
        ({"before": moved(BEFORE, 1, 1e-3)}, "initial weights", 0, "conv/bias"),
        ({"gradients": moved(GRADIENTS, (0, 1), 0.01)}, "gradients of step 1", 1, "conv/bias"),
        ({"gradients": moved(GRADIENTS, (1, 0), 0.2)}, "gradients of step 2", 2, "conv/kernel"),
        # The optimizer is called twice in a step, or gets no gradient of something.
        ({"calls": np.array([[1, 2], [1, 1]])}, "gradients of step 1", 1, "conv/bias"),
        ({"changes": moved(CHANGES, (0, 0), 0.1)}, "weights after step 1", 1, "conv/kernel"),
        ({"changes": moved(CHANGES, (2, 0), 0.2)}, "weights after steps 2 to 3", 3, "conv/kernel"),
        # It is not trained, and changes no loss.
        ({"changes": moved(CHANGES, (0, 2), 0.1)}, "untrained variables after step 1", 1, NAMES[2]),
        ({"outputs": moved(OUTPUTS, 0, 0.1)}, "outputs", 4, "output 1"),
        (renamed("other", *NAMES[1:]), "the variables", 0, "conv/kernel"),
        (renamed(*NAMES[:2]), "the variables", 0, "norm/moving_mean"),
    ],
)
def test_what_differs_first_is_named(changes, what, step, name):
    found = compare(ONE, recorded(**changes))
    assert (found.agrees, found.first[0], found.first.step) == (False, what, step)
    assert found.first.name == name


def test_the_first_in_time_comes_first_and_not_what_is_listed_first():
    late = recorded(returned=losses(0, 0.5, 0), changes=moved(CHANGES, (0, 0), 0.1))
    assert compare(ONE, late).first.what == "weights after step 1"


@pytest.mark.parametrize(
    ("both", "said"),
    [
        ({"returned": {"loss": [2.3, math.nan, 1.0]}}, "not finite: loss, from step 2 on"),
        ({"returned": {"loss": [math.inf] * 3}}, "not finite: loss, from step 1 on"),
        ({"gradients": GRADIENTS * np.nan}, "not finite: gradients, from step 1 on"),
        ({"changes": CHANGES * [[[1]], [[1]], [[np.nan]]]}, "not finite: weights, from step 3 on"),
        ({"calls": np.zeros((2, 2), int)}, "not seen: gradients: none came to a Distributed"),
        ({"unseen": {"gradients": "for a reason"}}, "not seen: gradients: for a reason"),
    ],
)
def test_what_is_not_finite_or_not_seen_never_agrees(both, said):
    one, two = recorded(1, **both), recorded(2, **both)
    found = compare(one, two)
    assert found.agrees
    assert found.is_open
    lines = list(verdict([one.run, two.run], [found], None))
    assert lines[0] == "This does not show that the numbers agree:"
    assert lines[1].strip().startswith(said)
    # Of what is finite a difference is still found.
    other = recorded(2, **{"before": moved(BEFORE, 0, 0.1), **both})
    assert not compare(one, other).agrees


def test_a_step_that_a_loss_scale_skips_is_not_seen_as_infinite():
    bad = np.concatenate([GRADIENTS[:1] * np.inf, GRADIENTS[1:]])
    skipped = [recorded(ranks, gradients=bad, skips=True) for ranks in (1, 2)]
    assert not compare(*skipped).is_open
    assert compare(*skipped).agrees


def test_outputs_for_other_rows_are_left_out():
    found = compare(ONE, recorded(outputs=-OUTPUTS, rows_of_outputs="5678"))
    assert found.agrees
    assert not found.is_open
    assert "outputs" in found.left_out


def test_of_16_bit_floats_more_is_rounding():
    half = {"returned": losses(5e-3, 5e-3, 5e-2), "gradients": moved(GRADIENTS, (0, 0), 0.01)}
    half |= {"changes": moved(CHANGES, (0, 0), 0.1), "is_half": True}
    assert compare(recorded(1, is_half=True), recorded(**half)).agrees
    assert not compare(ONE, recorded(**half | {"is_half": False})).agrees


LAYER = "drop: each rank draws other random numbers"
CLIPS = {"own_step": "Own.train_step", "clips": "clip_by_norm"}
OTHER = BEFORE + 1
FASTER = {
    "changes": 2 * CHANGES,
    "settings": ONE.run.settings | {"Adam: learning_rate": "1"},
}
OPEN = {"unseen": {"gradients": "for a reason"}}
TURNED = {"gradients": GRADIENTS[:, :, ::-1]}
CUT = np.minimum(OWN[:1], 1.0)  # All have the same norm.
ACTIVE = {"own": np.repeat(CUT, 2, 0)}
MEANS = {"tried": Tried("mean", 12)}
SUMS = {"tried": Tried("sum", 12, "", ["the gradients of its train_step are sums (do that)"])}
NEITHER = {"tried": Tried("neither", 12, "", ["the gradients of a differ (do that)"])}


@pytest.mark.parametrize(
    ("changes", "again", "first"),
    [
        ({"before": OTHER}, {"before": OTHER}, "The initial weights differ in each run."),
        ({"before": OTHER}, {}, "The initial weights depend on the number of ranks."),
        (
            {"returned": losses(0.1)},
            {"returned": losses(0.2)},
            "Two runs with 1 rank differ too",
        ),
        (FASTER, {}, "Adam: learning_rate is 0.001 with 1 rank and 1 with 2 ranks."),
        ({"returned": losses(0.1), "rows": 128}, {}, "A step has 64 samples with 1 rank and 128"),
        ({"returned": losses(0.1)} | TURNED, {}, LAYER),
        # Each of these would change gradients too.
        (
            {"returned": losses(0.1)},
            {},
            "Gradients and weights agree, and only what a step returns",
        ),
        (renamed("other", *NAMES[1:]), {}, "The program makes another model or optimizer"),
        (TURNED | CLIPS, {}, LAYER),
        (TURNED | CLIPS | ACTIVE, {}, "Own.train_step calls clip_by_norm, "),
        (TURNED | CLIPS | ACTIVE | NEITHER, {}, "Own.train_step calls clip_by_norm, "),
        (TURNED | CLIPS | NEITHER, {}, "The trial before the first step found: the gradients of a"),
        (TURNED | NEITHER, {}, "The trial before the first step found: the gradients of a"),
        (TURNED | MEANS | {"of_batches": []}, {}, None),
        (TURNED | CLIPS | {"of_batches": []}, {}, None),
        ({"gradients": GRADIENTS / 2} | CLIPS, {}, "Own.train_step adds up over rows"),
        ({"gradients": GRADIENTS / 2} | SUMS, {}, "The loss adds up over rows"),
        # What a trial has seen is no sum.
        ({"gradients": GRADIENTS / 2} | MEANS, {}, "The loss multiplies gradients by what depends"),
        (
            {"gradients": GRADIENTS / 2} | NEITHER,
            {},
            "The loss adds up over rows, and divides by a",
        ),
        (
            {"gradients": GRADIENTS * 0.7} | NEITHER,
            {},
            "The trial before the first step found: the",
        ),
        (TURNED | {"returned": losses(math.nan)}, {}, "loss is not finite in one of the runs"),
        # Where rows are not known, other ones are a reason.
        ({"gradients": GRADIENTS * 0.7, "is_loop": True}, {}, "The loop's steps may have other"),
        (TURNED | {"is_loop": True, "of_batches": []}, {}, "The loop's steps may have other rows"),
        ({"gradients": GRADIENTS * 2}, {}, "The loss adds up over the ranks"),
        ({"gradients": GRADIENTS * 2, "of_gradients": ["op"]}, {}, "op."),
        ({"gradients": GRADIENTS * 0.7}, {}, "The loss multiplies gradients by what depends on"),
        ({"changes": 2 * CHANGES}, {}, "The gradients are the same, and not what is made of them"),
    ],
)
def test_the_likeliest_reason_comes_first(changes, again, first):
    other = recorded(**{"of_batches": [LAYER], **changes})
    one = recorded(1, own=CUT) if "own" in changes else ONE
    found = compare(one, other), compare(one, recorded(1, **again))
    assert not found[0].agrees
    said = next(reasons(ONE.run, other.run, *found), None)
    assert said == first if first is None else said.startswith(first)


@pytest.mark.parametrize(
    ("tried", "changes", "said", "unsaid"),
    [
        (MEANS, TURNED, "The trial of 12 rows before the first step found that their", "several"),
        (MEANS, TURNED, "a mask that none of them has", "steps before"),
        (MEANS, {"changes": moved(CHANGES, (2, 0), 0.2)} | OPEN, "The steps before step 3", "try"),
        ({"tried": Tried("nothing", 12)}, TURNED, "rows before the first step told nothing", "try"),
        (
            {"tried": Tried(why="it makes a collective call")},
            TURNED,
            "The step was not tried on a few rows: it makes a collective call. See what is",
            "trial",
        ),
    ],
)
def test_without_a_reason_it_is_said_what_a_trial_has_seen(tried, changes, said, unsaid):
    other = recorded(**changes, **tried)
    [text] = [
        line
        for line in verdict([ONE.run, other.run], [compare(ONE, other)], compare(ONE, ONE))
        if line.startswith("  1.")
    ]
    assert said in text
    assert unsaid not in text


def test_beside_layers_that_look_at_a_batch_it_is_said_that_the_rest_is_a_mean():
    other = recorded(**TURNED, **MEANS, of_batches=[LAYER])
    lines = list(verdict([ONE.run, other.run], [compare(ONE, other)], compare(ONE, ONE)))
    assert f"  1. {LAYER}." in lines
    [text] = [line for line in lines if line.startswith("A trial of 12 rows, without what depends")]
    assert lines.index(text) == lines.index(f"  1. {LAYER}.") + 1


def test_clipping_that_was_not_active_is_not_blamed():
    other = recorded(**TURNED, **CLIPS)
    found = compare(ONE, other)
    assert found.clip == ""
    assert not [text for text in reasons(ONE.run, other.run, found, compare(ONE, ONE))]


@pytest.mark.parametrize(
    ("factor", "ranks", "said"),
    [
        (1 / 2, 2, "all gradients with 2 ranks are half of those with 1 rank"),
        (1 / 3, 3, "all gradients with 3 ranks are a third of those with 1 rank"),
        (1 / 16, 16, "all gradients with 16 ranks are one part in 16 of those with 1 rank"),
        (3, 3, "all gradients with 3 ranks are 3 times those with 1 rank"),
    ],
)
def test_gradients_that_are_a_multiple_are_said_to_be(factor, ranks, said):
    other = recorded(ranks, gradients=GRADIENTS * factor, changes=CHANGES * factor)
    found = compare(ONE, other)
    lines = list(verdict([ONE.run, other.run], [found], compare(ONE, ONE)))
    assert f"  {said}" in lines
    assert len([line for line in lines if line.startswith("  1.")]) == 1
    assert not [line for line in lines if "weights" in line]


def test_a_multiple_of_some_gradients_or_of_one_number_is_none_of_all():
    gradients = GRADIENTS.copy()
    gradients[:, 1] /= 2
    found = compare(ONE, recorded(gradients=gradients))
    assert (found.factor, found.scaled) == (pytest.approx(0.5), (1, 2))
    single = np.zeros((2, 2, LENGTH))
    single[:, :, 0] = 1
    found = compare(recorded(1, gradients=single), recorded(gradients=single / 2))
    assert not found.agrees
    assert found.factor is None


def test_gradients_that_differ_by_little_are_no_multiple():
    gradients = GRADIENTS * 1.06
    gradients += 0.04 * np.linalg.norm(gradients, axis=2, keepdims=True) * np.eye(LENGTH)[0]
    found = compare(ONE, recorded(gradients=gradients))
    assert not found.agrees
    assert found.factor is None


def test_what_was_never_finite_has_no_difference():
    one, two = (recorded(n, returned={"loss": [math.nan] * 3, "mae": LOSSES}) for n in (1, 2))
    lines = list(verdict([one.run, two.run], [compare(one, two)], None))
    shown = lines[lines.index("What was seen agrees, to these relative differences:") :]
    names = [line.split()[0] for line in shown]
    assert "mae" in names
    assert "loss" not in names


def test_gradients_may_come_in_a_later_step_alone():
    calls = np.array([[0, 0], [1, 1]])
    gradients = GRADIENTS * [[[0]], [[1]]]
    one = recorded(1, gradients=gradients, calls=calls)
    found = compare(one, recorded(gradients=gradients / 2, calls=calls))
    assert (found.first.what, found.first.step) == ("gradients of step 2", 2)
    assert found.factor == pytest.approx(0.5)


def test_all_of_it_fits_80_columns():
    runs = [
        ONE,
        recorded(2, returned=losses(0.1, 0.1, 0.1), step_s=0.123456),
        recorded(16),
        recorded(4, returned={}, loss=""),
    ]
    found = [compare(ONE, each) for each in runs[1:]]
    rows = [row(ONE.run), *(row(each.run, own) for each, own in zip(runs[1:], found, strict=True))]
    assert {len(line) for line in rows} == {len(HEADER)}
    said = "\n".join(verdict([each.run for each in runs], found, compare(ONE, ONE)))
    assert "first loss of step 1, which is 2.3 and 2.53\n" in said
    assert "The likely reason:\n  1. " in said
    assert "The numbers differ between 1 rank and 4 ranks, too." in said
    assert "Fastest on this machine: 16 ranks, 246.91 times as fast as 2 ranks." in said
    agreed = list(verdict([ONE.run, runs[2].run], [found[1]], None))
    assert agreed[0] == "The numbers agree in 3 steps, to these relative differences:"
    assert [line.split()[0] for line in agreed[1:-1]] == [
        *("initial", "loss", "gradients", "gradients", "weights", "weights"),
        *("untrained", "untrained", "outputs"),
    ]
