"""Retrieval: a tower for users and what they have seen, one for items, and their scores."""

import keras
import numpy as np
from keras import layers, ops
from report import report

import ringreduce.keras as rr  # ringreduce

rr.init()  # ringreduce
keras.utils.set_random_seed(6)
USERS, ITEMS, SIZE, SEEN = 301, 203, 8, 5

rng = np.random.default_rng(0)
users = rng.integers(0, USERS, 1000)
# 0 stands for nothing: a user has seen one item or more.
seen = rng.integers(1, ITEMS, (1000, SEEN)) * (rng.random((1000, SEEN)) < 0.6)
seen[:, 0] = rng.integers(1, ITEMS, 1000)
items = rng.integers(1, ITEMS, 1000)
tastes, kinds = rng.normal(size=(USERS, 2)), rng.normal(size=(ITEMS, 2))
clicks = ((tastes[users] * kinds[items]).sum(axis=1) > 0).astype("float32")

user = keras.Input((), dtype="int64", name="user")
past = keras.Input((SEEN,), dtype="int64", name="past")
item = keras.Input((), dtype="int64", name="item")
table = rr.ShardedEmbedding(ITEMS, SIZE, embeddings_regularizer="l2", mask_zero=True)  # ringreduce
own = rr.ShardedEmbedding(USERS, SIZE)(user)  # ringreduce
known = layers.GlobalAveragePooling1D()(table(past))
left = layers.Dense(SIZE, activation="relu")(ops.concatenate([own, known], axis=1))
right = layers.Dense(SIZE)(table(item))
score = layers.Dot(axes=1)([left, right])
model = keras.Model([user, past, item], layers.Activation("sigmoid")(score))
model.compile(
    loss="binary_crossentropy",
    optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.5)),  # ringreduce
)
how = {"batch_size": 60, "epochs": 3, "shuffle": False, "verbose": 2}
train, held_back = (
    ([users[part], seen[part], items[part]], clicks[part])
    for part in (slice(901), slice(901, None))
)
history = rr.fit(model, *train, validation_data=held_back, **how)  # ringreduce
scores = rr.predict(model, [users[:7], seen[:7], items[:7]])  # ringreduce
losses = {"losses": history.history["loss"], "validation": history.history["val_loss"]}
report(**losses, scores=scores[:, 0].tolist())
