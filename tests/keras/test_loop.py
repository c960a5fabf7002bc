"""The loop of `rr.fit` beside Keras's own, in one process: what callbacks see, bits, errors."""

import gc
import os
import signal
import time
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce
import ringreduce.keras as rr
from ringreduce.keras import private
from ringreduce.keras.callbacks.watching import all_of, that_look
from ringreduce.keras.training import loop
from ringreduce.keras.training.steps import Steps
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.errors import MismatchError
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.filterwarnings("ignore:Your input ran out")]

ROWS = 44
X = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3) % 7 - 3
Y = X.sum(1, keepdims=True)


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    with ringreduce.init():
        yield
    ringreduce.shutdown()


class Hooks(keras.callbacks.Callback):
    """Notes each hook that is called, with its number and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []


def _noting(name: str) -> Any:
    def note(self: Hooks, number: Any = None, logs: Any = None) -> None:
        if isinstance(number, dict):
            number, logs = None, number
        self.seen.append([name, number, dict(logs or {})])

    return note


for _name in dir(keras.callbacks.Callback):
    if _name.startswith("on_") and not _name.startswith("on_batch"):
        setattr(Hooks, _name, _noting(_name))


# With their first values: each is traced once, and begins anew for each training.
_MADE: dict[str, tuple[Any, list[Any]]] = {}


def made(kind: str = "", **options: Any) -> Any:
    """The model of this kind and these options, as a new one is."""
    keras.utils.set_random_seed(3)
    key = f"{kind} {options} {private.has_plain_fit}"
    if key not in _MADE:
        model = _new(**options)
        model.optimizer.build(model.trainable_variables)
        _MADE[key] = model, [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    model, values = _MADE[key]
    for variable, value in zip((*model.variables, *model.optimizer.variables), values, strict=True):
        variable.assign(value)
    return model


def _new(optimizer: str = "SGD", *, dropout: bool = False, **options: Any) -> Any:
    layers = [keras.Input((3,)), keras.layers.Dense(4, activation="relu")]
    layers += [keras.layers.Dropout(0.5, seed=7)] if dropout else []
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    inner = getattr(keras.optimizers, optimizer)(0.01)
    model.compile(rr.DistributedOptimizer(inner), "mse", metrics=["mae"], **options)
    return model


def in_ring(ring: Any, *layers: Any) -> Any:
    """An eager model of one of several ranks in threads."""
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.25), ring)
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def slices(y: Any = Y) -> Any:
    return tf.data.Dataset.from_tensor_slices((X, y))


def dataset(batch: int = 4, *, is_counted: bool = True) -> Any:
    data = slices().batch(batch)
    return data if is_counted else data.filter(lambda *_: True)


def noisy() -> Any:
    """Each of Keras's epochs begins these numbers anew."""
    return dataset().map(lambda x, y: (x + tf.random.normal([], seed=5), y))


def generated() -> Any:
    while True:
        for first in range(0, ROWS, 4):
            yield X[first : first + 4], Y[first : first + 4]


def case(*data: Any, steps_per_execution: int = 1, run_eagerly: bool = False, **given: Any) -> Any:
    """Arguments of `rr.fit`, where functions make data, and those of `compile`."""
    compiled = {"steps_per_execution": steps_per_execution, "run_eagerly": run_eagerly}
    return data, given, compiled


def stopping(hook: str, at: int) -> Any:
    """A callback that wants to stop in a hook."""

    def stop(number: int, logs: Any = None) -> None:
        callback.model.stop_training |= number == at

    callback = keras.callbacks.LambdaCallback(**{hook: stop})
    return [callback]


uncounted = partial(dataset, is_counted=False)
CASES: dict[str, Any] = {
    "arrays": case(X, Y, batch_size=5, epochs=3),
    "unknown length": case(uncounted, epochs=3),
    "steps that go on": case(dataset, epochs=4, steps_per_epoch=4),
    "more steps than data": case(dataset, epochs=2, steps_per_epoch=14),
    "executions of steps": case(
        lambda: dataset().repeat(), epochs=2, steps_per_epoch=4, steps_per_execution=3
    ),
    "executions, unknown length": case(uncounted, epochs=2, steps_per_execution=3),
    "validation, later epochs": case(
        dataset, epochs=4, initial_epoch=1, validation_data=partial(dataset, 5), validation_freq=2
    ),
    "validation in steps": case(dataset, epochs=2, validation_data=generated, validation_steps=3),
    "none": case(dataset, epochs=0),
    "eager executions": case(
        partial(dataset, 11), epochs=2, steps_per_execution=3, run_eagerly=True
    ),
    "stops at a batch": case(dataset, epochs=2, callbacks=stopping("on_train_batch_end", 2)),
    "stops at an epoch's end": case(dataset, epochs=5, callbacks=stopping("on_epoch_end", 1)),
    "stops at an epoch's begin": case(dataset, epochs=5, callbacks=stopping("on_epoch_begin", 1)),
    "shuffled": case(lambda: slices().shuffle(ROWS, seed=5).batch(4), epochs=3),
    "random numbers": case(noisy, epochs=3),
    "class weights": case(lambda: slices(np.int32(Y > 0)).batch(4), class_weight={0: 1.0, 1: 3.0}),
}


