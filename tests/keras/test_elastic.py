"""Training goes on when ranks are lost: no step and no sample is lost, and none is used twice."""

import json
import re
import types
import zipfile
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest

import ringreduce
import ringreduce.keras as rr
from ringreduce.keras.checks.elastic_refusals import TABLE
from ringreduce.keras.elastic.backup import skip
from ringreduce.keras.repeating import Repeating
from ringreduce.tensorflow.kept import kept
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.errors import ConfigError
from tests import hosts
from tests.jobs import facts_in, run_job
from tests.scope import in_full

LambdaCallback = keras.callbacks.LambdaCallback

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

BATCH, STEPS, EPOCHS = 12, 4, 3
ONCE = [float(EPOCHS)] * BATCH * STEPS  # How often each sample is used, if once in each epoch.


# A rank that waits in vain for one that does not come waits for longer than a test may take.
WAITS = {"RINGREDUCE_JOIN_TIMEOUT_S": "1000"}
ENDS = "kill", "exit", "raise", "leave", "stop"


def trained(folder, size, *faults, least=1, timeout_s=20.0, variables=(), unlike=None, **case):
    """By rank, what those that are left say. A fault: rank, point, number there, how."""
    case = json.dumps({"way": "eager", "faults": faults, **case})
    environment = {"RINGREDUCE_ELASTIC": "" if least is None else str(least), **dict(variables)}
    program = ["tests/programs/elastic.py", case, str(folder)]
    options = {"timeout_s": timeout_s, "environment": environment, "unlike": unlike}
    done = run_job(size, program, **options)
    found = {fact["rank"]: fact for fact in facts_in(done.output)}
    lost = {rank for rank, _, _, how in faults if how in ENDS or how == "notice"}
    if "training stopped" in done.errors:
        lost = {*range(size)}
    assert sorted(found) == sorted({*range(size)} - lost), done.errors
    return found, done


def rows_of_log(folder):
    rows = [row.split(",") for row in (folder / "log.csv").read_text().splitlines()]
    assert {len(row) for row in rows} == {len(rows[0])}
    return [row[0] for row in rows]


def assert_exactly_once(found):
    left = sorted(found)
    for rank, fact in found.items():
        assert fact["uses"] == ONCE, f"rank {rank}"
        counted = fact["iterations"], fact["steps"], fact["batches"]
        assert counted == (EPOCHS * STEPS,) * 3, f"rank {rank}"
        assert fact["members"] == left
        assert fact["digest"] == found[left[0]]["digest"]
        assert fact["history"] == found[left[0]]["history"]


DATA = ["arrays", "dataset", "sequence", "generator", "loader"]
# A step is the same with all data.
WAYS = [*((data, "graph") for data in DATA), ("dataset", "eager"), ("sequence", "xla")]


@pytest.mark.full
@pytest.mark.parametrize(("data", "way"), WAYS)
def test_each_sample_is_used_once_in_each_epoch(tmp_path, data, way):
    found, _ = trained(tmp_path, 3, [2, "begin", 7, "kill"], data=data, way=way)
    assert_exactly_once(found)
    # What was that rank's in that epoch is not in the metrics. Of a loader, Keras asks for a batch
    # after the last one.
    lost = 4.0 if data == "loader" else 8.0
    assert found[0]["history"]["seen"] == [48.0, 48.0 - lost, 48.0]


# Where a rank is lost, how often it has come by there, and how.
POINTS = [
    *(("begin", 6, "kill"), ("bucket", 10, "kill"), ("reduced", 11, "kill")),
    *(("commit", 6, "kill"), ("update", 12, "kill"), ("end", 5, "kill"), ("end", 5, "leave")),
    *(("end", STEPS, "kill"), ("epoch end", 1, "kill")),
    *(("validated", 2, "kill"), ("validated", 2, "leave")),
]


@pytest.mark.parametrize(
    ("point", "victim", "data"),
    [
        *(in_full(point, victim, "arrays") for point in POINTS for victim in (0, 2)),
        (("validated", 2, "leave"), 0, "loader"),
    ],
)
def test_a_rank_may_be_lost_anywhere(tmp_path, point, victim, data):
    options = {"data": data, "validates": True, "deterministic": data == "loader"}
    found, done = trained(tmp_path, 3, [victim, *point], **options)
    assert_exactly_once(found)
    if "validated" in point:
        assert f"lost rank {victim} after step {2 * STEPS}; " in done.errors
    assert all(fact["history"]["val_seen"] == [21.0] * EPOCHS for fact in found.values())


