"""Checks which optimizers can be wrapped, and which models need a wrapped one."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator, is_initialized
from ringreduce.keras import private
from ringreduce.keras.normalization import SyncBatchNormalization
from ringreduce.keras.wrapper import Wrapper
from ringreduce.tensorflow.low_rank import PowerSGD
from ringreduce.tensorflow.variables import differing, path_of
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import brief, for_rr

_log = logging.getLogger(__name__)
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
                    "pass accumulate_steps to DistributedOptimizer: it adds up first and reduces "
                    "once.",
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


def refuse_strategy(model: Any = None) -> None:
    """ConfigError within a scope of tf.distribute, or for a `model` that was made in one.

    Variables made there can be used and changed only within it, though it has one replica.
    """
    what, strategy = "is used", None
    if model is not None and (strategy := private.strategy_of(model)) is not None:
        what = f"got the model {model.name}, which was made"
    elif tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
    if strategy is None:
        return
    count = strategy.num_replicas_in_sync
    raise ConfigError(
        f"{what} inside a tf.distribute strategy of {count} replica{'s' * (count != 1)} "
        f"({type(strategy).__name__})",
        remedy="Use one or the other; a ringreduce worker is one replica: make model and optimizer "
        "outside of strategy.scope().",
    )


def refuse_states_of_rows(model: Any, ring: Communicator) -> None:
    """ConfigError on several ranks for an RNN that keeps a state for each row of a batch."""
    for layer in private.layers_of(model) if ring.size > 1 else ():
        states = keras.tree.flatten(getattr(layer, "states", None) or [])
        if getattr(layer, "stateful", False) and states and states[0] is not None:
            rows = int(states[0].shape[0])
            raise ConfigError(
                f"got the model {model.name} with {layer.name}, which is stateful: it keeps a "
                f"state for each of {rows} rows of a batch, of which each of {ring.size} ranks "
                f"gets {rows // ring.size} in training, and one batch in "
                f"{ring.size} in evaluation",
                **ring.config.who,
                remedy="Leave out stateful=True and the batch size of keras.Input; or use the "
                "model in one process.",
            )


def refuse_fixed_rows(model: Any, ring: Communicator, rows: int | None) -> None:
    """ConfigError on several ranks for layers that need as many rows as a keras.Input has fixed.

    `rows` are those of a global batch; None: as many as that input has. Most layers need none.
    """
    needed = fixed_rows(model)
    if ring.size == 1 or needed is None:
        return
    rows = rows or needed
    own = -(-rows // ring.size)
    if own == needed:
        return

    def part_of(each: Any) -> Any:
        kind = tf.SparseTensorSpec if getattr(each, "sparse", False) else tf.TensorSpec
        return kind((own, *each.shape[1:]), each.dtype)

    # A Sequential has none by that name.
    specs = keras.tree.map_structure(part_of, getattr(model, "input", model.inputs[0]))
    called = tf.function(lambda parts: model(parts, training=False), autograph=False)
    try:
        outputs = called.get_concrete_function(specs).structured_outputs
        problem = None
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        outputs, problem = [], error
    pairs = zip(model.outputs, tf.nest.flatten(outputs), strict=False)
    is_kept = all(_rows(o) != needed or _rows(here) in (own, None) for o, here in pairs)
    if problem is None and is_kept:
        return
    raise ConfigError(
        f"got the model {model.name}, which works only on {needed} rows at a time, as its "
        f"keras.Input says: each of {ring.size} ranks gets {own} of {rows} rows of a batch",
        **ring.config.who,
        remedy=f"Leave out the batch size: keras.Input({tuple(model.inputs[0].shape[1:])}); and "
        "let layers take the number of rows from their inputs, not as a constant. Or use batches "
        f"of {needed * ring.size} rows.",
    ) from problem


def fixed_rows(model: Any) -> int | None:
    """How many rows the inputs of `model` have in each batch; None: any number."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    fixed = {count for each in inputs if (count := _rows(each)) is not None}
    return fixed.pop() if len(fixed) == 1 else None


def _rows(tensor: Any) -> int | None:
    shape = tf.TensorShape(tensor.shape)
    return shape[0] if shape.rank else None


def refuse_wrapped(inner: keras.Optimizer) -> None:
    """ConfigError if `inner` is distributed, or something that it or one in it has."""
    for held in (inner, *itertools.chain(*map(held_by, all_within(inner)))):
        if isinstance(held, Wrapper):
            text = f"got an optimizer that is already distributed ({held.name})"
            raise ConfigError(text, remedy="Wrap it once, the outermost one.")


