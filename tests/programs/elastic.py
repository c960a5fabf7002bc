"""Trains while ranks are lost at given points, and says how often each sample was used.

There is a weight for each sample, and a step takes 1 from those of its samples.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from shared import built, digest, reset_connections

import ringreduce.keras as rr
from ringreduce.communicator.calls import Calls
from ringreduce.communicator.reforming import Survivors
from ringreduce.effects.notice import _listener
from ringreduce.keras.elastic.leaving import Looks
from ringreduce.keras.training import loop
from ringreduce.keras.training.elastic_steps import Elastic
from ringreduce.keras.training.looking import LooksInFit
from ringreduce.tensorflow.commit import CommitPoint
from ringreduce.tensorflow.plans import BucketReducer
from ringreduce.vocabulary.errors import RingReduceError

case = json.loads(sys.argv[1])
folder = sys.argv[2]
if "hosts" in case:  # network namespaces, by rank
    with open(f"/run/netns/{case['hosts'][int(os.environ['RINGREDUCE_RANK'])]}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
if case.get("deterministic"):
    tf.config.experimental.enable_op_determinism()
ring = rr.init()
RANK = ring.rank
BATCH, STEPS, EPOCHS = 12, case.get("steps", 4), case.get("epochs", 3)
COUNT = BATCH * STEPS - case.get("short", 0)
FAR = -1e3  # below every output, so that the gradient of the loss by it is 1
hits: dict[str, int] = {}


def pass_by(point):
    """Lose this rank, if it is to be lost the nth time that it comes by here."""
    hits[point] = hits.get(point, 0) + 1
    for rank, where, number, how in case.get("faults", []):
        if (rank, where, number) == (RANK, point, hits[point]):
            if how == "exit":
                os._exit(3)
            if how == "leave":
                sys.exit(0)
            if how == "raise":
                raise ValueError("a sample that cannot be used")
            if how == "cut":  # this host off from the others
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
                return
            if how == "reset":
                reset_connections()
                return
            if how == "notice":  # that it is to go
                os.kill(os.getpid(), signal.SIGTERM)
                while not all(heard.reason for heard in _listener._heard):
                    time.sleep(0.001)
                return
            if how == "stay":  # until the others have waited for longer than for a lost rank
                while ring.failure is None:
                    time.sleep(0.01)
                time.sleep(2.5)
                return
            if point == "left":
                wait_for("rank0")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def wait_for(name):
    """Wait until another rank has made that file."""
    while not Path(folder, name).exists():
        time.sleep(0.01)


def passing_by(owner, name, point, *, after=""):
    """Have `owner`'s method `name` come by `point`, and by `after` when it has ended."""
    method = getattr(owner, name)

    def wrapped(*arguments, **options):
        pass_by(point)
        result = method(*arguments, **options)
        if after:
            pass_by(after)
        return result

    setattr(owner, name, wrapped)


passing_by(BucketReducer, "reduce", "bucket", after="reduced")
passing_by(CommitPoint, "passed", "commit")
passing_by(Survivors, "exchange", "exchange")
passing_by(Elastic, "_catch_up", "catching up")
passing_by(Elastic, "_restore", "left")
passing_by(Elastic, "run", "call")
passing_by(LooksInFit, "_hand_over", "hand over")
passing_by(keras.optimizers.SGD, "update_step", "update")

call = Calls.call


def passing_barrier(calls, name, *arguments):
    """The first of a ring is that of its formation."""
    if name == "barrier":
        pass_by("barrier")
    return call(calls, name, *arguments)


Calls.call = passing_barrier

if case.get("behind") == RANK:
    # It loses the ring between the others' commit of a step and its own.
    passed = CommitPoint.passed
    times = iter(range(100))

    def late(point, means, update):
        if next(times) == case["behind_in"]:
            while ring.failure is None:
                time.sleep(0.01)
            raise ring.failure
        return passed(point, means, update)

    CommitPoint.passed = late


if case.get("misses", [None])[0] == RANK:
    # It loses the ring when others have left an exchange, of those after the first step that with
    # a number, or the last, as if it had not come to its end. How many looks there are is a matter
    # of time.
    meeting, look = Elastic._meeting, Looks.look
    meetings, looks = iter(range(100)), []

    def looking(*args, **options):
        looks.append("begun")
        try:
            return look(*args, **options)
        finally:
            looks.pop()

    Looks.look = looking

    def missing(elastic, make):
        is_counted = elastic._steps and not looks
        number = "end" if elastic._at_end else next(meetings) if is_counted else None
        is_missed = number == case["misses"][1]

        def miss():
            nonlocal is_missed
            result = make()
            if is_missed:
                is_missed = False
                while ring.failure is None:
                    time.sleep(0.01)
                raise ring.failure
            return result

        return meeting(elastic, miss)

    Elastic._meeting = missing


class Epochs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pass_by("epoch end")

    def on_test_end(self, logs=None):
        pass_by("validated")


class Points(Epochs):
    batches = 0

    def on_train_batch_begin(self, batch, logs=None):
        pass_by("begin")

    def on_train_batch_end(self, batch, logs=None):
        Points.batches += 1
        pass_by("end")


