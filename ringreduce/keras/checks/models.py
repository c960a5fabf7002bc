"""Checks which models can be trained or evaluated by ranks, before that begins."""

import logging
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator, is_initialized
from ringreduce.keras import private
from ringreduce.keras.layers.normalization import SyncBatchNormalization
from ringreduce.keras.optimizers_in import wrappers_in
from ringreduce.keras.wrapper import Wrapper
from ringreduce.tensorflow.variables import path_of
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import brief

_log = logging.getLogger(__name__)


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


def refuse_scales(variables: Sequence[Any], ring: Communicator) -> None:
    """ConfigError on several ranks for scales of 8-bit floats, which have no gradients."""
    for variable in variables if ring.size > 1 else ():
        # Keras gives its new value as gradient, from the largest number that a rank has seen.
        if getattr(variable, "overwrite_with_gradient", False):
            text = f"trains {path_of(variable)}, a scale of 8-bit floats, of which there is no mean"
            raise ConfigError(text, **ring.config.who, remedy="Train with mixed_bfloat16.")


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