def refuse_scales(variables: Sequence[Any], ring: Communicator) -> None:
    """ConfigError on several ranks for scales of 8-bit floats, which have no gradients."""
    for variable in variables if ring.size > 1 else ():
        # Keras gives its new value as gradient, from the largest number that a rank has seen.
        if getattr(variable, "overwrite_with_gradient", False):
            text = f"trains {path_of(variable)}, a scale of 8-bit floats, of which there is no mean"
            raise ConfigError(text, **ring.config.who, remedy="Train with mixed_bfloat16.")


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
    several = [value for value in held if isinstance(value, (list, tuple, Mapping))]
    parts = (list(value.values()) if isinstance(value, Mapping) else value for value in several)
    return [*held, *itertools.chain(*parts)]


def refuse_other_ring(model: keras.Model, where: str, ring: Communicator) -> None:
    """ConfigError if `where` got a group, and an optimizer or layer uses the whole job."""
    # Parts with a communicator of their own may have another one on purpose.
    if not is_initialized() or ring is default_communicator():
        return
    layers = [v for v in private.layers_of(model) if isinstance(v, SyncBatchNormalization)]
    for part in (*wrappers_in(model), *layers):
        if part.communicator is None:
            name = "DistributedOptimizer" if isinstance(part, Wrapper) else "SyncBatchNormalization"
            raise ConfigError(
                f"got a group of {ring.size} ranks in {where}, while {part.name} of the "
                f"model averages over all {default_communicator().size}",
                **ring.config.who,
                remedy=f"Make it with {name}(..., communicator=group).",
            )


def refuse_other_optimizer(model: keras.Model, ring: Communicator) -> None:
    """ConfigError if an optimizer averages over other ranks than `rr.fit` compares in the end."""
    for wrapper in wrappers_in(model):
        group = wrapper.communicator
        if group is not None and list(group.members) != list(ring.members):
            raise ConfigError(
                f"trains on {ring.size} ranks in rr.fit, while {wrapper.name} averages over "
                f"{group.size} of them: weights would differ",
                **ring.config.who,
                remedy="Pass the optimizer's communicator to rr.fit too; or check=False, if "
                "something else makes weights equal.",
            )


def warn_of_plain_optimizer(model: keras.Model, where: str, ring: Communicator) -> None:
    """Log a warning if nothing seems to average the gradients of `model`."""
    optimizer = model.optimizer
    if ring.size == 1 or optimizer is None or wrappers_in(model):
        return
    _log.warning(
        "[%d/%d] %s got a model whose optimizer (%s) is no DistributedOptimizer: ranks train "
        "apart, unless its train_step averages gradients by itself. Wrap it, or use rr.load_model.",
        *(*ring.config.who.values(), where, optimizer.name),
    )


def require_compiled(model: keras.Model) -> None:
    """ConfigError if `model` is no model that was compiled, or is in a scope of tf.distribute."""
    require_model(model, "fit")
    if not model.compiled:
        remedy = "Call model.compile(optimizer=rr.DistributedOptimizer(...), ...) first."
        raise ConfigError(f"got {brief(model)}, which is no compiled model", remedy=remedy)
    refuse_strategy(model)


def require_model(model: Any, method: str) -> None:
    """ConfigError if `model` is none of Keras's, such as a Pipeline, which has its own `method`."""
    if not isinstance(model, keras.Model):
        remedy = f"The model comes first: rr.{method}(model, x, ...)."
        if isinstance(model, type):
            remedy = f"Pass a model, not its class: {model.__name__}(...)."
        elif hasattr(model, method):
            remedy = f"Call its own {method}: {type(model).__name__.lower()}.{method}(...)."
        raise ConfigError(f"got {brief(model)}, which is no keras.Model", remedy=remedy)


def require_distributed(model: keras.Model, ring: Communicator) -> None:
    """ConfigError unless `model` averages gradients, or may do so in a `train_step` of its own."""
    if wrappers_in(model):
        return
    if type(model).train_step is not keras.Model.train_step:
        return warn_of_plain_optimizer(model, "rr.fit", ring)
    raise ConfigError(
        f"got a model with a plain optimizer ({model.optimizer.name}), which averages nothing",
        **ring.config.who,
        remedy=f"Wrap it: {_wrapping(model.optimizer)} rr.load_model wraps that of a saved model.",
    )


def refuse_plain_since(model: keras.Model, where: str, ring: Communicator) -> None:
    """ConfigError if no optimizer of `model` averages any more; `where` it got another one."""
    if wrappers_in(model):
        return
    optimizer = model.optimizer
    name = "none" if optimizer is None else f"a plain one ({optimizer.name})"
    raise ConfigError(
        f"would go on training apart from the other ranks: {where} has replaced the model's "
        f"DistributedOptimizer by {name}, which averages nothing",
        **ring.config.who,
        remedy=f"Wrap it there too: {_wrapping(optimizer)}",
    )


def _wrapping(optimizer: Any) -> str:
    """How to compile a model with `optimizer`, or one of that class, wrapped."""
    kind = "Adam" if optimizer is None else type(optimizer).__name__
    return (
        f"model.compile(optimizer=rr.DistributedOptimizer(keras.optimizers.{kind}(...)), ...); for "
        'a name such as "adam" give the wrapper keras.optimizers.get("adam").'
    )