@pytest.mark.parametrize(
    ("data", "way", "point", "logs"),
    [
        ("dataset", "graph", ("bucket", 11, "kill"), {}),
        ("arrays", "graph", ("bucket", 11, "kill"), {"logs": "{}"}),
        in_full("arrays", "graph", ("bucket", 12, "kill"), {"logs": "None"}),
        in_full("generator", "graph", ("reduced", 15, "kill"), {}),
        in_full("arrays", "xla", ("bucket", 12, "kill"), {}),
        in_full("loader", "graph", ("bucket", 3, "kill"), {}),
        in_full("sequence", "eager", ("commit", 6, "kill"), {}),
    ],
)
def test_a_rank_may_be_lost_in_a_call_of_several_steps(tmp_path, data, way, point, logs):
    """A step that fails has not read the batch of the next, whatever it logs."""
    found, _ = trained(tmp_path, 3, [1, *point], data=data, way=way, blind=True, **logs)
    assert_exactly_once(found)
    # Eagerly there are none; of a loader Keras asks for a batch after the last one.
    one = EPOCHS * (1 + (data == "loader")) + 1
    assert {fact["calls"] for fact in found.values()} == {EPOCHS * STEPS if way == "eager" else one}


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "timeout_s", "faults"),
    [
        (4, 20.0, [[0, "begin", 6, "kill"], [2, "begin", 6, "kill"]]),
        (4, 20.0, [[0, "bucket", 11, "kill"], [2, "exchange", 1, "kill"]]),
        (4, 20.0, [[3, "begin", 6, "kill"], [0, "exchange", 2, "kill"]]),
        (4, 20.0, [[1, "begin", 6, "kill"], [3, "catching up", 1, "kill"]]),
        (4, 20.0, [[1, "begin", 6, "kill"], [3, "barrier", 1, "kill"]]),
        (4, 20.0, [[1, "begin", 5, "kill"], [0, "begin", 6, "kill"]]),
        # One that stops is left out, though another dies then; the last one goes on alone.
        (3, 2.0, [[2, "begin", 3, "stop"], [0, "end", 7, "exit"]]),
        (3, 1.0, [[2, "begin", 6, "stop"], [0, "begin", 6, "kill"]]),
    ],
)
def test_two_may_be_lost_and_one_while_the_others_recover(tmp_path, size, timeout_s, faults):
    found, _ = trained(tmp_path, size, *faults, timeout_s=timeout_s, variables=WAITS)
    assert_exactly_once(found)


def test_a_rank_that_has_missed_the_others_commit_takes_their_weights(tmp_path):
    found, _ = trained(tmp_path, 3, [2, "end", 6, "kill"], behind=1, behind_in=5)
    for fact in found.values():
        assert fact["uses"] == ONCE
        assert fact["iterations"] == fact["batches"] == EPOCHS * STEPS


@pytest.mark.full
def test_a_rank_that_has_missed_an_exchange_does_what_callbacks_do_after_it_once(tmp_path):
    # The averages of the first epoch's metrics, after two agreements in a step, but one in the
    # first, and that on what steps have changed.
    fault = 2, "written", 1, "kill"
    found, _ = trained(tmp_path, 3, fault, misses=[0, 2 * STEPS], halves=True)
    for fact in found.values():
        assert fact["uses"] == [1.75] * BATCH * STEPS
        assert fact["history"] == found[0]["history"]


@pytest.mark.parametrize(
    ("point", "number"),
    [in_full("begin", 6), in_full("epoch end", 2), in_full("written", 2), ("written", 1)],
)
def test_another_rank_goes_on_with_what_only_rank_0_does_once(tmp_path, point, number):
    found, done = trained(tmp_path, 3, [0, point, number, "kill"], writes=True)
    assert_exactly_once(found)
    assert rows_of_log(tmp_path) == ["epoch", "0", "1", "2"]
    assert "Epoch 3/3" in done.output
    # With a best value of its own, the third epoch's would be one too.
    assert "best.keras too" not in done.errors
    with zipfile.ZipFile(tmp_path / "best.keras") as file:
        assert file.testzip() is None


BACKED_UP = [in_full(data, 3) for data in ("arrays", "sequence", "generator", "loader")]


