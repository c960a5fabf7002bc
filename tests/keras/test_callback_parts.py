"""Callbacks alone and in rings of threads, without training."""

import threading
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce
import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce.keras import metric_states
from ringreduce.keras.callbacks.meeting import EpochMeetings
from ringreduce.keras.callbacks.metric_average import MetricAverage
from ringreduce.keras.callbacks.rank_zero import WRITERS, states_now, take_states
from ringreduce.keras.elastic.fields import Fields
from ringreduce.keras.metric_states import combined_results, states_of
from ringreduce.testing import ring_of_threads

pytestmark = pytest.mark.timeout(600)

schedule = hvd.callbacks.LearningRateScheduleCallback
warmup = hvd.callbacks.LearningRateWarmupCallback


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


class Vector(keras.metrics.Metric):
    """A metric with several numbers."""

    def __init__(self, length=1):
        super().__init__(name="vector")
        self.total = self.add_variable((length,), "zeros", dtype="int32", name="total")

    def result(self):
        return self.total.value * 2


def line_model(optimizer="sgd", **options):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    return model


def model_with(metric):
    model = line_model()
    model.extra = metric  # Tracked, as one made in __init__ is.
    return model


def on_threads(work, *metrics):
    """What ``work(comm, model)`` returns on each rank; there is a model for each metric."""
    models = [model_with(metric) for metric in metrics or (Vector(), Vector())]
    return ring_of_threads(len(models), lambda comm: work(comm, models[comm.rank]))


def test_states_combine_as_their_variables_say():
    def work(comm, model):
        for variable in model.extra.variables:
            variable.assign(2.0**comm.rank)
        # Rank 0 has had no batch, so what is there is none of the data's.
        together = combined_results(model, states_of(model, comm.rank), comm)
        return together, [float(v.numpy()) for v in model.extra.variables]

    # 2 on rank 1 and 4 on rank 2. Results that are each rank's own are averaged.
    combined = {"sum": 6.0, "mean": 3.0, "only_first_replica": 2.0, "none": 3.0}
    for rank, (together, kept) in enumerate(on_threads(work, States(), States(), States())):
        assert together == {"loss": 0.0, **combined}
        assert kept == [2.0**rank] * 4


def test_a_metric_of_several_numbers_is_added_too():
    def work(comm, model):
        model.extra.total.assign([comm.rank, 2, 3])
        return combined_results(model, states_of(model, comm.rank + 1), comm)["vector"]

    for vector in on_threads(work, Vector(3), Vector(3)):
        assert vector.dtype == np.int32
        assert vector.tolist() == [2, 8, 12]


def test_nobody_has_had_a_batch():
    def work(comm, model):
        return combined_results(model, states_of(model, 0), comm)

    assert on_threads(work, States(), States()) == [{}, {}]


def test_metrics_that_differ_are_an_error_that_names_both():
    def work(comm, model):
        with pytest.raises(ringreduce.MismatchError, match="rank 0 keeps metrics in") as failure:
            combined_results(model, states_of(model, 1), comm)
        return str(failure.value)

    for text in on_threads(work, Vector(3), Vector(4)):
        assert "int32 of shape (3,)" in text
        assert "int32 of shape (4,)" in text


def test_states_are_put_back_where_a_result_fails():
    class Fails(Vector):
        fails = False

        def result(self):
            if self.fails:
                raise RuntimeError("no result")
            return super().result()

    def work(comm, model):
        model.extra.total.assign([comm.rank + 1])
        states = states_of(model, 1)
        model.extra.fails = True
        with pytest.raises(RuntimeError):
            combined_results(model, states, comm)
        return model.extra.total.numpy().tolist()

    assert on_threads(work, Fails(), Fails()) == [[1], [2]]


