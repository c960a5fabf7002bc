"""What callbacks know of a training: which of it a backup has, and that training goes on by it."""

from collections import deque

import keras
import ml_dtypes
import numpy as np
import pytest

import ringreduce
import ringreduce.keras as rr
from ringreduce.keras.elastic.fields import OWN, Fields
from ringreduce.testing import ring_of_threads
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

GENERATOR = np.random.default_rng(5)
X = GENERATOR.normal(size=(24, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
EPOCHS = 6


def made(optimizer=None):
    dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))
    model = keras.Sequential([keras.Input((3,)), dense])
    # So large that the loss goes up and down.
    model.compile(optimizer or keras.optimizers.SGD(0.9), "mse", metrics=["mae"], run_eagerly=True)
    return model


# What a process has for itself, besides `OWN`, or what is no number, text, or array.
NOT_TAKEN = {
    ("*", "monitor_op"): "a function, chosen anew",
    ("*", "_model"): "the model",
    ("CSVLogger", "writer"): "an open file",
    ("CSVLogger", "csv_file"): "an open file",
    ("TensorBoard", "_writers"): "open files",
    ("TensorBoard", "_prev_summary_state"): "summaries of this process",
    ("ProgbarLogger", "*"): "what stands on the screen",
    ("BackupAndRestore", "*"): "the place, which its file has",
}


def of_keras(folder):
    """One of each of Keras's callbacks."""
    made_by = {
        "BackupAndRestore": lambda kind: kind(folder / "backup", delete_checkpoint=False),
        "CSVLogger": lambda kind: kind(folder / "log.csv"),
        "EarlyStopping": lambda kind: kind("loss", patience=9, restore_best_weights=True),
        "LearningRateScheduler": lambda kind: kind(lambda epoch: 0.9),
        "ModelCheckpoint": lambda kind: kind(folder / "best.keras", "loss", save_best_only=True),
        "ReduceLROnPlateau": lambda kind: kind("loss", patience=1, cooldown=3),
        "TensorBoard": lambda kind: kind(folder / "board", update_freq=1),
        "RemoteMonitor": None,  # It sends to a server, and notes nothing.
        "SwapEMAWeights": None,  # It needs another optimizer; it notes whether weights are swapped.
        "OrbaxCheckpoint": None,  # It needs a package.
        "LambdaCallback": lambda kind: kind(),
    }
    found = []
    for name in sorted(vars(keras.callbacks)):
        kind = getattr(keras.callbacks, name)
        if not (isinstance(kind, type) and issubclass(kind, keras.callbacks.Callback)):
            continue
        make = made_by.get(name, lambda kind: kind())
        if make is not None:
            found.append(make(kind))
    return found


def test_whatever_epochs_change_of_kerass_own_callbacks_is_taken_or_has_a_reason(tmp_path, caplog):
    every = [c for c in of_keras(tmp_path) if type(c) is not keras.callbacks.CallbackList]
    before = {}

    class First(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 0:
                self.fields = Fields(every, self.model)
                before.update({id(c): dict(vars(c)) for c in every})

    model = made()
    first = First()
    model.fit(X, Y, batch_size=8, epochs=EPOCHS, verbose=0, callbacks=[*every, first])
    assert len(every) > 8
    unknown = []
    for callback, (kind, taken) in zip(every, first.fields.changed(), strict=True):
        for name, value in vars(callback).items():
            is_same = before[id(callback)].get(name) is value
            reasons = {(kind, name), ("*", name), (kind, "*")} & NOT_TAKEN.keys()
            if not (is_same or name in taken or reasons or name in own_names(callback)):
                unknown.append((kind, name, value))
    assert not unknown
    assert "leave out" not in caplog.text  # Nothing that a user could do something about.


def own_names(callback):
    return {name for kind, names in OWN.items() if isinstance(callback, kind) for name in names}


class Kinds(keras.callbacks.Callback):
    """Has what may be taken, and what may not."""

    def __init__(self):
        super().__init__()
        self.options = {"kept": True}


def test_numbers_texts_arrays_and_collections_are_taken():
    values = {
        "number": 3,
        "real": 0.1 + 0.2,
        "infinite": float("inf"),
        "of numpy": np.float32(0.1),
        "text": "näme",
        "nothing": None,
        "list": [1, [2.5, "a"], None],
        "tuple": (1, (2,)),
        "dict": {"a": {"b": [1]}, "c": ()},
        "array": np.arange(6, dtype="int16").reshape(2, 3),
        "half": np.arange(3).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 2)),
        "arrays": [np.ones(2), {"x": np.zeros((), "bool")}],
        "set": {1},
        "deque": deque([1, [2.5]], 7),
    }
    others = {
        "object": object(),
        "keyed": {1: 2},
        "texts": np.array(["a"]),
        "sets": {(1, object())},
    }
    first, second = Kinds(), Kinds()
    fields, taking = (Fields([callback], made()) for callback in (first, second))
    vars(first).update(values | others)
    [(kind, changed)] = fields.changed()
    assert (kind, changed.keys()) == ("Kinds", values.keys())
    taking.put(fields.packed())
    assert vars(second).keys() == {*vars(Kinds()), *values}
    for name, value in values.items():
        found = vars(second)[name]
        assert repr(found) == repr(value.item() if isinstance(value, np.generic) else value)
    # Each has its own memory.
    vars(second)["array"][0, 0] = 9
    assert vars(first)["array"][0, 0] == 0


