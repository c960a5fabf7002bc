"""Puts back what a training step changes: variables, random states, and plain attributes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ringreduce.keras import private
from ringreduce.keras.optimizers_in import all_within, wrappers_in
from ringreduce.tensorflow import eager_draws
from ringreduce.tensorflow.held import Held
from ringreduce.tensorflow.private import restore_eager_seeds, state_of_eager_seeds

_COLLECTIONS = (list, dict, set, deque)
# Of longer ones it is not looked at what is in their items.
_LOOKED_AT_MAX = 1000
# What a step may replace; not layers and variables, which Keras keeps track of.
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    np.generic,
    np.ndarray,
    tuple,
    tf.Tensor,
)


@contextmanager
def put_back(model: keras.Model) -> Iterator[None]:
    """After the block `model`, its layers, metrics and optimizers are as they are now.

    That is their variables, the states of generators, and of their attributes numbers, texts,
    tensors, and what is in lists, dicts, sets and queues, and in such as are in these. What a step
    does elsewhere stays done.
    """
    objects = [model, *private.layers_of(model), *model.metrics]
    held = Held(_variables_of(model, objects))
    tables = [(vars(thing), _noted(vars(thing))) for thing in objects]
    states = random.getstate(), np.random.get_state(), state_of_eager_seeds()
    drawn: list[str] = []
    try:
        with eager_draws.seen() as drawn:
            yield
    finally:
        held.put_back()
        for table, before in tables:
            _restore(table, before)
        random.setstate(states[0])
        np.random.set_state(states[1])
        restore_eager_seeds(states[2], have_drawn=bool(drawn))


def _variables_of(model: keras.Model, objects: list[Any]) -> list[Any]:
    variables = [*model.variables, *model.metrics_variables]
    for optimizer in wrappers_in(model):
        variables += [v for held in all_within(optimizer) for v in held.variables]
    for value in (value for thing in objects for value in vars(thing).values()):
        if isinstance(value, tf.random.Generator):
            variables.append(value.state)
        elif isinstance(value, (tf.Variable, keras.Variable)):
            variables.append(value)
    if (generator := private.global_seed_generator()) is not None:
        variables.append(generator.state)
    return list({id(variable): variable for variable in variables}.values())


def _noted(table: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Any, list[Any]]]]:
    """The attributes, and copies of what is in collections among them, the outer ones first."""
    collections: dict[int, tuple[Any, list[Any]]] = {}
    waiting = [value for value in table.values() if isinstance(value, _COLLECTIONS)]
    while waiting:
        value = waiting.pop(0)
        if id(value) in collections:
            continue
        items = _items(value)
        collections[id(value)] = value, items
        if len(items) <= _LOOKED_AT_MAX:
            within = value.values() if isinstance(value, dict) else items
            waiting += [item for item in within if isinstance(item, _COLLECTIONS)]
    return dict(table), list(collections.values())


def _items(value: Any) -> list[Any]:
    return [*value.items()] if isinstance(value, dict) else [*value]


def _restore(table: dict[str, Any], noted: tuple[dict[str, Any], list[tuple[Any, Any]]]) -> None:
    before, collections = noted
    for name, now in list(table.items()):
        if name not in before and isinstance(now, (*_PLAIN, *_COLLECTIONS)):
            del table[name]
    for name, value in before.items():
        if table.get(name, before) is not value and isinstance(value, (*_PLAIN, *_COLLECTIONS)):
            table[name] = value
    for value, items in collections:
        if not _are_same(_items(value), items):
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(items)


def _are_same(items: Any, others: list[Any]) -> bool:
    """Whether they are the same objects, or pairs of the same; nothing is compared by value."""

    def key(item: Any) -> Any:
        return tuple(map(id, item)) if type(item) is tuple and len(item) == 2 else id(item)

    return list(map(key, items)) == list(map(key, others))
