"""Registering what the native library adds, through the symbols of TensorFlow's own library."""

from __future__ import annotations

import ctypes
import glob
import os

import tensorflow as tf

from ringreduce.effects import native

__all__ = ["why_not_registered"]

# RR_WHY_BYTES of native/include/ringreduce.h.
_WHY_BYTES = 2048


def why_not_registered(function: str) -> str | None:
    """Have a function of the native library register with TensorFlow; None: it has.

    Args:
        function: takes the path of libtensorflow_framework and where to write why it failed,
            and returns 0 if it did not.
    """
    library = native.library()
    if library is None:
        return native.why_missing()
    register = native.declare(library, function, ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p])
    why = ctypes.create_string_buffer(_WHY_BYTES)
    folder = tf.sysconfig.get_lib()
    # Its name ends in a version, elsewhere than on Linux in another place.
    for path in sorted(glob.glob(os.path.join(folder, "libtensorflow_framework.*"))):
        if register(os.fsencode(path), why) == 0:
            return None
    return why.value.decode(errors="replace") or f"no libtensorflow_framework in {folder}"
