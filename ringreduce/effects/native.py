"""Finds, loads and checks the package's C library.

It is built when the package is installed, if there is a compiler. Everything works without it,
slower. Modules declare the functions that they use with `functions`.
"""

import ctypes
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ringreduce.vocabulary.config import native_wanted
from ringreduce.vocabulary.errors import NativeError

_log = logging.getLogger(__name__)

ABI = 18  # RR_ABI of native/include/ringreduce.h

_NAMES = ("libringreduce_native.so", "libringreduce_native.dylib")


# ctypes's names of C's types.
pointer, integer = ctypes.c_void_p, ctypes.c_int
u32, u64, i64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64


def fields(**types: Any) -> tuple[tuple[str, Any], ...]:
    """A C structure's, by name, in order: its ``_fields_``."""
    return tuple(types.items())


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it was not built or ``RINGREDUCE_NATIVE=0`` hides it.

    Raises NativeError if it cannot be loaded or has another ABI: a broken installation, which
    continuing without it would hide.
    """
    if not native_wanted():
        return None
    if (path := _path()) is not None:
        return load(path)
    _log.warning("%s", why_missing())
    return None


def _path() -> Path | None:
    """Where the library is; None if it was not built."""
    # An editable installation has sources and built files in different folders.
    folders = sys.modules["ringreduce"].__path__
    paths = (Path(folder, name) for folder in folders for name in _NAMES)
    return next(filter(Path.exists, paths), None)


def why_missing() -> str:
    """Why `library()` is None, in a sentence for users; empty where there is one to load."""
    if not native_wanted():
        return "The native library is hidden by RINGREDUCE_NATIVE=0."
    if _path() is not None:
        return ""
    for folder in (Path(place).parent for place in sys.modules["ringreduce"].__path__):
        if (folder / "native").is_dir():
            return (
                f"ringreduce is imported from its sources in {folder}, where the native library is "
                "not built: everything works, over sockets and Python. `pip install -e .` there "
                "builds it. One installed elsewhere is not used: it may be of other sources."
            )
    return (
        "ringreduce was installed without its native library (no C compiler was found): "
        "everything works, over sockets and Python. With one, `pip install --force-reinstall "
        "ringreduce` makes it faster."
    )


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`. Raises NativeError if it does not load or has another ABI."""
    remedy = "Install ringreduce again: pip install --force-reinstall ringreduce"
    try:
        opened = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"cannot load {path}: {error}", remedy=remedy) from error
    try:
        abi = declare(opened, "rr_abi", ctypes.c_uint32, [])()
    except AttributeError as error:
        raise NativeError(f"{path} is not ringreduce's library", remedy=remedy) from error
    if abi != ABI:
        raise NativeError(f"{path} has ABI {abi}; this ringreduce needs {ABI}", remedy=remedy)
    return opened


def xla_futures_at(include: str) -> int:
    """Where XLA's table has the function that makes futures, by TensorFlow's headers in `include`.

    Raises OSError or ValueError if they do not say.
    """
    header = Path(include, "xla", "ffi", "api", "c_api.h").read_text(encoding="utf-8")
    fields = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((XLA_FFI_\w+)\);", header)
    return fields.index("XLA_FFI_Future_Create")


def functions(prefix: str, signatures: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Functions of the library, by names without `prefix`; NativeError where there is none."""
    opened = library()
    if opened is None:
        raise NativeError(why_missing())
    return {name: declare(opened, prefix + name, *types) for name, types in signatures.items()}


class _MethodDef(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = fields(name=ctypes.c_char_p, function=pointer, flags=integer, doc=ctypes.c_char_p)


_FASTCALL = 0x0080  # METH_FASTCALL
_MAKE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.py_object)


def method(name: str, owner: Any) -> Any:
    """A C function of METH_FASTCALL's form as a method of `owner`; calling it costs 30 ns."""
    make = _MAKE(("PyCFunction_NewEx", ctypes.pythonapi))
    return make(ctypes.addressof(_definition(name)), owner, None)


@cache
def _definition(name: str) -> _MethodDef:
    """The definition that Python needs of the function for as long as the process runs."""
    function = functions(name, {"": (pointer, [pointer] * 3)})[""]
    return _MethodDef(name.encode(), address(function), _FASTCALL, None)


def address(function: Any) -> int:
    """Where a C function is."""
    number = ctypes.cast(function, ctypes.c_void_p).value
    assert number is not None
    return number


def declare(opened: ctypes.CDLL, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """The function `name`, with its result and argument types set."""
    function = getattr(opened, name)
    function.restype = result
    function.argtypes = list(arguments)
    return function
