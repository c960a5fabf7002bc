"""Callbacks that need all ranks: alone, in rings of threads, and in training on rings of processes.

What programs/callbacks.py does in processes is looked at here; the rest needs no training.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce
import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce.keras.callbacks.metric_average import MetricAverage
from ringreduce.keras.callbacks.rank_zero import WRITERS, share_states
from ringreduce.keras.metric_states import combined_results, states_of
from ringreduce.testing import ring_of_threads
from tests.facts import facts_in
from tests.jobs import run_job
from tests.scope import in_full

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def world_of_one():
    """A default communicator of one rank."""
    with ringreduce.init() as communicator:
        yield communicator
    ringreduce.shutdown()


# In processes ------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, in_full(3)])
def facts(request, tmp_path_factory):
    """What each case of programs/callbacks.py said, by rank."""
    size = request.param
    arguments = ["tests/programs/callbacks.py", str(tmp_path_factory.mktemp("callbacks"))]
    result = run_job(size, arguments, timeout_s=60)
    assert result.exit_code == 0, result.errors
    said = {"size": size}
    for fact in facts_in(result.output):
        said.setdefault(fact["case"], {})[fact["rank"]] = fact
    lines = [line.partition("] ")[2] for line in result.output.splitlines()]
    said["printed"] = [line for line in lines if not line.startswith("{")]
    return said


def of_all_ranks(facts, case):
    return [facts[case][rank] for rank in range(facts["size"])]


@pytest.mark.tensorflow
def test_logs_are_those_of_one_process_on_all_data(facts):
    for fact in of_all_ranks(facts, "averaged logs"):
        assert fact["logged"] == {name: [value] * 2 for name, value in fact["expected"].items()}
        assert fact["last"] == fact["expected"]
        assert fact["keeps"]
    assert len(fact["expected"]) == 6


@pytest.mark.tensorflow
def test_early_stopping_and_plateaus_are_those_of_one_process_on_all_data(facts):
    for fact in of_all_ranks(facts, "stopping"):
        assert fact["epochs"] == fact["alone_epochs"]
        assert fact["rates"] == fact["alone_rates"]
        assert fact["weights"] == fact["alone_weights"]
        assert 4 < len(fact["epochs"]) < 40
        assert fact["rate"] < fact["rates"][0]
        assert fact["losses"] == facts["stopping"][0]["losses"]


@pytest.mark.tensorflow
def test_a_loss_that_is_nan_on_one_rank_stops_all_after_that_batch(facts):
    finite = []
    for fact in of_all_ranks(facts, "nan"):
        assert fact["batches"] == [0, 1, 2]
        assert fact["epochs"] == [0]
        assert fact["logged_nan"]
        finite.append(fact["finite"])
    assert finite == [True] * (facts["size"] - 1) + [False]


@pytest.mark.tensorflow
def test_a_rank_that_stops_takes_all_with_it(facts):
    assert [f["batches"] for f in of_all_ranks(facts, "one rank stops")] == [[0, 1]] * facts["size"]


@pytest.mark.tensorflow
def test_ranks_stop_and_call_alike_whoever_looks_at_batches(facts):
    for rank, fact in enumerate(of_all_ranks(facts, "several")):
        assert fact["looked"] == 24
        assert fact["batches"] == (list(range(8)) * 3 if rank == 0 else [])
        # As in one process: after the first batch, the epoch, the third batch.
        stopped = [fact[f"on_{hook}"] for hook in ("epoch_begin", "epoch_end", "train_batch_end")]
        assert stopped == [9, 16, 3]
        # Sixteen steps more, each with one bucket of gradients and nothing else.
        assert fact["asked"] == 16


@pytest.mark.tensorflow
def test_a_backup_on_rank_0_is_restored_on_all(facts):
    restored = of_all_ranks(facts, "restored")
    left = restored[0]["left"]
    for rank, fact in enumerate(restored):
        assert fact["had_backup"] is (rank == 0)
        assert not fact["has_backup"]  # Deleted at the end, as Keras does it.
        assert fact["epochs"] == [2]
        assert fact["start"] == [2, left]
    # Normalization had seen other data there, so this was copied and not merely equal.
    assert restored[1]["left"] != left
    # What random generators draw must stay each rank's own.
    assert len({str(fact["seeds"]) for fact in restored}) == facts["size"]


@pytest.mark.tensorflow
def test_a_backup_for_a_model_that_is_not_built_is_an_error_on_all(facts):
    for fact in of_all_ranks(facts, "unbuilt"):
        assert fact["error"] == "ConfigError"
        assert "the model is built on 0 ranks" in fact["text"]
        assert "keras.Input" in fact["text"]


@pytest.mark.tensorflow
def test_only_rank_0_writes_files(facts):
    first, *others = of_all_ranks(facts, "files")
    assert first["files"] == ["log.csv", "model.keras", "own.txt"]
    assert [fact["files"] for fact in others] == [[]] * len(others)
    # The mean over ranks of targets 0, 1, ... squared: averaged before it was written.
    loss = float(first["log"].splitlines()[1].split(",")[1])
    assert loss == np.float32(np.mean(np.arange(facts["size"]) ** 2))


@pytest.mark.tensorflow
def test_learning_rates_that_differ_become_rank_0s(facts):
    assert [fact["rate"] for fact in of_all_ranks(facts, "rates")] == [1.0] * facts["size"]


@pytest.mark.tensorflow
def test_the_learning_rate_is_warmed_up(facts):
    size = facts["size"]
    # From half the rate of one rank, 0.5, to `size` times it, over 4 batches of 2 epochs.
    expected = [0.5 * (1 + done / 4 * (size - 1)) for done in (1, 2, 3, 4, 4, 4)]
    for fact in of_all_ranks(facts, "warm-up"):
        assert fact["rates"] == [pytest.approx(rate, rel=1e-6) for rate in expected]
        assert fact["rates"][-1] == 0.5 * size
    said = f"Epoch 2: learning rate warmed up to {0.5 * size:g}."
    assert facts["printed"].count(said) == 1


@pytest.mark.tensorflow
def test_all_begin_with_the_roots_weights(facts):
    last = facts["size"] - 1
    for fact in of_all_ranks(facts, "broadcast"):
        assert fact["start"] == facts["broadcast"][last]["start"]
        assert fact["start"][:2] == facts["broadcast"][last]["mine"]
        assert fact["means"] == [float(last)] * 3


@pytest.mark.tensorflow
def test_weights_that_come_with_the_first_batch_are_copied_after_it(facts):
    weights = [fact["weights"] for fact in of_all_ranks(facts, "broadcast unbuilt")]
    assert weights == [weights[0]] * facts["size"]


@pytest.mark.tensorflow
def test_evaluation_by_all_is_that_of_one(facts):
    for fact in of_all_ranks(facts, "evaluate"):
        assert len(fact["pairs"]) == 5
        for what, (together, alone) in fact["pairs"].items():
            assert together == alone, what


@pytest.mark.tensorflow
def test_predictions_of_all_are_those_of_one(facts):
    for fact in of_all_ranks(facts, "predict"):
        assert len(fact["same"]) == 5
        assert all(fact["same"].values()), fact["same"]


@pytest.mark.tensorflow
def test_a_model_is_evaluated_with_the_moving_averages_of_rank_0(facts):
    for rank, fact in enumerate(of_all_ranks(facts, "averages")):
        assert fact["loss"][0] == pytest.approx(fact["loss"][1], rel=1e-6)
        assert fact["outputs"] < 1e-6
        assert fact["kept"] == [float(rank)] * 3


@pytest.mark.tensorflow
def test_ranks_that_log_under_different_names_are_an_error_on_all(facts):
    for fact in of_all_ranks(facts, "names"):
        assert fact["error"] == "MismatchError"
        assert "rank 0 logs loss, val_loss and rank 1 logs loss" in fact["text"]


# Metric states, in threads -----------------------------------------------------------------


class States(keras.metrics.Metric):
    """A state for each word that says how replicas combine."""

    def __init__(self):
        super().__init__(name="states")
        self.states = {
            word: self.add_variable((), "zeros", aggregation=word, name=word)
            for word in ("sum", "mean", "only_first_replica", "none")
        }

    def update_state(self, *arguments, **options):
        raise AssertionError("set by the test")

    def result(self):
        return {word: variable.value + 0.0 for word, variable in self.states.items()}


def model_with(metric):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    model.extra = metric  # Tracked, as one made in __init__ is.
    return model


def test_states_combine_as_their_variables_say():
    models = [model_with(States()) for _ in range(3)]

    def work(comm):
        model = models[comm.rank]
        for variable in model.extra.variables:
            variable.assign(2.0**comm.rank)
        # Rank 0 has had no batch, so what is there is none of the data's.
        together = combined_results(model, states_of(model, comm.rank), comm)
        return together, [float(v.numpy()) for v in model.extra.variables]

    for rank, (together, kept) in enumerate(ring_of_threads(3, work)):
        # 2 on rank 1 and 4 on rank 2. Results that are each rank's own are averaged.
        assert together == {
            "loss": 0.0,
            "sum": 6.0,
            "mean": 3.0,
            "only_first_replica": 2.0,
            "none": 3.0,
        }
        assert kept == [2.0**rank] * 4


class Vector(keras.metrics.Metric):
    """A metric with several numbers."""

    def __init__(self, length):
        super().__init__(name="vector")
        self.total = self.add_variable((length,), "zeros", dtype="int32", name="total")

    def result(self):
        return self.total.value * 2


def test_a_metric_of_several_numbers_is_added_too():
    models = [model_with(Vector(3)) for _ in range(2)]

    def work(comm):
        model = models[comm.rank]
        model.extra.total.assign([comm.rank, 2, 3])
        return combined_results(model, states_of(model, comm.rank + 1), comm)["vector"]

    for vector in ring_of_threads(2, work):
        assert vector.dtype == np.int32
        assert vector.tolist() == [2, 8, 12]


def test_nobody_has_had_a_batch():
    models = [model_with(States()) for _ in range(2)]

    def work(comm):
        model = models[comm.rank]
        return combined_results(model, states_of(model, 0), comm)

    assert ring_of_threads(2, work) == [{}, {}]


def test_metrics_that_differ_are_an_error_that_names_both():
    models = [model_with(Vector(3)), model_with(Vector(4))]

    def work(comm):
        model = models[comm.rank]
        try:
            combined_results(model, states_of(model, 1), comm)
        except ringreduce.MismatchError as error:
            return str(error)

    for text in ring_of_threads(2, work):
        assert "rank 0 keeps metrics in" in text
        assert "int32 of shape (3,)" in text
        assert "int32 of shape (4,)" in text


def test_states_are_put_back_where_a_result_fails():
    class Fails(Vector):
        fails = False

        def result(self):
            if self.fails:
                raise RuntimeError("no result")
            return super().result()

    models = [model_with(Fails(1)), model_with(Fails(1))]

    def work(comm):
        model = models[comm.rank]
        model.extra.total.assign([comm.rank + 1])
        states = states_of(model, 1)
        model.extra.fails = True
        try:
            combined_results(model, states, comm)
        except RuntimeError:
            return model.extra.total.numpy().tolist()

    assert ring_of_threads(2, work) == [[1], [2]]


# Logs, in threads --------------------------------------------------------------------------


def averaged(size, logs_of, model_of=lambda rank: model_with(Vector(1)), batches=1):
    """`logs_of` each rank after an epoch's end of `MetricAverage`."""
    models = [model_of(rank) for rank in range(size)]

    def work(comm):
        callback = MetricAverage(comm)
        callback.set_model(models[comm.rank])
        callback.on_epoch_begin(0)
        for batch in range(batches):
            callback.on_train_batch_end(batch)
        logs = logs_of(comm.rank)
        callback.on_epoch_end(0, logs)
        return logs

    return ring_of_threads(size, work)


