"""What the trial says of Keras's losses, metrics and layers is what two runs show."""

import pytest

from tests import verdicts
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(100)]

SOME = {
    "losses": {"MeanSquaredError": "mean", "Dice": "neither"},
    "metrics": {"AUC": "mean"},
    "layers": {"Attention": "neither", "Dropout": "mean", "CutMix": "neither"},
}
NAMES = [(kind, name) for kind, names in SOME.items() for name in names]
# `python -m tests.verdicts` tries all of them.
OTHERS = [(kind, name) for kind in SOME for name in verdicts.names_of(kind)[::8]]


@pytest.mark.parametrize(
    ("kind", "name"), [in_full(*each) if "CutMix" in each else each for each in NAMES]
)
def test_a_verdict_is_what_is_measured(kind, name):
    [case] = verdicts.KINDS[kind]([name])
    found = verdicts.outcome(case)
    assert found.is_right, found
    assert found.verdict.fit == SOME[kind][name]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "name"), OTHERS)
def test_other_verdicts_are(kind, name):
    [case] = verdicts.KINDS[kind]([name])
    assert not verdicts.shown(case)
