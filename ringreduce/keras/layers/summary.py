"""Shows how the parts of a model are divided among the ranks of a group."""

import math
from typing import Any

import tensorflow as tf

from ringreduce.keras.layers.part import parts_in, pieces_in
from ringreduce.keras.optimizers_in import state_for
from ringreduce.tensorflow.variables import path_of

_MIB = 1 << 20
# With more ranks only the ends are shown.
_SHOWN = 4


def summary(model: Any) -> str:
    """Print, on the first rank of a group, and return how the parts of `model` are divided.

    Of each the shape of the whole; by rank its length along the axis that is divided; and the MiB
    of the piece and of the whole, with what a built optimizer keeps for them. Nothing travels::

        part              whole        on each rank  axis  MiB    of MiB
        table/embeddings  (80000, 50)  40000, 40000  0     22.89  45.78
    """
    rows = [["part", "whole", "on each rank", "axis", "MiB", "of MiB"]]
    optimizer = getattr(model, "optimizer", None)
    total = [0.0, 0.0]
    parts = pieces_in(model.weights)
    for variable, part in parts:
        kept = 1
        if optimizer is not None and optimizer.built:
            kept += len(parts_in(state_for(optimizer, variable)))
        unit = kept * tf.as_dtype(variable.dtype).size / _MIB
        sizes = [unit * math.prod(shape) for shape in (part.own_shape, part.shape)]
        total = [a + b for a, b in zip(total, sizes, strict=True)]
        lengths = list(map(str, part.lengths))
        if len(lengths) > _SHOWN:
            lengths = [*lengths[: _SHOWN - 1], "...", lengths[-1]]
        shown = [path_of(variable), str(part.shape), ", ".join(lengths), str(part.axis)]
        rows.append([*shown, *(f"{size:.2f}" for size in sizes)])
    rows.append(["all", "", "", "", *(f"{size:.2f}" for size in total)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [map(str.ljust, row, widths) for row in rows]
    text = "\n".join("  ".join(line).rstrip() for line in cells)
    if not parts or parts[0][1].communicator.rank == 0:
        print(text, flush=True)
    return text
