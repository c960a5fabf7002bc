"""What the trial says of Keras's losses, metrics and layers is what two runs show."""

import pytest

from tests import verdicts

pytestmark = pytest.mark.tensorflow

SOME = {
    "losses": {"MeanSquaredError": "mean", "Dice": "neither"},
    "metrics": {"AUC": "mean"},
    "layers": {"Attention": "neither", "Dropout": "mean", "CutMix": "neither"},
}
NAMES = [(kind, name) for kind, names in SOME.items() for name in names]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_verdict_is_what_is_measured(kind, name):
    [case] = verdicts.KINDS[kind]([name])
    found = verdicts.outcome(case)
    assert found.is_right, found
    assert found.verdict.fit == SOME[kind][name]


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", verdicts.KINDS)
def test_all_verdicts_are(kind, capsys):
    assert verdicts.main([kind]) == 0, capsys.readouterr().out
