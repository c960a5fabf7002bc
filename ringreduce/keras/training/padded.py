"""Training on unequal amounts of data: a rank without batches makes empty steps until all are done.

    rank 0   batch  batch  batch  batch  batch
    rank 1   batch  batch  batch  empty  empty       weight 0 in the mean; changes nothing

Each step begins with an exchange of each rank's weight, but where ranks step alone (`LocalSGD`).
"""

from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import fail
from ringreduce.keras.data.uneven import empty_batch, spec_of
from ringreduce.keras.model.building import build
from ringreduce.keras.model.weighted import weigh_steps
from ringreduce.keras.rows import is_absent
from ringreduce.vocabulary.errors import ConfigError


def padded(dataset: Any, model: Any, ring: Communicator) -> Any:
    """This rank's `dataset` with empty batches at its end, as many as the longest rank's needs.

    Collective: builds `model`, and has each of its training steps weighted by this rank's samples.
    Where a number of batches is not known, the last step of an epoch has no data on any rank, and
    changes nothing; with ``steps_per_execution`` or ``jit_compile=True`` such a dataset is first
    read once, to count it. ConfigError if no rank has any data, or one's never ends.
    """
    empty = empty_batch(spec_of(dataset))
    if ring.size == 1:
        return dataset
    count, at_once = int(dataset.cardinality()), model.steps_per_execution > 1 or model.jit_compile
    if at_once and count == tf.data.UNKNOWN_CARDINALITY:
        # Else the step without data would discard earlier steps of its execution, and XLA would
        # have done half of it.
        count = int(dataset.reduce(np.int64(0), lambda n, *_: n + 1))
    longest = _longest(count, ring)
    build(model, spec := dataset.element_spec)
    weigh_steps(model, ring, is_counted=longest is not None)
    if any(part.name for part in tf.nest.flatten(spec) if not is_absent(part)):
        # `concatenate` would compare names of tensors, such as Ray Data's.
        dataset = dataset.map(lambda *parts: parts if isinstance(spec, tuple) else parts[0])
    endless = dataset.concatenate(tf.data.Dataset.from_tensors(empty).repeat())
    if longest is not None:
        return endless.take(longest).apply(tf.data.experimental.assert_cardinality(longest))
    # The filter hides from Keras that the dataset is endless, for which it wants steps_per_epoch.
    return endless.filter(lambda *_: True)


def _longest(count: int, ring: Communicator) -> int | None:
    """The largest number of batches of any rank; None where a rank does not know its own."""
    counts = ring.all_gather_object(count)
    named, problem = zip(ring.members, counts, strict=True), ""
    if endless := [str(rank) for rank, n in named if n == tf.data.INFINITE_CARDINALITY]:
        problem = f"the dataset of rank{'s' * (len(endless) > 1)} {', '.join(endless)} never ends"
        remedy = "Data that never ends needs no per_rank_data=True; pass steps_per_epoch to fit."
    elif max(counts) == 0:
        problem = "no rank has any data"
        remedy = "Look at how the data is divided: rr.shard takes what is not batched."
    if problem:
        raise fail(ring, ConfigError(problem, remedy=remedy))
    return None if min(counts) < 0 else max(counts)