def test_lists_in_themselves_and_long_ones_are_left_out_and_what_has_grown_is_named(caplog):
    callback = Kinds()
    callback.seen, callback.large = [0.5], np.zeros(1 << 18)
    fields = Fields([callback], made())
    callback.within = [1]
    callback.within.append(callback.within)
    callback.many = [[0] * 100] * 101
    callback.large = np.ones(1 << 18)
    [(_, changed)] = fields.changed()
    assert (changed.keys(), caplog.text) == ({"large"}, "")
    callback.seen *= 10_001
    fields.packed()
    assert "leave out Kinds.seen: more than 10,000 items" in caplog.text


def test_of_several_callbacks_of_a_class_each_gets_its_own_and_others_nothing():
    first = [Kinds(), keras.callbacks.EarlyStopping("loss"), Kinds()]
    second = [Kinds(), Kinds(), keras.callbacks.TerminateOnNaN()]
    fields, taking = (Fields(callbacks, made()) for callbacks in (first, second))
    first[0].count, first[1].wait, first[2].count = 1, 2, 3
    taking.put(fields.packed())
    assert [vars(callback).get("count") for callback in second] == [1, 3, None]
    assert not hasattr(second[2], "wait")


def test_a_rank_that_has_left_out_what_acts_on_another_gets_its_own():
    first, second = [Kinds(), Kinds()], [Kinds()]
    fields, taking = Fields(first, made(), first[:1]), Fields(second, made())
    first[0].count, first[1].count = 1, 2
    taking.put(fields.packed())
    assert second[0].count == 2


def test_what_is_much_larger_than_the_model_is_left_out_with_a_word(caplog):
    """Such as the outputs of all epochs."""
    first, second = Kinds(), Kinds()
    fields, taking = (Fields([callback], made()) for callback in (first, second))
    first.count, first.outputs = 1, [np.zeros(1 << 25, "int8")] * 3
    for _ in range(2):
        packed = fields.packed()
    assert "leave out Kinds.outputs: 96 MB" in caplog.text
    assert len(caplog.records) == 1
    taking.put(packed)
    assert (second.count, hasattr(second, "outputs")) == (1, False)


class Lost(Exception):
    pass


class Seen(keras.callbacks.Callback):
    """A user's own, which counts and lists."""

    def __init__(self):
        super().__init__()
        self.count, self.losses, self.began = 0, [], None

    def on_train_begin(self, logs=None):
        self.began = "now"

    def on_epoch_end(self, epoch, logs=None):
        self.count += 1
        self.losses.append(logs["loss"])


class Fails(keras.callbacks.Callback):
    def __init__(self, epoch, batch):
        super().__init__()
        self.at, self.epoch = (epoch, batch), None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise Lost

    def on_epoch_end(self, epoch, logs=None):
        if (epoch, "end") == self.at:
            raise Lost


