"""The native ops in a graph: they hand a bucket's gradients over and return its means.

TensorFlow's C API registers them on first use (native/src/tf_ops.c), so one library serves every
TensorFlow 2. Where that fails, gradients go through Python.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from ringreduce.effects import native
from ringreduce.tensorflow import framework, private

_log = logging.getLogger(__name__)


@cache
def are_available() -> bool:
    """Whether this process has the ops; the first call registers them."""
    if native.library() is None:
        return False
    why = framework.ops_missing()
    if why is not None:
        _log.warning("gradients go through Python, since the native ops cannot be used: %s", why)
    return why is None


def start(plan: int, bucket: int, gradients: Sequence[Any]) -> Any:
    """Add the op that packs `gradients`, of one dtype, into a bucket for the engine.

    `gradients` have the order of the bucket's slots. Returns a token, computed when the bucket has
    been handed over.
    """
    with tf.device("CPU:0"):
        return private.apply_op(
            "RingreduceStart", gradients=list(gradients), plan=plan, bucket=bucket
        )


def wait(plan: int, bucket: int, gradients: Sequence[Any], tokens: Sequence[Any]) -> list[Any]:
    """Add the op that waits for a bucket; return the means of its gradients.

    `tokens` are those of all starts of the step: a wait could hold the thread that a start needs.
    """
    with tf.device("CPU:0"):
        means = private.apply_op(
            "RingreduceWait",
            gradients=list(gradients),
            tokens=list(tokens),
            plan=plan,
            bucket=bucket,
        )
    for mean, gradient in zip(means, gradients, strict=True):
        mean.set_shape(gradient.shape)
    return list(means)
