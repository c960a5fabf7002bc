"""Whenever a job is killed, what is on the disk is a whole backup, which it goes on from."""

import contextlib
import itertools
import os
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce
import ringreduce.keras as rr
from ringreduce.effects.notice import Notice
from ringreduce.keras.elastic.backup import back_up
from ringreduce.keras.training.looking import LooksInFit
from ringreduce.keras.training.ranks import Training
from ringreduce.testing import ring_of_threads

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]

EPOCHS, STEPS = 2, 2
ONES = np.ones((8, 1), "float32")


class Count(keras.layers.Layer):
    """Its weight counts the steps."""

    def build(self, _):
        self.steps = self.add_weight(shape=(), initializer="zeros", name="steps")

    def call(self, inputs):
        return inputs * 0 - self.steps


def counting(ring):
    """A model whose weight counts the steps."""
    model = keras.Sequential([keras.Input((1,)), Count()])
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(1.0), ring)
    model.compile(optimizer, lambda y, found: tf.reduce_mean(found, -1), run_eagerly=True)
    return model


def counted(ring, *callbacks):
    """Train, and return how many steps have been made of the whole training."""
    model = counting(ring)
    data = np.ones((STEPS, 1), "float32")
    given = {"batch_size": 1, "epochs": EPOCHS, "verbose": 0, "communicator": ring}
    rr.fit(model, data, data, callbacks=callbacks, **given)
    count = float(model.layers[0].steps.numpy())
    assert count == int(model.optimizer.iterations)
    return count


class BacksUp(keras.callbacks.Callback):
    """As the ranks that are left do in the middle of the last epoch, where they are too few."""

    def __init__(self, backup):
        super().__init__()
        self.backup = backup

    def on_train_batch_end(self, batch, logs=None):
        if self.model.layers[0].steps == STEPS + 1:
            back_up([self.backup], self.model, 1, 1)


class Watch:
    """Notes what is in `folder` at each moment between two callbacks: what a kill would leave."""

    def __init__(self, folder):
        self.states, known = [{}], {}

        def look(_, event, __):
            nonlocal known
            if event == "c_return" and folder.exists():
                stats = {each.name: each.stat() for each in os.scandir(folder)}
                found = {n: (s.st_ino, s.st_size, s.st_mtime_ns) for n, s in stats.items()}
                if found != known:
                    known = found
                    self.states.append({name: (folder / name).read_bytes() for name in found})

        # Until the next hook that is none of these: what backs up comes last in each.
        watched = dict.fromkeys(("on_train_batch_end", "on_epoch_end", "on_train_end"), look)
        others = dict.fromkeys(("on_train_batch_begin", "on_epoch_begin"))
        self.hooks = keras.callbacks.LambdaCallback(
            **{
                hook: lambda *_, profile=profile, **__: sys.setprofile(profile)
                for hook, profile in {**watched, **others}.items()
            }
        )


def as_read(state):
    """Without the files of which a restart knows nothing, since they are not whole yet."""
    return {name: content for name, content in state.items() if "new" not in name}


