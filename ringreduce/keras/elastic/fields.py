"""What callbacks know of a training, such as a best value: a backup has it beside the weights.

    EarlyStopping   wait 2, best 0.31, best_weights ...     of each callback what has changed since
    ReduceLROnPlateau   cooldown_counter 1                  training began, by name

Without it a training that goes on would wait anew, or write over its best file what is worse. Taken
are numbers, texts, arrays, and lists, tuples and dicts of these.
"""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from ringreduce.keras import private

_log = logging.getLogger(__name__)

_PLAIN = bool, int, float, str, type(None)
# More items are data, or slow; of larger arrays so many elements tell whether they have changed.
_ITEMS_MAX, _HASHED_MAX, _BACKED_UP_MAX = 10_000, 1 << 16, 1 << 26
# What each process has for itself, by the class whose it is.
OWN: dict[Any, tuple[str, ...]] = {
    keras.callbacks.Callback: ("params",),
    # Negated for "min" by the first epoch that ends in a process.
    keras.callbacks.EarlyStopping: ("min_delta",),
    keras.callbacks.ReduceLROnPlateau: ("min_delta",),
    keras.callbacks.ModelCheckpoint: ("min_delta",),
    # What is being traced and timed.
    keras.callbacks.TensorBoard: (
        *("_is_tracing", "_profiler_started", "_should_trace"),
        *("_batch_start_time", "_epoch_start_time", "_train_accumulated_time"),
        *("_writers", "_summary_module"),
    ),
    # Its file says all.
    keras.callbacks.CSVLogger: ("append", "append_header", "keys", "csv_file", "writer"),
}
_History = keras.callbacks.History
_KINDS: Mapping[str, Any] = {"list": list, "tuple": tuple, "set": set}


class _Unfit(Exception):
    """A value is of no kind that is taken."""


