"""Transfer learning: a frozen base, then all of it with a smaller rate."""

import keras
import numpy as np
from keras import layers

x = np.random.rand(80, 10).astype("float32")
y = np.random.randint(0, 2, (80, 1)).astype("float32")
base = keras.Sequential([keras.Input((10,)), layers.Dense(12, "relu"), layers.Dense(6, "relu")])
base.trainable = False
inputs = keras.Input(shape=(10,))
model = keras.Model(inputs, layers.Dense(1)(base(inputs, training=False)))
model.compile(
    optimizer=keras.optimizers.Adam(),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy()],
)
first = model.fit(x, y, epochs=2, batch_size=20, validation_data=(x[:30], y[:30]))
base.trainable = True
model.compile(
    optimizer=keras.optimizers.Adam(1e-4),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy()],
)
second = model.fit(x, y, epochs=2, batch_size=20)
copy = keras.models.clone_model(model)
copy.set_weights(model.get_weights())
results = [*first.history["val_loss"], *second.history["loss"], float(copy.predict(x[:1])[0, 0])]
