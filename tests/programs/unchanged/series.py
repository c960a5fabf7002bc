"""A recurrent network on windows of a series."""

import keras
import numpy as np

series = np.sin(np.arange(140) / 5).astype("float32")[:, None]
train = keras.utils.timeseries_dataset_from_array(
    series[:-8], series[8:], sequence_length=8, batch_size=24
)
inputs = keras.layers.Input(shape=(8, 1))
model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.LSTM(6)(inputs)))
model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001), loss="mse")
history = model.fit(train, epochs=2, validation_data=train)
for x, _ in train.take(1):
    forecast = model.predict(x)
results = [*history.history["val_loss"], *forecast[:3, 0]]
