"""What happens in fit: a train_step and metrics of one's own."""

import keras
import numpy as np
import tensorflow as tf

loss_tracker = keras.metrics.Mean(name="loss")
mae_metric = keras.metrics.MeanAbsoluteError(name="mae")


class CustomModel(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.losses.mean_squared_error(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        loss_tracker.update_state(loss)
        mae_metric.update_state(y, y_pred)
        return {"loss": loss_tracker.result(), "mae": mae_metric.result()}

    def predict_step(self, data):
        return tf.reduce_mean(self(data))

    @property
    def metrics(self):
        return [loss_tracker, mae_metric]


inputs = keras.Input(shape=(8,))
model = CustomModel(inputs, keras.layers.Dense(1)(inputs))
model.compile(optimizer=keras.optimizers.Adam())
x = np.random.random((95, 8)).astype("float32")
y = np.random.random((95, 1)).astype("float32")
history = model.fit(x, y, epochs=3)
results = model.predict(x).tolist()
