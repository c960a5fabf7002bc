"""Files that a callback and the program itself write, and training that goes on from one."""

import keras
import numpy as np
from keras import layers

x = np.random.rand(30, 3).astype("float32")
y = x.sum(axis=1)
model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
model.fit(x, y, epochs=2, callbacks=[keras.callbacks.ModelCheckpoint("epoch.keras")])
assert int(keras.models.load_model("epoch.keras").optimizer.iterations) == 2
model.save("end.keras")
model = keras.models.load_model("end.keras")
assert isinstance(model.optimizer, keras.optimizers.SGD)
model.fit(x, y, epochs=1)
results = [float(model.evaluate(x, y, return_dict=True)["loss"])]
