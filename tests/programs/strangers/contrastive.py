"""Contrastive learning: both views pass one encoder, with BatchNormalization in it.

The loss compares each sample with all others of the batch, so it is computed on the embeddings of
all ranks.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from report import report

import ringreduce.keras as rr  # ringreduce

rr.init()  # ringreduce
keras.utils.set_random_seed(3)

dense, relu = layers.Dense(24, use_bias=False), layers.Activation("relu")
normalization = rr.SyncBatchNormalization(momentum=0.9)  # ringreduce
encoder = keras.Sequential([keras.Input((12,)), dense, normalization, relu, layers.Dense(8)])
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Contrastive(keras.Model):
    def __init__(self, encoder, temperature=0.2):
        super().__init__()
        self.encoder, self.temperature = encoder, temperature
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        (first, second), _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            one = ops.normalize(self.encoder(first, training=True), axis=1)
            two = ops.normalize(self.encoder(second, training=True), axis=1)
            one, two = rr.all_gather(one), rr.all_gather(two)  # ringreduce
            similarities = ops.matmul(one, ops.transpose(two)) / self.temperature
            labels = ops.arange(ops.shape(one)[0])
            loss = cross_entropy(labels, similarities)
            loss += cross_entropy(labels, ops.transpose(similarities))
        weights = self.encoder.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


rng = np.random.default_rng(0)
samples = rng.normal(size=(320, 12))
views = [(samples + 0.1 * rng.normal(size=samples.shape)).astype("float32") for _ in range(2)]

model = Contrastive(encoder)
model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.05)))  # ringreduce
history = rr.fit(model, tuple(views), epochs=3, batch_size=32, shuffle=False)  # ringreduce
report(encoder, losses=history.history["loss"])
