"""Where ranks exchange rows for the sake of their parts, and what gradients mean there.

    a rank's own rows | rows of all ranks, at the parts that they use | its own rows
                    enter                                           leave

Outside, a gradient is of this rank's loss, the mean over its rows, and is weighted at the end of
the step. Inside it is of all ranks' mean loss, whatever the shares of the batch are: a part whose
rank has an empty share still learns from the rows of others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import weighting


@tf.autograph.experimental.do_not_convert
def in_parts(
    function: Callable[..., Any], *tensors: Any, communicator: Communicator | None = None
) -> Any:
    """Call ``function(*tensors)``, which sends rows to the parts that they use, and back.

    Call it in a layer with parts (`PartLayer`) around what exchanges rows between the ranks of
    `communicator` and uses parts. The gradients of parts are then those of the mean over the whole
    batch, with every way to divide it. Within, use no variable that all ranks share, such as a
    router's weights: pass what is computed from it as one of `tensors`.

    Args:
        function: gets `tensors` and returns a tensor or a structure of them, with what belongs to
            this rank's rows.
        communicator: by default the process's.
    """
    ring = communicator or default_communicator()
    if ring.size == 1 or weighting.is_in_parts():
        return function(*tensors)
    weight = weighting.current()
    share = tf.constant(1.0) if weight is None else weight.factor
    share /= ring.size
    within = tf.nest.map_structure(lambda value: _scaled(value, 1 / share, share), list(tensors))
    with weighting.in_parts():
        result = function(*within)
    return tf.nest.map_structure(lambda value: _scaled(value, share, share), result)


def _scaled(value: Any, factor: Any, share: Any) -> Any:
    """`value`, with its gradient times `factor`; none where this rank has no rows."""
    if not tf.is_tensor(value) or not value.dtype.is_floating:
        return value
    return weighting.times_back(value, tf.where(share > 0, factor, tf.zeros_like(share)))
