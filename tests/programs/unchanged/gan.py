"""A generator and a discriminator with an optimizer each, that Keras's compile never sees."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers


class GAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real):
        count = tf.shape(real)[0]
        noise = tf.random.normal((count, self.latent_dim))
        both = tf.concat([self.generator(noise), real], axis=0)
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        noise = tf.random.normal((count, self.latent_dim))
        with tf.GradientTape() as tape:
            fakes = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(tf.zeros((count, 1)), fakes)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class Monitor(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        images = self.model.generator(tf.random.normal((3, self.model.latent_dim)))
        np.save(f"generated_{epoch}.npy", images)


model = GAN(
    keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(1)]),
    keras.Sequential([keras.Input((4,)), layers.Dense(8, "relu"), layers.Dense(6)]),
    latent_dim=4,
)
model.compile(
    d_optimizer=keras.optimizers.Adam(0.0003),
    g_optimizer=keras.optimizers.Adam(0.0003),
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
)
dataset = tf.data.Dataset.from_tensor_slices(np.random.rand(64, 6).astype("float32"))
model.fit(dataset.shuffle(64).batch(16), epochs=2, callbacks=[Monitor()])
results = []