@pytest.mark.parametrize(("data", "size"), [("arrays", 2), *BACKED_UP])
def test_too_few_back_up_and_others_go_on_with_the_next_step(tmp_path, data, size):
    case, fault = {"data": data, "backs_up": True}, (size - 1, "begin", 6, "kill")
    found, _ = trained(tmp_path, size, fault, least=size, **case)
    step = 5 if data == "loader" else 6  # Of a loader, Keras asks for a batch after the last one.
    for rank, fact in found.items():
        # In the step, or where the ranks tell each other before it what callbacks have changed.
        where = f"(in step {step}|after step {step - 1})"
        assert re.match(
            f"RendezvousError: rank {rank} of {size} has {size - 1} ranks left without rank "
            f"{size - 1}, lost {where}, and was to go on with at least {size}. See",
            fact["error"],
        )
    advice = f"Start the job again: it goes on from this step, with {tmp_path}/backup."
    assert found[0]["error"].endswith(advice)
    found, _ = trained(tmp_path, size - 1, **case)
    for fact in found.values():
        assert fact["uses"] == ONCE
        assert fact["iterations"] == fact["steps"] == EPOCHS * STEPS
        # Callbacks have seen the others before.
        assert fact["batches"] == EPOCHS * STEPS - (step - 1)


def test_a_loop_that_would_make_steps_again_is_refused():
    with ringreduce.Communicator(ringreduce.Config(rank=0, size=1)) as ring:
        model = types.SimpleNamespace(train_function=print)
        with pytest.raises(ConfigError, match=r"after step 3 of an epoch.*Train by rr\.fit"):
            skip(model, 3, ring)


@pytest.mark.full
def test_others_go_on_without_a_host_that_is_cut_off(tmp_path):
    hosts.require()
    layout = {name: {"one": [f"10.1.0.{number}/24"]} for number, name in enumerate("abc", 1)}
    variables = {
        "RINGREDUCE_RENDEZVOUS": "10.1.0.1:20000",
        "RINGREDUCE_LINK_TIMEOUT_S": "2",
        "RINGREDUCE_JOIN_TIMEOUT_S": "20",
    }
    unlike = {rank: {"RINGREDUCE_HOST_ID": str(rank)} for rank in range(3)}
    options, fault = {"variables": variables, "unlike": unlike}, (2, "begin", 6, "cut")
    with hosts.connected(layout) as three:
        names = [three.names[name] for name in layout]
        found, done = trained(tmp_path, 3, fault, hosts=names, **options)
    alone = found.pop(2)
    assert "cannot form the ring anew of rank 2 alone" in alone["error"]
    assert_exactly_once(found)
    line = r"\[0/3\] lost rank 2 (?:in step 6|after step 5); .* went on after ([\d.]+) s"
    [seconds] = re.findall(line, done.errors)
    print(f"{seconds} s from the limit for links on")
    assert float(seconds) < 10


@pytest.mark.full
@pytest.mark.parametrize("way", ["graph", "eager"])
def test_all_go_on_in_a_new_ring_where_only_connections_were_lost(tmp_path, way):
    faults = [1, "begin", 6, "reset"], [0, "begin", 9, "reset"]
    variables = {"RINGREDUCE_TRANSPORT": "zmq"}
    found, _ = trained(tmp_path, 3, *faults, variables=variables, way=way)
    assert_exactly_once(found)
    # All rows are in the metrics, and there were new rings.
    assert found[0]["history"]["seen"] == [48.0] * EPOCHS
    assert found[0]["epoch"] > 1


@pytest.mark.full
@pytest.mark.parametrize("transport", ["zmq", "auto"])
def test_a_rank_that_writes_while_connections_are_lost_is_waited_for(tmp_path, transport):
    faults = [2, "epoch end", 1, "reset"], [0, "epoch end", 1, "stay"]
    variables = {"RINGREDUCE_TRANSPORT": transport}
    found, _ = trained(tmp_path, 3, *faults, variables=variables, writes=True)
    assert_exactly_once(found)
    assert found[0]["epoch"] > 0
    assert rows_of_log(tmp_path) == ["epoch", "0", "1", "2"]


@pytest.mark.full
@pytest.mark.parametrize("stays", [False, True])
def test_a_rank_that_has_missed_the_end_of_training_ends_as_the_others(tmp_path, stays):
    case, fault = {"misses": [1, "end"], "stays": stays}, (2, "left", 1, "kill")
    found, _ = trained(tmp_path, 3, fault, least=3, variables=WAITS, **case)
    for fact in found.values():
        assert fact["uses"] == ONCE


