"""One stage of a pipeline: its model, and the passes of micro-batches through it.

Python goes through the schedule, so that TensorFlow cannot run a later pass early; each pass is one
traced function. Between both passes of a micro-batch its tape keeps what the forward one has left.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.rows import count_of, rows_in, slice_rows
from ringreduce.pure.pipeline import schedule
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import dtype_named

# A tensor between two stages: the shape of a row, and the name of the dtype.
Spec = tuple[tuple[int, ...], str]


class Stage:
    """The stage of this rank, with a functional or sequential `model`.

    Collective: stages are made one after the other, since each learns what it receives. ConfigError
    on all ranks if one has no layers, or does not fit the one before it.
    """

    def __init__(self, makers: Sequence[Callable[[], Any]], chain: Communicator) -> None:
        self._chain, self.number, self._stages = chain, chain.rank, chain.size
        self.is_first, self.is_last = self.number == 0, self.number == self._stages - 1
        self._sent: list[Any] = []
        with _other_seeds(self.number):
            made = makers[self.number]()
            arrives: Spec | None = None
            for number in range(self._stages):
                told: Any = None
                if number == self.number:
                    self._arrives = arrives
                    try:
                        self.model = _model_of(made, arrives)
                        told = [None, None if self.is_last else _spec_left_by(self.model)]
                    except ValueError as wrong:
                        told = [str(wrong), None]
                problem, spec = chain.broadcast_object(told, number)
                if problem:
                    raise ConfigError(
                        f"cannot make stage {number} of {self._stages}: it {problem}",
                        **chain.config.who,
                        remedy="A stage is a function that returns a model, or a list of layers; "
                        "it takes one tensor of fixed shape from the stage before it.",
                    )
                arrives = spec and (tuple(spec[0]), spec[1])
                if number == self.number:
                    self._leaves = arrives
        self._outputs = _graph(lambda inputs: self.model(inputs, training=False))

    def prepare(self, micro_batches: int) -> None:
        """Make the functions of the model, which was compiled."""
        model = self.model
        self._micro_batches = micro_batches
        self._weights = weights = list(model.trainable_variables)
        self._totals = [_Total() for _ in weights]
        tracker = next(metric for metric in model.metrics if metric.name == "loss")

        def forward(inputs: Any, training: bool) -> Any:
            outputs = model(inputs, training=training)
            # Losses of regularizers, say; the loss that is shown is the sum over all stages.
            penalty = tf.add_n(model.losses) if model.losses else tf.constant(0.0)
            tracker.update_state(penalty, sample_weight=count_of(outputs))
            return outputs, penalty

        def judged(inputs: Any, y: Any, sample_weight: Any, training: bool) -> Any:
            outputs = model(inputs, training=training)
            seen = {"x": inputs, "y": y, "y_pred": outputs, "sample_weight": sample_weight}
            loss = model.compute_loss(**seen, training=training)
            tracker.update_state(loss, sample_weight=rows_in(outputs))
            return loss, model.compute_metrics(**seen)

        def gradients(inputs: Any, y: Any, sample_weight: Any) -> Any:
            with tf.GradientTape() as tape:
                if not self.is_first:
                    tape.watch(inputs)
                loss, logs = judged(inputs, y, sample_weight, True)
                loss /= micro_batches
            return self._found(tape, loss, inputs), logs

        self._forward, self._judged = _graph(forward), _graph(judged)
        self._gradients = _graph(gradients)
        self._apply = _graph(lambda gradients: model.optimizer.apply(gradients, weights))

    def gradients(self, x: Any, y: Any, sample_weight: Any) -> tuple[list[Any], Any]:
        """The mean loss's gradients of this stage's weights, and this stage's logs."""
        rows, count = int(rows_in(x)), self._micro_batches
        if rows == 0 or rows % count:
            raise ConfigError(
                f"got a batch of {rows} rows, which cannot be divided into {count} equal "
                "micro-batches",
                **self._chain.config.who,
                remedy="Use batches, the last one too, whose rows are a multiple of micro_batches "
                "on each copy of the model: dataset.batch(n, drop_remainder=True).",
            )
        size = rows // count
        activations = self._incoming(self.number - 1, self._arrives, size, count)
        upstream = self._incoming(self.number + 1, self._leaves, size, count)
        # State for the backward pass, by micro-batch.
        left: dict[int, Any] = {}
        totals = self._totals
        logs = None
        for is_forward, number in schedule(self.number, self._stages, count):
            if is_forward:
                own = number * size, (number + 1) * size
                inputs = slice_rows(x, *own) if self.is_first else next(activations)
                if self.is_last:
                    judged = inputs, slice_rows(y, *own), slice_rows(sample_weight, *own)
                    left[number], logs = self._gradients(*judged)
                else:
                    outputs, left[number] = self._taped(inputs)
                    self._send(outputs, self.number + 1)
                continue
            found = left.pop(number)
            if not self.is_last:
                found = found(next(upstream))
            if not self.is_first:
                first, *found = found
                self._send(first, self.number - 1)
            for total, gradient in zip(totals, found, strict=True):
                total.add(gradient, is_first=number == 0)
        logs = self.model.get_metrics_result() if logs is None else logs
        return [total.found for total in totals], logs

    def apply(self, gradients: list[Any]) -> None:
        """Change the weights, with means over the data group; what was sent has arrived then."""
        self._apply(gradients)
        self.wait_sent()

    def test(self, x: Any, y: Any, sample_weight: Any) -> Any:
        """Send a batch through, which counts in the metrics; return this stage's logs."""
        inputs = self._inputs(x)
        if self.is_last:
            return self._judged(inputs, y, sample_weight, False)[1]
        outputs, _ = self._forward(inputs, False)
        self.wait_sent()
        self._send(outputs, self.number + 1)
        return self.model.get_metrics_result()

    def predict(self, x: Any) -> Any:
        """Send a batch through; return outputs on the last stage, elsewhere a row for each."""
        outputs = self._outputs(self._inputs(x))
        if self.is_last:
            return outputs
        self.wait_sent()
        self._send(outputs, self.number + 1)
        return tf.zeros((int(rows_in(x)), 1))

    def wait_sent(self) -> None:
        """Return once the neighbours have received everything, or raise what has prevented it."""
        for work in self._sent:
            work.wait()
        self._sent.clear()

    def _inputs(self, x: Any) -> Any:
        if self.is_first:
            return x
        return next(self._incoming(self.number - 1, self._arrives, int(rows_in(x)), 1))

    def _incoming(self, source: int, spec: Spec | None, rows: int, count: int) -> Iterator[Any]:
        """`count` tensors that a neighbour sends; while one is used, the next is received."""
        if spec is None:
            return iter(())

        def begun() -> Any:
            array = np.empty((rows, *spec[0]), dtype_named(spec[1]))
            return self._chain.recv(array, source, async_op=True)

        def received(work: Any) -> Iterator[Any]:
            for left in reversed(range(count)):
                array = work.wait()
                work = begun() if left else None
                yield tf.convert_to_tensor(array)

        return received(begun())

    def _taped(self, inputs: Any) -> tuple[Any, Callable[[Any], list[Any]]]:
        """The outputs for a micro-batch, and what makes of their gradient what `_found` returns."""
        with tf.GradientTape() as tape:
            if not self.is_first:
                tape.watch(inputs)
            outputs, penalty = self._forward(inputs, True)
        share = tf.cast(1 / self._micro_batches, penalty.dtype)
        targets = [outputs, penalty]
        return outputs, lambda upstream: self._found(tape, targets, inputs, [upstream, share])

    def _found(self, tape: Any, targets: Any, inputs: Any, upstream: Any = None) -> list[Any]:
        """Gradients of the inputs, but on the first stage, and of the weights."""
        if self.is_first:
            return list(tape.gradient(targets, self._weights, upstream))
        first, *others = tape.gradient(targets, [inputs, *self._weights], upstream)
        return [tf.zeros_like(inputs) if first is None else tf.convert_to_tensor(first), *others]

    def _send(self, tensor: Any, to: int) -> None:
        array = np.ascontiguousarray(tensor)
        self._sent.append(self._chain.send(array, to, async_op=True))


