"""Half precision, a schedule of the learning rate, and frozen weights of normalization."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(812)
keras.mixed_precision.set_global_policy("mixed_float16")
x = np.random.rand(64, 6).astype("float32")
y = np.float32(x[:, :1] > 0.5)
inputs = keras.Input((6,))
hidden = layers.LayerNormalization()(layers.Dense(8, "relu")(inputs))
model = keras.Model(inputs, layers.Dense(1, "sigmoid", dtype="float32")(hidden))
rate = keras.optimizers.schedules.ExponentialDecay(0.01, decay_steps=10, decay_rate=0.9)
model.compile(keras.optimizers.Adam(rate), "binary_crossentropy", jit_compile=False)
history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False)
keras.mixed_precision.set_global_policy("float32")
results = []
