"""Digits by a convolutional network."""

import keras
import numpy as np
from keras import layers

x = np.random.rand(120, 8, 8, 1).astype("float32")
y = keras.utils.to_categorical(np.random.randint(0, 3, 120), 3)

model = keras.Sequential(
    [
        keras.Input(shape=(8, 8, 1)),
        layers.Conv2D(4, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Flatten(),
        layers.Dense(3, activation="softmax"),
    ]
)
model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
model.fit(x, y, batch_size=16, epochs=2, validation_split=0.1)
loss, accuracy = model.evaluate(x, y, verbose=0)
print("Test loss:", loss)
results = [loss, accuracy]