def test_numbers_that_are_no_metrics_are_averaged_with_equal_weight():
    # "loss" has a tracker, which this train_step leaves alone: it says 0.
    logs = averaged(3, lambda rank: {"mine": rank + 1, "loss": float(3 * rank), "same": 0.1})
    assert logs == [{"mine": 2.0, "loss": 3.0, "same": 0.1}] * 3


def test_what_is_no_number_stays():
    def logs_of(rank):
        return {"text": str(rank), "none": None, "array": np.full(2, rank)}

    for rank, logs in enumerate(averaged(2, logs_of)):
        assert logs["text"] == str(rank)
        assert logs["none"] is None
        assert logs["array"].tolist() == [rank, rank]


def test_a_name_that_one_rank_lacks_is_an_error_on_all():
    def work(comm):
        callback = MetricAverage(comm)
        callback.set_model(models[comm.rank])
        try:
            callback.on_epoch_end(0, {"a": 1.0} if comm.rank else {"a": 1.0, "b": 2.0})
        except ringreduce.MismatchError as error:
            return str(error)

    models = [model_with(Vector(1)) for _ in range(3)]
    for text in ring_of_threads(3, work):
        assert "rank 0 logs a, b and rank 1 logs a" in text


def test_an_evaluation_between_epochs_needs_nobody_else():
    """Another callback's, on one rank, with the same callbacks."""
    models = [model_with(Vector(1)) for _ in range(2)]

    def work(comm):
        callback = MetricAverage(comm)
        callback.set_model(models[comm.rank])
        before = comm.statistics().collectives
        if comm.rank == 1:
            callback.on_test_begin()
            callback.on_test_batch_end(0)
            callback.on_test_end({"loss": 1.0})
        return comm.statistics().collectives - before

    assert ring_of_threads(2, work) == [0, 0]


