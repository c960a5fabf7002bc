"""Records the first steps of `rr.fit` for ``ringreduce verify``, and then ends the program."""

import hashlib
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import msgspec
import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private, weighting
from ringreduce.keras.checks.warnings import differences
from ringreduce.keras.data.division import Feed
from ringreduce.keras.layers.groups import model_group
from ringreduce.keras.layers.part import Part, part_of
from ringreduce.keras.metric_states import combined_results, entries_of, numbers_in, states_of
from ringreduce.keras.model.metric_trial import names_apart, names_in_steps
from ringreduce.keras.model.trial_in_fit import Trial
from ringreduce.keras.optimizers_in import all_within, wrappers_in
from ringreduce.keras.recording.gradients import HALVES, GradientRecord, facts_of, in_whole
from ringreduce.keras.rows import first_rows, rows_in, slice_rows
from ringreduce.keras.step import RECORDED, own_step, put_around
from ringreduce.pure.sketch import LENGTH, sketch
from ringreduce.pure.verification import GRADIENTS, Arrays, Run, Tried
from ringreduce.tensorflow.threads import threads_in_use
from ringreduce.tensorflow.variables import lasting, path_of, value_of
from ringreduce.vocabulary.types import ReduceOp

_ROWS = 4  # for which outputs are compared


