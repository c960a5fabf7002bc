"""An elastic job whose lost ranks come back; alone, what it trains to.

``python comes_back.py CASE FOLDER``; CASE in JSON. Each process writes what it has come to into
FOLDER, by its rank and life.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections import deque
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.communicator import arrival
from ringreduce.keras.training import growing
from ringreduce.keras.training.elastic_steps import Elastic
from ringreduce.transport.door import Visit

CASE, FOLDER = json.loads(sys.argv[1]), Path(sys.argv[2])
RANK = int(os.environ.get("RINGREDUCE_RANK", "0"))
LIFE = int(os.environ.get("RINGREDUCE_LIFE") or 0)
BATCH, STEPS, EPOCHS = 12, CASE.get("steps", 40), CASE.get("epochs", 3)
LOST = {tuple(each) for each in CASE.get("lost", ())}  # rank and step
NEWCOMERS = CASE.get("newcomers", len(LOST))
POINT = CASE.get("point", "")  # where the first newcomer ends
UNLIKE = CASE.get("unlike", "") if LIFE else ""


def end_here(point):
    if point == POINT and LIFE == 1:
        (FOLDER / f"ready-{RANK}-{LIFE}").unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGKILL)


def ending_before(owner, name, point):
    original = getattr(owner, name)

    def before(*args, **kwargs):
        end_here(point)
        return original(*args, **kwargs)

    setattr(owner, name, before)


def has_noted(self, *args, noted=Visit.ready):
    noted(self, *args)
    (FOLDER / f"ready-{RANK}-{LIFE}").touch()
    end_here("ready")


Visit.ready = has_noted
ending_before(arrival, "form_chosen", "forming")
ending_before(growing.Newcomer, "_receive", "state")
ending_before(Elastic, "join", "digest")


def wait_for(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited 60 s for {what}")
        time.sleep(0.005)


class Sequence(keras.utils.PyDataset):
    """Turned by one batch after each epoch, as a user's that shuffles."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.turned = x, y, 0

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        place = (index + self.turned) % STEPS
        rows = slice(place * BATCH, (place + 1) * BATCH)
        return self.x[rows], self.y[rows]

    def on_epoch_end(self):
        self.turned += 1


class Shuffled(Sequence):
    """As users write it: by NumPy's generator, which making a batch draws from too."""

    def __init__(self, x, y):
        super().__init__(x, y)
        self.order = np.arange(STEPS)

    def __getitem__(self, index):
        x, y = super().__getitem__(self.order[index])
        return x + np.random.normal(size=x.shape).astype("float32") * 0, y

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class Events(keras.callbacks.Callback):
    """Loses ranks, and has training wait for those that come back."""

    def __init__(self, ring):
        super().__init__()
        self.ring, self.before, self.waited = ring, ring.size, False
        self.seen = 0  # a plain value that newcomers get

    def on_train_batch_begin(self, batch, logs=None):
        end_here("first step")

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        self.seen += 1
        if self.seen != step:
            raise AssertionError(f"{self.seen} batches were seen in {step} steps")
        if LIFE == 0 and (RANK, step) in LOST:
            os.kill(os.getpid(), signal.SIGKILL)
        if not LOST or LIFE:
            return
        if len(self.ring.members) < CASE["size"] and max(step for _, step in LOST) < step:
            if self.ring.rank == 0:
                wait_for(lambda: len(list(FOLDER.glob("ready-*"))) >= NEWCOMERS, "newcomers")
            time.sleep(0.002)
        if CASE.get("lost with newcomer") == RANK and list(FOLDER.glob("ready-*")):
            os.kill(os.getpid(), signal.SIGKILL)


class Decays(keras.callbacks.Callback):
    """Changes weights when an epoch begins."""

    def on_epoch_begin(self, epoch, logs=None):
        for weight in self.model.trainable_weights:
            weight.assign(weight * 0.9)


class Anneals(keras.callbacks.Callback):
    """Changes a variable that the loss reads and no model has."""

    def __init__(self):
        super().__init__()
        self.latest = deque(maxlen=3)

    def on_epoch_end(self, epoch, logs=None):
        FACTOR.assign_add(0.25)
        self.latest.append(float(FACTOR))


FACTOR = tf.Variable(1.0)


class Rates(keras.callbacks.Callback):
    """Changes the rate within an epoch and between epochs."""

    def on_epoch_begin(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 0.9)

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            rate = self.model.optimizer.learning_rate
            rate.assign(rate * 0.95)


