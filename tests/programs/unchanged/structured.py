"""A table with numbers and names, and layers that look at it before training."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

count = 96
features = {
    "age": np.random.randint(20, 70, count).astype("float32"),
    "kind": np.random.choice(["normal", "fixed", "other"], count),
}
target = (features["age"] > 45).astype("float32")
ds = tf.data.Dataset.from_tensor_slices((features, target)).shuffle(count).batch(32)
age, kind = keras.Input((1,), name="age"), keras.Input((1,), name="kind", dtype="string")
normalizer = layers.Normalization()
normalizer.adapt(ds.map(lambda x, y: tf.expand_dims(x["age"], -1)))
lookup = layers.StringLookup(output_mode="multi_hot")
lookup.adapt(ds.map(lambda x, y: tf.expand_dims(x["kind"], -1)))
joint = layers.concatenate([normalizer(age), lookup(kind)])
model = keras.Model({"age": age, "kind": kind}, layers.Dense(1, "sigmoid")(joint))
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
history = model.fit(
    ds.map(lambda x, y: ({n: tf.expand_dims(v, -1) for n, v in x.items()}, y)), epochs=2
)
results = history.history["loss"]
