"""`DistributedOptimizer`: any Keras optimizer, with gradients averaged over the ring.

It holds the optimizer it wraps and forwards to it; a subclass of the user's class would lose the
state of one that is already built. Two facts of Keras 3 shape it:

- A training step calls only `apply_gradients`, which calls `apply`; a class of the user's may have
  either. Gradients are reduced before the inner one's is called, so before it clips or decays them.
- Variables exist at the latest when the first step is traced: then all receive rank 0's values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator, is_initialized
from ringreduce.communicator.rank_zero import waiting_ranks
from ringreduce.keras import private, weighting
from ringreduce.keras.advice import advice_on_option
from ringreduce.keras.checks import settings
from ringreduce.keras.checks.model_in_fit import model_in_fit
from ringreduce.keras.layers.part import (
    Part,
    is_own_piece,
    load_wholes,
    part_of,
    parts_in,
    save_wholes,
)
from ringreduce.keras.optimizer.accepted import refuse_unusable, refuse_wrapped, require_equal
from ringreduce.keras.optimizer.first_step import InitialValues, make_equal, prepare
from ringreduce.keras.optimizer.local_variables import LocalVariables
from ringreduce.keras.optimizer.pieces import joint, mark_state
from ringreduce.keras.optimizer.sharded import Sharding, refuse_divided, refuse_unshardable
from ringreduce.keras.optimizer.state import StrategyState, saved_options, state_of
from ringreduce.keras.optimizer.touched_rows import touched_rows
from ringreduce.keras.strategies.base import Step, Strategy, Use, chosen_strategy
from ringreduce.keras.strategies.reducer import Reducer
from ringreduce.keras.weighting import Averaging, gradient_op
from ringreduce.keras.wrapper import Wrapper
from ringreduce.pure.buckets import BUCKET_BYTES
from ringreduce.tensorflow import GradientBridge, draws
from ringreduce.tensorflow.commit import CommitPoint
from ringreduce.tensorflow.low_rank import PowerSGD
from ringreduce.tensorflow.sparse import as_gradient
from ringreduce.vocabulary.config import elastic_minimum
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import ReduceOp

# Updates variables with gradients.
_Apply = Callable[[Sequence[Any], Sequence[Any]], None]


class DistributedOptimizer(Wrapper):
    """An optimizer whose `apply` averages gradients over all ranks first.

    Works in `model.fit`, eagerly too, and in custom loops that call `apply` or `apply_gradients`.
    Before the first step every rank receives rank 0's trainable variables and optimizer state.
    Before an eager loop call ``optimizer.build(model.trainable_variables)``: else a rank whose
    weights differ is left out of the first mean.

    It must be the outermost wrapper. Its `variables` are the wrapped one's; other attributes of
    Keras's optimizers are read and set there too. It is saved as what it wraps, state included: by
    `model.save`, `model.save_weights`, `tf.train.Checkpoint`. Such files load where ringreduce is
    not installed, and plain ones load here. Keras's `load_model` and copies of a compiled model
    give a plain optimizer; use `ringreduce.keras.load_model`, or wrap it. `copy.deepcopy` and
    `pickle` of the optimizer itself keep the wrapper with its options, and begin anew, as Keras's
    optimizers do.

    Args:
        inner: the optimizer to wrap. Scale its learning rate with the number of ranks if the global
            batch grows with them.
        communicator: by default the process's, which `init` must have made when the first step
            comes.
        strategy: when ranks combine what they learn: `LocalSGD`, `DiLoCo`, or a `Strategy` of one's
            own. None, the default: in every step.
        bucket_bytes: about how many bytes of gradients are reduced at a time.
        gradient_accumulation_steps: add up the gradients of so many steps, and reduce and apply
            their mean once.
        compression: ``"none"``, ``"fp16"``, ``"bf16"``, ``"int8"`` or a `PowerSGD`: what float32
            gradients are while they travel between hosts (`Compression`). Ranks stay bit-identical.
        sparse_as_dense: make sparse gradients (`tf.IndexedSlices`, of embeddings) dense before they
            are reduced. By default only their rows travel, unless the whole is less. Either way
            rows of the same index are added before the optimizer sees them, with one rank too.
        local_variables: variables that are not shared; see `register_local_var`.
        scale_local_gradients: divide their gradients by the number of ranks, and weight them by
            this rank's samples: as those of the mean over all ranks' rows, like Horovod's.
        update_rows: ``"all"``, or ``"touched"`` for weights and optimizer state that change only in
            rows that have a gradient in this step, in a time that does not depend on the length of
            the table: docs/guides/keras.md says what momentum, decay and clipping mean then.
            For optimizers that work element by element; not under ``jit_compile=True``.
        op: ``"mean"``, or ``"sum"`` for the mean times the number of ranks.
        gradients: what a step's gradients are of this rank's rows. ``"mean"``: their mean, as of
            Keras's losses, so that ranks take the mean by rows. ``"sum"``: their sum, also divided
            by a number that is the same for any rows, such as the global batch size; then ranks
            add them up, and one without rows adds nothing. ``"tried"``, the default: ``"mean"``,
            and `rr.fit` tries the step on a few rows before it trains, and warns if it is no mean.
            ``"sum"`` goes neither with split layers and tables nor with `LocalSGD` and `DiLoCo`.
        shard_state: divide the update: each rank keeps 1 / size of the optimizer's state, updates
            as much of the weights, and gets the rest from the others. For optimizers that work
            element by element; results are those of an update that is not divided.
            docs/guides/keras.md says what it refuses, some of it in the first step. All ranks must
            take part in saving.
        check_numerics: what to do when a gradient of this rank holds NaN or infinity just before it
            is averaged; those of pieces and local variables are not. ``"raise"``: all ranks raise
            the same `NumericsError`, which names rank, variable, element and step; also where the
            sum of finite gradients overflows. ``"warn"``: that rank logs the same at its first,
            10th, 100th, ... bad step. ``"off"``, the default: no check, which would read all
            gradients once more. Leave it off around a LossScaleOptimizer, which skips such steps.

    Raises:
        ConfigError: `inner` is no Keras optimizer, is already distributed, or accumulates by
            itself; another argument is out of range, or does not go with `shard_state`; or a
            `tf.distribute` strategy is active.
        TypeError: there is no such argument; for one of Horovod's, it names the one to use.
    """

    # The one given; None for the process's.
    communicator: Communicator | None = None
    # Where all updates of a step begin; set by what repeats a step that a lost rank has broken.
    commit_point: CommitPoint | None = None
    # What `ringreduce verify` wants to know of each step; a `GradientRecord` or
    # `LoopRecorder`, or None.
    recorder: Any = None
    # State of the strategy and of `PowerSGD`, for Keras to save; or None.
    strategy_state: StrategyState | None = None

    def __init__(
        self,
        inner: Any,
        communicator: Communicator | None = None,
        *,
        strategy: Strategy | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        check_numerics: str = "off",
        gradient_accumulation_steps: int = 1,
        compression: str | PowerSGD = "none",
        sparse_as_dense: bool = False,
        update_rows: str = "all",
        local_variables: Sequence[Any] = (),
        scale_local_gradients: bool = False,
        op: ReduceOp | str = ReduceOp.MEAN,
        gradients: str = "tried",
        shard_state: bool = False,
        **others: Any,
    ) -> None:
        for name in others:
            raise TypeError(advice_on_option(name))
        refuse_unusable(inner, compression)
        strategy = chosen_strategy(strategy, gradient_accumulation_steps)
        strategy.check(inner)
        refuse_divided(inner)
        if shard_state:
            refuse_unshardable(inner, strategy, compression, update_rows)
        scaled = scale_local_gradients or gradient_op(op) is ReduceOp.SUM
        weighting.refuse_unknown_gradients(gradients, scaled)
        self._touched = touched_rows(update_rows, inner, sparse_as_dense)
        super().__init__(inner)
        self.communicator = communicator
        self._bridge = GradientBridge(bucket_bytes, check_numerics, compression, sparse_as_dense)
        self._options: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "check_numerics": check_numerics,
            "compression": compression,
            "sparse_as_dense": sparse_as_dense,
            "strategy": strategy,
            "update_rows": update_rows,
            "scale_local_gradients": scale_local_gradients,
            "op": gradient_op(op),
            "gradients": gradients,
            "shard_state": shard_state,
        }
        updates_rows = self._touched is not None
        self._running = strategy.begin(Use(self._ring, updates_rows, compression))
        if gradients == "sum" and self._running.is_alone:
            raise ConfigError(
                f'got gradients="sum" with {strategy!r}, whose ranks step by themselves',
                remedy="Divide by this rank's rows, tf.shape(x)[0], and leave gradients out.",
            )
        self.strategy_state = state_of(self._running, self._bridge.low_rank, inner)
        if self.built:
            mark_state(inner)
        self._sharding: Sharding | None = None
        self._loads = 0  # how often state was loaded
        self._local = LocalVariables(local_variables)
        self._initial = InitialValues()
        self._deferred: list[Any] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options as they were given, by name, and the number of local variables."""
        return {**self._options, "local_variables": len(self._local)}

    def add_up_gradients(self, adds_up: bool = True) -> None:
        """From now on as with ``gradients="sum"``, or with ``"tried"`` again.

        On all ranks, before the first step; or if its function is traced anew.
        """
        self._options["gradients"] = "sum" if adds_up else "tried"

    def _ring(self) -> Communicator:
        return self.communicator or default_communicator()

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Average `grads` over all ranks and apply them with the inner optimizer.

        Args:
            grads: tensors or what converts to them, `tf.IndexedSlices` or None; one for each
                variable, in the same order on all ranks. Rows with the same index are added.
            trainable_variables: by default those the optimizer was built with.

        Raises:
            ConfigError: inside a branch of `tf.cond`, or ``jit_compile=True`` where XLA cannot call
                the ring; something is neither a gradient nor None.
            RingReduceError: eagerly, when the reduction fails. From a `tf.function` the same error,
                which is a `tf.errors.UnknownError` too.
        """
        variables = None if trainable_variables is None else list(trainable_variables)
        self.take(list(grads), variables, lambda *means: self._inner.apply(*means))

    def prepare_now(self) -> None:
        """Do, eagerly, what a first step would do before it uses gradients. Collective."""
        known = self.trained
        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in known]
        prepare(self, known, zeros, [self._kind_of(variable) for variable in known])

    def take(self, grads: list[Any], variables: list[Any] | None, apply: _Apply) -> None:
        """Use this rank's gradients of a step; `apply` is the inner optimizer's, for means."""
        if not grads:
            return
        if self._deferred is not None:
            self._deferred.append((grads, variables))
            return
        if not self.built and variables is not None:
            # The inner `apply` does so: variables get the same names.
            with keras.name_scope(self._inner.name, caller=self._inner):
                self.build_inner(variables)
        self._shard_if_due()
        known = self.trained if variables is None else variables
        if len(grads) != len(known):
            if variables is None:
                keras.optimizers.Optimizer.apply(self, grads)  # Raises Keras's own error.
            text = f"got {len(grads)} gradients for {len(known)} variables"
            raise ConfigError(text, remedy="Pass one for each variable, None where there is none.")
        pairs = zip(grads, known, strict=True)
        grads = [as_gradient(gradient, variable) for gradient, variable in pairs]
        kinds = [self._kind_of(variable) for variable in known]
        if not self._initial.are_given:
            grads = prepare(self, known, grads, kinds)
        if self._touched is not None:
            self._touched.look_at(self._inner, grads, known, self._ring())
            apply = partial(self._touched.apply, self._inner)
        weighting.refuse_local(kinds, self._ring())
        weight = weighting.current()
        if self.recorder is not None:
            self.recorder.note_own(grads, known)
        options = self._options["op"], self._options["scale_local_gradients"]
        adds_up = self._options["gradients"] == "sum"
        if adds_up:
            weighting.refuse_sums(kinds)
        reducer = Reducer(self._bridge, self._ring(), *options, self._sharding, adds_up)
        applied = partial(self._apply_means, apply)
        with draws.alike():
            self._running.take(Step(grads, known, kinds, weight, reducer, applied))

    def _apply_means(self, apply: _Apply, gradients: Sequence[Any], variables: list[Any]) -> None:
        if self.recorder is not None:
            kinds = [self._kind_of(variable) for variable in variables]
            parts = [self._part_in_update(variable) for variable in variables]
            gradients = self.recorder.note_means(gradients, variables, kinds, parts)

        def update(means: Sequence[Any]) -> None:
            if self._sharding is None:
                joint(self._inner, means, variables, apply)
            else:
                self._sharding.update(self._inner, apply, means, variables)

        if self.commit_point is None:
            update(gradients)
        else:
            self.commit_point.passed(gradients, update)

    def build_inner(self, variables: Sequence[Any]) -> None:
        """Build the inner optimizer; state for parts is in pieces too."""
        if self._is_divided():
            # Pieces of split layers are small already.
            means = [v for v in variables if self._kind_of(v) is Averaging.MEAN]
            divided = [variable for variable in means if part_of(variable) is None]
            self._sharding = Sharding(self._inner, variables, divided, self._ring(), self._options)
        else:
            super().build_inner(variables)
        refuse_wrapped(self._inner)  # A MultiOptimizer may make those in it only now.
        mark_state(self._inner)
        if self._sharding is not None and self._ring().rank == 0:
            print(f"ringreduce: {self._sharding.describe(self._inner)}", flush=True)

    @property
    def trained(self) -> list[Any]:
        """The variables that it was built for."""
        trained: list[Any] = private.trained_variables(self._inner)
        return trained if self._sharding is None else self._sharding.originals

    @property
    def may_leave_weights(self) -> bool:
        """Whether its update gathers weights at the end, which XLA may leave to the graph."""
        return bool(self._options["shard_state"])

    def _is_divided(self) -> bool:
        return self._options["shard_state"] and self._ring().size > 1

    def _shard_if_due(self) -> None:
        """Divide the state of an inner optimizer that was built before it was wrapped."""
        if self.built and self._sharding is None and self._is_divided():
            with tf.init_scope():
                self.build_inner(self.trained)

    def take_wholes(self) -> None:
        """Have all ranks go on from the state that rank 0's had undivided, if any. Collective."""
        if self._sharding is not None:
            self._sharding.take_wholes(self._inner)

    @property
    def kept_options(self) -> StrategyState | None:
        """The options for Keras to save, as JSON; None where all are those by default."""
        trained = self.trained if self._local and self.built else []
        local = [number for number, variable in enumerate(trained) if variable in self._local]
        return saved_options(self._options, DistributedOptimizer.__init__, local)

    def broadcast_state(self, root: int = 0) -> None:
        """Give all ranks what rank `root` has of the strategy and `PowerSGD`. Collective."""
        if self.strategy_state is not None:
            self.strategy_state.broadcast(self._ring(), root)

    @property
    def has_begun(self) -> bool:
        """Whether all ranks have begun alike, in a step before."""
        return self._initial.are_given

    # Those of the strategy at work (`Running`).
    is_settled = property(attrgetter("_running.is_settled"))
    has_met = property(attrgetter("_running.has_met"))
    is_alone = property(attrgetter("_running.is_alone"))
    holds_gradients = property(attrgetter("_running.holds_gradients"))

    def settle(self) -> None:
        """Make all ranks' weights equal, by a meeting if the strategy has some. Collective."""
        self._running.settle()

    def finalize_variable_values(self, var_list: Any) -> None:
        """Settle, and finalize the inner optimizer's variables, at the end of Keras's `fit`."""
        self.settle()
        if elastic_minimum() is None:  # A step of it cannot be made again.
            require_equal(self)
        self._inner.finalize_variable_values(var_list)

    def equal_now(self, variables: Sequence[Any]) -> list[Any]:
        """Select the `variables` that are equal on all ranks at this moment."""
        if not self.is_settled:
            return []
        shared = self.shared(variables)
        if self._running.keeps_state_equal:
            return shared
        states = {id(variable) for variable in self._inner.variables}
        return [variable for variable in shared if id(variable) not in states]

    def begun(self, variables: Sequence[Any]) -> list[Any]:
        """Select the `variables` with which all ranks have begun alike, in a step before."""
        return self._initial.known(variables)

    def save_own_variables(self, store: Any) -> None:
        """Save the inner optimizer's state, that of parts as wholes."""
        if not self.is_settled:
            raise ConfigError(
                "saves its optimizer between two meetings, when each rank has other weights",
                **self._ring().config.who,
                remedy="Save at the end of an epoch in rr.fit or rr.callbacks.Together, or call "
                "optimizer.settle() on all ranks first.",
            )
        if parts_in(self.variables):
            save_wholes(self._inner.variables, store)
        else:
            self._inner.save_own_variables(store)

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> Any:
        if self._sharding is not None and save_type == "savedmodel":
            return {}  # A model that is exported needs no optimizer.
        if self._sharding is not None:
            raise ConfigError(
                "got a sharded optimizer to put into a tf.train.Checkpoint, which would hold this "
                "rank's share alone",
                **self._ring().config.who,
                remedy="Use Keras's files: rr.on_rank_zero(lambda: model.save(path)) on all ranks, "
                "or rr.callbacks.OnRankZero around a callback that saves.",
            )
        return self._inner._trackable_children(save_type, **options)

    def load_own_variables(self, store: Any) -> None:
        """Load the inner optimizer's state; of parts this rank's pieces."""
        self._loads += waiting_ranks() is None  # Else all ranks get their pieces.
        # Where there are more or fewer, Keras warns, and loads none.
        if parts_in(self.variables) and len(store.keys()) == len(self.variables):
            load_wholes(self._inner.variables, store)
        else:
            self._inner.load_own_variables(store)

    @contextmanager
    def deferred(self) -> Iterator[list[Any]]:
        """Within the block no gradients are used; yields a list of them, and whose (None: all)."""
        self._deferred = []
        try:
            yield self._deferred
        finally:
            self._deferred = None

    def is_local(self, variable: Any) -> bool:
        """Whether neither values nor gradients of `variable` are shared."""
        return variable in self._local

    def _kind_of(self, variable: Any) -> Averaging:
        if variable in self._local:
            return Averaging.LOCAL
        return Averaging.PART if is_own_piece(variable) else Averaging.MEAN

    def _part_in_update(self, variable: Any) -> Part | None:
        """How its gradient is this rank's piece when it is applied; None: it is whole."""
        return part_of(variable if self._sharding is None else self._sharding.stand_in(variable))

    def register_local_var(self, variable: Any) -> None:
        """Share neither values nor gradients of `variable`, one of those that are trained.

        Its gradients are applied as they are, not divided by the number of ranks, unless
        ``scale_local_gradients`` was given. Call it before the first step, and alike on all ranks.

        Raises:
            ConfigError: it is no `keras.Variable` or `tf.Variable`, or a step was made; in the
                first step, where the optimizer does not train it, or uses all gradients together
                (``global_clipnorm``, a LossScaleOptimizer), so that shared weights would differ
                between ranks.
        """
        if self._initial.are_given:
            text = "got a local variable after the first step, in which it was shared"
            raise ConfigError(text, remedy="Call register_local_var before training.")
        self._local.add(variable)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], **options: Any) -> Any:
        """`apply` for pairs, by the inner optimizer's `apply_gradients`, as Keras's training does.

        Returns what that returns, or the step counter where it was not called.
        """
        gradients, variables = zip(*grads_and_vars, strict=True)
        returned: list[Any] = []

        def apply(means: Sequence[Any], variables: Sequence[Any]) -> None:
            pairs = list(zip(means, variables, strict=True))
            returned.append(self._inner.apply_gradients(pairs, **options))

        self.take(list(gradients), list(variables), apply)
        return returned[0] if returned else self._inner._iterations

    def stateless_apply(self, *_: Any, **__: Any) -> Any:
        """Raises ConfigError: it would average nothing."""
        text = "got a call of stateless_apply, which would average nothing"
        raise ConfigError(text, remedy="Call apply or apply_gradients.")

    def build(self, variables: Sequence[Any]) -> None:
        """Create the inner optimizer's variables and give all ranks rank 0's values."""
        if not self.built:
            self.build_inner(variables)
        self._shard_if_due()
        if tf.executing_eagerly() and (self.communicator is not None or is_initialized()):
            make_equal(self, variables)

    def settings(self) -> list[settings.Settings]:
        """Collect the settings that must be equal on all ranks, and do not show in gradients."""
        names = "strategy", "op", "gradients", "scale_local_gradients", "update_rows", "shard_state"
        chosen = settings.settings_in({name: self._options[name] for name in names})
        if self._sharding is not None:
            chosen |= {"times that a file was loaded": str(self._loads)}
        texts, model = {**settings.settings_of_optimizer(self._inner), **chosen}, model_in_fit()
        # Layers with local variables may be others on each rank, and so may those around them.
        is_shared = model is not None and not self._local
        of_model = settings.settings_of_model(model) if is_shared else []
        return [settings.Settings("optimizers", texts), *of_model]

    def shared(self, variables: Sequence[Any]) -> list[Any]:
        """Select the `variables`, the model's or the optimizer's, that are equal on all ranks."""
        return self._local.others_of(variables, self._inner)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Wrap an optimizer made from `config`; Keras's `deserialize` makes a plain one of it."""
        further = {} if custom_objects is None else {"custom_objects": custom_objects}
        return DistributedOptimizer(cls._inner_class.from_config(config, **further))

    def around(self, inner: keras.Optimizer) -> DistributedOptimizer:
        """Another wrapper around `inner` with the same options and local variables."""
        other = DistributedOptimizer(inner, self.communicator, **self._options)
        # The same object, since the first wrapper may still register more.
        other._local = self._local
        return other

    def __reduce__(self) -> Any:
        if self.communicator is not None:
            raise ConfigError(
                f"an optimizer ({self.name}) with a communicator of its own cannot be pickled",
                remedy="Leave the communicator out and call ringreduce.init() in both processes, "
                "or save the model and load it with ringreduce.keras.load_model.",
            )
        return _copy, self._describe()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copy(*self._describe())

    def _describe(self) -> tuple[Any, ...]:
        if self._local:
            raise ConfigError(
                f"an optimizer ({self.name}) with local variables cannot be copied: which those of "
                "the copy would be is not known",
                remedy="Make a new one, and register the other model's variables with it.",
            )
        return type(self._inner), self.get_config(), self.communicator, dict(self._options)

    def __repr__(self) -> str:
        return f"<DistributedOptimizer of {self._inner!r}>"


def _copy(
    inner: keras.Optimizer, config: Any, communicator: Communicator | None, options: dict[str, Any]
) -> DistributedOptimizer:
    """A wrapped optimizer from its description; pickles refer to this function."""
    return DistributedOptimizer(inner.from_config(config), communicator, **options)