@pytest.mark.parametrize(("machines", "exchanges"), [(("same", "same"), 1), (("one", "two"), 2)])
def test_results_travel_only_where_ranks_may_compute_others(monkeypatch, machines, exchanges):
    """Processors of two kinds may round otherwise."""
    kinds = threading.local()
    monkeypatch.setattr(metric_states, "_machine", lambda: kinds.name)

    def work(comm):
        kinds.name = machines[comm.rank]
        model = line_model(run_eagerly=True)
        rows = np.full((2 + comm.rank, 1), 1.0 + comm.rank)
        model.evaluate(rows, 0 * rows, verbose=0)
        before = comm.statistics().collectives
        found = combined_results(model, states_of(model, 1), comm)
        return found, comm.statistics().collectives - before

    (first, count), second = ring_of_threads(2, work)
    assert (first, count) == second
    assert count == exchanges


def test_optimizers_with_and_without_a_rate_that_can_be_set_are_an_error_on_all():
    def work(comm):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        model.compile(keras.optimizers.SGD(decay if comm.rank else 0.1), "mse")
        model.optimizer.build(model.trainable_variables)
        with pytest.raises(ringreduce.MismatchError, match=r"1 learning rates .* and 0 on rank 1"):
            EpochMeetings(model, comm).after([], Fields([], model))

    ring_of_threads(2, work)


# Logs, in threads --------------------------------------------------------------------------


def averaging(comm, model):
    callback = MetricAverage(comm)
    callback.set_model(model)
    return callback


def test_numbers_that_are_no_metrics_are_averaged_with_equal_weight_and_others_stay():
    def work(comm, model):
        callback = averaging(comm, model)
        callback.on_epoch_begin(0)
        callback.on_train_batch_end(0)
        # "loss" has a tracker, which this train_step leaves alone: it says 0.
        numbers = {"mine": comm.rank + 1, "loss": 3.0 * comm.rank, "same": 0.1}
        logs = {**numbers, "text": str(comm.rank), "none": None, "array": np.full(2, comm.rank)}
        callback.on_epoch_end(0, logs)
        return {**logs, "array": logs["array"].tolist()}

    averages = {"mine": 2.0, "loss": 3.0, "same": 0.1}
    assert on_threads(work, Vector(), Vector(), Vector()) == [
        {**averages, "text": str(rank), "none": None, "array": [rank] * 2} for rank in range(3)
    ]


def test_a_name_that_one_rank_lacks_is_an_error_on_all():
    def work(comm, model):
        with pytest.raises(ringreduce.MismatchError, match="rank 0 logs a, b and rank 1 logs a"):
            averaging(comm, model).on_epoch_end(
                0, {"a": 1.0} if comm.rank else {"a": 1.0, "b": 2.0}
            )

    on_threads(work, Vector(), Vector(), Vector())


def test_an_evaluation_between_epochs_needs_nobody_else():
    """Another callback's, on one rank, with the same callbacks."""

    def work(comm, model):
        callback = averaging(comm, model)
        before = comm.statistics().collectives
        if comm.rank == 1:
            callback.on_test_begin()
            callback.on_test_batch_end(0)
            callback.on_test_end({"loss": 1.0})
        return comm.statistics().collectives - before

    assert on_threads(work) == [0, 0]


def test_alone_logs_are_left_alone(world_of_one):
    model = line_model(run_eagerly=True)
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
    model = model_with(Vector())
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
    def work(comm, model):
        log = []
        callback = rr.callbacks.OnRankZero(Called("own", log), comm)
        callback.set_model(model)
        callback.set_params({})
        for hook in HOOKS:
            call(callback, hook)
        return len(log)

    assert on_threads(work) == [len(HOOKS) + 2, 0]


def test_the_next_training_may_begin_with_what_rank_0_s_callback_knew_on_any_rank():
    def work(comm):
        best = keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True)
        if comm.rank == 0:
            best.best = 0.5
        # A loop of its own may give callbacks to rank 0 alone.
        more = [] if comm.rank else [keras.callbacks.CSVLogger("log.csv")]
        given = [rr.callbacks.OnRankZero(each, comm) for each in [best, *more]]
        for some in (given, given[1:]):
            take_states(some, comm.all_gather_object(states_now(some, comm))[0])
        return best.best

    assert ring_of_threads(2, work) == [0.5, 0.5]