@pytest.mark.parametrize("double", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_job_that_is_killed_at_any_moment_goes_on_with_the_next_step(tmp_path, double):
    def backup(folder):
        return keras.callbacks.BackupAndRestore(folder, double_checkpoint=double)

    def work(ring):
        first = backup(tmp_path / "latest")
        watch = Watch(first.backup_dir)
        counted(ring, watch.hooks, first, BacksUp(first))
        sys.setprofile(None)
        found = []
        for before, state in itertools.pairwise(watch.states):
            if as_read(state) != as_read(before):
                folder = tmp_path / str(len(found))
                folder.mkdir()
                for name, content in state.items():
                    (folder / name).write_bytes(content)
                found.append(counted(ring, backup(folder)))
        return found

    [found] = ring_of_threads(1, work)
    # Two files are replaced three times, and then deleted.
    assert len(found) >= 7
    assert found == [EPOCHS * STEPS] * len(found)


@pytest.mark.filterwarnings("ignore:Your input ran out")
@pytest.mark.parametrize("is_counted", [True, False])
def test_an_epoch_of_which_a_backup_has_more_steps_than_there_are_ends(tmp_path, is_counted):
    def work(ring):
        backup = keras.callbacks.BackupAndRestore(tmp_path / str(ring.size))
        model = counting(ring)
        model.optimizer.build(model.trainable_variables)
        if ring.rank == 0:
            back_up([backup], model, 0, 3)
        ring.barrier()
        data = tf.data.Dataset.from_tensor_slices((ONES, ONES)).batch(2)
        data = data.take(2) if is_counted else data.take(2).filter(lambda *_: True)
        epochs = []
        notes = keras.callbacks.LambdaCallback(on_epoch_end=lambda at, logs: epochs.append(at))
        given = {"epochs": 2, "verbose": 0, "callbacks": [backup, notes]}
        history = rr.fit(model, data, communicator=ring, **given).history
        assert epochs == [0, 1]
        assert len(history["loss"]) == 1
        return float(model.layers[0].steps.numpy())

    text = "a backup after step 3 of epoch 1, of which the data have only 2 batches now: that epoch"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", rr.DataWarning)
        assert ring_of_threads(2, work, timeout_s=60.0) == [2.0] * 2
    assert len(found) == 1
    assert text in str(found[0].message)


class Counts(keras.callbacks.Callback):
    """The batches of each epoch, and of how many epochs it has heard."""

    def __init__(self):
        super().__init__()
        self.begun, self.seen, self.told = 0, 0, []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun, self.seen = self.begun + 1, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1

    def on_epoch_end(self, epoch, logs=None):
        self.told.append([self.begun, self.seen])


def test_an_epoch_that_goes_on_has_begun_once_for_callbacks(tmp_path):
    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 6:
                raise Interrupted

    def trained(*callbacks):
        with ringreduce.Communicator(ringreduce.Config(rank=0, size=1)) as ring:
            model, counts = counting(ring), Counts()
            halving = keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2)
            given = {"batch_size": 2, "epochs": 3, "verbose": 0, "communicator": ring}
            every = [halving, counts, *callbacks]
            with contextlib.suppress(Interrupted):
                rr.fit(model, ONES, ONES, callbacks=every, **given)
            steps = int(model.optimizer.iterations.numpy())
            return counts.told, steps, float(model.optimizer.learning_rate)

    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)
    _, steps, _ = trained(backup, Ends())
    assert steps == 6
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1)
    assert trained(backup) == trained() == ([[1, 4], [2, 4], [3, 4]], 12, 0.125)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_data_that_begin_anew_in_the_middle_are_warned_of(tmp_path):
    with ringreduce.Communicator(ringreduce.Config(rank=0, size=1)) as ring:
        for _ in range(2):
            model = counting(ring)
            model.optimizer.build(model.trainable_variables)
            backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
            back_up([backup], model, 1, 0)
            data = tf.data.Dataset.from_tensor_slices((ONES, ONES)).batch(2).repeat()
            given = {"epochs": 2, "steps_per_epoch": 3, "verbose": 0, "callbacks": [backup]}
            with pytest.warns(rr.DataWarning, match="goes on with epoch 2 .* its data begin anew"):
                rr.fit(model, data, communicator=ring, **given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_training_stops_within_an_epoch_only_where_it_can_go_on_there(tmp_path, monkeypatch):
    stops = []
    init = LooksInFit.__init__

    def noted(looks, *given, stops_in_epochs, **more):
        stops.append(stops_in_epochs)
        init(looks, *given, stops_in_epochs=stops_in_epochs, **more)

    monkeypatch.setattr(LooksInFit, "__init__", noted)
    whole = tf.data.Dataset.from_tensor_slices((ONES, ONES))
    shuffled = whole.shuffle(9, seed=1).batch(2)
    cases = [
        (True, {"x": ONES, "y": ONES, "batch_size": 2}),
        (True, {"x": ONES, "y": ONES, "batch_size": 2, "steps_per_epoch": 2}),
        (True, {"x": shuffled}),
        (True, {"x": shuffled, "validation_data": whole.batch(2)}),
        # Validation takes seeds of the same shuffle; a pass has begun in an epoch before.
        (False, {"x": shuffled, "validation_data": shuffled}),
        (False, {"x": whole.batch(2).repeat(), "steps_per_epoch": 2}),
        (False, {"x": iter([(ONES, ONES)] * 9), "steps_per_epoch": 2}),
        (False, {"x": whole.batch(2), "per_rank_data": True}),
    ]
    with ringreduce.Communicator(ringreduce.Config(rank=0, size=1)) as ring:
        for number, (_, data) in enumerate(cases):
            folder = tmp_path / str(number)
            rr.fit(counting(ring), **data, verbose=0, backup_dir=folder, communicator=ring)
    assert stops == [expected for expected, _ in cases]


def test_a_backup_that_fails_leaves_the_one_before_and_says_why(tmp_path, monkeypatch):
    """As on a full disk, half way."""
    with ringreduce.Communicator(ringreduce.Config(rank=0, size=1)) as ring:
        model = counting(ring)
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        back_up([backup], model, 0, 1)
        before = {path.name: path.read_bytes() for path in (tmp_path / "backup").iterdir()}

        def save(path, **_):
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(model, "save_weights", save)
        notice = Notice("", str, lambda: False)
        looks = LooksInFit(model, Training.of(model, ring), notice, [backup], stops_in_epochs=True)
        said = looks._back_up()
        assert said.startswith("It could not be backed up (OSError: [Errno 28] No space left")
        assert said.endswith("the backup before, if there is one, stays.")
        after = {path.name: path.read_bytes() for path in (tmp_path / "backup").iterdir()}
        names = [name for name in before if not name.endswith(".bkp")]
        assert {name: after[name] for name in names} == {name: before[name] for name in names}
        assert "new.weights.h5" not in after


class Interrupted(Exception):
    pass


def goes_on(folder, then, now, place=(0, 2)):
    """What is said where a training goes on at `place` with other arguments than it began with."""

    def trained(ring, given, *hooks):
        model = counting(ring)
        backup = keras.callbacks.BackupAndRestore(folder)

        def back_up_and_end(*_, **__):
            if ring.rank == 0:
                back_up([backup], model, *place)
            ring.barrier()
            raise Interrupted

        acting = keras.callbacks.LambdaCallback(**dict.fromkeys(hooks, back_up_and_end))
        callbacks = [backup, acting]
        model.optimizer.build(model.trainable_variables)
        rr.fit(model, **given, epochs=2, verbose=0, callbacks=callbacks, communicator=ring)

    def work(ring):
        with pytest.raises(Interrupted):
            trained(ring, then, "on_train_batch_end")

    def again(ring):
        trained(ring, now)

    ring_of_threads(2, work, timeout_s=60.0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", rr.DataWarning)
        ring_of_threads(2, again, timeout_s=60.0)
    return [str(one.message) for one in found if "goes on" in str(one.message)]


ARRAYS = {"x": ONES, "y": ONES, "batch_size": 2}


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"batch_size": 4}, "made with batch_size=2 (now 4): some samples"),
        ({"y": ONES * 2, "seed": 1}, "made with seed=0 (now 1) and other data: some samples"),
    ],
    ids=["batches", "data"],
)
def test_other_steps_than_those_of_the_backup_are_told(tmp_path, other, text):
    [said] = goes_on(tmp_path, ARRAYS, {**ARRAYS, **other})
    assert said.startswith("training goes on after step 2 of epoch 1, from a backup")
    assert text in said


def test_nothing_is_told_of_the_same_steps_and_of_whole_epochs(tmp_path):
    assert not goes_on(tmp_path / "same", ARRAYS, ARRAYS)
    other = {**ARRAYS, "batch_size": 4}
    assert not goes_on(tmp_path / "whole", ARRAYS, other, place=(1, 0))