def begun(ring, folder, callbacks, *, fails=None, save_freq="epoch"):
    """Train up to where it fails, and return the model; None if it does."""
    # First, though it must have what the others have come to.
    backup = keras.callbacks.BackupAndRestore(folder / "backup", save_freq=save_freq)
    acting = [backup, *callbacks, *([Fails(*fails)] if fails else [])]
    model = made(rr.DistributedOptimizer(keras.optimizers.SGD(0.9, momentum=0.5), ring))
    how = {"batch_size": 8, "epochs": EPOCHS, "verbose": 0, "communicator": ring}
    try:
        rr.fit(model, X, Y, callbacks=acting, **how)
    except Lost:
        for callback in callbacks:  # As the end of a process does.
            if (file := getattr(callback, "csv_file", None)) is not None:
                file.close()
        return None
    return model


def weights_of(model):
    return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]


def monitored(ring, folder, **how):
    """What callbacks that go by metrics have in the end, and the model."""
    folder.mkdir(exist_ok=True)
    best, rows, seen = folder / "best.weights.h5", folder / "log.csv", Seen()
    of_file = {"save_best_only": True, "save_weights_only": True}
    callbacks = [
        stop := keras.callbacks.EarlyStopping("loss", 0.01, 4, restore_best_weights=True),
        rate := keras.callbacks.ReduceLROnPlateau("loss", patience=2, cooldown=1),
        keras.callbacks.ModelCheckpoint(best, "loss", **of_file),
        keras.callbacks.CSVLogger(rows, append=True),
        seen,
    ]
    if (model := begun(ring, folder, callbacks, **how)) is None:
        return None
    weights, history = weights_of(model), model.history
    model.load_weights(best)
    known = stop.wait, stop.best, stop.best_epoch, stop.min_delta, rate.wait, rate.cooldown_counter
    listed = seen.count, seen.losses, history.history, history.epoch, rows.read_text()
    return [*weights, *model.get_weights()], known, listed


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("place", [1, "end"])
def test_a_training_goes_on_after_an_epoch_as_if_nothing_had_happened(tmp_path, size, place):
    def work(ring):
        undisturbed = monitored(ring, tmp_path / "whole")
        assert monitored(ring, tmp_path / "parts", fails=(3, place)) is None
        return undisturbed, monitored(ring, tmp_path / "parts")

    for (weights, *known), (weights_after, *known_after) in ring_of_threads(size, work):
        assert known_after == known
        assert all(map(np.array_equal, weights_after, weights))


@pytest.mark.parametrize("size", [in_full(1), 2])
@pytest.mark.parametrize(
    ("fails", "save_freq"), [in_full((3, 2), 2), in_full((1, 0), 1), ((1, 1), 1)]
)
def test_a_training_goes_on_after_a_step_and_makes_none_twice(tmp_path, size, fails, save_freq):
    def work(ring):
        undisturbed = begun(ring, tmp_path / "whole", [], save_freq=save_freq)
        seen = Seen()
        assert begun(ring, tmp_path / "parts", [], fails=fails, save_freq=save_freq) is None
        model = begun(ring, tmp_path / "parts", [seen], save_freq=save_freq)
        assert seen.count == EPOCHS - fails[0]
        assert model.history.epoch == list(range(EPOCHS))
        return all(map(np.array_equal, weights_of(model), weights_of(undisturbed)))

    assert all(ring_of_threads(size, work))


class Changes(keras.callbacks.Callback):
    """Changes the logs on one rank."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def on_epoch_end(self, epoch, logs=None):
        if self.rank == 1:
            logs["loss"] += 1


def test_a_callback_that_has_come_to_other_values_on_some_rank_is_an_error_on_all():
    def work(ring):
        model = made(rr.DistributedOptimizer(keras.optimizers.SGD(0.1), ring))
        callbacks = [Changes(ring.rank), keras.callbacks.EarlyStopping("loss", patience=5)]
        with pytest.raises(
            ringreduce.MismatchError, match="EarlyStopping has come to other values"
        ):
            rr.fit(model, X, Y, verbose=0, callbacks=callbacks, communicator=ring)

    ring_of_threads(2, work)