class Written(keras.callbacks.Callback):
    """After what writes; adds to logs, as ReduceLROnPlateau does."""

    def on_epoch_end(self, epoch, logs=None):
        logs["written"] = 1.0
        pass_by("written")


class Halves(keras.callbacks.Callback):
    """The learning rate, at each epoch's end."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2


class Seen(keras.metrics.Metric):
    """The number of rows."""

    def __init__(self):
        super().__init__(name="seen")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.cast(tf.shape(y_pred)[0], tf.float32))

    def result(self):
        return tf.identity(self.total)


@keras.saving.register_keras_serializable("elastic")
class Uses(keras.layers.Layer):
    """Of each row the weight of its sample; counts the steps, and draws random numbers."""

    def build(self, _):
        self.uses = self.add_weight(shape=(COUNT,), initializer="zeros", name="uses")
        self.steps = self.add_weight(shape=(), initializer="zeros", name="n", trainable=False)
        self.more = self.add_weight(shape=(case.get("more", 1),), initializer="ones", name="more")
        self.noise = keras.layers.GaussianNoise(1e-3)

    def call(self, numbers, training=False):
        if training:
            self.steps.assign_add(1.0)
        rows = tf.one_hot(tf.reshape(tf.cast(numbers, tf.int32), [-1]), COUNT)
        more = tf.reduce_mean(self.more) * 0 + tf.reduce_mean(self.noise(self.more)) * 0
        return tf.linalg.matvec(rows, self.uses)[:, None] + more


class Sequence(keras.utils.PyDataset):
    def __init__(self, x):
        super().__init__()
        self.x = x

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        part = self.x[index * BATCH : (index + 1) * BATCH]
        return part, part * 0 + FAR


def batches(x):
    while True:
        for step in range(STEPS):
            part = x[step * BATCH : (step + 1) * BATCH]
            yield part, part * 0 + FAR


class Loader:
    def __init__(self, x):
        self.x = x

    def __iter__(self):
        return (b for b, _ in zip(batches(self.x), range(STEPS), strict=False))


# Where no callback looks at batches, one call makes all steps of an epoch, but the first.
is_blind = case.get("blind", False)
if case.get("often"):
    Looks._wishes = lambda looks, count: (1, 1)  # After each step.
if is_blind:
    loop._CALL_S = 1e3
    LooksInFit.left = 1 << 30
    LooksInFit.after_steps = lambda *_: None

keras.utils.set_random_seed(1)
x = np.arange(COUNT, dtype="float32")[:, None]
y = x * 0 + FAR
whole = tf.data.Dataset.from_tensor_slices((x, y))
data = {
    "arrays": lambda: {"x": x, "y": y, "batch_size": BATCH},
    "dataset": lambda: {"x": whole.shuffle(COUNT, seed=1).batch(BATCH)},
    "sequence": lambda: {"x": Sequence(x)},
    "generator": lambda: {"x": batches(x), "steps_per_epoch": STEPS},
    "loader": lambda: {"x": Loader(x)},
}[case.get("data", "arrays")]()


class Quiet(keras.Sequential):
    """Its steps log nothing."""

    def train_step(self, data):
        super().train_step(data)
        return {"{}": {}, "None": None}[case["logs"]]


kind = Quiet if "logs" in case else keras.Sequential
model = kind([keras.Input((1,)), Uses()])
model.compile(
    optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(float(BATCH)), bucket_bytes=64),
    loss="mae",
    metrics=[Seen()],
    run_eagerly=case.get("way") == "eager",
    jit_compile=case.get("way") == "xla",
)
built(model, x[:1], y[:1])
writers = [
    keras.callbacks.CSVLogger(f"{folder}/log.csv"),
    keras.callbacks.ModelCheckpoint(
        f"{folder}/best.keras", monitor="seen", mode="max", save_best_only=True
    ),
]
try:
    history = rr.fit(
        model,
        **data,
        epochs=EPOCHS,
        verbose=2,
        callbacks=[
            Epochs() if is_blind else Points(),
            *(writers if case.get("writes") else []),
            *([Halves()] if case.get("halves") else []),
            Written(),
        ],
        backup_dir=f"{folder}/backup" if case.get("backs_up") else None,
        validation_data=(x[:21], y[:21]) if case.get("validates") else None,
        validation_batch_size=7,
    )
except RingReduceError as error:
    print(json.dumps({"rank": RANK, "error": f"{type(error).__name__}: {error}"}), flush=True)
    raise SystemExit(0) from None
layer = model.layers[0]
Path(folder, f"rank{RANK}").touch()
if case.get("stays") and RANK == 0:
    wait_for(f"rank{case['misses'][0]}")
print(
    json.dumps(
        {
            "rank": RANK,
            "members": list(ring.members),
            "epoch": ring._session.membership.epoch,
            "uses": [-round(float(n), 3) for n in layer.uses.numpy()],
            "steps": float(layer.steps.numpy()),
            "iterations": int(model.optimizer.iterations.numpy()),
            "batches": int(layer.steps) if is_blind else Points.batches,
            "calls": hits.get("call", 0),  # of `Elastic`; none alone
            "history": history.history,
            "digest": digest([layer.uses.numpy(), layer.more.numpy()]),
        }
    ),
    flush=True,
)