def test_alone_logs_are_left_alone(world_of_one):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    data = np.ones((4, 1)), np.ones((4, 1))
    callbacks = [
        rr.callbacks.Together([keras.callbacks.EarlyStopping("loss")]),
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    ]
    before = world_of_one.statistics().collectives
    history = model.fit(*data, epochs=2, verbose=0, callbacks=callbacks)
    assert sorted(history.history) == ["loss"]
    assert world_of_one.statistics().collectives == before


# Forwarding --------------------------------------------------------------------------------


class Called(keras.callbacks.Callback):
    """Remembers which hooks were called, in which order."""

    def __init__(self, name, log):
        super().__init__()
        self.name, self.log = name, log

    def __getattribute__(self, attribute):
        if attribute.startswith(("on_", "set_")):
            return lambda *a, **o: self.log.append((self.name, attribute))
        return super().__getattribute__(attribute)


HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


def call(callback, hook):
    arguments = (0, {}) if "batch" in hook or "epoch" in hook else ({},)
    getattr(callback, hook)(*arguments)


def test_every_hook_of_keras_is_forwarded_in_order(world_of_one):
    log = []
    together = rr.callbacks.Together([Called("first", log), Called("second", log)])
    model = model_with(Vector(1))
    together.set_model(model)
    together.set_params({"epochs": 3})
    assert together.model is model
    assert together.params == {"epochs": 3}
    assert len(HOOKS) >= 16
    for hook in HOOKS:
        call(together, hook)
    expected = ["set_model", "set_params", *HOOKS]
    assert log == [(name, hook) for hook in expected for name in ("first", "second")]


