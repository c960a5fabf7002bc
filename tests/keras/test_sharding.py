"""A sharded update trains to the bits of one that is not, and keeps a part of the state."""

import functools
import re
import tempfile

import keras
import pytest

import ringreduce.keras as rr
from ringreduce.keras.sharding import weights_to_divide
from ringreduce.vocabulary.errors import ConfigError
from tests.facts import facts_in
from tests.jobs import run_job
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

EQUAL = ["adam graph", "adam eager", "adam jit", "accumulated", "set", "loop", "decayed"]
EQUAL += ["begun", "exported"]
RARE = ["sgd graph", "nesterov graph", "adamw graph", "rmsprop graph", "adagrad graph", "sum"]
RARE += ["rmsprop eager", "half", "two optimizers", "momentum graph", "frozen", "not finite"]
CLOSE = ["clipped graph", "clipnorm graph"]
# Of several ranks and hosts.
SPREAD = ["adam graph", "rmsprop graph", "adam eager", "accumulated", "loop"]
OTHERS = ["saved", "restarted", "refused", "freed"]
# Ranks, the host of each, and how they reach each other.
PAIR = (0, 0), "auto"
LAYOUTS = [((0, 0, 0), "zmq"), ((0, 0, 1, 1), "auto"), ((0, 0, 0, 1), "auto")]


@functools.cache
def said(layout, *cases):
    """By case and rank, what programs/sharded.py says."""
    hosts, transport = layout
    unlike = {rank: {"RINGREDUCE_HOST_ID": str(host)} for rank, host in enumerate(hosts)}
    with tempfile.TemporaryDirectory() as folder:
        done = run_job(
            *(len(hosts), ["tests/programs/sharded.py", folder, *cases]),
            timeout_s=200,
            environment={"RINGREDUCE_TRANSPORT": transport},
            unlike=unlike if len(set(hosts)) > 1 else None,
        )
    assert done.exit_code == 0, done.errors
    found = {}
    for fact in facts_in(done.output):
        found.setdefault(fact["case"], []).append(fact)
    return found


def of_pair(case):
    return said(
        PAIR, *([*RARE, CLOSE[1]] if case in (*RARE, CLOSE[1]) else [*EQUAL, CLOSE[0], *OTHERS])
    )[case]


def on_layouts(cases):
    return [in_full(layout, case) for layout in LAYOUTS for case in cases]


def of(layout, case):
    if layout == PAIR:
        return of_pair(case)
    cases = [*SPREAD, CLOSE[0], *OTHERS, *(["pieces"] if len(layout[0]) == 4 else [])]
    return said(layout, *cases)[case]


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        *((PAIR, case) for case in EQUAL),
        *(in_full(PAIR, case) for case in RARE),
        *on_layouts(SPREAD),
        in_full(LAYOUTS[1], "pieces"),
    ],
)
def test_it_trains_to_the_same_bits(layout, case):
    facts = of(layout, case)
    assert [fact["is_equal"] for fact in facts] == [True] * len(layout[0])
    assert len({str(fact["weights"]) for fact in facts}) == 1


@pytest.mark.parametrize(
    ("layout", "case"), [(PAIR, CLOSE[0]), in_full(PAIR, CLOSE[1]), *on_layouts(CLOSE[:1])]
)
def test_norms_of_pieces_are_those_of_wholes(layout, case):
    """But for the order in which they are added up."""
    facts = of(layout, case)
    assert max(fact["difference"] for fact in facts) < 1e-6
    assert len({str(fact["weights"]) for fact in facts}) == 1


@pytest.mark.parametrize("layout", [PAIR, *map(in_full, LAYOUTS)])
def test_ranks_keep_their_shares_of_the_state(layout):
    facts = of(layout, "adam graph")
    scalars = 2
    assert sum(fact["kept"] - scalars for fact in facts) == facts[0]["whole"] - scalars
    if layout == PAIR:
        assert max(fact["kept"] for fact in facts) < 0.51 * facts[0]["whole"]


