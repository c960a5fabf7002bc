"""Names of tests: what a value of a parameter is called, where pytest would only number it."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import re
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import msgspec
import numpy as np

__all__ = ["name_of"]

_CHARACTERS_MAX = 80
_PLAIN = str | bytes | int | float | complex | None | re.Pattern | enum.Enum


def name_of(value: Any) -> str | None:
    """A short text of `value`, the same in every process; None: pytest has a name for it.

    Raises ValueError for what has none: a lambda whose source is not found.
    """
    is_long = isinstance(value, str | bytes) and len(value) > _CHARACTERS_MAX
    if not is_long and (isinstance(value, _PLAIN) or _own_name(value)):
        return None
    name = _short(value)
    half = _CHARACTERS_MAX // 2
    return name if len(name) <= _CHARACTERS_MAX else f"{name[:half]}..{name[-half:]}"


def _own_name(value: Any) -> str:
    """That of a class, a function or a module; empty for others, and for a lambda."""
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) and name != "<lambda>" else ""


def _short(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, re.Pattern):
        return str(value.pattern)
    if isinstance(value, _PLAIN | np.generic | np.dtype | range | slice):
        return str(value)
    if isinstance(value, PurePath):
        return value.name
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{_all(value.ravel().tolist() if value.size < 5 else value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{_fields(value.items())}}}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"{type(value).__name__}{_all(value)}"
    if isinstance(value, set | frozenset):
        return f"{{{','.join(sorted(map(_short, value)))}}}"
    if isinstance(value, list | tuple):
        return _all(value)
    if isinstance(value, functools.partial):
        given = filter(None, (_all(value.args)[1:-1], _fields(value.keywords.items())))
        return f"{_short(value.func)}({','.join(given)})"
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, msgspec.Struct):
        return f"{type(value).__name__}{_all(msgspec.structs.astuple(value))}"
    if dataclasses.is_dataclass(value):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return f"{type(value).__name__}{_all(fields)}"
    if name := _own_name(value):
        return name
    if isinstance(value, types.FunctionType):
        given = value.__defaults__ or ()  # what it was made with, in a loop
        return _source(value.__code__) + (f" with {_all(given)}" if given else "")
    return type(value).__name__


def _source(code: types.CodeType) -> str:
    """The text of a lambda, without that word."""
    likely = [each for each in _lambdas(code.co_filename) if each.lineno == code.co_firstlineno]
    # Of several in one line: the one that uses the same names and constants.
    texts = [ast.unparse(each) for each in likely if len(likely) == 1 or _uses(each) == _used(code)]
    if not texts:
        raise ValueError("a lambda has no name that can be found")
    return texts[0].removeprefix("lambda").strip(": ")


@functools.cache
def _lambdas(path: str) -> list[ast.Lambda]:
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]


def _uses(node: ast.Lambda) -> tuple[object, ...]:
    code = compile(ast.unparse(node), "", "eval").co_consts[0]
    return _used(code)


def _used(code: types.CodeType) -> tuple[object, ...]:
    # Names of a function around it are others' cells here and globals there.
    names = {*code.co_names, *code.co_freevars, *code.co_varnames, *code.co_cellvars}
    return names, [each for each in code.co_consts if not isinstance(each, types.CodeType)]


def _all(values: Collection[Any]) -> str:
    return f"({','.join(map(_short, values))})"


def _fields(items: Iterable[tuple[Any, Any]]) -> str:
    return ",".join(f"{_short(name)}={_short(value)}" for name, value in items)