def test_a_callback_on_rank_zero_is_not_called_elsewhere():
    def work(comm):
        log = []
        callback = rr.callbacks.OnRankZero(Called("own", log), comm)
        callback.set_model(models[comm.rank])
        callback.set_params({})
        for hook in HOOKS:
            call(callback, hook)
        return len(log)

    models = [model_with(Vector(1)) for _ in range(2)]
    assert ring_of_threads(2, work) == [len(HOOKS) + 2, 0]


def test_the_next_training_may_begin_with_what_rank_0_s_callback_knew_on_any_rank():
    def work(comm):
        best = keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True)
        if comm.rank == 0:
            best.best = 0.5
        # A loop of its own may give callbacks to rank 0 alone.
        more = [] if comm.rank else [keras.callbacks.CSVLogger("log.csv")]
        given = [rr.callbacks.OnRankZero(each, comm) for each in [best, *more]]
        share_states(given, comm)
        share_states(given[1:], comm)
        return best.best

    assert ring_of_threads(2, work) == [0.5, 0.5]


def test_callbacks_that_write_files_are_known():
    names = {kind.__name__ for kind in WRITERS}
    assert names >= {"ModelCheckpoint", "BackupAndRestore", "TensorBoard", "CSVLogger"}


RECORDERS = [
    "wandb.integration.keras.callbacks.metrics_logger",
    "mlflow.tensorflow.callback",
    "neptune_tensorflow_keras.impl",
    "comet_ml.keras",
    "clearml.callbacks",
    "aim.sdk.adapters.keras",
    "dvclive.keras",
]


