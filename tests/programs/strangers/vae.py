"""Variational autoencoder with a train_step of its own, as in Keras's examples."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from report import report

import ringreduce.keras as rr  # ringreduce

rr.init()  # ringreduce
keras.utils.set_random_seed(1)


class Sampling(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.kl_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.loss_tracker, self.kl_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance, code = self.encoder(data)
            reconstruction = self.decoder(code)
            errors = ops.sum(ops.square(data - reconstruction), axis=(1, 2, 3))
            kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            kl_loss = ops.mean(ops.sum(kl, axis=1))
            loss = ops.mean(errors) + 0.1 * kl_loss
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        self.kl_tracker.update_state(kl_loss)
        return {"loss": self.loss_tracker.result(), "kl_loss": self.kl_tracker.result()}


inputs = keras.Input((8, 8, 1))
x = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(inputs)
x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
mean, log_variance = layers.Dense(2)(x), layers.Dense(2)(x)
encoder = keras.Model(inputs, [mean, log_variance, Sampling()([mean, log_variance])])
code = keras.Input((2,))
x = layers.Reshape((4, 4, 8))(layers.Dense(4 * 4 * 8, activation="relu")(code))
x = layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid")(x)
decoder = keras.Model(code, x)

rng = np.random.default_rng(0)
rows, columns = rng.integers(0, 5, size=(2, 600))
images = np.zeros((600, 8, 8, 1), "float32")
for image, row, column in zip(images, rows, columns, strict=True):
    image[row : row + 4, column : column + 4] = 1.0

vae = VAE(encoder, decoder)
vae.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.Adam(0.01)))  # ringreduce
history = rr.fit(vae, images, epochs=4, batch_size=64, verbose=2)  # ringreduce
report(vae, losses=history.history["loss"])
