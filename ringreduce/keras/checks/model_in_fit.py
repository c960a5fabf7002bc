"""The model that is being trained, and its data, where nothing passes them."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import keras


class _Local(threading.local):
    model: Any = None  # that `rr.fit` trains in this thread


_in_fit = _Local()


@contextlib.contextmanager
def in_fit(model: Any) -> Iterator[None]:
    """Within the block `model_in_fit` returns `model`."""
    before, _in_fit.model = _in_fit.model, model
    try:
        yield
    finally:
        _in_fit.model = before


def model_in_fit() -> Any:
    """The model whose ``fit`` calls this function, through any others; None outside of `fit`."""
    if _in_fit.model is not None:
        return _in_fit.model
    frame = _frame_of_fit()
    return None if frame is None else frame.f_locals["self"]


def data_in_fit(model: Any) -> tuple[Any, Any, Any] | None:
    """x, y and sample_weight that ``model.fit`` of Keras was given, whose call this is in."""
    frame = _frame_of_fit()
    here = {} if frame is None else frame.f_locals
    if here.get("self") is not model or "x" not in here:
        return None
    return here["x"], here.get("y"), here.get("sample_weight")


def _frame_of_fit() -> FrameType | None:
    """The innermost ``fit`` of a Keras model that this is called in."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # Keras has no other way to find out, and no callback need be there.
        if frame.f_code.co_name == "fit" and isinstance(frame.f_locals.get("self"), keras.Model):
            return frame
        frame = frame.f_back
    return None
