"""Marks functions whose calls a journal keeps whole, and not the collectives that they make."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from ringreduce.communicator.journal import passed
from ringreduce.communicator.process import default_communicator, is_initialized

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outermost(function: _Function) -> _Function:
    """Have a journal keep what `function` gives; one of `kept_calls.RULES` has its name.

    Its communicator is the argument `ring` or `communicator`, by default the process's.
    """
    parameters = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = functools.partial(function, *args, **kwargs)
        bound = parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        ring = arguments.get("ring") or arguments.get("communicator")
        if ring is None:
            if not is_initialized():
                return run()
            ring = default_communicator()
        return passed(ring, function.__name__, arguments, run)

    return cast(_Function, call)