def trained(name: str, *callbacks: Any) -> tuple[Any, list[Any]]:
    """The model, and what it has come to: history, epochs and weights."""
    data, given, compiled = CASES[name]
    data = [part() if callable(part) else part for part in data]
    given = {key: value() if callable(value) else value for key, value in given.items()}
    model = made("arrays" if name == "arrays" else "", **compiled)
    given["callbacks"] = [*given.get("callbacks", ()), *callbacks]
    history = rr.fit(model, *data, verbose=0, **given)
    assert model.history is history
    return model, [history.history, history.epoch, [w.tolist() for w in model.get_weights()]]


# In these the loop takes no branch that it does not take in another one, or in another test.
RARE = (
    *("executions of steps", "validation, later epochs", "eager executions"),
    *("stops at an epoch's end", "shuffled", "class weights"),
)


@pytest.mark.parametrize("name", [in_full(name) if name in RARE else name for name in CASES])
def test_callbacks_and_bits_are_those_of_keras_and_of_single_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    run = Steps.run

    def noting(self: Steps, iterator: Any, most: int, limit_s: float | None) -> Any:
        asked.append(most)
        return run(self, iterator, most, limit_s)

    monkeypatch.setattr(Steps, "run", noting)
    monkeypatch.setattr(loop, "_CALL_S", 1e6)  # On a busy machine a step may take longer.
    ours, theirs = Hooks(), Hooks()
    _, one_by_one = trained(name, ours)
    calls = len(asked)
    model, found = trained(name)
    assert isinstance(model.train_function, Steps)
    if name not in ("none", "stops at a batch") and "executions" not in name:
        assert len(asked) - calls < calls
    monkeypatch.setattr(private, "has_plain_fit", lambda model: False)
    plain, expected = trained(name, theirs)
    assert not isinstance(plain.train_function, Steps)
    assert ours.seen == theirs.seen
    assert found == one_by_one == expected


