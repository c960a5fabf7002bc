"""A mixture of experts, of which each worker has some; each row goes to the one chosen for it."""

import keras
import numpy as np
import tensorflow as tf
from report import report

import ringreduce.keras as rr  # ringreduce

comm = rr.init()  # ringreduce
keras.utils.set_random_seed(6)
EXPERTS, WIDTH = 4, 8


class Experts(rr.parts.PartLayer):  # ringreduce
    def build(self, shape):
        self.router = self.add_weight(shape=(WIDTH, EXPERTS), name="router")
        self.kernel = self.add_part((EXPERTS, WIDTH, WIDTH), name="kernel")
        self.own = EXPERTS // self.ring().size

    def call(self, rows):
        scores = tf.nn.softmax(rows @ self.router)
        chosen = tf.argmax(scores, 1, tf.int32)
        order = tf.argsort(chosen, stable=True)
        counts = tf.math.bincount(chosen // self.own, minlength=EXPERTS // self.own)

        def ask(rows):
            sent, received = rr.all_to_all(tf.gather(rows, order), counts)  # ringreduce
            which, _ = rr.all_to_all(tf.gather(chosen, order) % self.own, counts)  # ringreduce
            answers = tf.einsum("rw,rwv->rv", sent, tf.gather(self.kernel.value, which))
            back, _ = rr.all_to_all(tf.tanh(answers), received)  # ringreduce
            return tf.gather(back, tf.argsort(order))

        answers = rr.parts.in_parts(ask, rows)  # ringreduce
        return rows + tf.ensure_shape(answers, rows.shape) * tf.reduce_max(scores, 1, True)


x = np.random.default_rng(0).normal(size=(501, WIDTH)).astype("float32")
y = np.sin(3 * x).sum(1, keepdims=True)
model = keras.Sequential([keras.Input((WIDTH,)), Experts(), keras.layers.Dense(1)])
model.compile(
    loss="mse",
    optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.05)),  # ringreduce
)
history = rr.fit(model, x, y, batch_size=50, epochs=3, shuffle=False, verbose=2)  # ringreduce
report(losses=history.history["loss"], kernel=rr.predict(model, x[:5])[:, 0].tolist())  # ringreduce
