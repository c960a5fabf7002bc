"""Each deliberate breakage can still be made: a stale one would prove nothing."""

from pathlib import Path

import pytest

from tests.breakage_list import BREAKAGES, read

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name)
def test_it_changes_one_place_and_its_tests_are_there(breakage):
    assert breakage.applied(ROOT) != (ROOT / breakage.file).read_text()
    assert breakage.tests
    assert all((ROOT / test).is_file() for test in breakage.tests)


def test_names_are_unique():
    assert len({breakage.name for breakage in BREAKAGES}) == len(BREAKAGES)


def test_old_and_new_may_stand_on_one_line():
    """Each keeps its indentation; of several lines, and among others that stay."""
    lines = "= a", "-   b =>     c => d", "- e =>", "- f", "+ g =>"
    (breakage,) = read("[x/y.py]\nname: Harm.\n" + "\n".join(lines))
    assert (breakage.text, breakage.replacement) == ("a\n  b\ne\nf", "a\n    c => d\n\ng =>")
