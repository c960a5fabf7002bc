"""`Pipeline`: a Keras model in stages, each on a rank of its own, or on several with data divided.

    4 ranks, 2 stages           chain: the stages of one copy      data group: the copies of a stage
    rank 0: stage 0, copy 0     ranks 0 and 1                      ranks 0 and 2
    rank 1: stage 1, copy 0     ranks 2 and 3                      ranks 1 and 3
    rank 2: stage 0, copy 1
    rank 3: stage 1, copy 1

Within a chain activations go forward and gradients back (`ringreduce.keras.pipeline.stage`),
between two ranks each; a data group is what other data-parallel jobs are, with all that `rr.fit`
uses.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import private
from ringreduce.keras.callbacks.rank_zero import OnRankZero, acts_once
from ringreduce.keras.callbacks.replicas import VerifyReplicas
from ringreduce.keras.callbacks.together import StopTogether, Together, given_callbacks
from ringreduce.keras.checks.models import refuse_other_optimizer, refuse_other_ring
from ringreduce.keras.checks.seeds import draw_apart
from ringreduce.keras.checks.settings import Settings, require_same_settings, settings_in
from ringreduce.keras.checks.warnings import differences, note_sharding, warn_of_parity
from ringreduce.keras.data.adapters import feed_of
from ringreduce.keras.data.arrays import Arrays, are_arrays
from ringreduce.keras.data.division import BATCH_SIZE, Plan
from ringreduce.keras.metric_states import gathered_numbers, numbers_in
from ringreduce.keras.optimizer.distributed import DistributedOptimizer
from ringreduce.keras.optimizer.first_step import broadcast_variables
from ringreduce.keras.optimizer.local_variables import joint_in
from ringreduce.keras.pipeline.stage import Stage
from ringreduce.keras.rows import rows_in
from ringreduce.keras.training.evaluate import evaluate, in_order, predict
from ringreduce.keras.training.fit import fit_on
from ringreduce.keras.training.ranks import Training
from ringreduce.keras.weighting import step_weight
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.types import dtype_named
from ringreduce.vocabulary.words import brief


class Pipeline:
    """A model of which each rank has one stage, trained on micro-batches.

    All ranks make the same calls with the same arguments, data included. Rank r has stage r mod S
    of S stages, and calls the function of no other stage. With more ranks than stages there are
    copies: each trains on its rows of a batch, and ranks with the same stage average gradients. A
    batch is trained as one process would, in micro-batches, one forward and one backward in turn
    (1F1B): choose several times as many as stages. docs/guides/groups.md has an example.

    What looks at a whole batch sees a micro-batch: BatchNormalization, losses that are no mean over
    rows (a warning says so). Penalties, such as regularizers, count on every stage. ``model.save``,
    ``load_weights`` and the like are those of this rank's stage, a plain Keras model: save it on
    the first of `replicas`, under a name that has `stage` in it.

    Args:
        stages: a function for each stage, which returns a model, or layers in a list. The first one
            needs a `keras.Input`; each gives one tensor of fixed shape and of floats to the next.
        micro_batches: into how many equal parts each copy divides its rows of a batch.
        communicator: by default the process's. Its size is a multiple of the number of stages.

    Attributes:
        model: this rank's stage, compiled by `compile`.
        stage: its number, from 0.
        stages: how many there are.
        chain: communicator of the ranks that have this rank's copy, in the order of stages.
        replicas: communicator of the ranks that have the same stage.

    Raises:
        ConfigError: on all ranks: the ranks cannot be divided among the stages, a stage has no
            layers, or does not fit the one before it.
        MismatchError: the ranks passed different arguments, or replicas of a stage differ.
    """

    def __init__(
        self,
        stages: Sequence[Callable[[], Any]],
        micro_batches: int = 8,
        communicator: Communicator | None = None,
    ) -> None:
        ring = self._ring = communicator or default_communicator()
        makers = _checked(stages, micro_batches, ring)
        self.micro_batches, self.stages = micro_batches, len(makers)
        arguments = {"stages": len(makers), "micro_batches": micro_batches}
        require_same_settings([Settings("arguments of rr.Pipeline", settings_in(arguments))], ring)
        self.stage = ring.rank % self.stages
        self.chain, self.replicas = _group(ring, ring.rank // self.stages), _group(ring, self.stage)
        self._stage = Stage(makers, self.chain)
        self.model = model = self._stage.model
        broadcast_variables(model.variables, communicator=self.replicas)
        # For what Keras does around a step: data, callbacks, metrics.
        model.run_eagerly = True
        model.train_step, unpacked = self._train_step, keras.utils.unpack_x_y_sample_weight
        model.test_step = lambda data: self._stage.test(*unpacked(data))
        model.predict_step = lambda data: self._stage.predict(unpacked(data)[0])

    def compile(
        self,
        optimizer: Any,
        loss: Any,
        *,
        metrics: Any = None,
        loss_weights: Any = None,
        weighted_metrics: Any = None,
    ) -> None:
        """Compile the model: each stage with the optimizer, the last one with loss and metrics.

        Args:
            optimizer: of Keras, or its name, which is wrapped; or a `DistributedOptimizer` with
                ``communicator=pipeline.replicas``.

        Raises:
            ConfigError: the optimizer uses all gradients together (``global_clipnorm``, a loss
                scale), of which each rank has its own stage's; or it averages over other ranks.
        """
        chosen = keras.optimizers.get(optimizer)
        if not isinstance(chosen, DistributedOptimizer):
            chosen = DistributedOptimizer(chosen, self.replicas)
        judged = {
            "loss": loss,
            "metrics": metrics,
            "loss_weights": loss_weights,
            "weighted_metrics": weighted_metrics,
        }
        measures = judged if self._stage.is_last else {}
        self.model.compile(optimizer=chosen, run_eagerly=True, **measures)
        if joint := joint_in(self.model.optimizer):
            text = f"got {joint}: each stage would go by its own gradients"
            remedy = "Use clipnorm or clipvalue; mixed_bfloat16 needs no loss scale."
            raise ConfigError(text, **self._ring.config.who, remedy=remedy)
        refuse_other_ring(self.model, "rr.Pipeline", self.replicas)
        refuse_other_optimizer(self.model, self.replicas)
        self._stage.prepare(self.micro_batches)

    def fit(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_data: Any = None,
        shuffle: Any = True,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        *,
        seed: int = 0,
        check: bool = True,
    ) -> Any:
        """Train as `rr.fit` does with these arguments: on whole data, with **global batches**.

        Rows of each batch are a multiple of `micro_batches` times the copies: drop what is left at
        the end. Only rank 0 prints. Callbacks see the logs of the whole model on all ranks; those
        that write files act on rank 0, ModelCheckpoint on the first rank of each stage, whose path
        has ``pipeline.stage`` in it.

        Returns:
            The `keras.callbacks.History`, equal on all ranks.

        Raises:
            ConfigError: `compile` was not called, rows cannot be divided, stages would write one
                file; there is a BackupAndRestore, since stages could go on from different epochs.
            MismatchError: the ranks were given different data or arguments.
        """
        ring, replicas = self._ring, self.replicas
        self._require_compiled()
        count = Arrays(x, y, sample_weight).count if are_arrays(x) else None
        self._require_rows(count, batch_size, steps_per_epoch, type(x).__name__)
        what = "the data given to Pipeline.fit"
        order: Any = {"first": initial_epoch, "shuffle": shuffle, "seed": seed}
        plan = Plan(replicas, what, batch_size, steps_per_epoch, **order, check=check, readers=ring)
        training = feed_of((x, y, sample_weight), plan)
        validation = None
        if validation_data is not None:
            is_alone = not isinstance(validation_data, (tuple, list))
            parts = (validation_data,) if is_alone else validation_data
            what = "the validation data given to Pipeline.fit"
            rows = batch_size if are_arrays(parts[0]) else None
            how: Any = {"deal": True, "check": check, "readers": ring}
            plan = Plan(replicas, what, rows, validation_steps, **how)
            validation = feed_of(parts, plan)
        everywhere = {
            "epochs": epochs,
            "initial_epoch": initial_epoch,
            "shuffle": shuffle,
            "seed": seed,
            "batches": int(training.dataset.cardinality()),
        }
        # Copies validate on batches in turn, of which one may have more.
        batches = None if validation is None else int(validation.dataset.cardinality())
        of_copy = {"batches of validation_data": batches}
        for arguments, among in ((everywhere, ring), (of_copy, self.chain)):
            settings = Settings("arguments of Pipeline.fit", settings_in(arguments))
            require_same_settings([settings], among)
        note_sharding(replicas)
        draw_apart(self.model, replicas)
        what = "batch, since each micro-batch is computed by itself: "
        warn_of_parity(differences(self.model), replicas, f"stage {self.stage}", what)
        self.model.optimizer.build(self.model.trainable_variables)
        all_callbacks = [_WholeLogs(self), *self._callbacks(callbacks)]
        history = fit_on(
            self.model,
            training,
            validation,
            Training(replicas, None, ring) if private.has_plain_fit(self.model) else None,
            [
                Together(all_callbacks, replicas, is_global=True, check=False),
                StopTogether(ring),
                *([VerifyReplicas(None, replicas)] if check else []),
            ],
            epochs=epochs,
            verbose=verbose if ring.rank == 0 else 0,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
        )
        self._stage.wait_sent()
        return history

    def _require_rows(
        self, count: int | None, batch_size: int | None, steps: int | None, kind: str
    ) -> None:
        """ConfigError unless copies and micro-batches divide batches, and `count` rows if known."""
        ring, copies = self._ring, self.replicas.size
        if count is None and batch_size is not None:
            text = f"got batch_size={batch_size} for {kind}"
            remedy = "Batch it by the rows of all copies: dataset.batch(n, drop_remainder=True)."
            raise ConfigError(text, **ring.config.who, remedy=remedy)
        if count is None:
            return
        unit = self.micro_batches * copies
        size = batch_size or (-(-count // steps) if steps else BATCH_SIZE)
        if size % unit or count % unit:
            raise ConfigError(
                f"cannot divide {count} rows in batches of {size} among {copies} copies with "
                f"{self.micro_batches} micro-batches each",
                **ring.config.who,
                remedy=f"Use a batch_size, and a number of rows, that are multiples of {unit}: "
                f"x[:{count // unit * unit}].",
            )

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = 0,
        sample_weight: Any = None,
        steps: int | None = None,
        return_dict: bool = False,
        check: bool = True,
    ) -> Any:
        """Evaluate as `rr.evaluate` does, by all ranks; batches may have any number of rows."""
        self._require_compiled()
        shown = verbose if self._ring.rank == 0 else 0
        inputs = x, y, sample_weight, batch_size, self.replicas
        how: Any = {"verbose": shown, "steps": steps, "check": check}
        results = evaluate(self.model, *inputs, return_dict=True, **how)
        self._stage.wait_sent()
        logs = self.whole_logs({name: results[name] for name in in_order(self.model, results)})
        values = list(logs.values())
        return logs if return_dict else values[0] if len(values) == 1 else values

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = 0,
        steps: int | None = None,
        check: bool = True,
    ) -> Any:
        """Predict as `rr.predict` does; all ranks get the outputs of the last stage."""
        shown = verbose if self._ring.rank == 0 else 0
        outputs = predict(self.model, x, batch_size, self.replicas, shown, steps, check)
        self._stage.wait_sent()
        return self._from_last(outputs)

    def whole_logs(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """The last stage's logs, with the penalties of all stages in the loss. Collective."""
        every = [numbers for [numbers] in gathered_numbers([numbers_in(logs)], self.chain)]
        logs_of_all = every[-1]
        for name in logs_of_all.keys() & {"loss", "val_loss"}:
            logs_of_all[name] = sum(stage_logs[name] for stage_logs in every)
        return logs_of_all

    def _train_step(self, data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        gradients, logs = self._stage.gradients(x, y, sample_weight)
        with step_weight(rows_in(x), self.replicas):
            self._stage.apply(gradients)
        return logs

    def _require_compiled(self) -> None:
        if not self.model.compiled:
            text = "got no optimizer and no loss"
            remedy = "Call pipeline.compile(optimizer, loss) first."
            raise ConfigError(text, **self._ring.config.who, remedy=remedy)

    def _callbacks(self, callbacks: Any) -> list[Any]:
        """Callbacks for this rank; all but those that save models act on one rank or on all."""
        plain = given_callbacks(callbacks)
        checkpoint = keras.callbacks.ModelCheckpoint
        saving = [callback for callback in plain if isinstance(callback, checkpoint)]
        every = self.chain.all_gather_object([str(callback.filepath) for callback in saving])
        paths = [path for stage_paths in every for path in set(stage_paths)]
        problem, remedy = "", 'Put pipeline.stage in it, as in f"stage{pipeline.stage}.keras".'
        if same := sorted(path for path in set(paths) if paths.count(path) > 1):
            problem = f"cannot save several stages as {same[0]}"
        if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in plain):
            problem = "got a BackupAndRestore: stages could go on from different epochs"
            remedy = "Save with ModelCheckpoint, load on all ranks, and pass initial_epoch."
        if problem:
            raise ConfigError(problem, **self._ring.config.who, remedy=remedy)
        return [
            OnRankZero(callback, self._ring)
            if acts_once(callback) and callback not in saving
            else callback
            for callback in plain
        ]

    def _from_last(self, outputs: Any) -> Any:
        """Broadcast the last stage's arrays, in a structure, to all ranks of the chain."""
        leaves, last = keras.tree.flatten(outputs), self.stages - 1
        structure = keras.tree.pack_sequence_as(outputs, list(range(len(leaves))))
        described = [[leaf.dtype.name, list(leaf.shape)] for leaf in leaves]
        structure, described = self.chain.broadcast_object([structure, described], last)
        if self.stage != last:
            leaves = [np.empty(shape, dtype_named(dtype)) for dtype, shape in described]
        for leaf in leaves:
            if leaf.size:
                self.chain.broadcast(leaf, last)
        return keras.tree.map_structure(lambda number: leaves[number], structure)


