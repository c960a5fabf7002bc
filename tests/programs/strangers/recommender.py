"""Collaborative filtering: embeddings of users and items, whose product is the rating."""

import keras
import numpy as np
from keras import layers, ops
from report import report

import ringreduce.keras as rr  # ringreduce

rr.init()  # ringreduce
keras.utils.set_random_seed(6)
USERS, ITEMS, SIZE = 60, 40, 8

rng = np.random.default_rng(0)
pairs = np.stack([rng.integers(0, USERS, 1000), rng.integers(0, ITEMS, 1000)], axis=1)
tastes, kinds = rng.normal(size=(USERS, 2)), rng.normal(size=(ITEMS, 2))
ratings = 1 / (1 + np.exp(-(tastes[pairs[:, 0]] * kinds[pairs[:, 1]]).sum(axis=1)))


class Recommender(keras.Model):
    def __init__(self):
        super().__init__()
        options = {"embeddings_regularizer": keras.regularizers.l2(1e-6)}
        self.user = layers.Embedding(USERS, SIZE, **options)
        self.user_bias = layers.Embedding(USERS, 1)
        self.item = layers.Embedding(ITEMS, SIZE, **options)
        self.item_bias = layers.Embedding(ITEMS, 1)

    def call(self, inputs):
        users, items = inputs[:, 0], inputs[:, 1]
        product = ops.sum(self.user(users) * self.item(items), axis=1, keepdims=True)
        return ops.sigmoid(product + self.user_bias(users) + self.item_bias(items))


model = Recommender()
model.compile(
    loss="binary_crossentropy",
    optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(2.0)),  # ringreduce
)
train, held_back = (pairs[:900], ratings[:900]), (pairs[900:], ratings[900:])
how = {"batch_size": 64, "epochs": 3, "shuffle": False, "verbose": 2}
history = rr.fit(model, *train, validation_data=held_back, **how)  # ringreduce
report(model, losses=history.history["loss"], validation=history.history["val_loss"])
