"""Collectives stay in the program's order wherever they stand, on real rings."""

from __future__ import annotations

import pytest

from ringreduce.effects import native
from tests.facts import facts_in, facts_of
from tests.jobs import run_job
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

needs_xla = pytest.mark.skipif(native.library() is None, reason="without the native library")
WAYS = ("graph", "jit", "jit inside", "jit both") if native.library() is not None else ("graph",)


def same(*values):
    """Each as it comes out of a collective: a tensor of two."""
    return [[value, value] for value in values]


@pytest.fixture(params=[2, in_full(3)], scope="module")
def facts(request):
    """By case, what every rank of a ring that ran programs/order.py said."""
    return {case: list(said.values()) for case, said in facts_of("order", request.param).items()}


def by_way(facts, case):
    """What each rank found, by the way in which it ran: on two ranks in one, on three in all."""
    for said in facts[case]:
        found = {way: said[way] for way in WAYS if way in said}
        assert len(found) == len(WAYS) or (len(facts[case]) == 2 and found)
        yield from found.values()


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("twice", same(1, 2)),
        ("among", same(1, 2, 3, 4, 5, 6)),
        ("loops", same(4, 2, 6, 4, 8)),
        ("both", same(1, 2, 3, 4)),
        ("turns", [same(0, 1, 2, 3, 4, 5)]),
    ],
)
def test_each_gets_what_is_its_own(facts, case, expected):
    for found in by_way(facts, case):
        assert found == [expected] * 3


def test_so_do_gradients_of_functions_and_loops(facts):
    """Of the mean loss, (size + 1) / 2 times the sum of 2 v + v + v**3."""
    factor = (len(facts["gradients"]) + 1) / 2
    gradient = [factor * (3 + 3 * v**2) for v in (1.0, 2.0)]
    for found in by_way(facts, "gradients"):
        assert found == [[[1, 1], gradient, gradient]] * 3


def test_so_do_gradients_of_functions_in_loops(facts):
    """Of four times v."""
    factor = (len(facts["functions in loops"]) + 1) / 2
    for found in by_way(facts, "functions in loops"):
        assert found == [[[4, 8], [4 * factor] * 2]] * 3


def test_the_first_collective_may_be_in_a_later_trace(facts):
    for said in facts["later"]:
        assert said["results"] == same(1, len(facts["later"]))


TRAINED_ON_3 = [(case, way) for case in ("optimizers", "rows", "rows of a tape") for way in WAYS]
TRAINED_ON_3 += [("several steps", way) for way in WAYS if way in ("graph", "jit both")]
TRAINED = [
    (case, way)
    for case, way in (
        ("optimizers", "jit inside"),
        ("several steps", "graph"),
        ("rows", "jit"),
        ("rows of a tape", "graph"),
    )
    if way in WAYS
]


@pytest.mark.parametrize(
    ("case", "way", "size"),
    [*((*trained, 2) for trained in TRAINED), *(in_full(*trained, 3) for trained in TRAINED_ON_3)],
)
def test_training_in_functions_of_a_function_is_the_same(case, way, size):
    """As programs/order_training.py says."""
    said = list(facts_of("order_training", size)[case].values())
    assert len({fact["digests"][way] for fact in said}) == 1
    assert max(fact["differences"][way] for fact in said) < 2e-6
    if "moved" in said[0]:
        assert said[0]["moved"] > 1e-2


@pytest.mark.parametrize("way", ["graph", in_full("eager"), in_full("jit")])
def test_an_order_that_is_tensorflows_is_never_silently_wrong(way):
    """With several targets it depends on what else was recorded, which only rank 0 has more of."""
    result = run_job(2, ["tests/programs/swapped.py", way], timeout_s=60)
    *attempts, last = [fact for fact in facts_in(result.output) if fact["rank"] == 1]
    for attempt in attempts:
        assert attempt["found"] == same(*(10**power for power in range(6)))
    assert last["error"] == "MismatchError"
    assert "takes the gradient of its tensor collective number" in last["text"]
    assert "Ask the tape for the gradients of one loss" in last["text"]


@pytest.mark.parametrize(
    ("case", "way"),
    [
        ("persistent", "graph"),
        in_full("outside", "graph"),
        pytest.param("persistent", "jit both", marks=[needs_xla, pytest.mark.full]),
        pytest.param("second", "jit inside", marks=needs_xla),
    ],
)
def test_gradients_that_tensorflow_does_not_order_are_never_silently_wrong(case, way):
    """Of a function, by a tape outside of it, and of gradients."""
    size = 2
    factor = (size + 1) / 2
    expected = {
        "outside": same(*(factor * 10**power for power in range(5))),
        "second": [
            [5 * v**4 + 4 * v**3 for v in (1, 2)],
            [20 * v**3 + 12 * v**2 for v in (1, 2)],
        ],
    }
    result = run_job(size, ["tests/programs/unordered.py", case, way], timeout_s=60)
    facts = list(facts_in(result.output))
    assert {fact["rank"] for fact in facts} == set(range(size))
    for fact in facts:
        if fact["error"]:
            # Of the backward pass of a function the error is TensorFlow's, with our text.
            texts = ("tensor collective number", "began another step while gradients")
            is_ours = any(text in fact["text"] for text in texts)
            assert fact["error"] == "MismatchError" or is_ours, fact
        else:
            assert fact["found"] == expected["second" if case == "second" else "outside"]