class Record(keras.callbacks.Callback):
    """Records steps on all ranks; rank 0 writes them into a folder, then all leave. Comes last.

    Gradients are recorded in the first half of the steps, the time in the others. Collective, after
    each step.
    """

    def __init__(
        self,
        steps: int,
        folder: str,
        arguments: Mapping[str, str],
        ring: Communicator,
        feed: Feed,
        model: keras.Model,
        trial: Trial | None,
    ) -> None:
        super().__init__()
        self._trial = trial
        self._wanted, self._folder, self._ring = steps, Path(folder), ring
        self._settings, self._feed = dict(arguments), feed
        self._steps: list[_Step] = []
        # What that matters was not seen, and what else was left out; and why.
        self._unseen: dict[str, str] = {}
        self._left_out: dict[str, str] = {}
        self._rows = lasting(0.0)
        # Now, since Keras's own loop makes its function before it calls callbacks.
        put_around(model, RECORDED, self._with_rows)

    def _watch(self) -> None:
        """Have the optimizers note their steps."""
        self._wrappers = wrappers_in(self.model)
        for wrapper in self._wrappers:
            wrapper.recorder = GradientRecord(wrapper.name, self._has)
        if not self._wrappers:
            self._unseen[GRADIENTS] = "the model has no DistributedOptimizer"
        elif any(wrapper.is_alone for wrapper in self._wrappers):
            self._unseen[GRADIENTS] = "each rank applies its own between meetings"

    def on_train_begin(self, logs: Any = None) -> None:
        self._watch()  # Callbacks may have put in others; nothing was traced yet.
        self._variables = list(self._recorded_variables())
        self._start = [self._value(variable) for variable in self._variables]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before: Any = np.zeros(2)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._is_noted = len(self._steps) < max(1, self._wanted // 2)
        for wrapper in self._wrappers:
            wrapper.recorder.switch(self._is_noted)
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        seconds = time.perf_counter() - self._began_s
        pairs = zip(self._variables, self._start, strict=True)
        changes = [self._sketch(variable, start) for variable, start in pairs]
        gradients = self._noted() if self._is_noted else {}
        returned = self._returned(dict(logs or {}))
        self._steps.append(_Step(seconds, *returned, changes, self._is_noted, gradients))
        if len(self._steps) == self._wanted:
            self.on_train_end()

    def on_train_end(self, logs: Any = None) -> None:
        if not self._steps:
            sys.exit()  # Nothing was trained, and the command says so.
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux says KiB.
        peaks = self._ring.all_gather_object(memory)
        arrays = self._arrays()
        outputs, digest = self._outputs()  # Last, since this may fail.
        if self._ring.rank == 0:
            run = self._run(peaks, digest)
            (self._folder / "run").write_bytes(msgspec.msgpack.encode(run))
            np.savez(self._folder / "arrays.npz", **arrays._replace(outputs=outputs)._asdict())
        sys.exit()

    def _run(self, memory: list[int], digest: str) -> Run:
        model, steps, trial = self.model, self._steps, self._trial
        step = own_step(model)
        of_gradients: list[str] = []
        for wrapper in self._wrappers:
            settings, texts = facts_of(wrapper)
            self._settings |= settings
            of_gradients += texts
        seconds = [step.seconds for step in steps]
        timed = seconds[max(1, self._wanted // 2) :] or seconds[1:] or seconds
        trained = {id(variable) for variable in model.trainable_variables}
        returned = {
            name: [step.returned[name] for step in steps if name in step.returned]
            for name in dict.fromkeys(name for step in steps for name in step.returned)
        }
        group = model_group(model.weights)
        within = [held for wrapper in self._wrappers for held in all_within(wrapper)]
        return Run(
            ranks=self._ring.size,
            returned=returned,
            loss=next((step.loss for step in steps if step.loss), ""),
            rows=round(sum(steps[0].rows)) // (1 if group is None else group.size) if steps else 0,
            step_s=statistics.median(timed),
            threads=threads_in_use(),
            memory=memory,
            steps=len(steps),
            settings=self._settings,
            names=[self._name(variable) for variable in self._variables],
            trained=[id(variable) in trained for variable in self._variables],
            gradient_names=self._gradient_names(),
            is_half=any(layer.compute_dtype in HALVES for layer in private.layers_of(model)),
            skips=any(isinstance(o, keras.optimizers.LossScaleOptimizer) for o in within),
            own_step="" if step is None else f"{type(model).__name__}.train_step",
            clips=_clips_of(step),
            of_batches=differences(model) if trial is None else trial.known,
            of_gradients=list(dict.fromkeys(of_gradients)),
            rows_of_outputs=digest,
            unseen=self._unseen,
            left_out=self._left_out,
            tried=_tried(trial),
        )

    # --- Numbers that a step returns ------------------------------------------------------------

    def _with_rows(self, _: Any, step: Any, data: Any) -> Any:
        """Make a training step, and note how many rows of this rank's count in it."""
        weight = weighting.current()
        rows = rows_in(data) if weight is None else weight.own
        self._rows.assign(tf.cast(rows, tf.float32))
        return step(data)

    def _returned(self, logs: dict[str, Any]) -> tuple[dict[str, float], str, list[float]]:
        """What a step returns, over the rows of all ranks; the loss's key; each rank's rows."""
        model, ring = self.model, self._ring
        results = numbers_in(model.get_metrics_result())
        sums, tracker = self._loss_sums()
        sums, self._before = sums - self._before, sums
        # For the loss a metric has the mean over the epoch so far; the step's own says more.
        loss = [tracker, float(sums[0] / sums[1])] if sums[1] else ["", 0.0]
        rows = float(self._rows.numpy())
        every = ring.all_gather_object([rows, entries_of(logs, results), loss])
        weights = np.array([told[0] for told in every])
        together = results
        if ring.size > 1:
            together = combined_results(model, states_of(model, 1), ring)
        returned: dict[str, float] = {}
        apart_in_steps, added = names_in_steps(model)
        apart = [*names_apart(model), *apart_in_steps]
        for name in dict.fromkeys(name for told in every for name in told[1]):
            entries = [told[1].get(name, (False, None)) for told in every]
            if name in apart:
                self._left_out[name] = "the states of this metric do not combine"
            elif name in added and all(number is not None for _, number in entries):
                returned[name] = float(sum(number for _, number in entries))
            elif name in together and all(is_metric for is_metric, _ in entries):
                returned[name] = float(np.linalg.norm(together[name]))
            elif any(number is None for _, number in entries):
                self._left_out[name] = "what the step returns as such is not a number"
            else:
                returned[name] = _mean([number for _, number in entries], weights)
        names = [told[2][0] for told in every if told[2][0]]
        if names:
            values = np.array([told[2][1] for told in every])
            has_any = np.array([bool(told[2][0]) for told in every])
            mean = _mean(values, weights * has_any)
            returned[names[0]] = float(values.sum()) if names[0] in added else mean
        name = names[0] if names else next((n for n in returned if "loss" in n), "")
        return returned, name, weights.tolist()

    def _loss_sums(self) -> tuple[np.ndarray, str]:
        """The sum of losses and what it is to be divided by, of the epoch so far; its name."""
        for metric in self.model.metrics:
            # A step of one's own may have another name for it.
            if isinstance(metric, keras.metrics.Mean) and "loss" in metric.name:
                sums = [value_of(metric.total), value_of(metric.count)]
                return np.array(sums, np.float64), metric.name
        return np.zeros(2), ""

    # --- Variables ------------------------------------------------------------------------------

    def _recorded_variables(self) -> Iterator[Any]:
        """The weights, but local ones, and TensorFlow's own variables in layers."""
        model = self.model
        weights = shared = model.weights
        for wrapper in wrappers_in(model):
            shared = wrapper.shared(shared)
        chosen = {id(variable) for variable in shared}
        weights = [v for v in weights if id(v) in chosen or part_of(v) is not None]
        if len(weights) < len(model.weights):
            self._unseen["local variables"] = "each rank has its own"
        yield from weights
        self._attributes: dict[int, str] = {}
        for layer in (model, *private.layers_of(model)):
            for name, value in vars(layer).items():
                is_new = isinstance(value, tf.Variable) and id(value) not in self._attributes
                if is_new and value.dtype.is_floating:
                    self._attributes[id(value)] = f"{layer.name}.{name}"
                    yield value

    def _name(self, variable: Any) -> str:
        part = part_of(variable)
        name = self._attributes.get(id(variable)) or path_of(variable)
        return f"{name} {tuple(variable.shape) if part is None else part.shape}"

    def _has(self, part: Part | None) -> bool:
        """Whether this rank adds its piece of what is `part`; rank 0 alone has what is whole."""
        first = self._ring.members[0]
        return self._ring.rank == 0 if part is None else first in part.communicator.members

    def _value(self, variable: Any) -> Any:
        part = part_of(variable)
        if not self._has(part):
            return None
        # numpy cannot compute with 16-bit floats.
        return in_whole(value_of(variable).astype(np.float32), part)

    def _sketch(self, variable: Any, start: Any) -> np.ndarray:
        if start is None:
            return np.zeros(LENGTH)
        with np.errstate(invalid="ignore", over="ignore"):
            return sketch(self._value(variable) - start, self._name(variable))

    def _noted(self) -> "dict[tuple[int, int, int], _Gradient]":
        """The gradients of the last step by wrapper, call and place."""
        found = {}
        for number, wrapper in enumerate(self._wrappers):
            for at, noted in enumerate(wrapper.recorder.read()):
                columns = zip(noted.names, noted.calls, noted.means, noted.own, strict=True)
                for place, (name, calls, mean, own) in enumerate(columns):
                    numbers = np.zeros(LENGTH) if mean is None else sketch(mean, name)
                    found[number, at, place] = _Gradient(name, calls, numbers, own)
        return found

    def _arrays(self) -> Arrays:
        """What was recorded of variables, on rank 0 that of all ranks' pieces. Collective."""
        ring, steps = self._ring, self._steps
        noted = [step.gradients for step in steps if step.is_noted]
        keys = self._keys()
        absent = _Gradient("", 0, np.zeros(LENGTH), np.zeros(2))
        rows = [[step.get(key, absent) for key in keys] for step in noted]

        def total(array: Any, *shape: int) -> np.ndarray:
            flat = np.array(array, np.float64).reshape(-1)
            if flat.size and ring.size > 1:
                flat = ring.all_reduce(flat, ReduceOp.SUM)
            return flat.reshape(shape)

        own = np.array([[each.own for each in row] for row in rows], np.float64)
        own = own.reshape(len(rows), len(keys), 2)
        for step, numbers in zip(steps, own, strict=False):
            numbers *= step.rows[ring.rank] > 0
        every = ring.all_gather_object([own.shape, own.tobytes()])
        owns = [np.frombuffer(data, np.float64).reshape(shape) for shape, data in every]
        sketches = [
            np.zeros(LENGTH) if start is None else sketch(start, self._name(variable))
            for variable, start in zip(self._variables, self._start, strict=True)
        ]
        many = len(self._variables)
        return Arrays(
            before=total(sketches, many, LENGTH),
            changes=total([step.changes for step in steps], len(steps), many, LENGTH),
            gradients=total(
                [[each.sketch for each in row] for row in rows], len(rows), len(keys), LENGTH
            ),
            calls=np.array([[each.calls for each in row] for row in rows]).reshape(
                len(rows), len(keys)
            ),
            own=np.array(owns).reshape(ring.size, len(rows), len(keys), 2),
            outputs=np.zeros((0, LENGTH)),
        )

    def _gradient_names(self) -> list[str]:
        names = {key: each.name for step in self._steps for key, each in step.gradients.items()}
        return [names[key] for key in self._keys()]

    def _keys(self) -> list[tuple[int, int, int]]:
        return sorted({key for step in self._steps for key in step.gradients})

    # --- Outputs --------------------------------------------------------------------------------

    def _outputs(self) -> tuple[np.ndarray, str]:
        """Of each output for the first rows a sketch, and a digest of the rows. Collective."""
        nothing = np.zeros((0, LENGTH)), ""
        if not all(self._ring.all_gather_object(self._feed.first is not None)):
            self._left_out["outputs"] = "the first rows of the data are not kept"
            return nothing
        batch = first_rows(self._feed.first)
        batch = slice_rows(batch, 0, min(_ROWS, int(rows_in(batch))))
        x = keras.utils.unpack_x_y_sample_weight(batch)[0]
        try:
            # On all ranks, since layers may call the ring.
            outputs = keras.tree.flatten(self.model.predict_on_batch(x))
            arrays = [np.asarray(output, np.float32) for output in outputs]
        except Exception as error:  # Whatever the model raises; the rest was recorded.
            self._left_out["outputs"] = f"predict_on_batch raises {type(error).__name__}"
            return nothing
        parts = tf.nest.flatten(x, expand_composites=True)
        data = b"".join(np.asarray(part).tobytes() for part in parts if part is not None)
        named = [sketch(array, f"output {number}") for number, array in enumerate(arrays)]
        digest = hashlib.blake2b(data, digest_size=8).hexdigest()
        return np.array(named).reshape(len(named), LENGTH), digest


class _Gradient(NamedTuple):
    """A variable's in a step; zeros for the sketch of what other ranks have."""

    name: str
    calls: int
    sketch: np.ndarray
    own: np.ndarray


@dataclass
class _Step:
    seconds: float
    returned: dict[str, float]
    loss: str  # the key of the loss; empty: none
    rows: list[float]  # of each rank
    changes: list[np.ndarray]
    is_noted: bool  # whether gradients were
    gradients: dict[tuple[int, int, int], _Gradient]


def _mean(values: Any, weights: np.ndarray) -> float:
    """The mean by rows; what a rank without any has is left out."""
    counts = weights > 0
    if not counts.any():
        return float("nan")
    return float(np.average(np.array(values, np.float64)[counts], weights=weights[counts]))


def _tried(trial: Trial | None) -> Tried:
    if trial is None:
        return Tried(why="that is done on two ranks or more")
    found = trial.verdict
    return Tried("" if found.why else found.fit, found.rows, found.why, trial.findings)


def _clips_of(step: Any) -> str:
    """The name of a function that clips, if that is called in a step."""
    code = getattr(getattr(step, "__func__", step), "__code__", None)
    return next((name for name in getattr(code, "co_names", ()) if name.startswith("clip_")), "")