def test_callbacks_that_write_files_are_known():
    names = {kind.__name__ for kind in WRITERS}
    assert names >= {"ModelCheckpoint", "BackupAndRestore", "TensorBoard", "CSVLogger"}


RECORDERS = [
    *("wandb.integration.keras.callbacks.metrics_logger", "mlflow.tensorflow.callback"),
    *("neptune_tensorflow_keras.impl", "comet_ml.keras", "clearml.callbacks"),
    *("aim.sdk.adapters.keras", "dvclive.keras"),
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


# Learning rates ----------------------------------------------------------------------------


def rates_of(callback, *, epochs=3, steps=2, optimizer=None):
    """The rate in each batch, as Keras would call the hooks."""
    model = line_model(optimizer or keras.optimizers.SGD(0.5))
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


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: schedule(0.5, lambda epoch: 2.0**-epoch), [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]),
        (lambda: schedule(1.0, lambda at: at, staircase=False), [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]),
        (lambda: schedule(8.0, 0.125, start_epoch=1, end_epoch=2), [0.5] * 2 + [1.0] * 4),
        (lambda: warmup(0.5, warmup_epochs=2), [0.5] * 6),
    ],
    ids=["staircase", "curve", "left alone outside its epochs", "nothing to warm up alone"],
)
def test_rates_are_set_by_epoch_or_by_batch(world_of_one, make, expected):
    assert rates_of(make()) == expected


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_momentum_correction_is_that_of_a_momentum_scaled_for_one_step(world_of_one, is_wrapped):
    """Goyal et al., remark 2: v = m * (new rate / old rate) * v + new rate * g."""

    def velocity(**options):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
        optimizer = rr.DistributedOptimizer(optimizer) if is_wrapped else optimizer
        model.compile(optimizer=optimizer, loss="mse")
        optimizer.build(model.trainable_variables)
        callback = schedule(0.5, lambda epoch: 2.0**epoch, **options)
        callback.set_model(model)
        for epoch in range(2):
            callback.on_epoch_begin(epoch)
            optimizer.apply([tf.constant([[1.0]])])
        return float(optimizer.momentums[0].numpy().item())

    # -0.5, then half of it and -1; with the correction half of twice it and -1.
    assert velocity(momentum_correction=False) == -1.25
    assert velocity() == -1.5


@pytest.mark.parametrize(
    "make", [keras.optimizers.Adam, keras.optimizers.SGD, keras.optimizers.RMSprop]
)
def test_optimizers_without_such_a_momentum_need_no_correction(make):
    optimizer = make(0.25)
    callback = schedule(1.0, lambda epoch: epoch + 1.0)
    assert rates_of(callback, optimizer=optimizer) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_an_epoch_of_unknown_length_needs_steps(world_of_one):
    with pytest.raises(ringreduce.ConfigError, match="Pass steps_per_epoch"):
        rates_of(warmup(1.0), steps=None)
    with pytest.raises(ringreduce.ConfigError, match="LearningRateScheduleCallback does not know"):
        rates_of(schedule(1.0, abs, staircase=False), steps=None)
    assert rates_of(warmup(1.0, steps_per_epoch=2), steps=None)


@pytest.mark.parametrize(
    ("make", "given", "text"),
    [
        (rr.callbacks.Together, keras.callbacks.EarlyStopping, r"no keras\.callbacks\.Callback"),
        (rr.callbacks.OnRankZero, keras.callbacks.EarlyStopping, r"its class: EarlyStopping\("),
        (rr.callbacks.Together, np.ones((99, 9)), r"got ndarray of shape \(99, 9\), which is no"),
        (lambda epochs: warmup(1.0, warmup_epochs=epochs), -1, "warmup_epochs is -1"),
        (rr.callbacks.VerifyReplicas, 0, "every is 0"),
    ],
)
def test_wrong_arguments_are_refused(make, given, text):
    with pytest.raises(ringreduce.ConfigError, match=text):
        make(given)