@pytest.mark.parametrize("layout", [PAIR, *map(in_full, LAYOUTS)])
def test_files_are_plain_and_training_goes_on_from_them(layout):
    """Model and weights load, sharded or not; the next steps are those of the uninterrupted."""
    for fact in of(layout, "saved"):
        assert len({*fact["weights"], of(layout, "adam graph")[0]["weights"]}) == 1
        assert fact["is_sharded"] == [True, True, True, False]
        assert fact["shapes"] == [[20, 37], [20, 37], [37], [37]]
    assert len({w for fact in of(layout, "restarted") for w in fact["weights"]}) == 1


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("alone", "cannot save .* here: each of 2 ranks has a piece of it. Call rr.on_rank_zero"),
        ("checkpoint", "into a tf.train.Checkpoint, which would hold this rank's share alone"),
        ("constraint", "kernel with a constraint, which looks at all of it"),
        ("divided", "another DistributedOptimizer has divided the state.*Keep that one"),
        ("file of rank 0", "times that a file was loaded is 1 on rank 0 and 0 on rank 1"),
        ("rows", "table/embeddings in rows. Pass sparse_as_dense=True"),
    ],
)
def test_what_would_be_wrong_is_refused(case, text):
    assert all(re.search(text, fact[case]) for fact in of_pair("refused"))


def test_its_memory_goes_with_the_optimizer():
    assert [fact["is_freed"] for fact in of_pair("freed")] == [True, True]


@pytest.mark.parametrize(
    ("inner", "options", "text"),
    [
        (keras.optimizers.Lamb, {}, r"lamb\w* \(Lamb\) looks at whole variables"),
        (keras.optimizers.Muon, {}, r"muon\w* \(Muon\) looks at whole variables"),
        (lambda: keras.optimizers.SGD(use_ema=True), {}, "with use_ema"),
        (keras.optimizers.SGD, {"strategy": rr.LocalSGD(4)}, "with strategy=LocalSGD"),
        (keras.optimizers.SGD, {"compression": "int8"}, "with compression='int8'"),
        (keras.optimizers.SGD, {"update_rows": "touched"}, "with update_rows='touched'"),
    ],
    ids=["Lamb", "Muon", "EMA", "LocalSGD", "int8", "touched"],
)
def test_what_needs_whole_variables_is_refused_by_name(inner, options, text):
    with pytest.raises(ConfigError, match=f"sharded=True.*{text}"):
        rr.DistributedOptimizer(inner(), sharded=True, **options)


def test_an_elastic_job_is_refused(monkeypatch):
    monkeypatch.setenv("RINGREDUCE_ELASTIC", "1")
    with pytest.raises(ConfigError, match="elastic training, in which a lost rank takes"):
        rr.DistributedOptimizer(keras.optimizers.SGD(), sharded=True)


def test_one_rank_alone_has_a_plain_update():
    optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(), sharded=True)
    with rr.init(rank=0, size=1):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
        assert [tuple(each.shape) for each in optimizer.variables[2:4]] == [(3, 4), (3, 4)]
    rr.shutdown()


@pytest.mark.parametrize(
    ("inner", "options", "count"),
    [
        (keras.optimizers.Adam, {}, 16),
        (lambda: keras.optimizers.SGD(momentum=0.9), {}, 0),
        (keras.optimizers.Adam, {"compression": "bf16"}, 0),
        (keras.optimizers.Lamb, {}, 0),
    ],
    ids=["Adam", "momentum", "bf16", "Lamb"],
)
def test_it_is_recommended_where_it_pays(inner, options, count):
    optimizer = rr.DistributedOptimizer(inner(), **options)
    optimizer.build_inner([keras.Variable([[0.0] * 16])])
    assert weights_to_divide(optimizer) == count


KILLED = """
import os, signal, sys
import keras, numpy as np
import ringreduce.keras as rr
comm = rr.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(99), keras.layers.Dense(1)])
model.compile(rr.DistributedOptimizer(keras.optimizers.Adam(), sharded=True), "mse",
              run_eagerly=True)
inner, steps = model.optimizer._inner, []
plain = inner.apply_gradients

def apply(pairs, **options):
    plain(pairs, **options)
    steps.append(0)
    if comm.rank == 1 and len(steps) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

inner.apply_gradients = apply
rr.fit(model, np.ones((64, 4)), np.ones((64, 1)), batch_size=8, verbose=0)
"""


def test_a_rank_that_is_killed_between_its_update_and_the_gather_is_named(tmp_path):
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    done = run_job(2, [str(program)], timeout_s=60)
    assert done.exit_code != 0
    assert (
        "rank 0 of 2 lost rank 1: its connection has ended, so it died, in all_gather"
        in done.errors
    )
