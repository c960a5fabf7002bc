"""Knowledge distillation: a trained teacher, and a student with a compute_loss of its own."""

import keras
import numpy as np
from keras import layers, ops
from report import report

import ringreduce.keras as rr  # ringreduce

rr.init()  # ringreduce
keras.utils.set_random_seed(9)

rng = np.random.default_rng(0)
images = rng.normal(size=(400, 8, 8, 1)).astype("float32")
labels = images[:, 2:6, 2:6].mean(axis=(1, 2, 3)).argsort().argsort() // 134


def make(name, filters):
    convolution = layers.Conv2D(filters, 3, strides=2, activation="relu")
    parts = [keras.Input((8, 8, 1)), convolution, layers.Flatten(), layers.Dense(3)]
    return keras.Sequential(parts, name=name)


class Distiller(keras.Model):
    def __init__(self, student, teacher, alpha=0.1, temperature=3):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.alpha, self.temperature = alpha, temperature
        teacher.trainable = False

    def compile(self, *, student_loss_fn, distillation_loss_fn, **kwargs):
        super().compile(**kwargs)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        taught = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(taught / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
teacher = make("teacher", 16)
optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(0.1))  # ringreduce
teacher.compile(optimizer=optimizer, loss=cross_entropy)
rr.fit(teacher, images, labels, epochs=2, batch_size=40, shuffle=False)  # ringreduce

student = make("student", 4)
distiller = Distiller(student, teacher)
distiller.compile(
    optimizer=rr.DistributedOptimizer(keras.optimizers.SGD(0.1)),  # ringreduce
    metrics=["sparse_categorical_accuracy"],
    student_loss_fn=cross_entropy,
    distillation_loss_fn=keras.losses.KLDivergence(),
)
history = rr.fit(distiller, images, labels, epochs=2, batch_size=40, shuffle=False)  # ringreduce
report(teacher, student, losses=history.history["loss"])
