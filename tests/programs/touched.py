"""Updates of touched rows on a real ring; each case prints one line of JSON.

What is right is what one process does: an optimizer over a group of this rank alone.
"""

import keras
import numpy as np
import tensorflow as tf
from shared import difference, digest, error_of, keep_graphs, say

import ringreduce.keras as rr

comm = rr.init()
alone = comm.split(comm.rank)
ROWS, WIDTH = 8, 4
# Rows 6 and 7 have momentum after the first step. In the last but one each rank has so many rows
# that the whole table travels; in the last, rank 1 has none.
STEPS = [([6, 6, 7], [7]), ([1, 2], [1]), ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 5]), ([3], [])]


def optimizer_of(inner, communicator=None, **options):
    return rr.DistributedOptimizer(inner, communicator, update_rows="touched", **options)


def gradient_of(ids):
    """Whole multiples of the number of ranks, other ones in each row."""
    ids = np.array(ids, "int64")
    values = comm.size * (1 + ids[:, None] + np.arange(WIDTH)).astype("float32")
    return tf.IndexedSlices(values, ids, tf.constant([ROWS, WIDTH], tf.int64))


def mean_of(per_rank):
    """The gradient of the mean in one process."""
    ids = [index for ids in per_rank for index in ids]
    whole = gradient_of(ids)
    return tf.IndexedSlices(whole.values / comm.size, whole.indices, whole.dense_shape)


def applied(case, accumulate_steps=1):
    """Steps with integers, exact with momentum 0.5."""
    table, twin = (keras.Variable(tf.zeros((ROWS, WIDTH)), name="table") for _ in range(2))
    optimizer = optimizer_of(
        keras.optimizers.SGD(0.5, momentum=0.5), accumulate_steps=accumulate_steps
    )
    reference = optimizer_of(
        keras.optimizers.SGD(0.5, momentum=0.5), alone, accumulate_steps=accumulate_steps
    )
    seen = []
    for per_rank in STEPS:
        before = table.numpy()
        optimizer.apply([gradient_of(per_rank[comm.rank])], [table])
        reference.apply([mean_of(per_rank)], [twin])
        seen.append(np.nonzero((table.numpy() != before).any(1))[0].tolist())
    pairs = zip([table, *optimizer.variables], [twin, *reference.variables], strict=True)
    say(
        case,
        moved=seen,
        equal=all((own.numpy() == other.numpy()).all() for own, other in pairs),
        digest=digest([table, *optimizer.variables]),
    )


def fitted(case, layer, make, is_eager=False):
    """`rr.fit` on 65 rows in batches of 64: in the last one most ranks have no row."""
    generator = np.random.default_rng(0)
    ids = 3 * generator.integers(0, 334, (65, 3))
    targets = generator.normal(size=(65, 1)).astype("float32")

    def model_of(layer, communicator=None, **options):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((3,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        model.compile(optimizer_of(make(), communicator), "mse", **options)
        return model

    of_table = {"embeddings_initializer": "ones", "name": "table"}
    model = model_of(layer(1003, WIDTH, **of_table), run_eagerly=is_eager)
    twin = model_of(keras.layers.Embedding(1003, WIDTH, **of_table), alone, run_eagerly=True)
    options = {"batch_size": 64, "epochs": 2, "shuffle": False, "verbose": 0}
    rr.fit(model, ids, targets, **options)
    twin.fit(ids, targets, **options)
    own, reference = (each.layers[0].weights[0].numpy() for each in (model, twin))
    if layer is rr.ShardedEmbedding:
        reference = reference[comm.rank :: comm.size]
    say(
        case,
        apart=float(np.abs(own - reference).max()),
        moved=sorted(np.nonzero((own != 1).any(1))[0].tolist())
        == np.nonzero((reference != 1).any(1))[0].tolist(),
        digest=digest(model.layers[-1].weights),
        whole=difference(model, twin) if layer is keras.layers.Embedding else None,
    )


def momentum():
    return keras.optimizers.SGD(2**-6, momentum=0.5)


def adagrad():
    return keras.optimizers.Adagrad(2**-6, clipnorm=0.5)


keep_graphs()
applied("applied")
applied("accumulated", accumulate_steps=2)
fitted("fit", keras.layers.Embedding, momentum)
fitted("sharded, clipped", rr.ShardedEmbedding, adagrad, is_eager=True)
chosen = "all" if comm.rank == 0 else "touched"
other = rr.DistributedOptimizer(keras.optimizers.SGD(0.5), update_rows=chosen)
say("settings", **error_of(lambda: other.build([keras.Variable(tf.zeros((2, 2)))])))
