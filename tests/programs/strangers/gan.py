"""GAN with two optimizers and a train_step of its own, as in Keras's examples."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from report import report

import ringreduce.keras as rr  # ringreduce

rr.init()  # ringreduce
keras.utils.set_random_seed(2)
LATENT = 4


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seed_generator = keras.random.SeedGenerator(3)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real):
        count = ops.shape(real)[0]
        latent = keras.random.normal((count, LATENT), seed=self.seed_generator)
        fake = self.generator(latent)
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(ops.concatenate([fake, real], axis=0))
            d_loss = self.loss_fn(labels, predictions)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        latent = keras.random.normal((count, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(latent))
            g_loss = self.loss_fn(ops.zeros((count, 1)), predictions)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


discriminator = keras.Sequential(
    [keras.Input((2,)), layers.Dense(16), layers.LeakyReLU(0.2), layers.Dense(1)]
)
generator = keras.Sequential(
    [keras.Input((LATENT,)), layers.Dense(16), layers.LeakyReLU(0.2), layers.Dense(2)]
)
angles = np.random.default_rng(0).uniform(0, 2 * np.pi, 485)
points = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("float32")

gan = GAN(discriminator, generator)
gan.compile(
    d_optimizer=rr.DistributedOptimizer(keras.optimizers.Adam(0.001)),  # ringreduce
    g_optimizer=rr.DistributedOptimizer(keras.optimizers.Adam(0.001)),  # ringreduce
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
)
history = rr.fit(gan, points, epochs=3, batch_size=50, verbose=2)  # ringreduce
report(discriminator, generator, losses=history.history["d_loss"])
