"""Tries a training step on a few rows before training: whole, and in parts, as ranks have them.

    rows                     a a a a b b b b b b b b      12 of the first batch, in this order
    gradients of the step    g(ab)
    as two ranks have them   g(a)   ,   g(b)              must be (4 g(a) + 8 g(b)) / 12

It looks at what optimizers would get, not for known causes: so it finds a loss that divides by a
constant, one over what counts in its batch, a model that mixes rows; and at the numbers that a step
keeps beside what it trains, such as a mean of its rows. The step runs eagerly, each
row gets the same random draws alone and with others, batch normalization uses its moving averages,
and nothing is applied. What the step has changed is put back
(`ringreduce.keras.model.putting_back`).

Where step, loss and layers are Keras's own, forward passes show the same in a third of the time: if
a row's output is the same alone and with others, and the gradients of the loss by the outputs
combine, then by the chain rule those by the weights do. What that does not show is tried as above.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import psutil
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import refusing
from ringreduce.keras import metric_states, private
from ringreduce.keras.metric_states import MetricStates, numbers_in, results_of_all, states_of
from ringreduce.keras.model.averages import is_average, untrained
from ringreduce.keras.model.metric_trial import may_not_combine
from ringreduce.keras.model.putting_back import put_back
from ringreduce.keras.optimizers_in import all_within, wrappers_in
from ringreduce.keras.rows import is_uneven, map_arrays, rows_in, slice_rows
from ringreduce.keras.step import innermost_step, own_step
from ringreduce.keras.wrapper import Wrapper
from ringreduce.pure.parity import Comparison, Fit, chosen_rows, compare, compare_each, gravest
from ringreduce.tensorflow.eager_draws import Draws
from ringreduce.tensorflow.variables import path_of, plain_variable, value_of

_log = logging.getLogger(__name__)

_ROWS_MAX, _ROWS_MIN = 12, 6
# Above what float32 rounds: convolutions differ by 2e-5 from their mean by parts, those in bfloat16
# by 3e-3; the smallest effect of a step that was no mean was 3e-2.
TOLERANCE, _TOLERANCE_16 = 1e-3, 3e-2
# Where a forward pass of two rows takes longer, fewer rows are tried, or none.
_SLOW_S, _TOO_SLOW_S = 0.25, 2.0
_LINE_MAX = 300
_METHODS = "call", "compute_loss", "compute_metrics"


@dataclass(frozen=True)
class Verdict:
    """What a trial has found, in plain types, so that ranks can tell each other."""

    fit: str = Fit.NOTHING.value  # of gradients
    rows: int = 0  # that were tried
    missed: float = 0.0  # by how much the mean of parts misses the whole
    where: str = ""  # what differs first
    sums: tuple[str, ...] = ()  # names in logs whose values of ranks are to be added up
    apart: tuple[str, ...] = ()  # names in logs of metrics whose states do not combine
    of_rows: tuple[str, ...] = ()  # variables that it sets by its rows, and trains not
    why: str = ""  # nothing was tried
    ranks: str = ""  # how the program itself learns of ranks
    fits: tuple[str, ...] = ()  # of gradients of each distributed optimizer, as in `wrappers_in`


class _Switch:
    """TensorFlow's, and the threads that have it on."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users, self.before = 0, False


_switch = _Switch()
_OF_DATASETS = "Even though the `tf.config.experimental_run_functions_eagerly`"


class _NotTried(Exception):
    """Says why."""


def try_step(model: keras.Model, batch: Any, ring: Communicator) -> Verdict:
    """Try the training step of `model`, which is built and compiled, on rows of `batch`.

    `batch`: x, (x, y) or (x, y, sample_weight) of arrays or tensors. Nothing is sent. What the step
    raises is no error: it may need more rows than a trial has.
    """
    try:
        with put_back(model), refusing(ring, _NotTried("it makes a collective call")):
            return _tried(model, batch)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and _is_of_signal(error):
            raise
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, _NotTried):
            cause = cause.__cause__ or cause.__context__
        return Verdict(why=_line_of(cause or error))


