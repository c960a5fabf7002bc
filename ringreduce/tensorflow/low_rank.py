"""`PowerSGD`: gradients of matrices travel as two thin ones each (`ringreduce.pure.low_rank`).

    bucket   | matrix | vector | matrix |       P of each, and vectors --> mean
                                                Q of each              --> mean
    matrix + residual  =  mean of P  times  mean of Q  +  residual for the next step

Every rank does this with its own gradients, on one host or many; what travels is float32.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ringreduce.pure import low_rank
from ringreduce.pure.buckets import Bucket, BucketPlan, GradientSpec
from ringreduce.tensorflow.codecs import Residuals
from ringreduce.vocabulary.errors import ConfigError

# A matrix is worth it if it has so many times the bytes of P and Q.
_GAIN_MIN = 2


@dataclass(frozen=True)
class PowerSGD:
    """``DistributedOptimizer(compression=PowerSGD(4))``: low-rank gradients with error feedback.

    A float32 gradient of shape (..., m) is a matrix of m columns. Vectors, and matrices that would
    not become half as many bytes, travel as they are; so do rows of tables.

    Args:
        rank: columns of P and Q; 1 and more. More is closer to the gradients.
        start_step: steps at the start that travel as they are, since gradients change fast there.
        exclude: regular expressions; variables in whose path one is found travel as they are.

    Residuals take four bytes of memory for each weight, and are not saved. Q and the number of
    steps are equal on all ranks, and are.
    """

    rank: int = 4
    start_step: int = 100
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_step", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: {least} and more")
        if isinstance(self.exclude, str):
            raise ConfigError(f"exclude is {self.exclude!r}", remedy="Pass a list of expressions.")
        object.__setattr__(self, "exclude", tuple(self.exclude))

    def encoded(self, gradient: Any) -> Any:
        """Rows of tables, which stay as they are."""
        return gradient

    def shape_of(self, spec: GradientSpec) -> tuple[int, int] | None:
        """Rows and columns of a gradient as a matrix; None if it travels as it is."""
        if spec.dtype != "float32" or len(spec.shape) < 2 or not spec.count:
            return None
        columns = spec.shape[-1]
        rows = spec.count // columns
        if self.rank * (rows + columns) * _GAIN_MIN > spec.count:
            return None
        is_excluded = any(re.search(pattern, spec.path) for pattern in self.exclude)
        return None if is_excluded else (rows, columns)


class LowRank:
    """One optimizer's state of `PowerSGD`; changed by one thread at a time."""

    def __init__(self, settings: PowerSGD) -> None:
        self.settings, self.residuals, self.step = settings, Residuals(1), 0
        # Q transposed, by the variable's identity. The variable is kept, so that no other gets it.
        self._across: dict[int, tuple[Any, np.ndarray]] = {}

    def across(self, variable: Any, columns: int, number: int) -> np.ndarray:
        """Q of the gradient with this number, to be changed."""
        if id(variable) not in self._across:
            drawn = np.random.default_rng([columns, number])
            shape = self.settings.rank, columns
            self._across[id(variable)] = variable, drawn.standard_normal(shape, np.float32)
        return self._across[id(variable)][1]

    def state(self, variables: Sequence[Any]) -> dict[str, np.ndarray]:
        """The state that is equal on all ranks, by place in `variables`."""
        state = {"step": np.asarray(self.step)}
        for number, variable in enumerate(variables):
            if id(variable) in self._across:
                state[f"across {number}"] = self._across[id(variable)][1]
        return state

    def load(self, state: dict[str, np.ndarray], variables: Sequence[Any]) -> None:
        """Set what `state` was; of a Q of another rank nothing is taken."""
        self.step = int(state["step"])
        for number, variable in enumerate(variables):
            across = state.get(f"across {number}")
            if across is not None and across.shape == (self.settings.rank, variable.shape[-1]):
                self._across[id(variable)] = variable, np.array(across, np.float32)


