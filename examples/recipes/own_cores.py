"""Give each worker of a host cores of its own, those of one NUMA node as far as it goes.

``ringreduce run -n 2 examples/recipes/own_cores.py``. The launcher says how many threads each
worker has; this says on which cores they run. It must come before TensorFlow starts its threads.
"""

import hashlib
import os
from pathlib import Path


def bind_to_own_cores():
    """Bind this process to its share of the cores that it may use."""
    rank = int(os.environ.get("RINGREDUCE_LOCAL_RANK", 0))
    ranks = int(os.environ.get("RINGREDUCE_LOCAL_SIZE", 1))
    cores = sorted(os.sched_getaffinity(0), key=place)
    if len(cores) >= ranks:
        bounds = [len(cores) * bound // ranks for bound in (rank, rank + 1)]
        os.sched_setaffinity(0, cores[slice(*bounds)])


def place(core):
    """NUMA node, socket, core and thread of a core's number: neighbours share memory and caches."""
    folder = Path(f"/sys/devices/system/cpu/cpu{core}")
    nodes = [int(node.name.removeprefix("node")) for node in folder.glob("node*")]
    files = [folder / "topology" / name for name in ("physical_package_id", "core_id")]
    return *nodes, *(int(file.read_text()) for file in files), core


bind_to_own_cores()

import keras  # noqa: E402
import numpy as np  # noqa: E402

import ringreduce.keras as rr  # noqa: E402


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