class Fields:
    """Attributes of `callbacks`, and what of them has changed since this was made.

    With the `History` of `model`. `acting_once`: those of them that one rank calls, which others
    may not have. `ending`: epoch and logs that `History` will note when callbacks that are called
    now have ended.
    """

    def __init__(
        self, callbacks: Iterable[Any], model: Any, acting_once: Sequence[Any] = ()
    ) -> None:
        self._callbacks, self._model = list(callbacks), model
        once = {*map(id, acting_once)}
        self._acts_once = [id(callback) in once for callback in self._callbacks]
        self._begun = [_keys_of(callback) for callback in self._callbacks]
        self._left_out: set[tuple[str, str]] = set()
        self._warns = True
        self.ending: tuple[int, Mapping[str, Any]] | None = None

    def changed(self) -> list[tuple[str, dict[str, Any]]]:
        """The class of each callback, and its attributes that training has changed."""
        return [self._changed(place) for place in range(len(self._callbacks))]

    def _changed(self, place: int) -> tuple[str, dict[str, Any]]:
        callback, before = self._callbacks[place], self._begun[place]
        kind, now, values = type(callback).__name__, _keys_of(callback), vars(callback)
        for name in before.keys() & values.keys() - now.keys():
            if callable(values[name]):
                continue  # Chosen anew, as EarlyStopping does for its `monitor`.
            self._leave_out(kind, name, f"more than {_ITEMS_MAX:,} items, or of another kind now")
        names = [name for name, key in now.items() if before.get(name) != key]
        return kind, {name: values[name] for name in names}

    def _leave_out(self, kind: str, name: str, why: str) -> None:
        if self._warns and (kind, name) not in self._left_out:
            self._left_out.add((kind, name))
            _log.warning("backups leave out %s.%s: %s", kind, name, why)

    def digests(self) -> tuple[list[str], list[int]]:
        """The classes of Keras's own, and a hash of each one's numbers and texts that have changed.

        Equal on all ranks, since these go by the logs of an epoch; but for those that act on one.
        """
        told = [
            self._changed(place)
            for place, callback in enumerate(self._callbacks)
            if not self._acts_once[place] and private.is_of_keras(type(callback))
        ]
        hashes = [repr(sorted(_plain_in(values).items())).encode() for _, values in told]
        return [kind for kind, _ in told], [*map(zlib.crc32, hashes)]

    def packed(self, *, warns: bool = True) -> np.ndarray:
        """All of it in bytes, uint8; it `warns`, once, of what it leaves out."""
        self._warns = warns
        arrays: list[np.ndarray] = []
        told = [
            [kind, acts_once, _encoded_all(self._small(kind, values), arrays)]
            for acts_once, (kind, values) in zip(self._acts_once, self.changed(), strict=True)
        ]
        epochs, rows = self._history()
        head = json.dumps([told, epochs, _encoded_all(rows, arrays)]).encode()
        parts = [len(head).to_bytes(8, "little"), head, *(array.tobytes() for array in arrays)]
        return np.frombuffer(b"".join(parts), np.uint8)

    def _small(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `values` that are no larger than a few copies of the model; else it warns."""
        weights = sum(int(np.prod(v.shape)) * 4 for v in getattr(self._model, "weights", ()))
        most, small = max(4 * weights, _BACKED_UP_MAX), {}
        for name, value in values.items():
            arrays: list[np.ndarray] = []
            _encoded_all({name: value}, arrays)
            if (nbytes := sum(array.nbytes for array in arrays)) <= most:
                small[name] = value
            else:
                self._leave_out(kind, name, f"{nbytes >> 20} MB")
        return small

    def put(self, packed: np.ndarray) -> None:
        """Set what was `packed`; of several callbacks of a class in order."""
        data = packed.tobytes()
        length = int.from_bytes(data[:8], "little")
        told, epochs, encoded = json.loads(data[8 : 8 + length])
        left = _Bytes(data[8 + length :])
        waiting = list(zip(self._acts_once, self._callbacks, strict=True))
        for kind, acts_once, values in told:
            found = {name: _decoded(value, left) for name, value in values.items()}
            for place, (once, callback) in enumerate(waiting):
                if type(callback).__name__ == kind and once == acts_once:
                    vars(callback).update(found)
                    del waiting[place]
                    break
        rows = {name: _decoded(value, left) for name, value in encoded.items()}
        if isinstance(kept := getattr(self._model, "history", None), _History):
            kept.epoch, kept.history = epochs, rows

    def _history(self) -> tuple[list[int], dict[str, list[Any]]]:
        """The epochs that have ended, and the values in the logs of each, by name."""
        kept = getattr(self._model, "history", None)
        if not isinstance(kept, _History):
            return [], {}
        epochs, rows = list(getattr(kept, "epoch", ())), dict(kept.history)
        if self.ending is not None:
            epoch, logs = self.ending
            epochs.append(epoch)
            rows |= {name: [*rows.get(name, ()), value] for name, value in logs.items()}
        return epochs, rows


def plain_fields(callback: Any) -> dict[str, Any]:
    """The numbers and texts among the attributes of a callback, but for what is its process's."""
    return _plain_in({name: vars(callback)[name] for name in _names_of(callback)})


def _plain_in(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in values.items()
        if isinstance(value, (*_PLAIN, np.generic))
    }


def _names_of(callback: Any) -> list[str]:
    own = {name for kind, names in OWN.items() if isinstance(callback, kind) for name in names}
    return [name for name in vars(callback) if name not in own]


def _keys_of(callback: Any) -> dict[str, str]:
    """What tells the value of each attribute that can be taken from another one."""
    keys = {}
    for name in _names_of(callback):
        arrays: list[np.ndarray] = []
        for text in _encoded_all({name: vars(callback)[name]}, arrays).values():
            some = [a.reshape(-1)[:: 1 + a.size // _HASHED_MAX] for a in arrays]
            keys[name] = f"{text} {[zlib.crc32(part.tobytes()) for part in some]}"
    return keys


def _encoded_all(values: Mapping[str, Any], arrays: list[np.ndarray]) -> dict[str, Any]:
    """Those of `values` that can be taken, for JSON; their arrays are put behind `arrays`."""
    encoded = {}
    for name, value in values.items():
        encoder = _Encoder()
        # A list may be in itself.
        with contextlib.suppress(_Unfit, RecursionError):
            encoded[name] = encoder.encoded(value)
            arrays += encoder.arrays
    return encoded


class _Encoder:
    """Encodes one attribute, which has at most so many items in all."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._left = _ITEMS_MAX

    def encoded(self, value: Any) -> Any:
        """`value` for JSON, with a place for each of its `arrays`."""
        if isinstance(value, np.generic):
            value = value.item()
        if type(value) in _PLAIN:
            return value
        if isinstance(value, np.ndarray) and _has_plain_elements(value):
            self.arrays.append(np.ascontiguousarray(value))
            return {"array": [value.dtype.name, list(value.shape)]}
        if type(value) in (list, tuple, set, deque, dict):
            self._left -= len(value)
            if self._left < 0:
                raise _Unfit
            if type(value) is deque:
                items = [self.encoded(item) for item in value]
                return {"deque": {"items": items, "most": value.maxlen}}
            if type(value) is not dict:
                return {type(value).__name__: [self.encoded(item) for item in value]}
            if {*map(type, value)} <= {str}:
                return {"dict": {name: self.encoded(item) for name, item in value.items()}}
        raise _Unfit


def _has_plain_elements(array: np.ndarray) -> bool:
    """Whether its dtype is found by its name, as those of numbers are, bfloat16 too."""
    with contextlib.suppress(TypeError):
        return array.dtype == np.dtype(array.dtype.name) and not array.dtype.hasobject
    return False


class _Bytes:
    """Those of arrays, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def next(self, dtype: str, shape: Sequence[int]) -> np.ndarray:
        """The next array, a copy."""
        kind, count = np.dtype(dtype), int(np.prod(shape, dtype=int))
        array: np.ndarray = np.frombuffer(self._data, kind, count, self._place).copy()
        self._place += array.nbytes
        return array.reshape(shape)


def _decoded(value: Any, left: _Bytes) -> Any:
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "array":
        return left.next(*content)
    if kind == "dict":
        return {name: _decoded(item, left) for name, item in content.items()}
    if kind == "deque":
        return deque((_decoded(item, left) for item in content["items"]), content["most"])
    items = [_decoded(item, left) for item in content]
    return _KINDS[kind](items)
