"""Looks: when ranks tell each other who was told to go, and what follows in loops of one's own."""

import itertools
import json
import threading

import keras
import pytest

from ringreduce.effects.notice import Notice
from ringreduce.keras.elastic import leaving
from ringreduce.keras.elastic.leaving import Looks
from ringreduce.testing import ring_of_threads
from tests.jobs import facts_in, run_job

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]


class Clock:
    """Of `leaving.time`: each rank's own, in seconds."""

    def __init__(self):
        self.own = threading.local()

    def monotonic(self):
        return getattr(self.own, "now", 0.0)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(leaving, "time", made)
    return made


def looking(ring, clock, seconds, told=None, steps=3000):
    """The counts at which a rank looks, whose step takes `seconds`, until ranks go; and those.

    `told`: after how many steps it is told to go.
    """
    notice = Notice("", str, bool)
    looks, made, at = Looks(ring, notice, str), 0, []
    while made < steps:
        made += looks.left(made)
        clock.own.now = made * seconds
        if told is not None and made >= told:
            notice.reason = "SIGTERM"
        if looks.is_due(made):
            at.append(made)
            if going := looks.look(made):
                return at, going
    return at, {}


def test_ranks_look_about_once_a_second_at_steps_that_the_slowest_can_keep(clock):
    def work(ring):
        return looking(ring, clock, [0.001, 0.002, 0.001][ring.rank])

    (at, going), *others = ring_of_threads(3, work)
    assert others == [(at, going)] * 2
    assert not going
    # It is not known at first how long a step takes. Then it is a share of a second of the slowest.
    apart = [after - before for before, after in itertools.pairwise(at)]
    most = leaving.TIMES.look_s / 0.002
    assert at[0] == 1
    assert apart[0] <= 8
    assert all(most - 2 <= each <= most for each in apart[4:-1])


@pytest.mark.parametrize("told", [{2: 1000}, {0: 1000, 2: 1010}, {0: 0, 1: 0, 2: 0}])
def test_those_that_are_told_at_about_the_same_time_go_at_the_same_step(clock, told):
    def work(ring):
        return looking(ring, clock, 0.001, told.get(ring.rank))

    (at, going), *others = ring_of_threads(3, work)
    assert others == [(at, going)] * 2
    assert going == dict.fromkeys(told, "SIGTERM")
    *_, seen, acted = at
    assert seen >= min(told.values())
    assert acted - seen <= max(1, int(1000 * leaving.TIMES.look_again_s))


def test_the_last_look_waits_for_no_other():
    def work(ring):
        notice = Notice("", str, bool)
        looks = Looks(ring, notice, str)
        notice.reason = "SIGTERM" if ring.rank else ""
        return looks.look(5), looks.look(6, is_last=True), looks.goes_on({1: "SIGTERM"})

    assert ring_of_threads(2, work) == [({}, {1: "SIGTERM"}, False)] * 2


def test_a_wish_that_is_gone_with_its_rank_is_nothing_to_act_on():
    looks = Looks(ring_of(4, [0, 2]), Notice("", str, bool), str, minimum=2)
    assert looks.goes_on({1: "SIGTERM", 3: "SIGTERM"})
    assert not looks.goes_on({2: "SIGTERM"})


def ring_of(size, members):
    from types import SimpleNamespace

    return SimpleNamespace(config=SimpleNamespace(rank=0, size=size), members=members)


def test_what_a_rank_waits_for_is_said_by_its_callback_or_validation():
    ready, over = threading.Event(), threading.Event()

    class Slow(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            ready.set()
            over.wait(30)

    class Evaluates(keras.Sequential):
        def evaluate(self):
            ready.set()
            over.wait(30)

    said = []
    for hook in (
        lambda: Slow().on_epoch_end(1),
        Evaluates().evaluate,
        lambda: (ready.set(), over.wait(30)),
    ):
        ready.clear()
        over.clear()

        def train(hook=hook):
            said.append(leaving._doing_here())
            hook()

        thread = threading.Thread(target=train)
        thread.start()
        assert ready.wait(30)
        said[-1] = said[-1]()
        over.set()
        thread.join()
    of_callback, of_validation, of_step = said
    assert of_callback == "it is in Slow.on_epoch_end"
    assert of_validation == "it is in validation"
    assert of_step == "it is in a step, or at the begin of training"


def looped(size, least, *told, seldom=False, **case):
    """What ranks of a loop say, in order, and how it went; `told`: a rank, and the step."""
    case = json.dumps({"told": told, "seldom": seldom, **case})
    program = ["tests/programs/leaving_loop.py", case]
    done = run_job(size, program, environment={"RINGREDUCE_ELASTIC": str(least)})
    assert "Traceback" not in done.errors, done.errors
    return sorted(facts_in(done.output), key=lambda fact: fact["rank"]), done


def test_ranks_leave_a_loop_at_a_commit_and_no_step_is_made_again():
    found, done = looped(4, 2, [1, 3], [0, 3])
    assert done.exit_code == 0
    assert [fact["rank"] for fact in found] == [2, 3]
    for fact in found:
        assert (fact["made"], fact["iterations"], fact["members"]) == (12, 12, [2, 3])
        assert fact["begun"] == [[0, 4], [5, 2]]
        assert fact["digest"] == found[0]["digest"]
    assert "ranks 0, 1 left at step=5, made=5 (SIGTERM); ranks 2, 3 went on after" in done.errors
    undisturbed, _ = looped(1, 1)
    assert found[0]["weights"] == pytest.approx(undisturbed[0]["weights"], rel=1e-5)


def test_a_rank_that_is_told_in_the_last_step_leaves_when_the_loop_has_ended():
    found, done = looped(3, 2, [1, 11], seldom=True)
    assert [(fact["rank"], fact["made"], fact["begun"]) for fact in found] == [
        (rank, 12, [[0, 3]]) for rank in (0, 2)
    ]
    assert done.exit_code == 0
    assert "rank 1 left at step=12, made=12 (SIGTERM)" in done.errors


def test_ranks_of_a_loop_look_together_after_a_look_that_only_some_have_ended():
    found, done = looped(3, 1, dies=2, misses=1)
    assert [(fact["rank"], fact["made"], fact["members"]) for fact in found] == [
        (rank, 12, [0, 1]) for rank in (0, 1)
    ]
    assert found[0]["digest"] == found[1]["digest"]
    assert "lost rank 2 at" in done.errors


def test_a_loop_with_too_few_left_stops_on_all_ranks_which_may_save():
    found, done = looped(2, 2, [1, 3])
    assert done.exit_code == 143
    assert [fact["stopped"] for fact in found] == [[143, "saved"]] * 2
    assert [(fact["made"], fact["iterations"]) for fact in found] == [(5, 5)] * 2
    assert found[0]["digest"] == found[1]["digest"]
    assert "since rank 1 was told to go (SIGTERM). The program has the state" in done.errors
