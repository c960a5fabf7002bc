"""Show the cores and the threads that each worker has.

``ringreduce run -n 2 examples/recipes/own_cores.py``. The launcher gives each worker of a host
cores of its own, neighbours, and as many threads.
"""

import hashlib
import os

import keras
import numpy as np

import ringreduce.keras as rr


def main():
    comm = rr.init()
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(320, 8)).astype("float32")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.05)), loss="mse")
    rr.fit(model, x, x.sum(axis=1, keepdims=True), batch_size=32, verbose=0)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    print(f"rank {comm.rank}: cores {cores}, {os.environ.get('TF_NUM_INTRAOP_THREADS')} threads")
    weights = b"".join(weight.tobytes() for weight in model.get_weights())
    print("hosts", len(comm.statistics().hosts), "weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
