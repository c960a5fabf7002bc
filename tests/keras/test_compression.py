"""Compression between hosts, and none within one: on real rings."""

import numpy as np
import pytest

from tests.facts import facts_in, facts_of
from tests.jobs import run_job

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

RANKS = (0, 1)


@pytest.fixture(scope="module")
def facts():
    """What each case of programs/compressed.py said over sockets, which count as two hosts."""
    return facts_of("compressed", 2, "zmq")


EXACT = [-60000.0, 60000.0, -0.5, -2.0, -1 - 2.0**-9]


# 8 significant bits.
SHORT = [-59904.0, 59904.0, -0.5, -2.0, -1.0]


@pytest.mark.parametrize(
    ("name", "expected", "way"),
    [
        ("none", EXACT, "eager"),
        # Twice 60000 is more than float16 holds.
        ("fp16", EXACT, "eager"),
        *(("bf16", SHORT, way) for way in ("eager", "graph", "jit")),
    ],
)
def test_gradients_are_rounded_and_overflow_by_no_sum(facts, name, expected, way):
    for rank in RANKS:
        assert facts[f"rounded {name}"][rank][way] == [expected]


KEEPING = pytest.mark.parametrize("name", ["int8", "thin"])


@KEEPING
def test_nothing_is_lost_between_steps_routes_and_buckets(facts, name):
    first, second = (facts[f"ledger {name}"][rank] for rank in RANKS)
    assert first["digest"] == second["digest"]
    # Rounding of float32 sums up to 30.
    assert max(first["off"]) < 1e-3
    if name == "int8":
        # The second is so short that it is never encoded; its bucket is, with others.
        assert 0 < min(first["most"]) <= max(first["most"]) < 0.1
    else:
        assert [most > 0 for most in first["most"]] == [True, False, True, False, True]


@KEEPING
def test_models_of_the_same_names_keep_their_own(facts, name):
    assert [facts[f"two models {name}"][rank]["equal"] for rank in RANKS] == [True, True]


@pytest.mark.parametrize("case", ["int8 graph", "int8 eager", "thin graph", "meeting"])
def test_what_is_not_finite_is_seen_by_all_and_not_kept(facts, case):
    for rank in RANKS:
        fact = facts[f"poisoned {case}"][rank]
        assert (fact["seen"], fact["equal"], fact["finite"]) == (True, True, True)
        assert fact["digest"] == facts[f"poisoned {case}"][0]["digest"]


@pytest.mark.parametrize("name", ["none", "bf16", "int8"])
@pytest.mark.parametrize("case", ["local", "local, overlapped", "diloco", "diloco, overlapped"])
def test_ranks_are_equal_after_each_meeting(facts, case, name):
    first, second = (facts[f"met {case} {name}"][rank] for rank in RANKS)
    # Of 11 steps the last two are met for by settling.
    assert len(first["digests"]) == (1 if "overlapped" in case else 4)
    assert first["digests"] == second["digests"]
    # Changes of three steps are up to 2; the outer optimizer's momentum adds up what is rounded.
    assert (first["off"] > 0) == (name != "none")
    assert first["off"] < 0.1


def test_nothing_is_lost_between_meetings(facts):
    first, second = (facts["meeting ledger"][rank] for rank in RANKS)
    assert first["digest"] == second["digest"]
    assert max(first["off"], second["off"]) < 1e-3
    assert 0 < min(first["most"]) <= max(first["most"]) < 0.2


def test_matrices_of_low_rank_arrive_whole_and_others_nearly(facts):
    first, second = (facts["thin"][rank] for rank in RANKS)
    assert first | {"rank": 1} == second
    for kind in ("start", "excluded", "vector"):
        assert first[kind] == 0
    assert first["low rank"] < 1e-5 < 1 < first["noise"]
    assert first["after zeros"] < 1e-5


def test_what_is_equal_on_all_ranks_is_saved(facts):
    for rank in RANKS:
        fact = facts["saved"][rank]
        assert fact["steps"] == [4, 4]
        assert (fact["fresh"], fact["equal"]) == (0, True)
        assert len(set(fact["digests"])) == 1


@pytest.mark.parametrize(("name", "off"), [("int8", 0.03), ("thin", 0.2)])
def test_it_trains_as_without(facts, name, off):
    fact = facts["fitted"][0]
    np.testing.assert_allclose(fact[name], fact["none"], rtol=off)
    assert fact[name] != fact["none"]
    assert fact["digest"] == facts["fitted"][1]["digest"]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("tape", "Use DistributedOptimizer with a plain tape"),
        ("scaled", "Use mixed_bfloat16, which needs no scale"),
        ("unknown", "accepted: none, fp16, bf16, int8, or a PowerSGD object"),
        ("thin tape", "Use DistributedOptimizer with a plain tape"),
        ("thin scaled", "Use mixed_bfloat16, which needs no scale"),
        ("thin meetings", "Use compression='int8' or 'bf16' for meetings"),
        ("rank", "rank is 0; accepted: 1 and more"),
        ("start", "start_step is -1; accepted: 0 and more"),
        ("exclude", "Pass a list of expressions"),
        ("called", "Use Compression.fp16"),
    ],
)
def test_what_cannot_be_is_refused(facts, case, text):
    for rank in RANKS:
        assert facts[f"refused {case}"][rank]["error"] == "ConfigError"
        assert text in facts[f"refused {case}"][rank]["text"]


def test_what_the_encoding_cannot_hold_is_said(facts):
    for rank in RANKS:
        assert facts["overflown"][rank]["error"] == "NumericsError"
        text = facts["overflown"][rank]["text"]
        assert "their sum overflows float32, or compression=fp16" in text


@pytest.mark.full
def test_within_a_host_nothing_is_encoded_and_that_is_said_once(facts):
    within = facts_of("compressed", 2)
    for rank in RANKS:
        for name in ("none", "fp16", "bf16"):
            assert within[f"rounded {name}"][rank]["eager"] == [EXACT]
        assert facts["warned"][rank]["texts"] == []
    assert within["fitted"][0]["int8"] == within["fitted"][0]["none"]
    (text,) = within["warned"][0]["texts"]
    assert "all ranks are on one host" in text
    assert within["warned"][1]["texts"] == []


UNLIKE = ("bf16", "int8")


@pytest.fixture(scope="module")
def unlike():
    """What two ranks said whose processors round differently, as numba and BLAS see them."""
    other = {1: {"NUMBA_CPU_NAME": "generic", "OPENBLAS_CORETYPE": "Prescott"}}
    environment = {"RINGREDUCE_TRANSPORT": "zmq"}
    arguments = ["tests/programs/unlike.py", *UNLIKE]
    result = run_job(2, arguments, environment=environment, unlike=other)
    assert result.exit_code == 0, result.errors
    said = {}
    for fact in facts_in(result.output):
        said.setdefault(fact["case"], {})[fact["rank"]] = fact
    first, second = (said["processor"][rank] for rank in RANKS)
    assert second["numba"] == "generic" != first["numba"]
    return said


@pytest.mark.full
@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize(("case", "count"), [("every step", 20), ("meetings", 4)])
def test_unlike_processors_end_each_step_alike(unlike, case, count, name):
    first, second = (unlike[f"{case} {name}"][rank]["digests"] for rank in RANKS)
    assert len(first) == count
    assert first == second