def made():
    keras.utils.set_random_seed(7)
    layers = [keras.Input((5,)), keras.layers.Dense(8, activation="tanh")]
    if CASE.get("normalizes"):
        layers.append(keras.layers.BatchNormalization())
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    inner = keras.optimizers.Adam(0.02 if UNLIKE != "rate" else 0.03)
    if UNLIKE == "optimizer":
        inner = keras.optimizers.Adam(0.02, beta_1=0.8)
    options = {"jit_compile": CASE.get("way") == "xla", "run_eagerly": CASE.get("way") == "eager"}
    loss = "mae" if UNLIKE == "loss" else "mse"
    if CASE.get("anneals"):

        def loss(true, predicted):
            return FACTOR * keras.losses.mean_squared_error(true, predicted)

    model.compile(rr.DistributedOptimizer(inner), loss, metrics=["mae"], **options)
    return model


def data():
    rng = np.random.default_rng(0)
    rows = BATCH * STEPS + (UNLIKE == "a row more")
    x = rng.normal(size=(rows, 5)).astype("float32")
    y = x.sum(1, keepdims=True) + (UNLIKE == "values")
    kind = CASE.get("data", "arrays")
    if kind == "arrays":
        return (x, y), {"batch_size": BATCH}
    if kind in ("sequence", "shuffled sequence"):
        return ((Sequence if kind == "sequence" else Shuffled)(x, y),), {}
    if kind == "generator":
        batches = [slice(BATCH * each, BATCH * (each + 1)) for each in range(STEPS)]
        rows = [(x[batch], y[batch]) for batch in batches] * EPOCHS
        return (iter(rows),), {"steps_per_epoch": STEPS}
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    if kind == "shuffled":
        rows = rows.shuffle(BATCH * STEPS, seed=4)
    return (rows.batch(BATCH),), {}


def main():
    ring = rr.init()
    end_here("prefix")
    told = ring.all_gather_object([RANK, LIFE])
    assert told[ring.rank] == [RANK, LIFE]
    if UNLIKE == "call":
        ring.barrier()
    if CASE.get("early") == "split":
        ring.split(0)
    if CASE.get("early") == "send" and ring.rank == 2:  # Rank 0 knows nothing of it.
        ring.send_object("a message", 1)
    if CASE.get("early") == "send" and ring.rank == 1:
        ring.recv_object(2)
    model = made()
    kept = tf.Variable(float(LIFE))
    rr.broadcast_variables([kept])
    given, options = data()
    callbacks = [Events(ring)] if LOST else []
    if CASE.get("hook"):
        callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: ring.barrier()))
    callbacks += [Decays()] * bool(CASE.get("decays")) + [Anneals()] * bool(CASE.get("anneals"))
    if CASE.get("rates"):
        callbacks.append(Rates())
        callbacks.append(keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0))
        callbacks.append(keras.callbacks.EarlyStopping("loss", patience=9, min_delta=10.0))
    if CASE.get("validates"):
        options["validation_data"] = tuple(each[: 3 * BATCH] for each in data_of_arrays())
    end_here("building")
    epochs = EPOCHS + (UNLIKE == "epochs")
    history = rr.fit(
        model,
        *given,
        epochs=epochs,
        verbose=0,
        callbacks=callbacks,
        seed=int(UNLIKE == "seed"),
        **options,
    )
    values = [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]
    fact = {
        "rank": RANK,
        "life": LIFE,
        "members": list(ring.members),
        "weights": [w.tolist() for w in model.get_weights()],
        "digest": hashlib.md5(b"".join(np.asarray(v).tobytes() for v in values)).hexdigest(),
        "history": history.history,
        "epochs": history.epoch,
        "kept": float(kept),
        "factor": float(FACTOR),
        "fields": [
            [getattr(c, name, None) for name in ("wait", "best", "cooldown_counter", "seen")]
            for c in callbacks
        ],
    }
    (FOLDER / f"fact-{RANK}-{LIFE}.json").write_text(json.dumps(fact))


def data_of_arrays():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(BATCH * STEPS, 5)).astype("float32")
    return x, x.sum(1, keepdims=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        if LIFE:  # Nobody waits for it any more.
            (FOLDER / f"ready-{RANK}-{LIFE}").touch()
        raise