class _Total:
    """The sum of a weight's gradients over micro-batches: new memory costs more than to add."""

    def __init__(self) -> None:
        self._dense: Any = None
        self._rows: Any = None

    @property
    def found(self) -> Any:
        return self._rows if self._dense is None else self._dense.read_value()

    def add(self, gradient: Any, *, is_first: bool) -> None:
        if isinstance(gradient, tf.IndexedSlices) and not is_first:
            values = tf.concat([self._rows.values, gradient.values], 0)
            indices = tf.concat([self._rows.indices, gradient.indices], 0)
            gradient = tf.IndexedSlices(values, indices, gradient.dense_shape)
        if gradient is None or isinstance(gradient, tf.IndexedSlices):
            self._rows = gradient
        elif self._dense is None:
            self._dense = tf.Variable(gradient, trainable=False)
        elif is_first:
            self._dense.assign(gradient)
        else:
            self._dense.assign_add(gradient)


def _graph(function: Callable[..., Any]) -> Any:
    return tf.function(function, autograph=False, reduce_retracing=True)


@contextmanager
def _other_seeds(number: int) -> Iterator[None]:
    """Within the block, layers of each stage draw other seeds; in the end nothing was drawn."""
    # Keras takes default seeds from Python's generator, which all ranks seed alike.
    state = random.getstate()
    random.seed(f"{random.random()} {number}")
    try:
        yield
    finally:
        random.setstate(state)


