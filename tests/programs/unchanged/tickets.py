"""Support tickets: several inputs and outputs, with weights of losses and samples."""

import keras
import numpy as np
from keras import layers

title = keras.Input(shape=(6,), name="title")
tags = keras.Input(shape=(4,), name="tags")
hidden = layers.concatenate([layers.Dense(8, activation="relu")(title), tags])
priority = layers.Dense(1, name="priority")(hidden)
department = layers.Dense(3, name="department")(hidden)
model = keras.Model(
    {"title": title, "tags": tags}, {"priority": priority, "department": department}
)
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-3),
    loss={
        "priority": keras.losses.MeanSquaredError(),
        "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    },
    loss_weights={"priority": 1.0, "department": 0.2},
)
data = {"title": np.random.rand(100, 6), "tags": np.random.randint(2, size=(100, 4))}
targets = {"priority": np.random.random((100, 1)), "department": np.random.randint(3, size=100)}
history = model.fit(
    data,
    targets,
    epochs=2,
    batch_size=30,
    sample_weight={"priority": np.random.rand(100), "department": np.ones(100)},
)
results = [*history.history["loss"], *model.predict(data)["priority"][:3, 0]]
