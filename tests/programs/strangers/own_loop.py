"""A training loop of one's own, with metrics, as in Keras's guide."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from report import report

import ringreduce.keras as rr  # ringreduce

comm = rr.init()  # ringreduce
keras.utils.set_random_seed(8)
BATCH, EPOCHS = 64, 3

rng = np.random.default_rng(0)
points = rng.uniform(-1, 1, (640, 2)).astype("float32")
labels = (points[:, 0] * points[:, 1] > 0).astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((points, labels))
dataset = rr.shard(dataset).batch(BATCH // comm.size)  # ringreduce

model = keras.Sequential([keras.Input((2,)), layers.Dense(32, activation="relu"), layers.Dense(2)])
optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.5))  # ringreduce
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
accuracy = keras.metrics.SparseCategoricalAccuracy()


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = loss_fn(y, logits)
    gradients = tape.gradient(loss, model.trainable_weights)
    optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
    accuracy.update_state(y, logits)
    return loss


losses = []
for epoch in range(EPOCHS):
    accuracy.reset_state()
    total = 0.0
    for x, y in dataset:
        total += float(train_step(x, y))
    losses.append(float(rr.all_reduce(total / len(dataset), "mean")))  # ringreduce
    print(f"epoch {epoch}: loss {losses[-1]:.4f}, accuracy {float(accuracy.result()):.3f}")
report(model, losses=losses)
