"""A student that learns from a teacher; a fit of one's own around Keras's."""

import pickle

import keras
import numpy as np
from keras import layers


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student
        self.fits = 0

    def fit(self, *args, **kwargs):
        self.fits += 1
        self.teacher.trainable = False
        return super().fit(*args, **kwargs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        soft = self.teacher(x, training=False)
        own = super().compute_loss(x, y, y_pred, sample_weight)
        return own + keras.ops.mean(keras.ops.square(soft - y_pred))

    def call(self, x):
        return self.student(x)


def dense(units):
    return keras.Sequential([keras.Input((6,)), layers.Dense(units, "relu"), layers.Dense(2)])


x = np.random.rand(64, 6).astype("float32")
y = np.random.randint(0, 2, 64)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
teacher, student = dense(12), dense(4)
teacher.compile(optimizer=keras.optimizers.Adam(), loss=loss)
teacher.fit(x, y, epochs=2)
model = Distiller(student=student, teacher=teacher)
model.compile(optimizer=keras.optimizers.AdamW(), loss=loss, metrics=["accuracy"])
model.fit(x, y, epochs=2)
assert model.fits == 1
again = pickle.loads(pickle.dumps(teacher))
results = [float(teacher.evaluate(x, y)), float(again.evaluate(x, y))]
