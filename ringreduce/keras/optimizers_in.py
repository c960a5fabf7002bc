"""The distributed optimizers of a model, and the optimizers and state within one."""

import itertools
from typing import Any

import keras

from ringreduce.keras import private
from ringreduce.keras.wrapper import Wrapper


def all_within(optimizer: Any) -> list[Any]:
    """An optimizer and those that it wraps."""
    # A wrapper's `inner_optimizer` is within its own, where that is a LossScaleOptimizer.
    name = "_inner" if isinstance(optimizer, Wrapper) else "inner_optimizer"
    wrapped = [getattr(optimizer, name, None), *getattr(optimizer, "optimizers", ())]
    inner = [nested for held in filter(None, wrapped) for nested in all_within(held)]
    return [optimizer, *inner]


def state_for(optimizer: keras.Optimizer, variable: Any) -> list[Any]:
    """List the state that a built optimizer, or one in it, has for `variable`."""
    states_of = []
    for member in all_within(optimizer):
        place = private.places_in_lists(member).get(private.key_of(member, variable))
        if place is not None:
            lists = private.lists_of_state(member).values()
            states_of += [states[place] for states in lists if states[place] is not None]
    return states_of


def build_optimizer_here(model: keras.Model) -> None:
    """Give the optimizer of a built model its variables, on this rank alone."""
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        # Not `build` of our wrapper, which is collective: it copies rank 0's values.
        getattr(optimizer, "build_inner", optimizer.build)(model.trainable_variables)


def settle(model: keras.Model) -> None:
    """Make weights equal on all ranks where they step alone between meetings. Collective."""
    for wrapper in wrappers_in(model):
        wrapper.settle()


def is_settled(model: keras.Model) -> bool:
    """Whether weights are equal on all ranks: not where they step alone, between meetings."""
    return all(wrapper.is_settled for wrapper in wrappers_in(model))


def is_alone(model: keras.Model) -> bool:
    """Whether `model` has optimizers, none of which needs other ranks in each step."""
    wrappers = wrappers_in(model)
    return bool(wrappers) and all(wrapper.is_alone for wrapper in wrappers)


def wrappers_in(model: keras.Model) -> list[Any]:
    """The distributed optimizers of `model`; a GAN has several, as attributes or in a list."""
    every = (getattr(model, "optimizer", None), *held_by(model))
    return list({id(part): part for part in every if isinstance(part, Wrapper)}.values())


def held_by(owner: Any) -> list[Any]:
    """The attributes of an object, and what is in those that are lists or tables."""
    held = list(vars(owner).values())
    # As `dict`, not `Mapping`, which is asked in Python: this is done many times in an epoch.
    several = [value for value in held if isinstance(value, (list, tuple, dict))]
    parts = (list(value.values()) if isinstance(value, dict) else value for value in several)
    return [*held, *itertools.chain(*parts)]
