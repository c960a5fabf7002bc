"""The native ops in a graph: they hand a bucket's gradients over and return its means.

TensorFlow's C API registers them on first use (native/src/tf_ops.c), and XLA's interface the custom
calls (native/src/xla_calls.c). Where that fails, gradients go through Python.
"""

import ctypes
import glob
import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from ringreduce.effects import native
from ringreduce.tensorflow import private

_log = logging.getLogger(__name__)
# RR_WHY_BYTES of native/include/ringreduce.h.
_WHY_BYTES = 2048


@cache
def are_available() -> bool:
    """Whether this process has the ops; the first call registers them."""
    if native.library() is None:
        return False
    why = register("rr_tensorflow_register", ("framework",))
    if why is not None:
        _log.warning("gradients go through Python, since the native ops cannot be used: %s", why)
    return why is None


def start(plan: int, bucket: int, gradients: Sequence[Any]) -> Any:
    """Add the op that packs `gradients`, in the order of slots, for the engine; return a token."""
    return _op("RingreduceStart", plan, bucket, gradients=list(gradients))


def wait(
    plan: int, bucket: int, results: Sequence[tuple[tf.TensorShape, Any]], tokens: Sequence[Any]
) -> list[Any]:
    """Add the op that waits for a bucket, after all starts; return the means.

    `results` are their shapes and their dtype, which is one.
    """
    flat = [number for shape, _ in results for number in (shape.rank, *shape)]
    kind = {"T": results[0][1], "N": len(results), "shapes": flat}
    means = list(_op("RingreduceWait", plan, bucket, tokens=list(tokens), **kind))
    for mean, (shape, _) in zip(means, results, strict=True):
        mean.set_shape(shape)
    return means


def _op(name: str, plan: int, bucket: int, **more: Any) -> Any:
    with tf.device("CPU:0"):
        return private.apply_op(name, plan=plan, bucket=bucket, **more)


def register(function: str, libraries: tuple[str, ...], *arguments: ctypes.c_int) -> str | None:
    """Call `function` of the native library to register with TensorFlow; None, or why it failed."""
    # With the path of one of TensorFlow's libraries, and memory for the reason; 0: it succeeded.
    library = native.library()
    assert library is not None
    types = [ctypes.c_char_p, *map(type, arguments), ctypes.c_char_p]
    call = native.declare(library, function, ctypes.c_int, types)
    why = ctypes.create_string_buffer(_WHY_BYTES)
    folder = tf.sysconfig.get_lib()
    for name in libraries:
        # The version follows the suffix on Linux, and precedes it elsewhere.
        for path in sorted(glob.glob(os.path.join(folder, f"libtensorflow_{name}.*"))):
            if call(os.fsencode(path), *arguments, why) == 0:
                return None
    return why.value.decode(errors="replace") or f"no libtensorflow_{libraries[0]} in {folder}"