class Own(keras.Sequential):
    def train_step(self, data):
        return {}


class Logged(keras.Sequential):
    def evaluate(self, *arguments, **options):  # As a package's, that logs what it is given.
        return super().evaluate(*arguments, **options)


def _model(ring, layers=(), steps=1, kind=keras.Sequential, jit=False, **options):
    model = kind([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    if options.get("local_variables"):
        options["local_variables"] = model.trainable_variables[:1]
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(), ring, **options)
    how = {"steps_per_execution": steps, "jit_compile": jit, "run_eagerly": not jit}
    model.compile(optimizer=optimizer, loss="mse", **how)
    return model


def _model_with_two_optimizers(ring):
    model = _model(ring)
    model.second = rr.DistributedOptimizer(keras.optimizers.SGD(), ring)
    return model


def _fit(ring, make=_model, **arguments):
    x = np.zeros((8, 2), "float32")
    rr.fit(make(ring), x, x[:, :1], communicator=ring, verbose=0, **arguments)


def _given(**arguments):
    return lambda ring: _fit(ring, **arguments)


def _made(*layers, **options):
    """A training of such a model, whose layers are made with the communicator."""

    def make(ring):
        return _model(ring, [layer(communicator=ring) for layer in layers], **options)

    return _given(make=make)


def _in_a_loop(ring):
    kept(ring, Repeating).by = lambda meeting: meeting()
    try:
        _fit(ring)
    finally:
        kept(ring, Repeating).by = None


def _in_a_loop_of_ones_own(ring):
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(), ring)
    optimizer.apply([np.ones(2, "float32")], [keras.Variable(np.ones(2, "float32"))])


def _log_on_rank_0(ring, wrap=list):
    _fit(ring, callbacks=[] if ring.rank else wrap([keras.callbacks.CSVLogger("log.csv")]))


def _log_by_on_rank_zero(ring):
    _log_on_rank_0(ring, lambda logs: [rr.callbacks.OnRankZero(*logs)])


def _backup_on_rank_0(ring):
    _fit(ring, backup_dir=None if ring.rank else "never made")


def _compiled_anew(ring):
    def compile_anew(epoch, logs):
        optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(), ring)
        model.compile(optimizer, "mse", run_eagerly=True)

    model = _model(ring)
    _fit(ring, lambda _: model, callbacks=[LambdaCallback(on_epoch_end=compile_anew)], epochs=2)


class _Experts(rr.parts.PartLayer):
    def build(self, _):
        self.add_part((4, 2), "zeros", name="experts")

    def call(self, inputs):
        return inputs


_table = partial(rr.ShardedEmbedding, 4, 3)
# Rows of the table, trainings that they refuse, and what the error says that these have.
REFUSED = [
    ("several optimizers", _given(make=_model_with_two_optimizers), "distributed optimizers=2"),
    (
        "accumulation, `LocalSGD`, `DiLoCo`",
        *(_made(strategy=rr.LocalSGD(2)), "strategy=LocalSGD(every=2"),
    ),
    ("int8 and `PowerSGD`", _made(compression="int8"), "compression=int8"),
    ('`op="sum"`', _made(op="sum"), "op="),
    ("local variables", _made(local_variables=True), "local_variables=1"),
    ("`ShardedEmbedding`, `PartLayer`, split layers", _made(_table), "variables in pieces="),
    ("`ShardedEmbedding`, `PartLayer`, split layers", _made(_Experts), "variables in pieces="),
    ("`rr.SyncBatchNormalization`", _made(rr.SyncBatchNormalization), "SyncBatchNormalization"),
    ("groups of ranks", lambda ring: _fit(ring.split(0)), "a group of ranks"),
    ("a `fit` of another package", _made(kind=Logged), "fit of another package"),
    ("`steps_per_execution` above 1", _made(steps=2), "steps_per_execution=2"),
    ("a `train_step` of yours in XLA", _made(kind=Own, jit=True), "own train_step in XLA"),
    ("several updates in a `train_step`, or none", _made(kind=Own), "updates in a step=0"),
    ("`per_rank_data=True`", _given(per_rank_data=True), "per_rank_data"),
    ("`batch_share`", _given(batch_share="measured"), "batch_share=measured"),
    ("`compile` in a callback", _compiled_anew, "compile in training"),
    *(
        ("callbacks that not all ranks have", begin, f"callbacks=(rank 0: {kind}; rank 1: none)")
        for begin, kind in (
            *((_log_on_rank_0, "CSVLogger"), (_log_by_on_rank_zero, "CSVLogger")),
            (_backup_on_rank_0, "BackupAndRestore"),
        )
    ),
    ("`rr.elastic.run` around `rr.fit`", _in_a_loop, "rr.elastic.run around it"),
    ("`model.fit`, other loops", _in_a_loop_of_ones_own, "steps of another loop"),
]


