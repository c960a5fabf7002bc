"""Jobs on a Spark cluster of two executors, one after another; prints what each of them said."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from pyspark.sql import SparkSession

import ringreduce
from ringreduce import spark

FOLDER = Path(sys.argv[1])
ROWS, EPOCHS = 96, 3


def say(case, **facts):
    print(json.dumps({"case": case, **facts}), flush=True)


def where():
    """The rank's place, a sum over all, and what its environment says."""
    import ringreduce as rr

    comm = rr.init()
    sums = comm.all_reduce(np.full(3, comm.rank + 1.0, np.float32)).tolist()
    print(f"{comm.rank} writes", flush=True)
    print(f"{comm.rank} complains", file=sys.stderr, flush=True)
    own = comm.rank, comm.size, comm.local_size, comm.transport, os.environ.get("CHOSEN")
    return own, sums, len(comm.config.secret) >= 32, comm.config.timeout_s


def fails(how):
    """Rank 1 fails in some way, in an attempt that is the first or any."""
    import ringreduce as rr

    comm = rr.init()
    if comm.rank == 1 and not (how == "once" and comm.config.restart):
        if how == "raise":
            raise ValueError("no such luck")
        if how == "exit":
            sys.exit(3)
        if how == "result":
            return threading.Lock()
        if how == "executor":  # The worker's parent is Spark's daemon, of which it is a child.
            os.kill(psutil.Process().parent().parent().pid, signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    comm.barrier()
    return comm.rank, comm.config.restart


def fails_early():
    """Rank 1 fails before it joins the ring, for which rank 0 waits."""
    import ringreduce as rr

    if os.environ["RINGREDUCE_RANK"] == "1":
        raise KeyError("too early")
    rr.init()


def trained(backup_dir=None):
    """Digests and losses of a model that is trained on rows that all ranks have."""
    import keras
    from shared import digest

    import ringreduce.keras as rr

    comm = rr.init()

    class Killer(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if backup_dir and (epoch, comm.rank, comm.config.restart) == (2, 1, 0):
                os.kill(os.getpid(), signal.SIGKILL)

    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).integers(-4, 5, (ROWS, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(1)])
    model.compile(rr.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    how = {"batch_size": 16, "epochs": EPOCHS, "verbose": 2, "backup_dir": backup_dir}
    found = rr.fit(model, x, x[:, :1] * 2, callbacks=[Killer()], **how)
    return (
        digest(model.get_weights()),
        [float(loss) for loss in found.history["loss"]],
        comm.config.restart,
    )


def of_rows(columns):
    """What `shard` gives a rank, and what a model that trains on it ends with."""
    import keras
    import tensorflow as tf
    from shared import digest

    import ringreduce.keras as rr

    comm = rr.init()
    features, label, text = spark.shard(*columns)
    facts = [[str(a.dtype), list(a.shape)] for a in (features, label, text)]
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    # With no rows a list's length is not known.
    data = tf.data.Dataset.from_tensor_slices((features.reshape(-1, 3), label)).batch(4)
    rr.fit(model, data, epochs=2, verbose=0, per_rank_data=True)
    table = spark.shard()
    return (
        facts,
        sorted(label.tolist()),
        [digest(model.get_weights()), table.num_rows == len(label), comm.size],
    )


def refusals():
    """What `shard` says of columns that are no arrays; on a rank alone."""
    from ringreduce import RingReduceError

    said = []
    for name in ("ragged", "holes", "absent"):
        try:
            spark.shard(name)
        except RingReduceError as error:
            said.append(str(error))
    lists = spark.shard("words")
    return said, [str(lists.dtype), lists[0]]


def attempt(case, *arguments, **options):
    """What `run` raises."""
    began = time.monotonic()
    try:
        say(case, results=spark.run(*arguments, **options))
    except Exception as error:
        text, peer = str(error), getattr(error, "peer", None)
        say(case, kind=type(error).__name__, text=text, peer=peer)
    return time.monotonic() - began


def main():
    expected = ringreduce.launch(trained, 2, output="failed")
    say("launched", results=expected)
    session = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.executor.instances", "2")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    session.sparkContext.addPyFile(str(Path(__file__).with_name("shared.py")))
    os.environ["RINGREDUCE_TIMEOUT_S"] = "25"
    attempt("run", where, num_proc=2, env={"CHOSEN": "yes"})
    attempt("again", where, (), {}, 1, session.sparkContext, timeout_s=33)
    attempt("trained", trained, num_proc=2)
    attempt("backup", trained, (str(FOLDER / "backup"),), num_proc=2, max_restarts=1)
    for how in ("raise", "exit", "result", "kill"):
        attempt(how, fails, [how], num_proc=2)
    say("early", took=attempt("early", fails_early, num_proc=2, join_timeout_s=300))
    attempt("once", fails, kwargs={"how": "once"}, num_proc=2, max_restarts=2)
    attempt("room", where, num_proc=5, start_timeout_s=3)
    attempt("unknown", where, num_proc=2, colour="red")
    rows = [([float(i), 1.0, -1.0], float(i), f"t{i}") for i in range(9)]
    frame = session.createDataFrame(rows, "features array<double>, label double, text string")
    attempt("shard", of_rows, [["features", "label", "text"]], dataframe=frame.repartition(2))
    # One of two partitions is empty.
    attempt("few", of_rows, [["features", "label", "text"]], num_proc=2, dataframe=frame.limit(1))
    odd = [([1.0], 1.0, ["a"]), ([1.0, 2.0], None, ["b", "c"])]
    frame = session.createDataFrame(odd, "ragged array<double>, holes double, words array<string>")
    attempt("refusals", refusals, num_proc=1, dataframe=frame)
    attempt("executor", fails, ["executor"], num_proc=2)
    attempt("after", where, num_proc=2)
    session.stop()
    attempt("no dataframe", where, num_proc=2, dataframe=[1, 2])


if __name__ == "__main__":
    main()
