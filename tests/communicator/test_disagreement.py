"""Ranks whose calls do not match: all get the same error, which says what both sides do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ringreduce.effects import native
from tests.rings import MISMATCH_S, Ring

# What rank 1 does, what the others do, and a word of each that the errors must hold.
DISAGREEMENTS = {
    "operator": ("ring.all_reduce(x, 'max')", "ring.all_reduce(x, 'sum')", ", max", ", sum"),
    "mean": ("ring.all_reduce(x, 'mean')", "ring.all_reduce(x)", ", mean", ", sum"),
    "half": (
        "ring.all_reduce(x.astype('float16'))",
        "ring.all_reduce(x.astype('float32'))",
        "100 float16",
        "100 float32",
    ),
    "dtype": (
        "ring.all_reduce(x.astype('float32'))",
        "ring.all_reduce(x)",
        "100 float32",
        "100 float64",
    ),
    "length": ("ring.all_reduce(x[:99])", "ring.all_reduce(x)", "of 99 ", "of 100 "),
    "kind": ("ring.barrier()", "ring.all_reduce(x)", "barrier #1", "all_reduce #1"),
    "order": (
        "[ring.broadcast(x), ring.all_reduce(x)]",
        "[ring.all_reduce(x), ring.broadcast(x)]",
        "broadcast #1",
        "all_reduce #1",
    ),
    "signature": (
        "ring.all_reduce(x, signature=1)",
        "ring.all_reduce(x, signature=2)",
        "other gradients, shapes or root",
        "all_reduce #1",
    ),
    "large": (
        "ring.all_reduce(large[:-1])",
        "ring.all_reduce(large)",
        "of 299999 ",
        "of 300000 ",
    ),
    "encoded": (
        "ring.all_reduce(wide, coding=coded('bf16'))",
        "ring.all_reduce(wide)",
        "all_reduce #1",
        "all_reduce #1",
    ),
    "encodings": (
        "ring.all_reduce(wide, coding=coded('bf16'))",
        "ring.all_reduce(wide, coding=coded('fp16'))",
        "all_reduce #1",
        "all_reduce #1",
    ),
    "encoded length": (
        "ring.all_reduce(wide[:-1], coding=coded('int8'))",
        "ring.all_reduce(wide, coding=coded('int8'))",
        "all_reduce #1",
        "all_reduce #1",
    ),
    "small after large": (
        "[ring.all_reduce(np.ones(2_000_000)), ring.all_reduce(x[:2])]",
        "[ring.all_reduce(np.ones(2_000_000)), ring.all_reduce(x[:3])]",
        "of 2 ",
        "of 3 ",
    ),
    "root": (
        "ring.broadcast(x, root=3 - RANK)",
        "ring.broadcast(x, root=0)",
        "root",
        "broadcast #1",
    ),
    # Roots wait for nobody: of two that both are, each learns of it from its next call.
    "two roots": (
        "ring.broadcast(x, root=2)",
        "ring.broadcast(x, root=0)",
        "broadcast #1",
        "broadcast #1",
    ),
    "object": ("ring.broadcast_object(1)", "ring.barrier()", "broadcast_object #1", "barrier #1"),
    "gather": (
        "ring.all_gather(np.ones((2, 3)))",
        "ring.all_gather(np.ones((2, 4)))",
        "other gradients, shapes or root",
        "all_gather #1",
    ),
    "scatter": (
        "ring.reduce_scatter(x)",
        "ring.all_reduce(x)",
        "reduce_scatter #1",
        "all_reduce #1",
    ),
}
# How ranks reach each other, what hosts they are on, and which of them does another thing.
DISAGREEING = {
    "zmq": ("zmq", (), 1),
    "shm": ("shm", (), 1),
    "two hosts, within one": ("auto", ("a", "a", "b"), 1),
    "two hosts, between them": ("auto", ("a", "a", "b"), 2),
}


@pytest.fixture(scope="module", params=list(DISAGREEING))
def disagreements(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[dict[str, Any]]]:
    """What each of three ranks raised, for each kind of disagreement; one ring for each."""
    calls = {name: case[:2] for name, case in DISAGREEMENTS.items()}
    transport, hosts, victim = DISAGREEING[request.param]
    program = f"""
    from ringreduce.pure.encodings import Coding, encoding_of
    coded = lambda name: Coding(encoding_of(name))
    open_rings = []
    x, large = np.ones(100), np.ones(300_000)
    wide = large.astype(np.float32)
    for number, (name, calls) in enumerate({calls!r}.items()):
        ring = join(number)
        open_rings.append(ring)
        call = calls[0] if RANK == {victim} else calls[1]
        # A rank that is not concerned yet learns of it from its next call.
        attempt(name, lambda: until_error(lambda: (eval(call), ring.barrier())))
        attempt(name + " again", ring.barrier)
    hold()
    for ring in open_rings:
        ring.close()
    """
    if transport != "zmq" and native.library() is None:
        pytest.skip(native.why_missing())
    directory = tmp_path_factory.mktemp("disagreements")
    rings = len(DISAGREEMENTS)
    with Ring(directory, 3, program, rings=rings, transport=transport, hosts=hosts) as ring:
        ring.wait(f"{list(DISAGREEMENTS)[-1]} again")
        found = {name: ring.wait(name) for name in DISAGREEMENTS}
        found |= {f"{name} again": ring.wait(f"{name} again") for name in DISAGREEMENTS}
        ring.release()
    return found


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_all_get_a_mismatch(
    name: str, disagreements: dict[str, list[dict[str, Any]]]
) -> None:
    facts = disagreements[name]
    assert [fact["kind"] for fact in facts] == ["MismatchError"] * 3, facts
    assert all(fact["seconds"] < MISMATCH_S for fact in facts), facts


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_mismatch_says_what_both_sides_do(
    name: str, disagreements: dict[str, list[dict[str, Any]]]
) -> None:
    *_, theirs, ours = DISAGREEMENTS[name]
    for fact in disagreements[name]:
        # Its number is that within the host, where there are several.
        text = re.sub(r"#\d+", "#1", fact["text"])
        assert theirs in text
        assert ours in text


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_after_a_mismatch_every_call_raises_it_at_once(
    name: str, disagreements: dict[str, list[dict[str, Any]]]
) -> None:
    for fact in disagreements[f"{name} again"]:
        assert fact["kind"] == "MismatchError"
        assert fact["seconds"] < 0.5


def test_a_rank_that_comes_late_is_told_the_cause_though_all_have_left(tmp_path: Path) -> None:
    # The abort lies in its queue when it finds that it can no longer send.
    program = """
    ring = join()
    say("ready")
    if RANK == 0:
        hold()
    attempt("result", ring.barrier if RANK == 1 else lambda: ring.all_reduce(np.ones(10)))
    ring.close()
    """
    with Ring(tmp_path, 3, program) as ring:
        ring.wait("ready")
        for rank in (2, 1):
            assert ring.workers[rank].wait() == 0
        ring.workers[0].stdin.close()
        assert ring.workers[0].wait() == 0
        [late] = ring.said(0, "result")
        assert late["kind"] == "MismatchError", late
        assert "was told by rank 2" in late["text"]


@pytest.mark.parametrize("name", ["order", "small after large"])
def test_a_mismatch_says_where_in_the_call_it_was(
    name: str, disagreements: dict[str, list[dict[str, Any]]]
) -> None:
    facts = disagreements[name]
    # Small arrays have no segments in shared memory, and large ones before them had many.
    places = "hop 1|exchange step 1 of [12]|(segment 1 of 1|meeting) in shared memory"
    assert any(re.search(rf", in \w+ #\d, ({places})\.", f["text"]) for f in facts), facts
