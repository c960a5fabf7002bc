"""Updates of the rows that have a gradient: `DistributedOptimizer(update_rows="touched")`.

The inner optimizer does the work, on stand-ins: of a table, and of each state it keeps for that,
it sees a small variable that consists of the rows with a gradient.

    table      0 1 2 3 4 5 6 7      gradient of rows 1 and 6
    stand-in     1         6        what is read is gathered, what is assigned scattered, in place

So clipping, decay, the schedule, the step counter and a loss scale are Keras's own code, for all
optimizers that work element by element.

A row is *touched* in a step if its gradient, the mean over all ranks, is not 0 in every element. So
it does not matter whether rows or whole tables travelled. docs/guides/keras.md says what that means
for momentum, decay, bias correction, clipping and the learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.checks.users_line import ParityWarning, warn_at_users_line
from ringreduce.keras.optimizer.accepted import require_elementwise
from ringreduce.keras.optimizers_in import all_within
from ringreduce.tensorflow.variables import path_of, plain_variable
from ringreduce.tensorflow.xla import is_compiling
from ringreduce.vocabulary.errors import ConfigError


def touched_rows(update_rows: str, inner: Any, sparse_as_dense: bool) -> TouchedRows | None:
    """Make the updates of touched rows for an optimizer's `update_rows`; None for "all"."""
    if update_rows == "all":
        return None
    if update_rows != "touched":
        raise ConfigError(f"update_rows is {update_rows!r}; accepted: 'all', 'touched'")
    if sparse_as_dense:
        raise ConfigError(
            'got update_rows="touched" and sparse_as_dense=True, after which no gradient has rows',
            remedy="Leave one of them out.",
        )
    require_elementwise(inner, 'got {} with update_rows="touched", which', '; or update_rows="all"')
    for part in all_within(inner):
        if getattr(part, "use_ema", False):
            raise ConfigError(
                f'got {part.name} with use_ema and update_rows="touched": an average of all '
                "weights passes over all rows in every step",
                remedy='Leave use_ema out, or use update_rows="all".',
            )
    return TouchedRows()


class TouchedRows:
    """Applies gradients with an inner optimizer to the rows that have one."""

    def __init__(self) -> None:
        self._has_warned = False

    def look_at(
        self, inner: Any, gradients: Sequence[Any], variables: Sequence[Any], ring: Communicator
    ) -> None:
        """Refuse what cannot be updated by rows; warn once if no gradient has rows."""
        pairs = zip(gradients, variables, strict=True)
        tables = [v for gradient, v in pairs if isinstance(gradient, tf.IndexedSlices)]
        for table in tables:
            if is_compiling():
                raise ConfigError(
                    f'has update_rows="touched", and {path_of(table)} in a step compiled with '
                    "jit_compile=True, where gradients of tables have no rows",
                    **ring.config.who,
                    remedy='Compile the model with jit_compile=False, or use update_rows="all".',
                )
            if getattr(table, "constraint", None) is not None:
                raise ConfigError(
                    f'has update_rows="touched", and {path_of(table)} with a constraint, which '
                    "looks at all rows in every step",
                    **ring.config.who,
                    remedy='Make the layer without it, or use update_rows="all".',
                )
        if not tables and not self._has_warned and ring.rank == 0:
            self._has_warned = True
            warn_at_users_line(
                f'{inner.name} has update_rows="touched", but no gradient of this step has rows, '
                "so all weights are updated. Rows come from look-ups (keras.layers.Embedding, "
                "tf.gather); a table that is also used whole, by a regularizer or as the output "
                'layer, has a gradient for every row. Leave update_rows="touched" out then.',
                ParityWarning,
            )

    def apply(self, inner: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """`inner.apply`, which sees rows of variables with slices, whose indices are unique."""
        given: list[Any] = []
        seen: list[Any] = []
        rows: dict[Any, Any] = {}
        for gradient, variable in zip(gradients, variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                gradient, ids = _touched(gradient)
                if ids.shape[0] == 0:
                    continue  # As is known eagerly. Keras's `add` takes it for a bias.
                key = private.key_of(inner, variable)
                variable, rows[key] = _Rows(variable, ids, key), ids
            given.append(gradient)
            seen.append(variable)
        if not given:
            inner.iterations.assign_add(1)  # Keras takes it for no step.
        with ExitStack() as replaced:
            for optimizer in all_within(inner):
                replaced.enter_context(_state_in_rows(optimizer, rows))
            inner.apply(given, seen)
        for stand_in in seen:
            if isinstance(stand_in, _Rows):
                stand_in.end()


def _touched(gradient: tf.IndexedSlices) -> tuple[Any, Any]:
    """Values and indices of the rows that are not 0 everywhere; NaN is not 0."""
    values = gradient.values
    elements = list(range(1, values.shape.rank))
    places = tf.where(tf.reduce_any(tf.not_equal(values, 0), elements))[:, 0]
    return tf.gather(values, places), tf.gather(gradient.indices, places)


@contextmanager
def _state_in_rows(optimizer: Any, rows: dict[Any, Any]) -> Iterator[None]:
    """Within the block `optimizer` has stand-ins for its state for the variables with `rows`."""
    places = private.places_in_lists(optimizer)
    # Keras refuses a variable that it does not know.
    by_place = {places[key]: ids for key, ids in rows.items() if key in places}
    lists = private.lists_of_state(optimizer)
    for name, states in lists.items():
        replaced = list(states)
        for index, ids in by_place.items():
            if states[index] is not None:
                replaced[index] = _Rows(states[index], ids)
        # Neither Keras nor TensorFlow tracks these.
        vars(optimizer)[name] = replaced
    try:
        yield
    finally:
        vars(optimizer).update(lists)


class _Rows:
    """Some rows of a variable, as an optimizer uses one."""

    constraint = None

    def __init__(self, variable: Any, ids: Any, key: Any = None) -> None:
        self._variable, self._ids = plain_variable(variable), ids
        self.dtype, self.name = self._variable.dtype, self._variable.name
        self.shape = tf.TensorShape([ids.shape[0], *self._variable.shape[1:]])
        # Keras finds by this what it keeps for a variable.
        self._unique_id = key

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        # Not of the variable's value, which would be read, and perhaps copied, whole.
        return tf.convert_to_tensor(tf.gather(self._variable, self._ids), dtype, name=name)

    def _scatter(self, method: str, value: Any) -> None:
        rows = tf.IndexedSlices(tf.convert_to_tensor(value, self.dtype), self._ids)
        getattr(self._variable, method)(rows)

    assign = partialmethod(_scatter, "scatter_update")
    assign_add = partialmethod(_scatter, "scatter_add")
    assign_sub = partialmethod(_scatter, "scatter_sub")

    def end(self) -> None:
        """Let the variable be read without a copy, as before a scattered update (keras#15376)."""
        tf.raw_ops.DisableCopyOnRead(resource=self._variable.handle)


def _of_values(operator: str) -> Any:
    return lambda rows, other: getattr(tf.Tensor, operator)(tf.convert_to_tensor(rows), other)


# Operators that optimizers use on a variable.
for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _operator in (f"__{_name}__", f"__r{_name}__"):
        setattr(_Rows, _operator, _of_values(_operator))
