"""Ranks that step alone and meet, against a simulation in numpy: on a real ring of two."""

import numpy as np
import pytest

from ringreduce.keras.meetings import _Meeting
from ringreduce.testing import ring_of_threads
from tests.facts import facts_in, facts_of
from tests.jobs import run_job
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

RANKS = (0, 1)


@pytest.fixture(scope="module")
def facts():
    return facts_of("meetings", 2)


@pytest.mark.parametrize(
    "case",
    [
        "local eager",
        "local, overlapped eager",
        "diloco eager",
        *(f"diloco, overlapped {way}" for way in ("eager", "jit")),
    ],
)
def test_it_is_what_the_simulation_gives(facts, case):
    found = [facts[case][rank] for rank in RANKS]
    assert max(fact["off"] for fact in found) < 2e-6
    assert len({fact["digest"] for fact in found}) == 1


@pytest.mark.parametrize("case", ["local, uneven eager", "diloco, overlapped, uneven graph"])
def test_ranks_count_by_samples_and_may_settle_in_between(facts, case):
    found = [facts[case][rank] for rank in RANKS]
    assert max(fact["off"] for fact in found) < 2e-6
    assert len({fact["digest"] for fact in found}) == 1


@pytest.mark.parametrize("name", ["diloco", "diloco, overlapped"])
def test_settling_right_after_a_meeting_is_no_second_one(facts, name):
    """Which the outer optimizer's momentum would take for a step."""
    found = [facts[f"{name}, at once eager"][rank] for rank in RANKS]
    assert max(fact["off"] for fact in found) < 2e-6
    assert len({fact["digest"] for fact in found}) == 1


def test_a_meeting_in_each_step_is_an_average_of_gradients(facts):
    assert [facts["one"][rank]["equal"] for rank in RANKS] == [True] * 2


def test_a_round_begins_with_weights_that_were_loaded(facts):
    assert [facts["loaded"][rank]["values"] for rank in RANKS] == [[5.0]] * 2


def test_fit_ends_each_epoch_and_itself_with_equal_weights(facts):
    found = [facts["fitted"][rank] for rank in RANKS]
    assert len({fact["digest"] for fact in found}) == 1
    assert found[0]["losses"] == found[1]["losses"]
    # One rank stops in its fifth epoch; the others go with it.
    assert found[0]["epochs"] == 5
    assert found[0]["losses"][-1] < found[0]["losses"][0] / 2
    assert found[0]["seen"][-1] == pytest.approx(found[0]["evaluated"], rel=1e-5)


def test_the_outer_optimizer_is_saved(facts):
    first, *others = (facts["saved"][rank] for rank in RANKS)
    assert len(set(first["first"])) == 1
    whole, loaded, forgetful = first["digests"]
    assert whole == loaded != forgetful
    for other in others:
        assert other["digests"] == first["digests"]


def test_ranks_that_step_alone_ask_nothing_of_others(facts):
    fact = facts["asked"][0]
    # Three meetings, and what an epoch needs; else two calls in each of 13 steps.
    assert fact["alone"] < 40, fact
    assert fact["alone"] + 13 < fact["each step"], fact
    for rank in RANKS:
        assert facts["asked"][rank]["alone digest"] == fact["alone digest"]


def test_a_job_that_is_started_again_goes_on_after_the_last_epoch(facts):
    found = [facts["resumed"][rank] for rank in RANKS]
    assert [fact["epochs"] for fact in found] == [[1], [1]]
    # Undisturbed, from the backup, and from the checkpoint.
    assert len({digest for fact in found for digest in fact["digests"]}) == 1


def test_one_that_stops_between_meetings_takes_all_with_it_at_the_next(facts):
    for rank in RANKS:
        fact = facts["stopped"][rank]
        assert fact["batches"] == [0, 1, 2]
        assert fact["settled"]
        assert fact["digest"] == facts["stopped"][0]["digest"]


def test_a_meeting_counts_as_reducing_and_blocks_for_as_long_as_it_is_waited_for():
    def work(comm):
        meeting = _Meeting(comm, [(1000,)], "none")
        meeting.begin(np.ones(1000, np.float32), np.float32(1))
        meeting.end()
        done = comm.statistics()
        return done.seconds, done.reducing_s, done.waited_s, done.stopped_s

    for seconds, reducing_s, waited_s, stopped_s in ring_of_threads(2, work):
        assert waited_s > 0
        assert reducing_s > 0
        # Without the barrier that forms the ring.
        assert stopped_s <= max(seconds, waited_s)


@pytest.mark.parametrize(
    ("when", "compression", "transport"),
    [
        ("under way", "none", "auto"),
        in_full("between", "bf16", "zmq"),
        in_full("under way", "int8", "zmq"),
    ],
)
def test_a_rank_killed_between_meetings_or_in_one_is_named(when, compression, transport):
    environment = {"RINGREDUCE_TRANSPORT": transport}
    arguments = ["tests/programs/lost_meeting.py", when, compression]
    result = run_job(3, arguments, environment=environment)
    found = {fact["rank"]: fact for fact in facts_in(result.output)}
    assert sorted(found) == [0, 2], result.errors
    for fact in found.values():
        assert fact["error"] == "PeerLostError", fact
        assert "rank 1" in fact["text"]
        # In the call that waits for what the killed rank has not sent.
        assert fact["steps"] == 6


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("none", "every is 0"),
        ("overlap", "overlap is 3; accepted: 0 to every - 1, 2"),
        ("two", "accumulate_steps=k, not both"),
        ("scaled", "needs no loss scale"),
        ("ema", "Leave use_ema out"),
        ("no strategy", "Pass an object, such as rr.LocalSGD(50)"),
        ("save", "of 2 saves its optimizer between two meetings"),
    ],
)
def test_what_cannot_be_is_refused(facts, case, text):
    for rank in RANKS:
        assert facts[f"refused {case}"][rank]["error"] == "ConfigError"
        assert text in facts[f"refused {case}"][rank]["text"]