def _is_of_signal(error: BaseException) -> bool:
    """Whether a handler of signals has raised it, which the process must obey."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _line_of(error: BaseException) -> str:
    """Why nothing was tried, in one line."""
    if isinstance(error, _NotTried):
        return str(error)
    text = f"on few rows it raises {type(error).__name__}"
    with contextlib.suppress(Exception):  # Of a class of the user's, that has no text.
        said = re.sub("\x1b\\[[0-9]+m", "", str(error)).split()  # Keras writes in bold letters.
        text += ": " + " ".join(said)
    return text[:_LINE_MAX]


def _tried(model: keras.Model, batch: Any) -> Verdict:
    rows = _chosen(batch, _allowed(model, batch))
    count, is_of_keras = int(rows_in(rows)), _is_of_keras(model)
    if is_of_keras and isinstance(model.optimizer, Wrapper) and model.trainable_weights:
        verdict = _by_outputs(model, rows, count)
        if verdict is not None:
            return verdict
    runs = _Runs(model, rows, count)
    whole, every = runs.whole(), np.arange(count)
    halves = [runs.of(part) for part in np.split(every, 2)]
    each = runs.compared(whole, halves)
    found = _gravest(each).fit
    is_quick = whole.seconds < _SLOW_S and not is_of_keras
    if found is Fit.NEITHER or (found is Fit.MEAN and is_quick):
        # A step that divides by half the rows of a batch passes with halves. And rounding may
        # switch a unit of a deep network on among all rows and off in a half; not so in others.
        thirds = [runs.of(part) for part in np.split(every, [(count + 1) // 3])]
        again = runs.compared(whole, thirds)
        each = [a if a.fit is Fit.SUM else b for a, b in zip(each, again, strict=True)]
    if _gravest(each).fit is Fit.SUM:
        # Where nothing counts in one half, the other one is the whole.
        again = runs.compared(whole, [runs.of(every[::2]), runs.of(every[1::2])])
        pairs = zip(each, again, strict=True)
        each = [a if a.fit is b.fit else b._replace(fit=Fit.NEITHER) for a, b in pairs]
    worst = _gravest(each)
    if worst.fit in (Fit.SUM, Fit.NEITHER, Fit.NOT_FINITE):
        again = runs.compared(whole, [runs.whole()])
        if _gravest(again).fit is not Fit.MEAN:
            raise _NotTried("it is random by other means than Keras's and TensorFlow's")
    where = ""
    if worst.fit in (Fit.NEITHER, Fit.NOT_FINITE):
        of_variable = f"the gradients of {whole.made.names[worst.place]}"
        where = _cause(model, rows, count, runs.tolerance) or of_variable
    return _verdict(model, runs, whole, halves, each, where)


def _by_outputs(model: keras.Model, rows: Any, count: int) -> Verdict | None:
    """What forward passes show of a model and a step that are Keras's own; None: not enough."""
    runs, every = _OutputRuns(model, rows, count), np.arange(count)
    try:
        whole, *halves = runs.whole(), *(runs.of(part) for part in np.split(every, 2))
        each = runs.compared(whole, halves)
    except _NotTried:
        return None
    if each[0].fit is not Fit.MEAN or not runs.are_outputs_alike(whole, halves):
        return None
    return _verdict(model, runs, whole, halves, each, "")


def _verdict(
    model: keras.Model,
    runs: _Runs,
    whole: _Run,
    halves: Sequence[_Run],
    each: Sequence[Comparison],
    where: str,
) -> Verdict:
    """What these runs and the comparisons of each optimizer's gradients tell ranks."""
    worst = _gravest(each)
    sums, apart = _of_logs(model, whole, halves, worst.fit)
    return Verdict(
        worst.fit.value,
        whole.rows,
        worst.missed,
        where,
        tuple(sums),
        tuple(apart),
        of_rows=tuple(_set_by_rows(whole, halves, runs.tolerance)),
        fits=tuple(one.fit.value for one in each),
    )


def _is_of_keras(model: keras.Model) -> bool:
    """Whether the step, the loss, the model's `call` and all layers are Keras's own."""
    layers = private.layers_of(model)
    if own_step(model) is not None or any(isinstance(v, keras.layers.Lambda) for v in layers):
        return False
    losses = [loss for loss in keras.tree.flatten(model.loss) if loss and not isinstance(loss, str)]
    kinds = map(type, [*losses, *layers])
    methods = [getattr(type(model), name) for name in _METHODS]
    return all(map(private.is_of_keras, [*methods, *kinds]))


