"""Registers what the native library adds with TensorFlow, through the symbols of its libraries."""

from __future__ import annotations

import ctypes
import glob
import os
import re

import tensorflow as tf

from ringreduce.effects import native

# RR_WHY_BYTES of native/include/ringreduce.h.
_WHY_BYTES = 2048


def ops_missing() -> str | None:
    """Register the ops of native/src/tf_ops.c; None if that worked, else the reason it did not."""
    return _registered("rr_tensorflow_register", ("framework",))


def custom_calls_missing() -> str | None:
    """Register the custom calls of native/src/xla_calls.c; returns as `ops_missing`."""
    if native.library() is None:
        return native.why_missing()
    header = os.path.join(tf.sysconfig.get_include(), "xla", "ffi", "api", "c_api.h")
    try:
        with open(header, encoding="utf-8") as file:
            functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((XLA_FFI_\w+)\);", file.read())
        futures_at = functions.index("XLA_FFI_Future_Create")
    except (OSError, ValueError) as error:
        return f"the order of the functions in XLA's table is not known: {error}"
    # Up to TensorFlow 2.19 only the second exports XLA's interface.
    return _registered("rr_xla_register", ("framework", "cc"), ctypes.c_int(futures_at))


def _registered(function: str, libraries: tuple[str, ...], *arguments: ctypes.c_int) -> str | None:
    """Call `function` of the native library to register with TensorFlow; None, or why it failed.

    It takes the path of one of TensorFlow's `libraries` (parts of names), `arguments`, and a buffer
    for the reason of a failure; it returns 0 if it succeeded.
    """
    library = native.library()
    if library is None:
        return native.why_missing()
    types = [ctypes.c_char_p, *map(type, arguments), ctypes.c_char_p]
    register = native.declare(library, function, ctypes.c_int, types)
    why = ctypes.create_string_buffer(_WHY_BYTES)
    folder = tf.sysconfig.get_lib()
    for name in libraries:
        # The version follows the suffix on Linux, and precedes it elsewhere.
        for path in sorted(glob.glob(os.path.join(folder, f"libtensorflow_{name}.*"))):
            if register(os.fsencode(path), *arguments, why) == 0:
                return None
    return why.value.decode(errors="replace") or f"no libtensorflow_{libraries[0]} in {folder}"
