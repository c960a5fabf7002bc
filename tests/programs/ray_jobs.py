"""Jobs on a Ray cluster of two nodes, one after another; prints what each of them said."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import ray
import ray.data
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig

import ringreduce
from ringreduce.ray import RingReduceConfig, RingReduceTrainer, run

FOLDER = Path(sys.argv[1])
EPOCHS, STEPS, ROWS = 4, 6, 16


def say(case, **facts):
    print(json.dumps({"case": case, **facts}), flush=True)


def train(config):
    """Trains with checkpoints; in the job `killed`, rank 1 dies once, in its third epoch."""
    import keras
    from shared import digest

    import ringreduce.keras as rr
    from ringreduce.ray import ReportCheckpoint

    comm = rr.init()
    context = ray.train.get_context()
    started_from = ray.train.get_checkpoint()

    class Killer(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch, comm.rank) == (2, 3, 1):
                os.kill(os.getpid(), signal.SIGKILL)

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).integers(-4, 5, (ROWS * STEPS - 3, 4)).astype("float32")
    layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    killed = config["killed"] and not comm.config.restart
    history = rr.fit(
        *(model, x, x.sum(1, keepdims=True)),
        batch_size=ROWS,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[ReportCheckpoint(), *([Killer()] if killed else [])],
    )
    facts = {
        "ranks": [comm.rank, context.get_world_rank()],
        "sizes": [comm.size, context.get_world_size()],
        "locals": [comm.local_rank, comm.local_size],
        "restart": comm.config.restart,
        "timeout_s": comm.config.timeout_s,
        "epochs": history.epoch,
        "continued": started_from is not None,
        "digest": digest(model.get_weights()),
        "job": comm.config.job_id,
    }
    if not config["killed"]:
        facts |= train_on_ray_data(comm)
    return comm.all_gather_object(facts)


def train_on_ray_data(comm):
    """One epoch on shards of Ray Data, of which rank 0 reads one batch and rank 1 all."""
    import keras

    import ringreduce.keras as rr

    class Count(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1

    shard = ray.train.get_dataset_shard("train")
    data = shard.to_tf("x", "y", batch_size=4)
    if comm.rank == 0:
        data = data.take(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer=optimizer, loss="mse")
    count = Count()
    history = rr.fit(model, data, verbose=0, callbacks=[count], per_rank_data=True)
    read = sum(len(y) for _, y in data)
    # Without training the loss is the mean of the squares of all targets, which are 2.
    return {"read": read, "loss": history.history["loss"], "steps": count.steps}


def trained(killed):
    # Of 32 rows each rank gets 16, of which rank 0 reads 4.
    rows = [{"x": np.arange(4, dtype=np.float32), "y": 2.0} for _ in range(32)]
    trainer = RingReduceTrainer(
        train,
        train_loop_config={"killed": killed},
        ringreduce_config=RingReduceConfig(timeout_s=25),
        # Two workers on a node would not see what is between hosts.
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2}),
        run_config=RunConfig(
            name=f"killed-{killed}",
            storage_path=str(FOLDER),
            failure_config=FailureConfig(max_failures=1),
        ),
        datasets={} if killed else {"train": ray.data.from_items(rows)},
    )
    result = trainer.fit()
    files = sorted(os.listdir(result.checkpoint.path))
    return {"ranks": result.return_value, "metrics": sorted(result.metrics), "files": files}


def fail_on_rank_one():
    comm = ringreduce.init()
    if comm.rank == 1:
        raise ValueError("no such luck")
    comm.barrier()


def failed():
    trainer = RingReduceTrainer(fail_on_rank_one, scaling_config=ScalingConfig(num_workers=2))
    try:
        trainer.fit()
    except ray.train.WorkerGroupError as error:
        return {"failures": {rank: str(why) for rank, why in error.worker_failures.items()}}


def total(value):
    comm = ringreduce.init()
    sums = np.full(3, float(value + comm.rank))
    comm.all_reduce(sums)
    place = [comm.rank, comm.local_rank, comm.local_size]
    return (place, sums.tolist()), os.environ["RINGREDUCE_SECRET"]


def die_on_rank_one():
    comm = ringreduce.init()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def error_of(*arguments, **options):
    try:
        run(*arguments, **options)
    except ringreduce.RingReduceError as error:
        return {"kind": type(error).__name__, "peer": error.peer, "text": str(error)}


def main(cluster):
    ray.init(address=cluster.address, log_to_driver=False)
    jobs = [run(total, 3, value) for value in (10, 20)]
    first, second = ([said for said, _ in ranks] for ranks in jobs)
    keys = [{secret for _, secret in ranks} for ranks in jobs]
    counts = [len(secrets) for secrets in keys]
    say("run", first=first, second=second, secrets=counts, same=keys[0] == keys[1])
    say("raised", **error_of(fail_on_rank_one, 2))
    say("died", **error_of(die_on_rank_one, 2))
    say("too many", **error_of(total, 9, 0, start_timeout_s=0.5))
    say("unknown", **error_of(total, 2, 0, colour="red"))
    say("failed", **failed())
    say("undisturbed", **trained(killed=False))
    say("killed", **trained(killed=True))
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    ray.shutdown()
    texts = [path.read_bytes() for path in session.rglob("*") if path.is_file()]
    shown = [key for each in keys for key in each if any(key.encode() in text for text in texts)]
    say("logs", files=len(texts), secrets=len(shown))


if __name__ == "__main__":
    node = {"num_cpus": 2, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        main(cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()