def test_an_interrupt_is_heard_after_few_steps_where_data_has_become_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "_CALL_S", 0.2)  # On a busy machine a step may take longer.
    at = 100

    def read(number: Any) -> Any:
        if number == at:
            os.kill(os.getpid(), signal.SIGINT)
        ready = time.perf_counter() + (0.0 if number < at else loop._CALL_S)
        while time.perf_counter() < ready:
            pass
        return X[:4], Y[:4]

    def batch(number: Any) -> Any:
        x, y = tf.numpy_function(read, [number], (tf.float32, tf.float32))
        return tf.ensure_shape(x, (4, 3)), tf.ensure_shape(y, (4, 1))

    model = made()
    # Where the tests run in the background, a shell may have had it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            rr.fit(model, tf.data.Dataset.range(2 * at).map(batch), verbose=0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert int(model.optimizer.iterations.numpy()) <= at + 3


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_call_makes_one_step_at_least_and_the_next_goes_on(
    is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_CALL_S", 0.0)
    ends: list[int] = []
    one = keras.callbacks.LambdaCallback(on_train_batch_end=lambda at, logs: ends.append(at))
    monkeypatch.setattr(type(one), "looks_at_batches", False, raising=False)
    model = made()
    rr.fit(model, dataset(is_counted=is_counted), epochs=2, verbose=0, callbacks=[one])
    assert ends == [*range(11)] * 2
    assert int(model.optimizer.iterations.numpy()) == 22


@pytest.mark.parametrize(
    ("name", "jit", "is_counted"), [("Adam", True, True), in_full("AdamW", False, False)]
)
def test_no_step_is_counted_that_was_not_made(name: str, jit: bool, is_counted: bool) -> None:
    weights = []
    for is_watched in (True, False):
        model = made(optimizer=name, dropout=True, jit_compile=jit)
        callbacks = [Hooks()] if is_watched else []
        data = dataset(4 if jit else 5, is_counted=is_counted)
        rr.fit(model, data, epochs=3, verbose=0, callbacks=callbacks)
        assert int(model.optimizer.iterations.numpy()) == (33 if jit else 27)
        weights.append(model.get_weights())
    assert all(map(np.array_equal, *weights))


def test_a_second_training_traces_nothing_and_a_compiled_one_anew() -> None:
    traces = []

    class Traced(keras.Model):
        def train_step(self, data: Any) -> Any:
            traces.append(1)
            return super().train_step(data)

    inputs = keras.Input((3,))
    model = Traced(inputs, keras.layers.Dense(1)(inputs))

    def count(data: Any) -> int:
        before = len(traces)
        rr.fit(model, data, verbose=0)
        return len(traces) - before

    for _ in range(2):
        model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        assert count(dataset()) > 0
        assert count(dataset()) == 0
        assert count(dataset(is_counted=False)) == 0
    function = model.train_function
    model.fit(dataset(), verbose=0, shuffle=False)  # By Keras's own function.
    model.train_on_batch(X, Y)
    assert model.train_function is function
    assert count(dataset()) == 0
    model.train_function = None
    assert count(dataset()) > 0


@pytest.mark.parametrize(
    "hook", ["on_train_begin", "on_epoch_begin", "on_train_batch_end", "on_epoch_end"]
)
def test_after_an_error_no_end_is_told(hook: str) -> None:
    hooks = Hooks()

    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("mine")

    setattr(hooks, hook, fail)
    with pytest.raises(LookupError, match="mine"):
        rr.fit(made(), dataset(), verbose=0, callbacks=[hooks])
    assert "on_train_end" not in [name for name, *_ in hooks.seen]


def test_what_a_generator_raises_is_raised() -> None:
    def failing() -> Any:
        for number in range(100):
            if number == 7:
                raise LookupError("mine")
            yield X[:4], Y[:4]

    with pytest.raises(LookupError, match="mine"):
        rr.fit(made(), failing(), steps_per_epoch=5, epochs=4, verbose=0)


def test_a_model_compiled_within_training_goes_on() -> None:
    class Compiles(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                self.model.layers[0].trainable = False
                rate = rr.DistributedOptimizer(keras.optimizers.SGD(0.01))
                self.model.compile(rate, "mse", metrics=["mae"])
            self.first = self.model.layers[0].get_weights()

    model, callback = _new(), Compiles()
    rr.fit(model, dataset(), epochs=2, verbose=0, callbacks=[callback])
    assert all(map(np.array_equal, callback.first, model.layers[0].get_weights()))


@pytest.mark.parametrize("name", ["fit", "evaluate", "make_train_function"])
def test_a_loop_of_the_users_own_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    plain = getattr(keras.Model, name)

    def own(self: Any, *arguments: Any, **options: Any) -> Any:
        called.append(name)
        return plain(self, *arguments, **options)

    # As mlflow.autolog does, or a subclass.
    monkeypatch.setattr(keras.Model, name, own)
    model = _new(run_eagerly=True)
    rr.fit(model, dataset(22), validation_data=dataset(22), verbose=0)
    assert called
    assert not isinstance(model.train_function, Steps)


def test_all_ranks_have_the_loop_that_one_must_have(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where a package has replaced `fit` on that rank alone.
    replaced: list[Any] = []
    monkeypatch.setattr(private, "has_plain_fit", lambda model: model not in replaced)

    def work(ring: Any) -> Any:
        model = in_ring(ring)
        model.layers[0].kernel.assign(np.ones((3, 1)))
        if ring.rank == 1:
            replaced.append(model)
        ring.barrier()
        rr.fit(model, X, Y, batch_size=22, verbose=0, communicator=ring)
        assert not isinstance(model.train_function, Steps)
        return model.get_weights()

    assert all(map(np.array_equal, *ring_of_threads(2, work)))


@pytest.mark.parametrize(
    ("is_counted", "where"),
    [
        (True, "found 3 batches in an epoch of rank 1, and 2 in that"),
        (False, "not know, (ended after 2|had not ended after [123]) batches of the epoch: if"),
    ],
)
def test_data_that_ends_early_on_one_rank_is_named(is_counted: bool, where: str) -> None:
    def work(ring: Any) -> None:
        data = dataset(is_counted=is_counted).take(2 + ring.rank)
        rr.fit(in_ring(ring), data, verbose=0, communicator=ring)

    with pytest.raises(MismatchError, match=where):
        ring_of_threads(2, work)


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_data_are_freed_after_training(kind: str) -> None:
    def work(ring: Any) -> None:
        x, options = np.ones((8, 3), "float32"), {"verbose": 0, "communicator": ring}
        data = (x, x[:, :1]) if kind == "arrays" else (dataset(),)
        kept = weakref.ref(data[0])
        validation = data if kind == "arrays" else None
        rr.fit(in_ring(ring), *data, validation_data=validation, **options)
        del x, data, validation
        # A thread of TensorFlow's that reads ahead may have them for a moment.
        assert any(gc.collect() >= 0 and kept() is None for _ in range(50))

    ring_of_threads(1, work)


@pytest.mark.filterwarnings("ignore:2 ranks will not train exactly")
def test_a_rank_without_rows_of_a_batch_keeps_its_averages_and_all_end_with_rank_0s() -> None:
    x = np.repeat(np.float32([[0], [4], [8], [12], [16]]), 3, axis=1)

    def work(ring: Any) -> list[Any]:
        norm, found = keras.layers.BatchNormalization(momentum=0.5), []

        def look(*_: Any, **__: Any) -> None:
            found.append([weight.numpy()[0].item() for weight in norm.non_trainable_variables])

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        options = {"batch_size": 4, "shuffle": False, "callbacks": [callback], "verbose": 0}
        rr.fit(in_ring(ring, norm), x, x[:, :1], communicator=ring, **options)
        look()
        return found[1:]

    # From mean 0 and variance 1; the last row is rank 1's.
    assert ring_of_threads(2, work) == [[[1.0, 2.5], [1.0, 2.5]], [[10.5, 1.25], [1.0, 2.5]]]


class Updating(keras.Sequential):
    """Its steps look after weights and numbers themselves."""

    rate = 1.0

    def train_step(self, data: Any) -> Any:
        for one in self.trainable_variables:
            one.assign_sub(self.rate * tf.reduce_mean(data[0]) * tf.ones_like(one))
        return {"one": tf.reduce_mean(data[1])}

    def test_step(self, data: Any) -> Any:
        return {"one": tf.reduce_mean(data[1])}


def updating(ring: Any, rate: float, **options: Any) -> list[int]:
    """The batches that a training has begun, and what has ended it."""
    x, begun = np.arange(12, dtype="float32").reshape(12, 1), []
    model = Updating([keras.Input((1,)), keras.layers.Dense(1)])
    model.rate = rate
    model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.25), ring), run_eagerly=True)
    one = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda at, logs: begun.append(at))
    given = {"batch_size": 4, "shuffle": False, "callbacks": [one], "verbose": 0, **options}
    text = "a train_step that updates weights itself"
    with pytest.raises(MismatchError, match=text) if rate else nullcontext():
        rr.fit(model, x, x, communicator=ring, **given)
    return begun


