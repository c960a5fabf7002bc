"""Read through the tf.data service: its workers prepare batches, and ranks train on them.

``ringreduce run -n 2 examples/recipes/data_service.py`` divides the reading: every row is prepared
once in an epoch, and goes to the rank that asks first. With ``--same`` each rank gets all batches,
and takes its rows of each. Rank 0 has the dispatcher and each rank a worker in its process; on
machines of their own they are started in the same way.
"""

import argparse
import hashlib

import keras
import tensorflow as tf

import ringreduce.keras as rr

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--same", action="store_true", help="every rank reads all batches")
ROWS, BATCH = 400, 16
service = tf.data.experimental.service


def prepare(number):
    """A row and its target, as if from a file."""
    x = tf.random.stateless_normal((8,), seed=(number, 1))
    return x, tf.reduce_sum(x, keepdims=True)


def main():
    arguments = parser.parse_args()
    comm = rr.init()
    keras.utils.set_random_seed(1)
    dispatcher = service.DispatchServer() if comm.rank == 0 else None
    target = comm.broadcast_object(dispatcher.target if dispatcher else None)
    address = target.partition("://")[2]
    worker = None
    if comm.rank == 0 or not arguments.same:
        worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    comm.barrier()

    data = tf.data.Dataset.range(ROWS).map(prepare)
    if arguments.same:
        # A pass of its own for each rank, and a single worker, so that all get equal batches.
        distribute = service.distribute("parallel_epochs", target)
        data = data.shuffle(ROWS, seed=1).batch(BATCH).apply(distribute)
    else:
        # One pass for all ranks, which the workers share.
        distribute = service.distribute("distributed_epoch", target, job_name="train")
        data = data.shuffle(ROWS).batch(BATCH // comm.size).apply(distribute)

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.05))
    model.compile(optimizer=optimizer, loss="mse")
    history = rr.fit(
        *(model, data),
        epochs=arguments.epochs,
        verbose=0,
        per_rank_data=not arguments.same,
    )
    # Once more, to see which rows come here.
    read = [value for _, y in data for value in y.numpy()[:, 0].tolist()]
    by_all = [value for values in comm.all_gather_object(read) for value in values]
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    print(f"read {len(read)} rows, all ranks {len(by_all)}, of which {len(set(by_all))} differ")
    print("losses", *history.history["loss"])
    print("weights", hashlib.sha256(weights).hexdigest())
    # Other ranks may still read from the worker here.
    comm.barrier()
    del worker


if __name__ == "__main__":
    main()
