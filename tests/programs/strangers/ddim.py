"""Diffusion model with an exponential moving average of its network, as in Keras's examples."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from report import report

import ringreduce.keras as rr  # ringreduce

rr.init()  # ringreduce
keras.utils.set_random_seed(4)
EMA = 0.9


def make_network():
    image, variance = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
    x = layers.Conv2D(8, 3, padding="same")(image)
    x = layers.Concatenate()([x, layers.UpSampling2D(size=8)(variance)])
    x = rr.SyncBatchNormalization(center=False, scale=False)(x)  # ringreduce
    x = layers.Conv2D(8, 3, padding="same", activation="swish")(x)
    return keras.Model([image, variance], layers.Conv2D(1, 1, kernel_initializer="zeros")(x))


class Diffusion(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network, self.ema_network = make_network(), make_network()
        self.ema_network.set_weights(self.network.get_weights())
        self.seed_generator = keras.random.SeedGenerator(5)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker]

    def train_step(self, images):
        images = self.normalizer(images, training=True)
        noises = keras.random.normal(ops.shape(images), seed=self.seed_generator)
        times = keras.random.uniform((ops.shape(images)[0], 1, 1, 1), seed=self.seed_generator)
        signal, noise = ops.cos(times * np.pi / 2), ops.sin(times * np.pi / 2)
        with tf.GradientTape() as tape:
            predicted = self.network([signal * images + noise * noises, noise**2], training=True)
            loss = ops.mean(ops.abs(noises - predicted))
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.noise_loss_tracker.update_state(loss)
        for weight, ema in zip(self.network.weights, self.ema_network.weights, strict=True):
            ema.assign(EMA * ema + (1 - EMA) * weight)
        return {"n_loss": self.noise_loss_tracker.result()}


rng = np.random.default_rng(0)
images = np.cumsum(rng.normal(size=(256, 8, 8, 1)), axis=1).astype("float32")

model = Diffusion()
model.normalizer.adapt(images)
optimizer = keras.optimizers.AdamW(0.005, weight_decay=1e-4)
model.compile(optimizer=rr.DistributedOptimizer(optimizer))  # ringreduce
history = rr.fit(model, images, epochs=3, batch_size=32, verbose=2)  # ringreduce
report(model.network, model.ema_network, losses=history.history["n_loss"])