class _Matrix(NamedTuple):
    """A matrix of a bucket: where it is, its shape, and what returns its Q."""

    start: int
    shape: tuple[int, int]
    across: Callable[[], np.ndarray]

    def of(self, flat: np.ndarray) -> np.ndarray:
        """It, or what lies at its place, in a bucket's array."""
        rows, columns = self.shape
        return flat[self.start : self.start + rows * columns].reshape(self.shape)


class LowRankReducer:
    """Reduces the buckets of `plan`, whose gradients are those of `variables`."""

    def __init__(self, kept: LowRank, plan: BucketPlan, variables: Sequence[Any]) -> None:
        self._kept = kept
        self._residuals = kept.residuals.of(plan, variables)
        self._matrices = [list(self._found_in(bucket, plan, variables)) for bucket in plan.buckets]
        self._is_dense = True

    def begin_step(self) -> None:
        """Begin a step."""
        self._is_dense = self._kept.step < self._kept.settings.start_step
        self._kept.step += 1

    def reduce(self, bucket: int, values: np.ndarray, mean: Callable[[np.ndarray], object]) -> None:
        """Replace `values`, float32 of shape (count,), with about what `mean` makes of an array.

        A matrix whose mean is not finite becomes NaN on all ranks; Q and residuals stay.
        """
        matrices = self._matrices[bucket]
        if self._is_dense or not matrices:
            mean(values)
            return
        rank, left = self._kept.settings.rank, self._residuals(bucket)[0]
        others = _between(matrices, values)
        lengths = [*(rank * matrix.shape[0] for matrix in matrices), *map(len, others)]
        sent, *parts = _joined(lengths)
        downs = [part.reshape(-1, rank) for part in parts[: len(matrices)]]
        copies = parts[len(matrices) :]
        for matrix, down in zip(matrices, downs, strict=True):
            low_rank.project(matrix.of(values), matrix.of(left), matrix.across(), down)
        for other, copy in zip(others, copies, strict=True):
            copy[:] = other
        mean(sent)
        for other, copy in zip(others, copies, strict=True):
            other[:] = copy
        back, *parts = _joined([rank * matrix.shape[1] for matrix in matrices])
        acrosses = [part.reshape(rank, -1) for part in parts]
        for matrix, down, across in zip(matrices, downs, acrosses, strict=True):
            if np.isfinite(down).all():
                low_rank.orthonormalize(down)
            low_rank.project_back(matrix.of(values), down, across)
        mean(back)
        for matrix, down, across in zip(matrices, downs, acrosses, strict=True):
            if not (np.isfinite(down).all() and np.isfinite(across).all()):
                matrix.of(values)[:] = np.nan
                continue
            low_rank.replace(matrix.of(values), matrix.of(left), down, across)
            # A column that is zero would stay so for ever.
            is_used = across.any(axis=1)
            matrix.across()[is_used] = across[is_used]

    def _found_in(self, bucket: Bucket, plan: BucketPlan, variables: Sequence[Any]) -> Any:
        for slot in bucket.slots:
            number = slot.gradient
            shape = self._kept.settings.shape_of(plan.gradients[number])
            if shape is not None:
                across = partial(self._kept.across, variables[number], shape[1], number)
                yield _Matrix(slot.start, shape, across)


def _between(matrices: Sequence[_Matrix], values: np.ndarray) -> list[np.ndarray]:
    """The parts of a bucket's `values` that are in no matrix."""
    parts, start = [], 0
    for matrix in matrices:
        parts.append(values[start : matrix.start])
        start = matrix.start + matrix.shape[0] * matrix.shape[1]
    return [part for part in (*parts, values[start:]) if part.size]


def _joined(sizes: Sequence[int]) -> list[np.ndarray]:
    """Float32 memory, and parts of it of these sizes."""
    memory, ends = np.empty(sum(sizes), np.float32), np.cumsum(sizes)
    return [memory, *np.split(memory, ends[:-1])]
