"""A process of TensorFlow's parameter server: coordinator, server or worker, by TF_CONFIG.

``python -m bench.strategies.server ...``. As TensorFlow's guide "Parameter server training" has it:
workers and server run a `tf.distribute.Server`; the coordinator makes variables on the server and
schedules functions, which any free worker runs. Workers read weights from the server, and send it
gradients:

    server-async    each applies its gradients when they are there, whatever the others do
    server-sync     each adds them to sums on the server; when all have, the mean is applied once

Keras models cannot be trained under this strategy. So the weights are a `tf.Module`'s variables,
and the same Keras model as elsewhere is a pure function of them. The coordinator acts on orders,
those of `bench.strategies.worker`; the others answer that they are there.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bench.strategies.curve import Curve
from bench.strategies.tasks import optimizer, task
from bench.strategies.ways import SYNCHRONOUS
from bench.turns import Line


class Momentum(tf.Module):
    """Keras's SGD with momentum, where the weights are."""

    def __init__(self, weights: Sequence[tf.Variable], like: keras.optimizers.SGD) -> None:
        super().__init__()
        self._rate, self._momentum = float(like.learning_rate), float(like.momentum)
        self._moved = [tf.Variable(tf.zeros(each.shape)) for each in weights]

    def apply(self, weights: Sequence[tf.Variable], gradients: Sequence[tf.Tensor]) -> None:
        for weight, moved, gradient in zip(weights, self._moved, gradients, strict=True):
            tf.raw_ops.ResourceApplyKerasMomentum(
                var=weight.handle,
                accum=moved.handle,
                lr=self._rate,
                grad=gradient,
                momentum=self._momentum,
            )


class Adam(tf.Module):
    """Keras's Adam, where the weights are."""

    def __init__(self, weights: Sequence[tf.Variable], like: keras.optimizers.Adam) -> None:
        super().__init__()
        self._rate, self._epsilon = float(like.learning_rate), float(like.epsilon)
        self._betas = float(like.beta_1), float(like.beta_2)
        self._moments = [
            (tf.Variable(tf.zeros(each.shape)), tf.Variable(tf.zeros(each.shape)))
            for each in weights
        ]
        self._steps = tf.Variable(0.0)

    def apply(self, weights: Sequence[tf.Variable], gradients: Sequence[tf.Tensor]) -> None:
        step = self._steps.assign_add(1.0, read_value=True)
        first_power, second_power = (tf.pow(beta, step) for beta in self._betas)
        for weight, moments, gradient in zip(weights, self._moments, gradients, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=weight.handle,
                m=moments[0].handle,
                v=moments[1].handle,
                beta1_power=first_power,
                beta2_power=second_power,
                lr=self._rate,
                beta1=self._betas[0],
                beta2=self._betas[1],
                epsilon=self._epsilon,
                grad=gradient,
            )


class Served(tf.Module):
    """Weights on the server, and what workers do with them."""

    def __init__(
        self, coordinator: Any, workers: int, name: str, *, seed: int = 1, steps: int = 0
    ) -> None:
        super().__init__()
        chosen = task(name)
        keras.utils.set_random_seed(seed)
        self.data = chosen.data(seed, steps)
        self._model = model = chosen.make()
        tf.random.set_seed(None)  # Otherwise all workers would shuffle alike.
        self._coordinator, self._workers = coordinator, workers
        share = self.data.inputs.shape[1] // workers
        inputs, labels = (
            each.reshape(-1, *each.shape[2:]) for each in (self.data.inputs, self.data.labels)
        )
        with coordinator.strategy.scope():
            self.weights = weights = [
                tf.Variable(each.numpy()) for each in model.trainable_variables
            ]
            self._sums = sums = [tf.Variable(tf.zeros(each.shape)) for each in weights]
            like = optimizer(chosen.optimizer)
            kind = Momentum if isinstance(like, keras.optimizers.SGD) else Adam
            self._optimizer = own_optimizer = kind(weights, like)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def batches() -> tf.data.Dataset:
            data = tf.data.Dataset.from_tensor_slices((inputs, labels))
            return data.shuffle(len(inputs)).repeat().batch(share)

        def gradients_of(batch: tuple[tf.Tensor, tf.Tensor]) -> list[tf.Tensor]:
            values = [tf.convert_to_tensor(each) for each in weights]
            with tf.GradientTape() as tape:
                tape.watch(values)
                logits, _ = model.stateless_call(values, [], batch[0], training=True)
                loss = loss_of(batch[1], logits)
            return tape.gradient(loss, values)

        @tf.function
        def apply_own(iterator: Iterator[Any]) -> None:
            own_optimizer.apply(weights, gradients_of(next(iterator)))

        @tf.function
        def add(iterator: Iterator[Any]) -> None:
            for total, gradient in zip(sums, gradients_of(next(iterator)), strict=True):
                total.assign_add(gradient, read_value=False)

        @tf.function
        def apply_mean() -> None:
            own_optimizer.apply(weights, [total / workers for total in sums])
            for total in sums:
                total.assign(tf.zeros(total.shape), read_value=False)

        self._apply_own, self._add, self._apply_mean = apply_own, add, apply_mean
        self._iterator = iter(coordinator.create_per_worker_dataset(tf.function(batches)))
        logits = tf.function(lambda inputs: model(inputs, training=False))

        def predict(inputs: np.ndarray) -> np.ndarray:
            for variable, weight in zip(model.trainable_variables, weights, strict=True):
                variable.assign(weight.numpy())
            return logits(inputs).numpy()

        self.predict = predict

    def train(self, steps: int, is_synchronous: bool) -> None:
        """So many steps, each of one batch on every worker; all are done when it returns."""
        if not is_synchronous:
            for _ in range(steps * self._workers):
                self._coordinator.schedule(self._apply_own, args=(self._iterator,))
            self._coordinator.join()
            return
        for _ in range(steps):
            for _ in range(self._workers):
                self._coordinator.schedule(self._add, args=(self._iterator,))
            self._coordinator.join()
            with tf.device("/job:ps/task:0/device:CPU:0"):
                self._apply_mean()


def coordinate(line: Line, workers: int, resolver: Any) -> None:
    """Act on orders."""
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    kept: dict[str, Served] = {}
    for order in line.orders():
        is_synchronous = order["way"] == SYNCHRONOUS
        if order["do"] == "speed":
            if order["model"] not in kept:
                kept[order["model"]] = Served(coordinator, workers, order["model"])
            served = kept[order["model"]]
            began = time.perf_counter()
            served.train(order["steps"], is_synchronous)
            line.answer(began=began, ended=time.perf_counter())
        else:
            served = Served(
                coordinator, workers, order["task"], seed=order["seed"], steps=order["steps"]
            )
            curve = Curve(served.predict, served.data, order["every"])
            served.train(1, is_synchronous)
            curve.after(1)
            done = 1
            while done < order["steps"]:
                until = min(order["steps"], (done // order["every"] + 1) * order["every"])
                served.train(until - done, is_synchronous)
                done = until
                curve.after(done)
            line.answer(curve=curve.points, accuracy=curve.tested())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    arguments = parser.parse_args()

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type == "chief":
        coordinate(Line(0), arguments.workers, resolver)
    else:
        server = tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
        )
        assert server.target
        line = Line(1 if resolver.task_type == "ps" else 2 + resolver.task_id)
        for _ in line.orders():
            line.answer()
    # TensorFlow's servers cannot be stopped, and a coordinator's threads wait for them.
    os._exit(0)


if __name__ == "__main__":
    main()
