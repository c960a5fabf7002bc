"""A PyDataset, and a generator whose epochs have steps."""

import keras
import numpy as np

x = np.random.rand(72, 4).astype("float32")
y = x.mean(axis=1, keepdims=True)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        rows = slice(index * 12, index * 12 + 12)
        return x[rows], y[rows]


def batches():
    while True:
        for index in range(6):
            yield x[index * 12 : index * 12 + 12], y[index * 12 : index * 12 + 12]


model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), "mse")
first = model.fit(Batches(workers=2), epochs=2)
second = model.fit(batches(), steps_per_epoch=4, epochs=2, class_weight=None)
results = [*first.history["loss"], *second.history["loss"], model.evaluate(Batches())]
