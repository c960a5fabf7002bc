"""N workers of batch B train to the weights of plain Keras with batch N B, and end alike.

Workers start from different seeds, rank 0 from the one that plain Keras starts from.
"""

from dataclasses import dataclass, field

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers
from keras.optimizers import SGD

import ringreduce.keras as rr
from ringreduce.effects import native
from tests.models import MUON_TRAINS
from tests.programs.shared import built, difference, digest
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

GLOBAL_BATCH, STEPS, EPOCHS = 12, 4, 2
# float32 sums in another order: after 8 steps of SGD the weights differ in the last digits. Adam
# divides by the root of squared gradients, which magnifies that where they are near zero; its
# relatives do alike.
SUMS, ROOTS = 2e-6, 2e-4
DECAY = {"weight_decay": 0.01}
OPTIMIZERS = {
    "sgd": (lambda: SGD(0.05, momentum=0.9), SUMS),
    "adam": (lambda: optimizers.Adam(0.01), ROOTS),
    "adamw": (lambda: optimizers.AdamW(0.01, global_clipnorm=0.1, **DECAY), ROOTS),
    "adamw clipnorm": (lambda: optimizers.AdamW(0.01, clipnorm=0.05, **DECAY), ROOTS),
    "nadam": (lambda: optimizers.Nadam(0.01), ROOTS),
    "lamb": (lambda: optimizers.Lamb(0.01), ROOTS),
    "lion": (lambda: optimizers.Lion(0.001), SUMS),
    "muon": (lambda: optimizers.Muon(0.01), ROOTS),
    "averages": (lambda: SGD(0.05, use_ema=True, ema_overwrite_frequency=3), SUMS),
    "loss scale": (
        lambda: optimizers.LossScaleOptimizer(SGD(0.05, momentum=0.9), dynamic_growth_steps=4),
        SUMS,
    ),
}
# Each rank's gradients are rounded, to 11 or 8 bits, before they are averaged.
ROUNDED = {"mixed_float16": 5e-3, "mixed_bfloat16": 3e-2}


@dataclass(frozen=True)
class Way:
    """One way to train, by the optimizer of this name."""

    optimizer: str
    # `fit`, which is quicker "eager", by "jit" or of a model that is not "built"; or a "loop", by
    # which a step is traced once, and not twice.
    how: str = "eager"
    policy: str = "float32"
    wrapper: dict = field(default_factory=dict)

    def __str__(self):
        return " ".join([self.optimizer, self.how, self.policy, *self.wrapper])

    @property
    def tolerance(self):
        policy = "mixed_bfloat16" if "compression" in self.wrapper else self.policy
        return ROUNDED.get(policy) or OPTIMIZERS[self.optimizer][1]


ACCUMULATED, SMALL_BUCKETS = {"gradient_accumulation_steps": 2}, {"bucket_bytes": 64}
QUICK = [
    Way("sgd", "unbuilt"),
    Way("sgd", "loop"),
    Way("sgd", wrapper=SMALL_BUCKETS),
    Way("adam"),
    Way("adam", policy="mixed_float16"),
    Way("sgd", policy="mixed_bfloat16"),
]
# Combinations of what these have one by one, and further optimizers.
FULL = [
    *(Way(name) for name in ("adamw", "averages", "loss scale")),
    *(Way(name, "loop") for name in ("adamw clipnorm", "nadam", "lamb", "lion")),
    *([Way("muon", "loop")] if MUON_TRAINS else []),
    *(Way(name, "fit", wrapper=ACCUMULATED) for name in ("sgd", "adamw clipnorm", "lamb")),
    Way("adam", wrapper=ACCUMULATED),
    Way("lamb", "fit", "mixed_float16"),
    Way("nadam", "fit", "mixed_bfloat16"),
    Way("sgd", "several steps"),
    Way("sgd", "eager loop"),
]
if native.library() is not None:
    FULL += [
        Way("sgd", "unbuilt jit"),
        *(Way(name, "jit") for name in ("adam", "averages", "loss scale")),
        Way("adam", "jit", wrapper=ACCUMULATED),
        Way("adam", "jit", "mixed_float16"),
        Way("adam", "jit", wrapper={"compression": "bf16"}),
    ]


def make_model(way, seed):
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(way.policy)
    try:
        layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((6,)), *layers])
    finally:
        keras.config.set_dtype_policy("float32")


def train(model, way, optimizer, data):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    several = 4 if way.how == "several steps" else 1
    is_eager, is_jit = "eager" in way.how, "jit" in way.how
    model.compile(
        optimizer, loss, run_eagerly=is_eager, jit_compile=is_jit, steps_per_execution=several
    )
    if "unbuilt" not in way.how:
        built(model)
    if "loop" not in way.how:
        model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0)
        return

    def step(batch, target):
        with tf.GradientTape() as tape:
            value = loss(target, model(batch, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables))

    step = step if is_eager else tf.function(step)
    for _ in range(EPOCHS):
        for batch, target in data:
            step(batch, target)


def trained(way):
    rng = np.random.default_rng(7)
    inputs = rng.normal(size=(GLOBAL_BATCH * STEPS, 6)).astype("float32")
    labels = rng.integers(0, 3, size=GLOBAL_BATCH * STEPS)
    data = tf.data.Dataset.from_tensor_slices((inputs, labels))
    make_optimizer = OPTIMIZERS[way.optimizer][0]
    model = make_model(way, seed=rr.rank())
    optimizer = rr.DistributedOptimizer(make_optimizer(), **way.wrapper)
    train(model, way, optimizer, rr.shard(data).batch(GLOBAL_BATCH // rr.size()))
    if rr.rank() == 0:
        alone = make_model(way, seed=0)
        batch = GLOBAL_BATCH * way.wrapper.get("gradient_accumulation_steps", 1)
        train(alone, Way(way.optimizer), make_optimizer(), data.batch(batch))
        assert difference(model, alone) < way.tolerance
        assert difference(alone, make_model(way, seed=0)) > 0.003
    return digest(model.get_weights())


@pytest.mark.parametrize(
    ("way", "size"),
    [
        *((way, 2) for way in QUICK),
        *(in_full(way, 3) for way in QUICK),
        *(in_full(way, 2) for way in FULL),
    ],
    ids=str,
)
def test_workers_end_where_one_process_does_and_bit_identical(ranks, way, size):
    assert len(set(ranks(size, trained, way))) == 1