def _model_of(made: Any, arrives: Spec | None) -> Any:
    """The model, with inputs and outputs that are known, of what a stage's function returned."""
    if isinstance(made, keras.Layer) and not isinstance(made, keras.Model):
        made = [made]
    if isinstance(made, (list, tuple)):
        if not all(isinstance(part, (keras.Layer, keras.KerasTensor)) for part in made):
            raise ValueError("gives a list of other things than layers")
        made = keras.Sequential(list(made))
    if not isinstance(made, keras.Model):
        raise ValueError(f"gives {made!r}")
    layers = [layer for layer in made.layers if not isinstance(layer, keras.layers.InputLayer)]
    if not layers and not made.weights:
        raise ValueError("has no layers")
    if getattr(made, "inputs", None) is None:
        if arrives is None:
            raise ValueError("has no keras.Input, which the first stage needs")
        inside = layers if isinstance(made, keras.Sequential) else [made]
        begin = keras.Input(arrives[0], dtype=arrives[1])
        made = keras.Sequential([begin, *inside], name=made.name)
    if arrives is not None:
        shapes = [tuple(tensor.shape[1:]) for tensor in made.inputs]
        if len(shapes) != 1 or not tf.TensorShape(shapes[0]).is_compatible_with(arrives[0]):
            takes = " and ".join(map(str, shapes))
            raise ValueError(f"takes rows of shape {takes}, and gets some of shape {arrives[0]}")
    return made


def _spec_left_by(model: keras.Model) -> Spec:
    if len(model.outputs) != 1:
        raise ValueError(f"gives {len(model.outputs)} tensors to the next stage, which takes one")
    [output] = model.outputs
    shape, dtype = tuple(output.shape[1:]), keras.backend.standardize_dtype(output.dtype)
    if None in shape:
        raise ValueError(f"gives rows of shape {shape}, which is not fixed")
    if not tf.as_dtype(dtype).is_floating:
        raise ValueError(f"gives {dtype}, which has no gradient")
    if getattr(output, "_keras_mask", None) is not None:
        raise ValueError("gives a mask with its output, which would not reach the next stage")
    return shape, dtype
