"""Optimizers and gradients in functions that a training step calls, as in `order.py`.

Each case prints one line of JSON: how its weights differ from those of the same training without
functions.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from shared import difference, digest, say
from ways import WAYS, comm, compiled, late

import ringreduce.keras as rr

rank, size = comm.rank, comm.size


def data(count=8):
    generator = np.random.default_rng(3)
    inputs = generator.normal(size=(count * size, 4)).astype("float32")
    targets = inputs[:, :2] - inputs[:, 2:] ** 2
    return inputs[rank::size], targets[rank::size]


class Two(keras.Model):
    """Two nets with an optimizer each, trained one after the other in functions of their own."""

    def __init__(self, wrap, **options):
        keras.utils.set_random_seed(5)
        super().__init__()
        self.nets = [
            keras.Sequential(
                [keras.Input((4,)), rr.SyncBatchNormalization(), keras.layers.Dense(2)]
            )
            for _ in range(2)
        ]
        self.optimizers = [
            rr.DistributedOptimizer(keras.optimizers.SGD(0.1), **options) for _ in self.nets
        ]
        self.parts = [wrap(functools.partial(self.part, number)) for number in range(2)]

    def part(self, number, x, y):
        net, optimizer = self.nets[number], self.optimizers[number]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(late(x, number), training=True) - y) ** 2)
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply(gradients, net.trainable_variables)
        return loss

    def train_step(self, batch):
        x, y = batch
        return {"first": self.parts[0](x, y), "second": self.parts[1](x, -y)}


def optimizers_in_functions(case, ways, **options):
    """A model's `train_step` that calls functions; without them it is the same training."""
    inputs, targets = data()
    ends = {}
    for way in ("plain", *ways):
        outer, inner = WAYS.get(way, (tf.function, lambda function: function))
        model = Two(inner, **options)
        for optimizer, net in zip(model.optimizers, model.nets, strict=True):
            optimizer.build(net.trainable_variables)
        # The reference eagerly: tracing it would take longer.
        how = {"run_eagerly": True} if way == "plain" else {"jit_compile": outer is compiled}
        model.compile(optimizer=model.optimizers[0], **how)
        model.fit(inputs, targets, batch_size=4, epochs=2, shuffle=False, verbose=0)
        ends[way] = model
    say(
        case,
        digests={way: digest(model.get_weights()) for way, model in ends.items()},
        differences={way: difference(model, ends["plain"]) for way, model in ends.items()},
        moved=difference(ends["plain"], Two(lambda function: function)),
    )


def rows_out_of_a_function(case, ways, with_tape):
    """What comes out of a function does not say which shape a sparse gradient stands for."""
    index = tf.constant([[1, 2], [2, 4], [rank, 0]])

    def trained(outer, inner):
        keras.utils.set_random_seed(5)
        layer = keras.layers.Embedding(5, 3)
        layer.build()
        optimizer = keras.optimizers.SGD(0.5)
        if not with_tape:
            optimizer = rr.DistributedOptimizer(optimizer)
        optimizer.build(layer.trainable_variables)

        @inner
        def gradients_of():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(index) ** 2)
            return tape.gradient(loss, layer.trainable_variables)

        looked_up = inner(lambda: tf.reduce_sum(layer(index) ** 2))

        @outer
        def step():
            if with_tape:
                with rr.DistributedGradientTape() as tape:
                    loss = looked_up()
                gradients = tape.gradient(loss, layer.trainable_variables)
            else:
                gradients = gradients_of()
            optimizer.apply(gradients, layer.trainable_variables)

        step()
        return layer.get_weights()[0]

    plain = (tf.function, lambda function: function)
    ends = {way: trained(*WAYS.get(way, plain)) for way in ("plain", *ways)}
    say(
        case,
        digests={way: digest([end]) for way, end in ends.items()},
        differences={way: float(np.abs(end - ends["plain"]).max()) for way, end in ends.items()},
    )


def chosen(*ways):
    """All ways on three ranks; on two some, since most of the time goes into compiling."""
    return [way for way in WAYS if way in ways or size > 2]


optimizers_in_functions("optimizers", chosen("jit inside"))
outermost = [way for way in chosen("graph") if way in ("graph", "jit both")]
optimizers_in_functions("several steps", outermost, accumulate_steps=2)
rows_out_of_a_function("rows", chosen("jit"), with_tape=False)
rows_out_of_a_function("rows of a tape", chosen("graph"), with_tape=True)
rr.shutdown()
