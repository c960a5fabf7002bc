"""`shard`: the rows of a DataFrame that a rank has, as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from ringreduce.vocabulary.errors import ConfigError

# The rows of the rank in this process: batches that Spark sends, and their columns.
_here: list[_Rows] = []


class _Rows:
    """Batches of rows, which are read when they are asked for, once."""

    def __init__(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> None:
        self._batches, self._schema = batches, schema
        self._table: pa.Table | None = None

    def table(self) -> pa.Table:
        if self._table is None:
            self._table = pa.Table.from_batches(list(self._batches), self._schema)
        return self._table


@contextmanager
def given(batches: Iterable[pa.RecordBatch], schema: pa.Schema | None) -> Iterator[None]:
    """In the block `shard` gives these rows; with None there are none to give."""
    rows = [] if schema is None else [_Rows(batches, schema)]
    _here.extend(rows)
    try:
        yield
    finally:
        _here.clear()


def shard(*columns: str) -> Any:
    """This rank's rows of the ``dataframe`` that `ringreduce.spark.run` was given.

    They are the rows of one partition, in its order, so ranks have unequal numbers, or none at all:
    pass ``per_rank_data=True`` to `rr.fit`, which trains on them as they are. They are held in this
    process's memory.

    Args:
        columns: names of columns.

    Returns:
        For one name its column, for several a tuple of them, for none a `pyarrow.Table`. A column
        of numbers or booleans is an array of shape (rows,), with the column's own dtype; one of
        lists of numbers that are equally long, of shape (rows, length), and with no rows (0, 0);
        others, such as texts, are arrays of Python objects. Writable, and the caller's own.

    Raises:
        ConfigError: there is no DataFrame, or no such column; numbers are missing in one, or its
            lists are of several lengths.
    """
    if not _here:
        raise ConfigError(
            "spark.shard was called where there are no rows",
            remedy="Call it within the function that ringreduce.spark.run calls, and pass that "
            "dataframe=...",
        )
    table = _here[-1].table()
    if not columns:
        return table
    arrays = [_array_of(table, name) for name in columns]
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def _array_of(table: pa.Table, name: str) -> np.ndarray:
    if name not in table.column_names:
        raise ConfigError(
            f"the DataFrame has no column {name!r}",
            remedy=f"It has {', '.join(map(repr, table.column_names))}.",
        )
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # One chunk, or none.
        column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _matrix_of(column, name)
    if _is_number(kind):
        _refuse_missing(column, name)
        return np.array(column.to_numpy(zero_copy_only=False))
    return np.array(column.to_pylist(), dtype=object)


def _matrix_of(column: pa.Array, name: str) -> np.ndarray:
    if not _is_number(column.type.value_type):
        return _objects(column.to_pylist())
    _refuse_missing(column, name)
    lengths = {len(row) for row in column}
    if len(lengths) > 1:
        raise ConfigError(
            f"the lists of column {name!r} have {min(lengths)} to {max(lengths)} numbers",
            remedy="Pad or cut them to one length; or take spark.shard(), a pyarrow.Table.",
        )
    values = column.flatten()
    _refuse_missing(values, name)
    length = lengths.pop() if lengths else 0
    return np.array(values.to_numpy(zero_copy_only=False)).reshape(len(column), length)


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def _refuse_missing(column: pa.Array, name: str) -> None:
    if column.null_count:
        raise ConfigError(
            f"{column.null_count} of {len(column)} values of column {name!r} are missing",
            remedy="Fill or drop them first: df.fillna, df.dropna.",
        )


def _objects(rows: list[Any]) -> np.ndarray:
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    return array
