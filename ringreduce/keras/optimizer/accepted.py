"""Checks which optimizers can be wrapped."""

import itertools
from typing import Any

import keras

from ringreduce.keras import private
from ringreduce.keras.checks.models import refuse_strategy
from ringreduce.keras.optimizers_in import all_within, held_by
from ringreduce.keras.wrapper import Wrapper
from ringreduce.tensorflow.low_rank import PowerSGD
from ringreduce.tensorflow.variables import differing
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import brief, for_rr

# Each element's step depends on that element's gradients alone.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "RMSprop", "Adamax", "Nadam")
_KNOWN = (*_ELEMENTWISE, "Lion", "Ftrl")
# Methods that see all gradients of a step.
_STEPS_OF_ALL = ("apply", "apply_gradients", "_backend_apply_gradients", "_clip_gradients")
_STEPS = tuple(getattr(keras.optimizers, name).update_step for name in _KNOWN)


def refuse_unusable(inner: Any, compression: Any) -> None:
    """Raise ConfigError unless gradients can be reduced for `inner`: see `DistributedOptimizer`."""
    if not isinstance(inner, keras.optimizers.Optimizer):
        text = f"got {brief(inner)} to wrap, which is no Keras 3 optimizer"
        raise ConfigError(text, remedy="Pass one, such as keras.optimizers.SGD(0.01).")
    refuse_wrapped(inner)
    for held in all_within(inner):
        if steps := getattr(held, "gradient_accumulation_steps", None):
            raise ConfigError(
                f"got {held.name} with gradient_accumulation_steps={steps}: all ranks would "
                "reduce in every step what it then adds up",
                remedy="Leave that out and "
                + for_rr(
                    "pass it to DistributedOptimizer, which adds up first and reduces once.",
                    "take a larger batch_size, of which each rank computes its part only.",
                ),
            )
        is_lossy = compression == "int8" or isinstance(compression, PowerSGD)
        if isinstance(held, keras.optimizers.LossScaleOptimizer) and is_lossy:
            raise ConfigError(
                f"got compression={compression!r} with {held.name}: what it takes in a step has "
                "another scale in the next",
                remedy="Use mixed_bfloat16, which needs no scale, or compression='fp16'.",
            )
    refuse_strategy()


def refuse_wrapped(inner: keras.Optimizer) -> None:
    """ConfigError if `inner` is distributed, or something that it or one in it has."""
    for held in (inner, *itertools.chain(*map(held_by, all_within(inner)))):
        if isinstance(held, Wrapper):
            text = f"got an optimizer that is already distributed ({held.name})"
            raise ConfigError(text, remedy="Wrap it once, the outermost one.")


def own_step_in(optimizer: keras.Optimizer) -> str | None:
    """The method of the user's own, if there is one, that sees all of a step's gradients."""
    names = (n for n in _STEPS_OF_ALL if not private.is_of_keras(getattr(optimizer, n)))
    return next(names, None)


def require_elementwise(inner: keras.Optimizer, what: str, other: str = "", **who: Any) -> None:
    """ConfigError, of `what` with {}, unless each element's step is known to need no other's."""
    for optimizer in all_within(inner):
        # A LossScaleOptimizer does what the one in it does.
        is_wrapper = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        is_known = is_wrapper or getattr(type(optimizer), "update_step", None) in _STEPS
        if own_step_in(optimizer) or not is_known:
            which = what.replace("{}", f"{optimizer.name} ({type(optimizer).__name__})")
            text = f"{which} looks at whole variables, or is not known"
            known = f"{', '.join(_ELEMENTWISE)} or another that works element by element"
            raise ConfigError(text, **who, remedy=f"Use {known}{other}.")


def require_equal(wrapper: Any) -> None:
    """ConfigError if a class of the user's has made other weights on each rank. Collective."""
    kinds = map(type, all_within(wrapper._inner))
    own_kinds = [kind.__name__ for kind in kinds if not private.is_of_keras(kind)]
    if not own_kinds or not wrapper.built or (ring := wrapper._ring()).size == 1:
        return
    if differing(wrapper.equal_now(wrapper.trained), ring):
        raise ConfigError(
            f"found that weights have gone apart, which {own_kinds[0]} updates on each rank",
            **ring.config.who,
            remedy="If it draws random numbers, let it draw them by keras.random, with "
            "seed=self.seed, where self.seed = keras.random.SeedGenerator(1) is an attribute of "
            "the optimizer: ranks get rank 0's. Else look for code that changes weights on some "
            "ranks only.",
        )