def _gravest(each: Sequence[Comparison]) -> Comparison:
    fit = gravest(one.fit for one in each)
    return max((one for one in each if one.fit is fit), key=lambda one: one.missed)


def _allowed(model: keras.Model, batch: Any) -> int:
    """How many rows may be tried."""
    nbytes = sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in model.trainable_weights)
    # The gradients of the whole and of two parts, and their mean.
    if 4 * nbytes > psutil.virtual_memory().available // 4:
        raise _NotTried("its gradients would take a large part of the memory that is left")
    if type(model).call is keras.Model.call:
        return _ROWS_MAX  # Only its step knows how its parts are called.
    x = keras.utils.unpack_x_y_sample_weight(slice_rows(batch, 0, 2))[0]
    began = time.perf_counter()
    with put_back(model):
        model(map_arrays(_tensor_of, x), training=False)
    took = time.perf_counter() - began
    if took > _TOO_SLOW_S:
        raise _NotTried(f"two rows take {took:.1f} s")
    return _ROWS_MIN if took > _SLOW_S else _ROWS_MAX


def _chosen(batch: Any, most: int) -> Any:
    """The rows of `batch` with the fewest and the most nonzero entries, sorted by their number."""
    count = int(rows_in(batch))
    if count < _ROWS_MIN:
        raise _NotTried(f"{count} rows are too few")
    x, *others = keras.utils.unpack_x_y_sample_weight(batch)
    inputs, others = ([p for p in tf.nest.flatten(part) if p is not None] for part in (x, others))
    dense = [np.asarray(part) for part in [*inputs, *others] if not is_uneven(part)]
    words = [array for array in dense[: len(inputs)] if array.dtype.kind in "iub"]
    answers = [array for array in dense[len(inputs) :] if array.dtype.kind in "iubf"]
    counts = np.zeros(count)
    for array in [*words, *answers]:
        counts += np.count_nonzero(array.reshape(count, -1), axis=1)
    chosen = chosen_rows(counts, min(most, count // 2 * 2))  # Halves of it are equal.
    return _rows_of(batch, chosen)


def _tensor_of(part: Any) -> Any:
    return part if is_uneven(part) else tf.convert_to_tensor(part)


def _rows_of(batch: Any, places: np.ndarray) -> Any:
    """The rows of `batch` at those places, in that order."""

    def gathered(part: Any) -> Any:
        if isinstance(part, tf.SparseTensor):
            return tf.sparse.concat(0, [slice_rows(part, n, n + 1) for n in places])
        return tf.gather(part, places)

    return map_arrays(gathered, batch)


@dataclass(frozen=True)
class _Made:
    """What a step has given."""

    gradients: list[Any]  # as optimizers get them; None, tensors or slices
    names: list[str]  # of their variables
    calls: list[list[int]]  # how many gradients each call of each optimizer had
    logs: dict[str, Any]  # its numbers


@dataclass(frozen=True)
class _Run:
    """A step, and what it has left."""

    made: _Made
    states: MetricStates
    assigned: dict[str, np.ndarray]  # what it has set of variables that it does not train
    seconds: float
    rows: int


class _Runs:
    """Runs of a model's training step on the same rows, or some of them."""

    def __init__(self, model: keras.Model, rows: Any, count: int) -> None:
        self._model, self._rows, self._count = model, rows, count
        self._step = innermost_step(model)
        self._draws = Draws(count)
        kinds = {str(getattr(layer, "compute_dtype", "")) for layer in private.layers_of(model)}
        is_16 = any(kind.endswith("float16") for kind in kinds)
        self.tolerance = _TOLERANCE_16 if is_16 else TOLERANCE

    def whole(self) -> _Run:
        """On all rows; the first time random draws are noted."""
        return self._run(self._draws.made(), self._rows, np.arange(self._count))

    def of(self, part: np.ndarray) -> _Run:
        """On those of the rows, of which each gets the draws that it has among all."""
        return self._run(self._draws.given(part), _rows_of(self._rows, part), part)

    def compared(self, whole: _Run, parts: Sequence[_Run]) -> list[Comparison]:
        """Compare each optimizer's gradients of all rows with those of parts."""
        calls = whole.made.calls
        if any(part.made.calls != calls for part in parts):
            raise _NotTried("it calls its optimizer in another way for other rows")
        if self._draws.unfit:
            raise _NotTried(f"{self._draws.unfit} draws what belongs to no row")
        if not any(map(sum, calls)):
            raise _NotTried("no wrapped optimizer gets gradients of it")
        arrays = _aligned([run.made.gradients for run in (whole, *parts)])
        counts = [part.rows for part in parts]
        owners = [number for number, of_one in enumerate(calls) for _ in range(sum(of_one))]
        found = compare_each(arrays[0], arrays[1:], counts, self.tolerance, owners)
        return [*found, *[Comparison(Fit.NOTHING)] * (len(calls) - len(found))]

    def _run(self, draws: AbstractContextManager[None], rows: Any, places: np.ndarray) -> _Run:
        model, wrappers = self._model, wrappers_in(self._model)
        with put_back(model), ExitStack() as stack:
            model.reset_metrics()
            for held in (held for wrapper in wrappers for held in all_within(wrapper)):
                if isinstance(held, keras.optimizers.LossScaleOptimizer) and held.built:
                    held.dynamic_scale.assign(1.0)
            stack.enter_context(_eagerly())
            stack.enter_context(_with_moving_averages(model))
            stack.enter_context(draws)
            averages = _averages_of(model)
            before = [np.array(value_of(variable)) for variable in averages]
            began = time.perf_counter()
            made = self._made(rows, places)
            seconds = time.perf_counter() - began
            assigned = {
                path_of(variable): after
                for variable, old in zip(averages, before, strict=True)
                if (after := np.array(value_of(variable))).tobytes() != old.tobytes()
            }
            return _Run(made, states_of(model, 1), assigned, seconds, len(places))

    def _made(self, rows: Any, places: np.ndarray) -> _Made:
        """Make the step on `rows`, which have these places among all, and note its gradients."""
        wrappers = wrappers_in(self._model)
        with ExitStack() as stack:
            taken = [stack.enter_context(wrapper.deferred()) for wrapper in wrappers]
            logs = self._step(rows)
        calls = [call for of_one in taken for call in of_one]
        return _Made(
            [value for values, _ in calls for value in values],
            [path_of(v) for values, of in calls for v in of or self._trained_by(values)],
            [[len(values) for values, _ in of_one] for of_one in taken],
            numbers_in(logs) if isinstance(logs, dict) else {},
        )

    def _trained_by(self, values: Sequence[Any]) -> list[Any]:
        """The variables of a call of `apply` that does not say which."""
        every = [wrapper.trained for wrapper in wrappers_in(self._model)]
        return next((v for v in every if len(v) == len(values)), [self._model] * len(values))


@dataclass(frozen=True)
class _Passed(_Made):
    """What a forward pass and the loss have given; the gradients are by outputs, of all rows."""

    outputs: list[np.ndarray]
    added: list[bytes]  # by layers to the loss


class _OutputRuns(_Runs):
    """Runs of the forward pass and the loss alone, of a model and a step that are Keras's own."""

    def are_outputs_alike(self, whole: _Run, parts: Sequence[_Run]) -> bool:
        """Whether a row's output is the same in the whole and in `parts`, which follow each other.

        And whether what layers add to the loss is the same for any rows.
        """
        every = [run.made for run in (whole, *parts) if isinstance(run.made, _Passed)]
        all_rows, *passed = every
        if any(each.added != all_rows.added for each in passed):
            return False
        joined = [np.concatenate(each) for each in zip(*(p.outputs for p in passed), strict=True)]
        return all(
            np.array_equal(one, other)
            or compare([one], [[other]], [1], self.tolerance / 10).fit is Fit.MEAN
            for one, other in zip(all_rows.outputs, joined, strict=True)
        )

    def _made(self, rows: Any, places: np.ndarray) -> _Passed:
        model = self._model
        x, y, weights = keras.utils.unpack_x_y_sample_weight(rows)
        predicted = model(x, training=True)
        parts = keras.tree.flatten(predicted)
        if any(is_uneven(part) or part.shape[:1] != [len(places)] for part in parts):
            raise _NotTried("an output has no element for each row")
        # Crossentropy takes the logits that softmax has noted at its output.
        parts += [logits for part in parts if (logits := private.logits_of(part)) is not None]
        with tf.GradientTape() as tape:
            tape.watch(parts)
            loss = model.compute_loss(x, y, predicted, weights, training=True)
        gradients = [None if g is None else _numbers(g) for g in tape.gradient(loss, parts)]
        private.loss_tracker_of(model).update_state(loss, sample_weight=len(places))
        logs = model.compute_metrics(x, y, predicted, weights)
        return _Passed(
            [self._among_all(gradient, places) for gradient in gradients],
            ["the outputs"] * len(parts),
            [[len(parts)], *([] for _ in wrappers_in(model)[1:])],
            numbers_in(logs),
            [_numbers(part) for part in parts],
            [_numbers(loss).tobytes() for loss in model.losses],
        )

    def _among_all(self, array: np.ndarray | None, places: np.ndarray) -> np.ndarray | None:
        """As `array` of some rows, with zeros for all others."""
        if array is None:
            return None
        every = np.zeros((self._count, *array.shape[1:]), array.dtype)
        every[places] = array
        return every


def _averages_of(model: keras.Model) -> list[Any]:
    """The floating-point variables that training sets beside what it trains.

    Without those of metrics, and of batch normalization, of which `fit` warns anyway.
    """
    layers = [v for v in private.layers_of(model) if isinstance(v, keras.layers.BatchNormalization)]
    known = [*model.metrics_variables, *(v for layer in layers for v in layer.variables)]
    left_out = {id(plain_variable(variable)) for variable in known}
    every = filter(is_average, untrained(model))
    return [variable for variable in every if id(plain_variable(variable)) not in left_out]


def _set_by_rows(whole: _Run, parts: Sequence[_Run], tolerance: float) -> list[str]:
    """The names of variables that get another value from all rows than from a part of them.

    What follows from weights alone, as a momentum encoder or spectral normalization, does not.
    """
    return [
        name
        for name, value in whole.assigned.items()
        if np.isfinite(value).all()
        and any(_differ(value, part.assigned.get(name), tolerance) for part in parts)
    ]


def _differ(value: np.ndarray, other: np.ndarray | None, tolerance: float) -> bool:
    if other is None:
        return True
    size = max(np.abs(value).max(initial=0), np.abs(other).max(initial=0))
    return not np.allclose(value, other, 0, tolerance * size)


def _aligned(runs: Sequence[Sequence[Any]]) -> list[list[np.ndarray]]:
    """The gradients of runs as arrays of equal shapes; of tables only rows that any has."""
    aligned: list[list[np.ndarray]] = [[] for _ in runs]
    for values in zip(*runs, strict=True):
        for each, array in zip(aligned, _arrays(values), strict=True):
            each.append(array)
    return aligned


def _arrays(values: Sequence[Any]) -> list[np.ndarray]:
    """One variable's gradients of several runs."""
    tables = [value for value in values if isinstance(value, tf.IndexedSlices)]
    known = [value for value in values if value is not None]
    if not known:
        return [np.zeros(0)] * len(values)
    if not tables:
        return [np.zeros(known[0].shape) if v is None else _numbers(v) for v in values]
    places = np.unique(np.concatenate([np.asarray(table.indices) for table in tables]))
    arrays = [np.zeros((len(places), *tables[0].values.shape[1:])) for _ in values]
    for array, value in zip(arrays, values, strict=True):
        if isinstance(value, tf.IndexedSlices):
            at = np.searchsorted(places, np.asarray(value.indices))
            np.add.at(array, at, _numbers(value.values))
        elif value is not None:
            array[...] = _numbers(value)[places]
    return arrays


def _numbers(tensor: Any) -> np.ndarray:
    array = np.asarray(tf.convert_to_tensor(tensor))
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array


def _of_logs(
    model: keras.Model, whole: _Run, halves: Sequence[_Run], fit: Fit
) -> tuple[list[str], list[str]]:
    """The names in logs whose values are to be added up, and of metrics that do not combine."""
    columns = list(zip(*(half.states.values for half in halves), strict=True))
    together = results_of_all(model, whole.states, columns) if whole.states.variables else {}
    candidates = [
        m.name for m in metric_states.metrics_in(model) if may_not_combine(m, in_steps=True)
    ]
    sums, apart = [], []
    for name, value in whole.made.logs.items():
        parts = [half.made.logs.get(name, np.nan) for half in halves]
        if any(np.shape(part) != np.shape(value) for part in parts) and name not in together:
            continue  # A number for each row.
        mean = together[name] if name in together else np.mean(parts, 0)
        if _is_near(mean, value):
            continue
        # One part may have the whole's by chance; metrics add up if gradients do.
        may_add_up = np.all(parts) and (fit is Fit.SUM or name not in together)
        if may_add_up and _is_near(np.sum(parts, 0), value):
            sums.append(name)
        elif any(name == metric or name.endswith(f"_{metric}") for metric in candidates):
            apart.append(name)
    return sums, apart


def _is_near(value: Any, other: Any) -> bool:
    return bool(np.allclose(value, other, TOLERANCE, 1e-6, equal_nan=True))


def _cause(model: keras.Model, rows: Any, count: int, tolerance: float) -> str:
    """What differs first of a model whose step is Keras's: its output, or its loss; or ""."""
    x = keras.utils.unpack_x_y_sample_weight(rows)[0]
    if type(model).call is keras.Model.call:
        return ""
    for training in (False, True):
        draws = Draws(count)
        outputs: list[Any] = []
        added: list[Any] = []
        for first, end in ((0, count), (0, count // 2), (count // 2, count)):
            drawn = draws.given(np.arange(first, end)) if outputs else draws.made()
            with put_back(model), _eagerly(), _with_moving_averages(model), drawn:
                outputs.append(model(slice_rows(x, first, end), training=training))
                added.append([_numbers(loss) for loss in model.losses])
        if draws.unfit:
            continue
        for of_all, of_half in zip(*map(keras.tree.flatten, outputs[:2]), strict=True):
            pair = _numbers(of_all)[: count // 2], _numbers(of_half)
            if (
                pair[0].shape != pair[1].shape
                or compare([pair[0]], [[pair[1]]], [1], tolerance).fit is Fit.NEITHER
            ):
                return "the model's output for a row depends on the rows beside it"
        if compare(added[0], added[1:], [1, 1], tolerance).fit in (Fit.SUM, Fit.NEITHER):
            return "what layers add to the loss (add_loss)"
    if own_step(model) is None:
        losses = [keras.losses.get(loss) for loss in keras.tree.flatten(model.loss) if loss]
        names = [str(getattr(v, "name", getattr(v, "__name__", v))) for v in losses]
        return f"the loss {', '.join(names)}" if names else ""
    return ""


@contextmanager
def _eagerly() -> Iterator[None]:
    """Within the block functions of TensorFlow run as Python does: none keeps what was traced.

    TensorFlow has one switch for all threads. It warns those that meanwhile make a tf.data.Dataset,
    for which it does nothing; that is left out from now on. To take the filter away again would
    have Python repeat all warnings that it shows once.
    """
    with _switch.lock:
        _switch.users += 1
        if _switch.users == 1:
            _switch.before = tf.config.functions_run_eagerly()
            tf.config.run_functions_eagerly(True)
            if not any(
                str(getattr(entry[1], "pattern", "")) == _OF_DATASETS for entry in warnings.filters
            ):
                warnings.filterwarnings("ignore", _OF_DATASETS)
    try:
        yield
    finally:
        with _switch.lock:
            _switch.users -= 1
            if _switch.users == 0:
                tf.config.run_functions_eagerly(_switch.before)


@contextmanager
def _with_moving_averages(model: keras.Model) -> Iterator[None]:
    """Within the block batch normalization takes its moving averages, as `fit` warns of it."""
    layers = [v for v in private.layers_of(model) if isinstance(v, keras.layers.BatchNormalization)]

    def without_training(call: Any) -> Any:
        def called(inputs: Any, training: Any = None, mask: Any = None) -> Any:
            return call(inputs, training=False, mask=mask)

        return called

    for layer in layers:
        vars(layer)["call"] = without_training(layer.call)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["call"]
