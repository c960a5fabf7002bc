"""Compression between hosts, and none within one: on real rings."""

import numpy as np
import pytest

from tests.facts import facts_of

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

RANKS = (0, 1)


@pytest.fixture(scope="module")
def facts():
    """What each case of programs/compressed.py said over sockets, which count as two hosts."""
    return facts_of("compressed", 2, "zmq")


EXACT = [-60000.0, 60000.0, -0.5, -2.0, -1 - 2.0**-9]


@pytest.mark.parametrize("way", ["graph", "eager", "jit"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", EXACT),
        # Twice 60000 is more than float16 holds.
        ("fp16", EXACT),
        # 8 significant bits.
        ("bf16", [-59904.0, 59904.0, -0.5, -2.0, -1.0]),
    ],
)
def test_gradients_are_rounded_and_overflow_by_no_sum(facts, name, expected, way):
    for rank in RANKS:
        assert facts[f"rounded {name}"][rank][way] == [expected]


def test_nothing_is_lost_between_steps_routes_and_buckets(facts):
    first, second = (facts["ledger"][rank] for rank in RANKS)
    assert first["digest"] == second["digest"]
    # Rounding of float32 sums up to 30.
    assert max(first["off"]) < 1e-3
    # The second is so short that it is never encoded; its bucket is, with others.
    assert 0 < min(first["most"]) <= max(first["most"]) < 0.1


def test_models_of_the_same_names_keep_their_own(facts):
    assert [facts["two models"][rank]["equal"] for rank in RANKS] == [True, True]


def test_what_is_not_finite_is_seen_by_all_and_not_kept(facts):
    for rank in RANKS:
        fact = facts["poisoned"][rank]
        assert (fact["seen"], fact["equal"], fact["finite"]) == (True, True, True)
        assert fact["digest"] == facts["poisoned"][0]["digest"]


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_it_trains_as_without(facts, name):
    fact = facts["fitted"][0]
    np.testing.assert_allclose(fact[name], fact["none"], rtol=0.03)
    assert fact[name] != fact["none"]
    assert fact["digest"] == facts["fitted"][1]["digest"]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("tape", "Use DistributedOptimizer with a plain tape"),
        ("scaled", "Use mixed_bfloat16, which needs no scale"),
        ("unknown", "accepted: none, fp16, bf16, int8"),
        ("called", "Use Compression.fp16"),
    ],
)
def test_what_cannot_be_is_refused(facts, case, text):
    for rank in RANKS:
        assert facts[f"refused {case}"][rank]["error"] == "ConfigError"
        assert text in facts[f"refused {case}"][rank]["text"]


@pytest.mark.full
def test_within_a_host_nothing_is_encoded_and_that_is_said_once(facts):
    within = facts_of("compressed", 2)
    for rank in RANKS:
        for name in ("none", "fp16", "bf16"):
            assert within[f"rounded {name}"][rank]["graph"] == [EXACT]
        assert facts["warned"][rank]["texts"] == []
    assert within["fitted"][0]["int8"] == within["fitted"][0]["none"]
    (text,) = within["warned"][0]["texts"]
    assert "all ranks are on one host" in text
    assert within["warned"][1]["texts"] == []
