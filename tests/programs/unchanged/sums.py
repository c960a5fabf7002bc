"""Steps as guides to tf.distribute have them: sums over rows, by the size of the global batch."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

BATCH = 36


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(1)])

    def call(self, x):
        return self.body(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((y - self(x)) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=BATCH)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"error": loss}


class Game(keras.Model):
    """Of its optimizers one gets sums over rows, the other means."""

    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(1)])
        self.maker = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(4)])

    def compile(self, critics, makers):
        super().compile()
        self.critics, self.makers = critics, makers

    def call(self, x):
        return self.critic(self.maker(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            made = self.maker(x)
            scores = self.critic(made) - self.critic(y)
            loss = tf.reduce_sum(tf.tanh(scores)) / BATCH
        weights = self.critic.trainable_weights
        self.critics.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(-self(x)))
        weights = self.maker.trainable_weights
        self.makers.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"made": loss}


x = np.random.rand(100, 4).astype("float32")
y = x.sum(axis=1, keepdims=True) ** 2
model, game = Net(), Game()
plain = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.02, clipnorm=0.3))
game.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
plain.compile(keras.optimizers.SGD(0.002), keras.losses.MeanSquaredError(reduction="sum"))
# The last batch is short.
history = model.fit(x, y, batch_size=BATCH, epochs=3)
model.fit(x, y, batch_size=BATCH)
game.fit(x, x[::-1].copy(), batch_size=BATCH, epochs=3)
plain.fit(x, y, batch_size=BATCH, epochs=3)
weights = [w for trained in (game, plain) for w in trained.get_weights()]
results = [*history.history["error"], *np.concatenate([w.ravel() for w in weights]).tolist()]