def test_the_bar_of_a_rank_that_takes_over_counts_from_where_the_epoch_began(monkeypatch, capsys):
    """Else the little time since the loss would be divided by all steps: 5us/step."""
    ring, clock = SimpleNamespace(rank=1, size=2), [1000.0]
    monkeypatch.setattr("time.time", lambda: clock[0])
    monkeypatch.setattr("ringreduce.keras.callbacks.rank_zero.every_rank", lambda _: ring)
    bar = rr.callbacks.OnRankZero(keras.callbacks.ProgbarLogger(), ring)
    bar.set_params({"verbose": 2, "epochs": 1, "steps": 11})
    bar.set_model(model_with(Vector()))
    bar.on_train_begin()
    bar.on_epoch_begin(0)
    clock[0] += 8.0
    ring.rank = 0  # The first was lost.
    bar.on_train_batch_end(9, {"loss": 1.0})
    clock[0] += 3.0
    bar.on_epoch_end(0, {"loss": 1.0})
    assert "11/11 - 11s - 1s/step - loss: 1" in capsys.readouterr().out


def test_a_root_that_is_no_rank_is_refused(world_of_one):
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
    callback.set_model(model_with(Vector()))
    with pytest.raises(ringreduce.ArrayError, match="Roots are 0 to 0"):
        callback.on_train_begin()


def test_a_root_other_than_0_needs_a_model_that_is_built():
    def work(comm):
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, communicator=comm)
        callback.set_model(keras.Sequential([keras.layers.Dense(1)]))
        with pytest.raises(ringreduce.ConfigError, match="the model is built on 0 ranks"):
            callback.on_train_begin()

    ring_of_threads(2, work)


def test_local_variables_keep_their_values_when_others_are_copied():
    def work(comm, model):
        model.set_weights([np.full((1, 1), comm.rank + 1.0), np.full(1, comm.rank + 1.0)])
        local = model.layers[0].bias
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", [local], communicator=comm)
        callback.set_model(model)
        callback.on_train_begin()
        return [float(np.squeeze(weight)) for weight in model.layers[0].get_weights()]

    assert on_threads(work) == [[1.0, 1.0], [1.0, 2.0]]


def test_horovods_names_and_arguments_are_taken():
    assert hvd.callbacks.MetricAverageCallback()
    assert hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0)
    assert hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", None)
    given = {"initial_lr": 0.1, "momentum_correction": True, "steps_per_epoch": None}
    assert warmup(**given, warmup_epochs=5, verbose=1)
    assert schedule(**given, multiplier=1.0, start_epoch=5, end_epoch=30, staircase=True)


class _Counted(keras.metrics.MeanSquaredError):
    """A user's, whose result follows from more than its variables."""

    calls = 0

    def result(self):
        type(self).calls += 1
        return super().result() + self.calls


@pytest.mark.parametrize("is_own", [False, True])
def test_results_are_computed_anew_where_states_or_a_metric_of_ones_own_changed_them(is_own):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[_Counted()] if is_own else ["mae"])
    model.train_on_batch(np.ones((4, 1)), np.zeros((4, 1)))
    first = states_of(model, 1)
    again = states_of(model, 3, known=first)
    assert again.batches == 3
    assert (again.results is first.results) == (not is_own)
    assert (again.results == first.results) == (not is_own)
    given = states_of(model, 1, results={"loss": tf.constant(3.0)})
    assert given.results == {"loss": 3.0}
    model.train_on_batch(np.ones((4, 1)), np.ones((4, 1)))
    later = states_of(model, 2, known=first)
    assert later.results["loss"] == pytest.approx(float(model.get_metrics_result()["loss"]))
    assert later.results != first.results
