"""A `fit`, `evaluate` or `predict` of a model's own class, which prepares data and calls Keras's.

As models with a preprocessor do. Data are divided where it calls ``super().fit``, since before that
they are not yet what the model trains on, and may have no rows that can be divided.

    rr.fit(model, x)
      type(model).fit(x)             the user's, on the whole data
        super().fit(prepared)        here `_Between`, the last class before keras.Model
          rr.fit(model, prepared)    on a model of the user's class again, whose `fit` is Keras's
"""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.tensorflow.kept import kept
from ringreduce.vocabulary.errors import ConfigError


class _Reached:
    """What a model's calls of Keras's methods by ``super()`` reach now, by name."""

    def __init__(self) -> None:
        self.instead: dict[str, Callable[..., Any]] = {}


def is_overridden(model: keras.Model, name: str) -> bool:
    """Whether a class of the user's, before Keras's own, has that method."""
    if name in vars(model):
        return False  # As within `keras_s`, and where a package has put one there.
    kinds = type(model).__mro__
    return any(name in vars(kind) for kind in kinds[: kinds.index(keras.Model)])


def through_own(
    model: keras.Model, name: str, ours: Callable[..., Any], options: dict[str, Any]
) -> Any:
    """What ``model.name`` of its own class returns; what that gives to Keras's goes to `ours`.

    `options` are arguments of `ours`; of those that Keras's method has too, the own one gets those
    that differ from the default. `ours` gets the rest of them beside what reaches Keras's method.
    """
    of_keras = inspect.signature(original := getattr(keras.Model, name)).parameters
    defaults = inspect.signature(ours).parameters
    given = {n: v for n, v in options.items() if n in of_keras and v is not defaults[n].default}
    rest = {n: v for n, v in options.items() if n not in of_keras}

    def reached(*arguments: Any, **more: Any) -> Any:
        bound = inspect.signature(original).bind(model, *arguments, **more).arguments
        bound.pop("self")
        bound.pop("kwargs", None)
        if bound.keys() - defaults.keys():
            # Callbacks of `predict`, which see all batches on each rank.
            return original(model, *arguments, **more)
        with keras_s(model, name, original):
            return ours(model, **{"verbose": options["verbose"], **bound, **rest})

    with _between(model, name, reached):
        return getattr(model, name)(**given)


def fit_through_own(
    model: keras.Model, fit: Callable[..., Any], options: dict[str, Any], ring: Communicator
) -> Any:
    """`through_own` of `fit`; ConfigError if the model's own trains without Keras's."""
    has_reached = False

    def reaching(model: Any, **arguments: Any) -> Any:
        nonlocal has_reached
        has_reached = True
        vars(model).pop(_MAKES_STEPS, None)
        return fit(model, **arguments)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"got the model {model.name}, whose own fit ({type(model).fit.__qualname__}) does not "
            "train by super().fit, in which rr.fit divides batches among ranks",
            **ring.config.who,
            remedy="Have it call super().fit(...); or, instead of rr.fit, call "
            "model.fit(rr.shard(dataset).batch(n), callbacks=[rr.callbacks.Together([...])]), "
            "with the rows of one rank as n.",
        )

    reaching.__signature__ = inspect.signature(fit)  # type: ignore[attr-defined]
    if _MAKES_STEPS not in vars(model):
        # Before anything is trained on the whole data, where Keras's methods do it.
        vars(model)[_MAKES_STEPS] = refuse
    try:
        result = through_own(model, "fit", reaching, options)
    finally:
        if vars(model).get(_MAKES_STEPS) is refuse:
            del vars(model)[_MAKES_STEPS]
    return result if has_reached else refuse()


# Called by Keras's `fit` and `train_on_batch`.
_MAKES_STEPS = "make_train_function"


@contextlib.contextmanager
def keras_s(model: keras.Model, name: str, original: Any) -> Iterator[None]:
    """Within the block ``model.name`` is Keras's: one of the model's own has called this."""
    before = {name: vars(model)[name]} if name in vars(model) else {}
    vars(model)[name] = types.MethodType(original, model)
    try:
        yield
    finally:
        del vars(model)[name]
        vars(model).update(before)


@contextlib.contextmanager
def _between(model: keras.Model, name: str, reached: Callable[..., Any]) -> Iterator[None]:
    """Within the block the model's own class gets to `reached` where it calls Keras's `name`.

    The model is of a class derived from its own then, but for the time of `reached`.
    """
    instead, plain = kept(model, _Reached).instead, type(model)
    kind: Any = plain
    other = plain if issubclass(plain, _Between) else _derived(kind)

    def call(*arguments: Any, **options: Any) -> Any:
        del instead[name]
        _become(model, plain)
        try:
            return reached(*arguments, **options)
        finally:
            _become(model, other)
            instead[name] = call  # It may call it once more.

    instead[name] = call
    _become(model, other)
    try:
        yield
    finally:
        _become(model, plain)
        instead.pop(name, None)


def _become(model: keras.Model, kind: type) -> None:
    object.__setattr__(model, "__class__", kind)  # Keras's own looks at what it sets.


class _Between(keras.Model):
    """What calls by ``super()`` reach, in place of keras.Model."""

    def fit(self, *arguments: Any, **options: Any) -> Any:
        return _called(self, "fit", super().fit)(*arguments, **options)

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        return _called(self, "evaluate", super().evaluate)(*arguments, **options)

    def predict(self, *arguments: Any, **options: Any) -> Any:
        return _called(self, "predict", super().predict)(*arguments, **options)


def _called(model: keras.Model, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    return kept(model, _Reached).instead.get(name, original)


@functools.cache
def _derived(plain: Any) -> Any:
    kind = type(plain.__name__, (plain, _Between), {"__doc__": plain.__doc__})
    kind.__qualname__ = plain.__qualname__
    private.save_as(kind, plain)  # The model may be saved meanwhile.
    return kind
