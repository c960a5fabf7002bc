"""`DistributedOptimizer`: any Keras optimizer, with gradients averaged over the ring.

It holds the optimizer it wraps and forwards to it, after Keras's own LossScaleOptimizer;
the rejected alternative, a class made from the user's own with methods replaced, loses the
state of an optimizer that is already built. Three facts of Keras 3 shape it:

- A training step calls nothing but `apply_gradients`, which calls `apply`; it is there that
  gradients are reduced, before the inner optimizer clips or decays them, so that N ranks of
  batch B do what one process does with batch N B.
- Saving records the class of `model.optimizer`. The wrapper's class takes the name and the
  module of the inner one, and its configuration and variables are the inner one's, and so is
  what `dir` lists, where Keras looks for more to save. So a saved model loads where ringreduce
  is not installed, as the plain optimizer.
- Variables of model and optimizer exist at the latest when the first step is traced, and
  the step has not run yet then: that is when rank 0's values go to everyone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import keras
import tensorflow as tf
from keras.src.saving import object_registration

from ringreduce import tensorflow as bridge
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import weighting
from ringreduce.keras.copying import Description
from ringreduce.keras.horovod import advice_on_option
from ringreduce.keras.initial import InitialValues, give_values, plain_variable
from ringreduce.keras.loss_scale import turn_inside_out
from ringreduce.keras.seeds import is_seed_state
from ringreduce.keras.wrapper import Wrapper
from ringreduce.tensorflow.accumulation import Accumulator, Kind, weighted
from ringreduce.tensorflow.collectives import all_reduce
from ringreduce.tensorflow.sparse import as_gradient, as_tensors, merged
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp

__all__ = [
    "DistributedOptimizer",
    "broadcast_variables",
    "build_optimizer_here",
    "warn_of_plain_optimizer",
]

_log = logging.getLogger(__name__)

# Large enough for the ring's full bandwidth, small enough that several are under way in turn.
# Within a host sizes from 1 to 64 MiB make no difference beyond noise (docs/performance.md).
BUCKET_BYTES = 4 << 20
# The last layers' gradients come first; the sooner they leave, the more is hidden.
FIRST_BUCKET_BYTES = 256 << 10


class DistributedOptimizer(Wrapper):
    """An optimizer whose `apply` averages gradients over all ranks first.

    Works in `model.fit`, eagerly too, and in custom loops that call `apply` or
    `apply_gradients`. Before the first step every rank receives rank 0's trainable variables
    and optimizer state. In an eager loop whose optimizer is not built in advance the first
    gradients are computed before that can happen; where a rank's weights turn out to have
    differed, its first gradients are left out of the mean. Call
    ``optimizer.build(model.trainable_variables)`` before such a loop to avoid that.

    It must be the outermost wrapper. It has no variables of its own, and what else Keras's
    optimizers have, it reads from the wrapped one and writes there.

    It is saved as what it wraps, state included: by `model.save`, `model.save_weights`,
    `tf.train.Checkpoint`. Such files load where ringreduce is not installed, and plain ones load
    here; `ringreduce.keras.load_model` wraps again what Keras's `load_model` gives back plain, as
    do copies of a compiled model. `copy.deepcopy` and `pickle` of the optimizer itself keep the
    wrapper with its options. Such a copy is not built, so that it can be used with another model
    like its original's, and has the state when it is; its `variables` show it until then.

    Args:
        inner: the optimizer to wrap. Scale its learning rate with the number of ranks if the
            global batch grows with them.
        communicator: whose ranks; by default the process's, which `init` must have made when
            the first step comes.
        bucket_bytes: about how many bytes of gradients are reduced at a time.
        accumulate_steps: reduce and apply only every so many calls of `apply`, with the mean of the
            gradients of them all: as one step with so many times the batch. The step counter
            counts what is applied. What is left over at the end of an epoch counts for the next.
        compression: ``"none"``, ``"fp16"`` or ``"bf16"``: what 32- and 64-bit gradients are rounded
            to for their journey (`Compression`). Ranks end bit-identical all the same.
        sparse_as_dense: make dense gradients of sparse ones (`tf.IndexedSlices`, of embeddings)
            before they are reduced. By default only their rows travel, unless so many are
            used that the whole is less. Either way rows of the same index are added before the
            optimizer sees them, with one rank too: plain Keras's Adam, say, squares each by itself.
        local_variables: variables that every rank keeps to itself; see `register_local_var`.
        check_numerics: what to do when a gradient holds NaN or infinity. Every rank looks at
            its own gradients just before they are averaged, since afterwards nobody could
            tell whose it was. ``"raise"``: all ranks raise the same `NumericsError`, which
            names rank, variable, element and step; also where all gradients are finite and
            their sum overflows, which 16-bit ones cannot, being summed in float32.
            ``"warn"``: that rank logs the same, and training goes on; once, and again at
            its 10th, 100th, ... bad step. ``"off"``: nothing is looked at. The default is
            ``"off"``, since it reads all gradients once more: that took 3.5 % of a step of the
            benchmarks' MLP, which has many weights and little arithmetic for each. Leave it off
            around a LossScaleOptimizer, whose business such steps are: it skips them.

    Raises:
        ConfigError: `inner` is no Keras optimizer, is already distributed, or accumulates by
            itself; another argument is out of range; or a `tf.distribute` strategy of several
            replicas is active.
        TypeError: there is no such argument; for one of Horovod's, what it is called here.
    """

    # What a class made for an optimizer's class wraps.
    _inner_class: Any = None

    def __new__(cls, inner: Any, *arguments: Any, **options: Any) -> DistributedOptimizer:
        """An instance of a class that is saved under the inner optimizer's name."""
        if cls is DistributedOptimizer and isinstance(inner, keras.optimizers.Optimizer):
            cls = _named_after(type(inner))  # type: ignore[arg-type]
        instance: DistributedOptimizer = super().__new__(cls)
        return instance

    def __init__(
        self,
        inner: Any,
        communicator: Communicator | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        check_numerics: str = "off",
        accumulate_steps: int = 1,
        compression: str = "none",
        sparse_as_dense: bool = False,
        local_variables: Sequence[Any] = (),
        **others: Any,
    ) -> None:
        for name in others:
            raise TypeError(advice_on_option(name))
        _refuse_unusable(inner)
        for name, value in (("bucket_bytes", bucket_bytes), ("accumulate_steps", accumulate_steps)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; accepted: 1 and more")
        turn_inside_out(_is_distributed, _like)
        super().__init__(learning_rate=0.0, name=inner.name)
        self._stand_for(inner)
        self._communicator = communicator
        self._options: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "check_numerics": check_numerics,
            "accumulate_steps": accumulate_steps,
            "compression": compression,
            "sparse_as_dense": sparse_as_dense,
        }
        self._bridge = bridge.GradientBridge(
            self._ring,
            bucket_bytes,
            min(bucket_bytes, FIRST_BUCKET_BYTES),
            check_numerics=check_numerics,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
        )
        self._accumulator = Accumulator(accumulate_steps) if accumulate_steps > 1 else None
        self._local: dict[int, Any] = {}
        self._initial = InitialValues()
        self._defer: Callable[[tuple[list[Any], Any]], None] | None = None
        for variable in local_variables:
            self.register_local_var(variable)

    def _ring(self) -> Communicator:
        return self._communicator or default_communicator()

    # Python that runs while tracing, and nothing that AutoGraph could make ops of.
    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Average `grads` over all ranks and apply them with the inner optimizer.

        Args:
            grads: tensors or what becomes them, `tf.IndexedSlices` or None; one for each variable,
                in the same order on all ranks. Rows of slices with the same index are added.
            trainable_variables: the variables; by default those the optimizer was built with.

        Raises:
            ConfigError: inside a branch of `tf.cond`, or ``jit_compile=True`` where XLA cannot call
                the ring; something is no gradient, nor None.
            RingReduceError: eagerly, when the reduction fails. Out of a `tf.function` the same
                error, which is a `tf.errors.UnknownError` too.
        """
        grads = list(grads)
        if not grads:
            return
        variables = None if trainable_variables is None else list(trainable_variables)
        if self._defer is not None:
            self._defer((grads, variables))
            return
        if not self._inner.built and variables is not None:
            # As its own `apply` would, for variables of the same names.
            with keras.name_scope(self._inner.name, caller=self._inner):
                self.build_inner(variables)
        known = variables or self._inner._trainable_variables
        if len(grads) != len(known):
            self._refuse_number(grads, variables)
        grads = [as_gradient(one, variable) for one, variable in zip(grads, known, strict=True)]
        if not self._initial.are_given:
            self._check_local()
            grads = self._synchronize(known, grads)
        weight = weighting.current()
        kinds = [self._kind_of(variable) for variable in known]
        if self._accumulator is None:
            if weight is not None:
                counts = {Kind.MEAN: weight.factor, Kind.LOCAL: tf.math.sign(weight.own)}
                grads = [
                    weighted(gradient, kind, counts.get(kind, weight.own))
                    for gradient, kind in zip(grads, kinds, strict=True)
                ]
            self._reduce_and_apply(grads, known, kinds, variables)
            return
        one = tf.constant(1.0)
        self._accumulator.add(
            grads,
            known,
            kinds,
            (one, one) if weight is None else (weight.own, weight.mean),
            lambda sums: self._reduce_and_apply(sums, known, kinds, variables),
        )

    @contextmanager
    def deferred(self, keep: Callable[[tuple[list[Any], Any]], None]) -> Iterator[None]:
        """Within the block `apply` does nothing but pass its arguments to `keep`."""
        self._defer = keep
        try:
            yield
        finally:
            self._defer = None

    def _refuse_number(self, gradients: list[Any], variables: list[Any] | None) -> None:
        """Raise what Keras does where gradients come without variables; it takes other calls."""
        if variables is None:
            self._inner.apply(gradients)
        raise ConfigError(
            f"got {len(gradients)} gradients for "
            f"{len(variables or self._inner._trainable_variables)} variables",
            remedy="Pass one for each variable, None where there is none.",
        )

    def _reduce_and_apply(
        self,
        gradients: Sequence[Any],
        known: Sequence[Any],
        kinds: Sequence[Kind],
        variables: Sequence[Any] | None,
    ) -> None:
        paths = [str(getattr(v, "path", v.name)) for v in known]
        shared = [
            gradient if kind is Kind.MEAN else None
            for gradient, kind in zip(gradients, kinds, strict=True)
        ]
        means = shared
        if Kind.MEAN in kinds:
            means = self._bridge.mean(shared, paths, before=self._require_synchronized)
        final = []
        for gradient, kind, mean in zip(gradients, kinds, means, strict=True):
            if kind is Kind.MAXIMUM and gradient is not None:
                final.append(all_reduce(gradient, self._ring(), ReduceOp.MAX))
            elif kind is Kind.LOCAL:
                final.append(merged(as_tensors(gradient, self._options["sparse_as_dense"])))
            else:
                final.append(mean)
        self._inner.apply(final, variables)

    def _kind_of(self, variable: Any) -> Kind:
        if id(plain_variable(variable)) in self._local:
            return Kind.LOCAL
        # The scales of 8-bit floats: their "gradient" is their new value, from the largest number
        # that was seen.
        is_new_value = getattr(variable, "overwrite_with_gradient", False)
        return Kind.MAXIMUM if is_new_value else Kind.MEAN

    def register_local_var(self, variable: Any) -> None:
        """Leave `variable` to each rank: neither its values nor its gradients are shared.

        Its gradients are applied as they are, not divided by the number of ranks. Call it before
        the first step, and alike on all ranks.

        Args:
            variable: `keras.Variable` or `tf.Variable`, one of those that are trained.

        Raises:
            ConfigError: it is neither, or a step was made; in the first step, where the optimizer
                does something with all gradients together (``global_clipnorm``, a
                LossScaleOptimizer), which would then differ between ranks, or does not train it.
        """
        if not isinstance(variable, (keras.Variable, tf.Variable)):
            raise ConfigError(
                f"got {type(variable).__name__} as a local variable",
                remedy="Pass variables, such as those in layer.trainable_variables, one by one.",
            )
        if self._initial.are_given:
            raise ConfigError(
                "got a local variable after the first step, in which it was shared",
                remedy="Call register_local_var before training.",
            )
        self._local[id(plain_variable(variable))] = variable

    def _check_local(self) -> None:
        if not self._local:
            return
        for one in _all_within(self._inner):
            joint = "global_clipnorm" if getattr(one, "global_clipnorm", None) else None
            if isinstance(one, keras.optimizers.LossScaleOptimizer):
                joint = "a loss scale"
            if joint:
                raise ConfigError(
                    f"has local variables, and {one.name} with {joint}: what it makes of all "
                    "gradients together would differ between ranks, and shared weights with it",
                    remedy="Use clipnorm or clipvalue, mixed_bfloat16, or a second optimizer for "
                    "what is local.",
                )
        trained = {id(plain_variable(variable)) for variable in self._inner._trainable_variables}
        for key, variable in self._local.items():
            if key not in trained:
                raise ConfigError(
                    f"got {bridge.path_of(variable)} as a local variable, which is not trained",
                    remedy="Register variables of the model that this optimizer is applied to.",
                )

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """`apply` for pairs, as Keras's training step calls it; returns the step counter."""
        gradients, variables = zip(*grads_and_vars, strict=True)
        self.apply(gradients, variables)
        return self._inner._iterations

    def build(self, variables: Sequence[Any]) -> None:
        """Create the inner optimizer's variables and give all ranks rank 0's values."""
        if not self._inner.built:
            self.build_inner(variables)
        if tf.executing_eagerly() and self._is_formed():
            give_values(self.shared(self._inner.variables), self.shared(variables), self._ring())

    def _is_formed(self) -> bool:
        from ringreduce.communicator.process import is_initialized

        return self._communicator is not None or is_initialized()

    def _synchronize(self, variables: Sequence[Any], gradients: list[Any]) -> list[Any]:
        """Give all ranks rank 0's values; return the gradients to reduce."""
        # All that it may ever train: what is frozen now, say, and will not be later.
        every = {id(v): v for v in (*self._inner._trainable_variables, *variables)}
        self._give()
        state = self.shared(self._inner.variables)
        return self._initial.give(self.shared([*every.values()]), gradients, self._ring(), state)

    def _require_synchronized(self) -> None:
        self._initial.require(self._ring())

    def shared(self, variables: Sequence[Any]) -> list[Any]:
        """Those of `variables` that are equal on all ranks: without local ones and their state.

        Args:
            variables: of the model or of the optimizer.
        """
        if not self._local:
            return list(variables)
        trained = [*self._inner._trainable_variables, *self._local.values()]
        state = set(map(id, self._inner.variables))
        owners = [_owner_of(v, trained) if id(v) in state else v for v in variables]
        return [
            variable
            for variable, owner in zip(variables, owners, strict=True)
            if id(plain_variable(owner)) not in self._local
        ]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Wrap an optimizer made from `config`, as ``type(optimizer).from_config`` of a wrapper.

        Keras makes the plain one of it: `keras.optimizers.deserialize`, `load_model`.

        Raises:
            ConfigError: called on `DistributedOptimizer` itself, which wraps no class yet.
        """
        if cls._inner_class is None:
            raise ConfigError(
                "DistributedOptimizer has no configuration of its own",
                remedy="Use keras.optimizers.deserialize, and wrap what it returns.",
            )
        further = {} if custom_objects is None else {"custom_objects": custom_objects}
        return DistributedOptimizer(cls._inner_class.from_config(config, **further))

    def __reduce__(self) -> Any:
        if self._communicator is not None:
            raise ConfigError(
                f"an optimizer ({self.name}) with a communicator of its own cannot be pickled",
                remedy="Leave the communicator out and call ringreduce.init() in both processes, "
                "or save the model and load it with ringreduce.keras.load_model.",
            )
        return _copy, (self._describe(), None, dict(self._options))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copy(self._describe(), self._communicator, dict(self._options))

    def _describe(self) -> Description:
        if self._local:
            raise ConfigError(
                f"an optimizer ({self.name}) with local variables cannot be copied: which those of "
                "the copy would be is not known",
                remedy="Make a new one, and register the other model's variables with it.",
            )
        return Description.of(self._inner, self._copied)

    def __repr__(self) -> str:
        return f"<DistributedOptimizer of {self._inner!r}>"


def broadcast_variables(
    variables: Sequence[Any], root_rank: int = 0, communicator: Communicator | None = None
) -> None:
    """Give `variables` on every rank the values they have on rank `root_rank`.

    `DistributedOptimizer` does this by itself for what it trains; use it for what it does
    not see, such as moving averages of normalization layers after loading them on one rank.

    Args:
        variables: `keras.Variable` or `tf.Variable`, the same on all ranks, such as
            ``model.variables``. States of Keras's random generators are left as they are, or
            ranks would draw the same numbers.
        root_rank: the rank to copy from.
        communicator: whose ranks; the process's default by default.

    Raises:
        MismatchError: the ranks' variables differ in number, shape or dtype.
    """
    bridge.broadcast_variables(
        [variable for variable in variables if not is_seed_state(variable)],
        communicator or default_communicator(),
        root_rank,
    )


def build_optimizer_here(model: Any) -> None:
    """Give the optimizer of a built model its variables, on this rank alone."""
    optimizer = model.optimizer
    if optimizer is None or optimizer.built:
        return
    # Not ours by `build`, which copies rank 0's values to all ranks, and so needs all of them.
    build = getattr(optimizer, "build_inner", optimizer.build)
    build(model.trainable_variables)


def warn_of_plain_optimizer(model: Any, where: str, communicator: Communicator) -> None:
    """Say so if nothing seems to average what `model` trains on."""
    optimizer = model.optimizer
    if communicator.size == 1 or optimizer is None or _is_distributed(optimizer):
        return
    _log.warning(
        "[%d/%d] %s got a model whose optimizer (%s) is no DistributedOptimizer: ranks train "
        "apart, unless its train_step averages gradients by itself. Wrap it, or use rr.load_model.",
        *(communicator.rank, communicator.size, where, optimizer.name),
    )


def _is_distributed(optimizer: Any) -> bool:
    return isinstance(optimizer, DistributedOptimizer)


def _like(optimizer: DistributedOptimizer, inner: Any) -> DistributedOptimizer:
    """Another with the same options, around `inner`."""
    if optimizer._copied is not None:
        raise ConfigError(
            f"the copy of an optimizer ({optimizer.name}) gets a loss scale before it is built, "
            "and would lose its state",
            remedy="Build it first, or copy an optimizer that has its LossScaleOptimizer inside.",
        )
    other = DistributedOptimizer(inner, optimizer._communicator, **optimizer._options)
    # The same, since whoever has the first may still register some with it.
    other._local = optimizer._local
    return other


def _owner_of(state: Any, trained: Sequence[Any]) -> Any:
    """Of the variables that are trained the one an optimizer keeps `state` for; None: none."""

    def prefix(owner: Any) -> str:
        # Keras names the state after the whole path of what it is kept for.
        path = getattr(owner, "path", str(owner.name).replace(":", "_"))
        return f"{path.replace('/', '_')}_"

    name = str(state.path).rpartition("/")[2]
    # The longest, since another's name may go on where this one's ends.
    owners = [owner for owner in trained if name.startswith(prefix(owner))]
    return max(owners, key=lambda owner: len(prefix(owner)), default=None)


def _refuse_unusable(inner: Any) -> None:
    if isinstance(inner, DistributedOptimizer):
        raise ConfigError(
            f"got an optimizer that is already distributed ({inner.name})",
            remedy="Wrap it once: a second average would only cost time.",
        )
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ConfigError(
            f"got {inner!r} to wrap, which is no Keras 3 optimizer",
            remedy="Pass one, such as keras.optimizers.SGD(0.01).",
        )
    for one in _all_within(inner):
        if steps := getattr(one, "gradient_accumulation_steps", None):
            raise ConfigError(
                f"got {one.name} with gradient_accumulation_steps={steps}: all ranks would "
                "reduce in every step what it then adds up",
                remedy="Leave that out and pass accumulate_steps to DistributedOptimizer: it adds "
                "up first and reduces once.",
            )
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise ConfigError(
            f"is used inside a tf.distribute strategy of {replicas} replicas",
            remedy="Use one or the other; a ringreduce worker is one replica.",
        )


def _all_within(optimizer: Any) -> list[Any]:
    """An optimizer and those that it wraps."""
    wrapped = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    found = [optimizer]
    for one in wrapped:
        if one is not None:
            found += _all_within(one)
    return found


@lru_cache
def _named_after(inner: type) -> type[DistributedOptimizer]:
    """A class of ours that Keras records under the inner class's name when it saves a model."""
    members = {
        "__module__": inner.__module__,
        "__doc__": DistributedOptimizer.__doc__,
        "_inner_class": inner,
    }
    named = type(inner.__name__, (DistributedOptimizer,), members)
    # Keras knows a class that the user has registered by that name. Registering ours under it too
    # would make Keras load ours.
    if inner in object_registration.GLOBAL_CUSTOM_NAMES:
        name = object_registration.GLOBAL_CUSTOM_NAMES[inner]
        object_registration.GLOBAL_CUSTOM_NAMES[named] = name
    return named


def _copy(
    description: Description, communicator: Communicator | None, options: dict[str, Any]
) -> DistributedOptimizer:
    """A wrapped optimizer from its description; what a pickled one names."""
    inner, state = description.remake()
    optimizer = DistributedOptimizer(inner, communicator, **options)
    optimizer._copied = state
    return optimizer