def test_weights_that_a_step_assigns_are_compared_after_the_first_batch() -> None:
    assert ring_of_threads(2, lambda ring: updating(ring, rate=1.0)) == [[0], [0]]


def test_numbers_of_a_test_step_beside_metrics_are_told() -> None:
    x = np.ones((12, 1), "float32")
    given = {"validation_data": (x, x), "rate": 0.0, "epochs": 2}
    with pytest.warns(rr.ParityWarning, match="returns val_one beside metrics: shown is") as found:
        ring_of_threads(2, lambda ring: updating(ring, **given))
    assert len(found) == 1


@pytest.mark.filterwarnings("ignore:Limiting")
def test_trial_runs_are_limited() -> None:
    model = made()
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    try:
        history = rr.fit(model, dataset(), epochs=5, verbose=0)
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert len(history.epoch) == 2
    assert int(model.optimizer.iterations.numpy()) == 6


class _Orbax(getattr(keras.callbacks, "OrbaxCheckpoint", keras.callbacks.ModelCheckpoint)):
    def __init__(self, save_freq: str | int = "epoch") -> None:
        """Do without its package."""
        keras.callbacks.Callback.__init__(self)
        self.save_freq = save_freq


class _Own(keras.callbacks.ModelCheckpoint):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Look."""


def test_callbacks_that_look_at_batches_are_known(tmp_path: Path) -> None:
    path = str(tmp_path / "model.keras")
    callbacks = keras.callbacks
    quiet = [
        callbacks.EarlyStopping(),
        callbacks.ModelCheckpoint(path),
        callbacks.BackupAndRestore(path),
        _Orbax(),
        callbacks.TensorBoard(path),
        callbacks.CSVLogger(path),
        callbacks.ReduceLROnPlateau(),
        callbacks.LearningRateScheduler(lambda epoch, rate: rate),
        callbacks.LambdaCallback(on_epoch_end=print),
        callbacks.ProgbarLogger(),
        callbacks.History(),
        rr.callbacks.VerifyReplicas(None),
        rr.callbacks.Profile(),
    ]
    assert that_look(all_of([rr.callbacks.Together(quiet)])) == []
    looking = [
        callbacks.TerminateOnNaN(),
        callbacks.ModelCheckpoint(path, save_freq=10),
        callbacks.BackupAndRestore(path, save_freq=10),
        _Orbax(save_freq=10),
        callbacks.TensorBoard(path, update_freq=10),
        callbacks.TensorBoard(path, profile_batch=2),
        callbacks.LambdaCallback(on_train_batch_begin=print),
        _Own(path),
    ]
    for one in looking:
        within = rr.callbacks.Together([rr.callbacks.OnRankZero(one), *quiet])
        assert that_look(all_of([within])) == [type(one).__name__]