def test_there_is_a_training_for_each_row_of_the_table():
    assert list(dict.fromkeys(what for what, *_ in REFUSED)) == [row.what for row in TABLE]


# A ring for each: in one, a rank that is held up on a busy machine would use up the others' limit.
@pytest.mark.parametrize(("what", "begin", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_what_is_refused_is_refused_by_name_on_all_ranks(monkeypatch, tmp_path, what, begin, text):
    monkeypatch.setenv("RINGREDUCE_ELASTIC", "1")
    monkeypatch.chdir(tmp_path)
    [remedy] = [row.remedy.replace("`", "") for row in TABLE if row.what == what]

    def work(ring):
        with pytest.raises(ConfigError, match="could not go on if a rank") as caught:
            begin(ring)
        assert f"has {text}" in str(caught.value)
        assert remedy in str(caught.value)

    ring_of_threads(2, work)


@pytest.mark.filterwarnings("ignore:2 ranks will not train exactly")
def test_moving_averages_are_those_of_rank_0_after_an_epoch(monkeypatch):
    monkeypatch.setenv("RINGREDUCE_ELASTIC", "1")
    x = np.arange(16, dtype="float32").reshape(8, 2)

    def work(ring):
        model = _model(ring, [keras.layers.BatchNormalization()])
        rr.fit(model, x, x[:, :1], communicator=ring, verbose=0)
        return [weight.tolist() for weight in model.layers[0].get_weights()]

    one, other = ring_of_threads(2, work)
    assert one == other
    assert any(one[2])


def test_the_guide_has_the_table_of_what_is_refused():
    guide = (Path(__file__).parents[2] / "docs/guides/jobs.md").read_text()
    [table] = re.findall(r"\n\| refused \| instead \|\n\| --- \| --- \|\n((?:\|.*\n)+)", guide)
    assert table.splitlines() == [f"| {row.what} | {row.remedy} |" for row in TABLE]


@pytest.mark.parametrize("number", [in_full(11), 12])
@pytest.mark.parametrize(("data", "way"), [("arrays", "graph"), in_full("dataset", "xla")])
def test_no_weight_is_updated_by_a_step_that_fails(tmp_path, data, way, number):
    """There are two buckets in a step: a rank is lost before the first, and before the second."""
    found, _ = trained(tmp_path, 2, [1, "bucket", number, "kill"], data=data, way=way, more=64)
    assert_exactly_once(found)
    # Of that rank's rows in that epoch, those of the step before are in the metrics no more.
    assert found[0]["history"]["seen"] == [48.0, 42.0, 48.0]


@pytest.mark.full
def test_weights_depend_only_on_who_takes_part_in_each_step(tmp_path):
    """The last batch has 7 rows, which do not divide."""
    digests = set()
    case = {"data": "generator", "way": "graph", "short": 5, "more": 64}
    # A mean over 7 rows gives each of them 12 / 7 of what one of 12 gets.
    uses = ONCE[:36] + [round(EPOCHS * BATCH / 7, 3)] * 7
    # The last one is lost between the buckets of that step.
    for at in (("begin", 7, "exit"), ("begin", 7, "raise"), ("bucket", 14, "kill")):
        found, _ = trained(tmp_path, 3, [2, *at], **case)
        assert [fact["uses"] for fact in found.values()] == [uses] * 2
        digests |= {fact["digest"] for fact in found.values()}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("point", "leavers", "data", "way"),
    [
        (("begin", 6), [2], "arrays", "graph"),
        (("validated", 1), [0, 2], "dataset", "xla"),
        *(in_full(("end", number), [1], "sequence", "eager") for number in (1, 5, STEPS, 12)),
        *(in_full(("epoch end", number), [0, 1], "generator", "graph") for number in (1, EPOCHS)),
        in_full(("begin", 1), [0], "loader", "graph"),
    ],
)
def test_ranks_that_are_told_to_go_leave_in_order(tmp_path, point, leavers, data, way):
    """No step is made again, and none of theirs is missing in the metrics."""
    faults = [[rank, *point, "notice"] for rank in leavers]
    options = {"data": data, "validates": True, "way": way, "writes": True}
    found, done = trained(tmp_path, 4, *faults, **options)
    assert sorted(found) == [rank for rank in range(4) if rank not in leavers]
    assert done.exit_code == 0
    assert_exactly_once(found)
    for fact in found.values():
        assert fact["history"]["seen"] == [48.0] * EPOCHS
        assert fact["history"]["val_seen"] == [21.0] * EPOCHS
    assert "Traceback" not in done.errors
    assert "killed" not in done.errors
    assert rows_of_log(tmp_path) == ["epoch", *map(str, range(EPOCHS))]
    for rank in leavers:
        assert re.search(rf"\[{rank}/4\] rank {rank} left after .* \(SIGTERM\)", done.errors)
        assert re.search(rf"ranks? [0-9, ]*{rank}[0-9, ]* left after .* \(SIGTERM\)", done.errors)


@pytest.mark.parametrize(
    "faults",
    [
        # Before, while and after the others form the ring anew.
        in_full([[3, "begin", 6, "kill"], [2, "begin", 6, "notice"]]),
        [[3, "begin", 6, "kill"], [2, "exchange", 1, "notice"]],
        in_full([[3, "bucket", 11, "kill"], [0, "catching up", 1, "notice"]]),
        # One is lost while another leaves.
        [[2, "begin", 6, "notice"], [0, "hand over", 1, "kill"]],
        [[2, "begin", 6, "notice"], [3, "exchange", 1, "kill"]],
        in_full([[0, "begin", 6, "notice"], [1, "catching up", 1, "kill"]]),
    ],
)
def test_ranks_leave_and_are_lost_at_once(tmp_path, faults):
    found, done = trained(tmp_path, 4, *faults, data="arrays", way="graph", often=True)
    assert_exactly_once(found)
    assert sorted(found) == [
        rank for rank in range(4) if rank not in [fault[0] for fault in faults]
    ]
    assert "Traceback" not in done.errors


def test_all_stop_where_a_loss_leaves_too_few_without_those_that_leave(tmp_path):
    faults = [[2, "begin", 6, "notice"], [0, "hand over", 1, "kill"]]
    options = {"data": "arrays", "way": "graph", "backs_up": True, "often": True}
    found, done = trained(tmp_path, 3, *faults, least=2, **options)
    assert not found
    assert "Traceback" not in done.errors
    assert len(re.findall(r"training stopped after .* rank 2 was told to go", done.errors)) == 2
    found, _ = trained(tmp_path, 2, **options)
    assert all(fact["uses"] == ONCE for fact in found.values())


@pytest.mark.parametrize(
    ("size", "least", "leavers", "point", "data"),
    [
        (2, 2, [1], ("begin", 6), "arrays"),
        (3, None, [0], ("validated", 1), "dataset"),
        in_full(3, None, [2], ("end", 1), "sequence"),
        in_full(3, None, [0, 1, 2], ("end", STEPS), "arrays"),
        in_full(3, None, [1], ("epoch end", EPOCHS), "arrays"),
        in_full(2, None, [1], ("end", 5), "generator"),
        in_full(1, None, [0], ("end", 6), "dataset"),
    ],
)
def test_a_job_that_stops_goes_on_with_the_next_step(tmp_path, size, least, leavers, point, data):
    """On another number of ranks, to the weights and the history of one left alone."""
    case = {"data": data, "validates": True, "backs_up": True, "way": "graph"}
    faults = [[rank, *point, "notice"] for rank in leavers]
    found, done = trained(tmp_path, size, *faults, least=least, **case)
    assert not found
    assert done.exit_code == 143
    assert "Traceback" not in done.errors
    advice = rf"training stopped after .*, since ranks? .* told to go \(SIGTERM\).* with {tmp_path}"
    assert len(re.findall(advice, done.errors)) == size
    found, _ = trained(tmp_path, 4 - size, **case)
    for fact in found.values():
        assert fact["uses"] == ONCE
        assert fact["iterations"] == fact["steps"] == EPOCHS * STEPS
        assert fact["history"]["seen"] == [48.0] * EPOCHS
        assert fact["history"]["val_seen"] == [21.0] * EPOCHS
