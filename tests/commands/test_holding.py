"""Holding: what is shown at once of a worker's standard error, and what waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ringreduce.commands.launch.holding import Holding

START = "Traceback (most recent call last):"


def test_lines_before_a_traceback_are_shown_and_the_rest_is_held() -> None:
    holding = Holding()
    assert holding.feed(["epoch 1", START, "  x"], 1.0) == ["epoch 1"]
    assert holding.feed(["ValueError: bad"], 2.0) == []
    assert holding.holds_since() == 1.0
    assert holding.take() == [START, "  x", "ValueError: bad"]
    assert holding.holds_since() is None
    assert holding.feed(["epoch 2"], 3.0) == ["epoch 2"]


@given(st.lists(st.lists(st.sampled_from(["log", START, "  x"]), max_size=900), max_size=9))
def test_nothing_is_lost_and_the_order_stays(writes: list[list[str]]) -> None:
    holding = Holding()
    shown = [line for lines in writes for line in holding.feed(lines, 0.0)]
    held = holding.take()
    assert shown + held == [line for lines in writes for line in lines]
    assert len(held) <= 2000
