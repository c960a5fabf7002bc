"""Registering what the native library adds, through the symbols of TensorFlow's own libraries."""

from __future__ import annotations

import ctypes
import glob
import os
import re

import tensorflow as tf

from ringreduce.effects import native

__all__ = ["custom_calls_missing", "ops_missing"]

# RR_WHY_BYTES of native/include/ringreduce.h.
_WHY_BYTES = 2048


def ops_missing() -> str | None:
    """Register the ops of native/src/tf_ops.c. None: they are there; else why they are not."""
    return _registered("rr_tensorflow_register", ("framework",))


def custom_calls_missing() -> str | None:
    """Register the custom calls of native/src/xla_calls.c. None: as for `ops_missing`."""
    if native.library() is None:
        return native.why_missing()
    header = os.path.join(tf.sysconfig.get_include(), "xla", "ffi", "api", "c_api.h")
    try:
        with open(header, encoding="utf-8") as file:
            functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((XLA_FFI_\w+)\);", file.read())
        futures_at = functions.index("XLA_FFI_Future_Create")
    except (OSError, ValueError) as error:
        return f"the order of the functions in XLA's table is not known: {error}"
    # Up to TensorFlow 2.19 XLA's interface is exported by the second only.
    return _registered("rr_xla_register", ("framework", "cc"), ctypes.c_int(futures_at))


def _registered(function: str, libraries: tuple[str, ...], *arguments: ctypes.c_int) -> str | None:
    """Have a function of the native library register with TensorFlow; why it has not.

    Args:
        function: takes the path of a library of TensorFlow's, `arguments` and where to write why
            it failed, and returns 0 if it did not.
        libraries: parts of the names of those that may have what it needs.
        arguments: further ones.
    """
    library = native.library()
    if library is None:
        return native.why_missing()
    types = [ctypes.c_char_p, *map(type, arguments), ctypes.c_char_p]
    register = native.declare(library, function, ctypes.c_int, types)
    why = ctypes.create_string_buffer(_WHY_BYTES)
    folder = tf.sysconfig.get_lib()
    for name in libraries:
        # It ends in a version, elsewhere than on Linux in another place.
        for path in sorted(glob.glob(os.path.join(folder, f"libtensorflow_{name}.*"))):
            if register(os.fsencode(path), *arguments, why) == 0:
                return None
    return why.value.decode(errors="replace") or f"no libtensorflow_{libraries[0]} in {folder}"
