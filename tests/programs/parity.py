"""Trains the same model from the same data in several ways; writes every rank's weights.

Run alone, step by step, and as N workers: the global batch is the same, so the weights must be
too. Ranks start from different seeds, and must not end with different weights.
"""

import sys
from dataclasses import dataclass, field, replace

import keras
import numpy as np
import tensorflow as tf
from shared import built, keep_graphs

import ringreduce.keras as rr

GLOBAL_BATCH, STEPS = 12, 4
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01, global_clipnorm=0.1),
    "adamw_clipnorm": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01, clipnorm=0.05),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "lion": lambda: keras.optimizers.Lion(0.001),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "averages": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=3),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), dynamic_growth_steps=4
    ),
}


@dataclass(frozen=True)
class Way:
    """One way to train with `model.fit`; alone and together it must end in the same weights.

    Attributes:
        optimizer: a name in `OPTIMIZERS`.
        wrapper: options of `DistributedOptimizer`.
        compile: options of `model.compile`.
        policy: the model's dtype policy.
    """

    optimizer: str
    wrapper: dict = field(default_factory=dict)
    compile: dict = field(default_factory=dict)
    policy: str = "float32"


COMMON = ("sgd", "adam", "adamw_clipnorm", "nadam", "lamb", "muon")
# To be tried in another way: a line here, and its tolerance in test_parity.py.
WAYS = {
    **{name: Way(name) for name in ("sgd", "adam", "adamw", "averages", "loss_scale")},
    **{f"{name} accumulated": Way(name, {"accumulate_steps": 2}) for name in COMMON},
    **{f"{name} mixed_float16": Way(name, policy="mixed_float16") for name in COMMON},
    **{f"{name} mixed_bfloat16": Way(name, policy="mixed_bfloat16") for name in COMMON},
    "steps_per_execution": Way("sgd", compile={"steps_per_execution": 4}),
    # A bucket for each gradient.
    "small_buckets": Way("sgd", wrapper={"bucket_bytes": 64}),
}
# The same with `jit_compile=True`; left out where XLA cannot call the ring.
JIT = (
    *("sgd", "adam", "adamw", "averages", "loss_scale", "steps_per_execution", "small_buckets"),
    *("adam accumulated", "adam mixed_float16", "sgd mixed_bfloat16"),
)
WAYS |= {
    f"{name} jit": replace(WAYS[name], compile={**WAYS[name].compile, "jit_compile": True})
    for name in JIT
}
# Built by the first step, as most users' are; the others before, which is faster.
UNBUILT = ("sgd", "sgd jit")
# As one process in every way: what they compute is in question, and tracing takes longer.
EAGER = (
    *("adam", "adamw", "averages", "loss_scale", "small_buckets", "adam accumulated"),
    *("adam mixed_float16", "sgd mixed_bfloat16"),
)
WAYS["adam bf16 jit"] = Way("adam", {"compression": "bf16"}, {"jit_compile": True})


def make_model(seed, policy="float32"):
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(policy)
    try:
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, activation="tanh"),
                keras.layers.Dense(3),
            ]
        )
    finally:
        keras.config.set_dtype_policy("float32")


def main(folder, part, *ways):
    """Train in each of `ways`; the weights go to a file of this part, size and rank."""
    keep_graphs()
    comm = rr.init()
    rng = np.random.default_rng(7)
    inputs = rng.normal(size=(GLOBAL_BATCH * STEPS, 6)).astype("float32")
    labels = rng.integers(0, 3, size=GLOBAL_BATCH * STEPS)
    data = rr.shard(tf.data.Dataset.from_tensor_slices((inputs, labels)))
    data = data.batch(GLOBAL_BATCH // comm.size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = {}

    def fit(name, way):
        # Rank 0's seed is the same in every run; the others' differ, as users' do.
        model = make_model(comm.rank, way.policy)
        optimizer = rr.DistributedOptimizer(OPTIMIZERS[way.optimizer](), **way.wrapper)
        is_eager = comm.size == 1 or name in EAGER
        eagerly = {"run_eagerly": True, "jit_compile": False} if is_eager else {}
        model.compile(optimizer=optimizer, loss=loss, **way.compile | eagerly)
        if name not in UNBUILT:
            built(model)
        model.fit(data, epochs=2, shuffle=False, verbose=0)
        weights[name] = model.get_weights()

    def loop(name, optimizer, step_wrapper):
        model = make_model(comm.rank)
        optimizer.build(model.trainable_variables)

        @step_wrapper
        def step(batch, target):
            with tf.GradientTape() as tape:
                value = loss(target, model(batch, training=True))
            gradients = tape.gradient(value, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)

        for _ in range(2):
            for batch, target in data:
                step(batch, target)
        weights[name] = model.get_weights()

    loops = {
        "eager_loop": ("sgd", lambda step: step),
        "graph_loop": ("sgd", tf.function),
        # Traced once, and not twice in two functions as in `fit`.
        **{name: (name, tf.function) for name in OPTIMIZERS if name not in WAYS},
    }
    for name in ways:
        if name in WAYS:
            fit(name, WAYS[name])
        else:
            optimizer, step_wrapper = loops[name]
            loop(name, rr.DistributedOptimizer(OPTIMIZERS[optimizer]()), step_wrapper)
    arrays = {f"{name}.{i}": w for name, ws in weights.items() for i, w in enumerate(ws)}
    np.savez(f"{folder}/{part}-{comm.size}-{comm.rank}.npz", **arrays)


main(*sys.argv[1:])
