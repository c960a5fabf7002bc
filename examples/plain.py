"""A Keras program that knows nothing of ringreduce: handwritten digits.

``ringreduce verify --unchanged examples/plain.py -n 1,2`` says whether two workers would train
alike, and faster; ``ringreduce run -n 2 --unchanged examples/plain.py`` trains on two.
"""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

pixels, labels = load_digits(return_X_y=True)
images = np.float32(pixels).reshape(-1, 8, 8, 1) / 16
train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.Conv2D(32, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(train_x, train_y, batch_size=64, epochs=8, validation_split=0.1, verbose=2)
loss, accuracy = model.evaluate(test_x, test_y, verbose=0)
print(f"accuracy on {len(test_x)} other digits: {accuracy:.3f}")
