"""All that callbacks do with files, and training that goes on from one."""

import json
import os
import tempfile

import keras
import numpy as np
from keras import layers

x = np.random.rand(90, 5).astype("float32")
y = x.sum(axis=1)
model = keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
if not os.path.exists("run"):
    os.makedirs("run")
model.fit(
    x,
    y,
    validation_data=(x, y),
    epochs=4,
    callbacks=[
        keras.callbacks.ModelCheckpoint("run/best.keras", save_best_only=True),
        keras.callbacks.ModelCheckpoint("run/{epoch:02d}.weights.h5", save_weights_only=True),
        keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(patience=1),
        keras.callbacks.CSVLogger("run/log.csv"),
        keras.callbacks.TensorBoard("run/board"),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: model.evaluate(x[:8], y[:8], verbose=0)
        ),
    ],
)
best = keras.models.load_model("run/best.keras")
assert isinstance(best.optimizer, keras.optimizers.SGD)
assert int(best.optimizer.iterations) > 0
best.fit(x, y, epochs=1)
best.save("run/final.keras")
best.save_weights("run/final.weights.h5")
best.export("run/exported")
# A folder that has another name on each rank.
with tempfile.TemporaryDirectory() as folder:
    best.save(f"{folder}/final.keras")
    best = keras.models.load_model(f"{folder}/final.keras")
model.load_weights("run/final.weights.h5")
with open("run/results.json", "w") as file:
    json.dump(model.evaluate(x, y, return_dict=True), file)
with open("run/log.csv") as file:
    rows = len(file.readlines())
assert rows == 5, rows


class Unfreezes(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.layers[0].trainable = True
            self.model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
            self.model.make_train_function(force=True)


best.layers[0].trainable = False
best.compile(optimizer="adam", loss="mse")
best.fit(x, y, epochs=3, callbacks=[Unfreezes()])
model = best
results = [float(best.evaluate(x, y)[0])]