class _WholeLogs(keras.callbacks.Callback):
    """Gives the callbacks after it the logs of the whole model, on all ranks."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._latest: dict[str, Any] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._latest = self._pipeline.whole_logs(logs)
        logs.clear()
        logs.update(self._latest)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # An epoch's logs are means over all copies.
        self.on_train_batch_end(0, logs)

    def on_train_end(self, logs: Any = None) -> None:
        # Keras passes those from before the last `on_epoch_end`.
        if logs is not None:
            logs.update(self._latest)


def _checked(stages: Any, micro_batches: Any, ring: Communicator) -> list[Callable[[], Any]]:
    """The functions of the stages; ConfigError if some argument is wrong."""
    makers = list(stages) if isinstance(stages, (list, tuple)) else []
    problem, remedy = "", "Pass a list of functions, each of which makes the layers of a stage."
    if not makers:
        problem = f"got {brief(stages)} as stages"
    elif wrong := [make for make in makers if isinstance(make, keras.Layer) or not callable(make)]:
        problem = f"got {brief(wrong[0])} as a stage, which is no function"
    elif ring.size % len(makers):
        problem = f"cannot divide {ring.size} ranks among {len(makers)} stages"
        remedy = "Start a multiple of as many ranks as there are stages."
    elif type(micro_batches) is not int or micro_batches < 1:
        problem, remedy = f"got {micro_batches!r} micro-batches", "Pass a whole number above 0."
    if problem:
        raise ConfigError(problem, **ring.config.who, remedy=remedy)
    return makers


def _group(ring: Communicator, color: int) -> Communicator:
    group = ring.split(color)
    assert group is not None
    return group