@pytest.mark.parametrize("module", [*RECORDERS, "wandbox.keras", "my_project.mlflow"])
@pytest.mark.parametrize("derived", [False, True])
def test_callbacks_that_record_a_run_act_on_rank_zero(module, derived):
    kind = type("Theirs", (Called,), {"__module__": module})
    if derived:
        kind = type("Mine", (kind,), {"__module__": "__main__"})

    def work(comm):
        log = []
        together = rr.callbacks.Together([kind("own", log)], comm)
        together.on_train_batch_begin(0, {})
        return len(log)

    assert ring_of_threads(2, work) == ([1, 0] if module in RECORDERS else [1, 1])


@pytest.mark.parametrize("make", [rr.callbacks.Together, rr.callbacks.OnRankZero])
def test_what_is_no_callback_is_refused(make):
    with pytest.raises(ringreduce.ConfigError, match=r"no keras\.callbacks\.Callback"):
        make(keras.callbacks.EarlyStopping)


# Learning rates ----------------------------------------------------------------------------


def rates_of(callback, *, epochs=3, steps=2, optimizer=None):
    """The rate in each batch, as Keras would call the hooks."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=optimizer or keras.optimizers.SGD(0.5), loss="mse")
    callback.set_model(model)
    callback.set_params({"steps": steps})
    callback.on_train_begin()
    rates = []
    for epoch in range(epochs):
        callback.on_epoch_begin(epoch)
        for batch in range(steps or 2):
            callback.on_train_batch_begin(batch)
            rates.append(float(model.optimizer.learning_rate))
            callback.on_train_batch_end(batch)
        logs = {}
        callback.on_epoch_end(epoch, logs)
        assert logs == {"learning_rate": rates[-1]}
    return rates


def test_a_staircase_sets_the_rate_by_epoch():
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 2.0**-epoch)
    assert rates_of(schedule) == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]


def test_a_curve_sets_it_by_batch():
    schedule = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: epoch, staircase=False)
    assert rates_of(schedule) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


def test_outside_its_epochs_the_rate_is_left_alone():
    schedule = hvd.callbacks.LearningRateScheduleCallback(8.0, 0.125, start_epoch=1, end_epoch=2)
    assert rates_of(schedule, optimizer=keras.optimizers.SGD(0.25)) == [0.25] * 2 + [1.0] * 4


def test_alone_there_is_nothing_to_warm_up(world_of_one):
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=2)
    assert rates_of(warmup) == [0.5] * 6


def test_momentum_correction_is_that_of_a_momentum_scaled_for_one_step():
    """Goyal et al., remark 2: v = m * (new rate / old rate) * v + new rate * g."""

    def velocity(optimizer, callback):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(optimizer=optimizer, loss="mse")
        optimizer.build(model.trainable_variables)
        callback.set_model(model)
        callback.on_epoch_begin(0)
        optimizer.apply([tf.constant([[1.0]])])
        callback.on_epoch_begin(1)
        optimizer.apply([tf.constant([[1.0]])])
        return float(optimizer.momentums[0].numpy().item())

    def make(**options):
        return hvd.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 2.0**epoch, **options)

    # -0.5, then half of it and -1; with the correction half of twice it and -1.
    sgd = keras.optimizers.SGD(0.5, momentum=0.5)
    assert velocity(sgd, make(momentum_correction=False)) == -1.25
    assert velocity(keras.optimizers.SGD(0.5, momentum=0.5), make()) == -1.5
    wrapped = rr.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.5))
    with ringreduce.init():
        assert velocity(wrapped, make()) == -1.5
    ringreduce.shutdown()


@pytest.mark.parametrize(
    "make", [keras.optimizers.Adam, keras.optimizers.SGD, keras.optimizers.RMSprop]
)
def test_optimizers_without_such_a_momentum_need_no_correction(make):
    optimizer = make(0.25)
    schedule = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: epoch + 1.0)
    assert rates_of(schedule, optimizer=optimizer) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_an_epoch_of_unknown_length_needs_steps(world_of_one):
    with pytest.raises(ringreduce.ConfigError, match="Pass steps_per_epoch"):
        rates_of(hvd.callbacks.LearningRateWarmupCallback(1.0), steps=None)
    with pytest.raises(ringreduce.ConfigError, match="LearningRateScheduleCallback does not know"):
        rates_of(hvd.callbacks.LearningRateScheduleCallback(1.0, abs, staircase=False), steps=None)
    assert rates_of(hvd.callbacks.LearningRateWarmupCallback(1.0, steps_per_epoch=2), steps=None)


def test_a_negative_warm_up_is_refused():
    with pytest.raises(ringreduce.ConfigError, match="warmup_epochs is -1"):
        hvd.callbacks.LearningRateWarmupCallback(1.0, warmup_epochs=-1)


def test_a_root_that_is_no_rank_is_refused(world_of_one):
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
    callback.set_model(model_with(Vector(1)))
    with pytest.raises(ringreduce.ArrayError, match="Roots are 0 to 0"):
        callback.on_train_begin()


def test_a_root_other_than_0_needs_a_model_that_is_built():
    models = [keras.Sequential([keras.layers.Dense(1)]) for _ in range(2)]

    def work(comm):
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, communicator=comm)
        callback.set_model(models[comm.rank])
        with pytest.raises(ringreduce.ConfigError, match="the model is built on 0 ranks"):
            callback.on_train_begin()

    ring_of_threads(2, work)


def test_local_variables_keep_their_values_when_others_are_copied():
    models = [keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]) for _ in range(2)]

    def work(comm):
        model = models[comm.rank]
        model.set_weights([np.full((1, 1), comm.rank + 1.0), np.full(1, comm.rank + 1.0)])
        model.compile(optimizer=keras.optimizers.SGD(0.1))
        local = model.layers[0].bias
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", [local], communicator=comm)
        callback.set_model(model)
        callback.on_train_begin()
        return [float(np.squeeze(weight)) for weight in model.get_weights()]

    assert ring_of_threads(2, work) == [[1.0, 1.0], [1.0, 2.0]]


def test_horovods_names_and_arguments_are_taken():
    callbacks = hvd.callbacks
    assert callbacks.MetricAverageCallback()
    assert callbacks.BroadcastGlobalVariablesCallback(root_rank=0)
    assert callbacks.BroadcastGlobalVariablesCallback(0, "", None)
    assert callbacks.LearningRateWarmupCallback(
        initial_lr=0.1, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=1
    )
    assert callbacks.LearningRateScheduleCallback(
        initial_lr=0.1,
        multiplier=1.0,
        start_epoch=5,
        end_epoch=30,
        staircase=True,
        momentum_correction=True,
        steps_per_epoch=None,
    )
