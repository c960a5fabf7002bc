"""`model.fit` with global batches that are divided among all ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import job_size
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import private
from ringreduce.keras.callbacks.rank_zero import OnRankZero, acts_once
from ringreduce.keras.callbacks.replicas import VerifyReplicas
from ringreduce.keras.callbacks.together import Together, given_callbacks, may_restore
from ringreduce.keras.checks.elastic_refusals import refuse
from ringreduce.keras.checks.models import (
    refuse_fixed_rows,
    refuse_other_optimizer,
    refuse_other_ring,
    refuse_states_of_rows,
    require_compiled,
    require_distributed,
)
from ringreduce.keras.checks.seeds import draw_apart
from ringreduce.keras.checks.settings import (
    digest_of,
    refuse_unlike,
    require_same_settings,
    settings_of_model,
)
from ringreduce.keras.checks.warnings import note_sharding
from ringreduce.keras.data.batch_shares import Measure, Shares, agreed_shares, told_share
from ringreduce.keras.data.division import Feed
from ringreduce.keras.elastic.backup import backups
from ringreduce.keras.elastic.leaving import heard
from ringreduce.keras.elastic.recovery import ending_together
from ringreduce.keras.layers.groups import make_alike
from ringreduce.keras.model.building import build
from ringreduce.keras.model.trial_in_fit import AfterFirst, Trial
from ringreduce.keras.model.weighted import weigh_steps
from ringreduce.keras.optimizers_in import is_alone, wrappers_in
from ringreduce.keras.recording.loops import given_up
from ringreduce.keras.repeating import is_repeating
from ringreduce.keras.rows import map_arrays, of_any_rows
from ringreduce.keras.training.answering import Answering
from ringreduce.keras.training.arguments import FitArguments
from ringreduce.keras.training.elastic_steps import Elastic
from ringreduce.keras.training.feeds import example_of, feeds_of, look
from ringreduce.keras.training.growing import Growing, Newcomer, Parts, growing_of
from ringreduce.keras.training.looking import LooksInFit
from ringreduce.keras.training.loop import Loop
from ringreduce.keras.training.overridden import fit_through_own, is_overridden
from ringreduce.keras.training.ranks import Training
from ringreduce.keras.training.record import Record
from ringreduce.keras.training.steps import MakesSteps
from ringreduce.vocabulary.config import elastic_minimum, profile_wanted, recording_wanted
from ringreduce.vocabulary.errors import ConfigError, MismatchError, PeerError


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: Any = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
    *,
    seed: int = 0,
    backup_dir: Any = None,
    check: bool | str = True,
    per_rank_data: bool = False,
    batch_share: str | float | None = None,
    profile: bool = False,
    communicator: Communicator | None = None,
) -> Any:
    """Train as ``model.fit`` does, with every batch divided among all ranks.

    Every rank passes the same arguments, with the same whole data. **Batches are global**,
    `batch_size` too: of each, rank r takes the r-th of `size` slices, which differ by at most one
    row. So N ranks train to what one process trains to, up to the rounding of sums, whether or not
    arrays and PyDatasets are shuffled: the order of epoch e follows from `seed` and e alone. What
    cannot be equal is warned about by name when training begins: layers and losses that look at a
    whole batch, and random layers.

    The callbacks are put into `rr.callbacks.Together`: they see the metrics of all ranks, and only
    rank 0 writes files. Only rank 0 prints; its bar shows its own rows' metrics until the epoch
    ends. Alone it is ``model.fit``, but for the order in which arrays and PyDatasets are shuffled.

    Args:
        model: compiled, with a `DistributedOptimizer`.
        x: arrays, with `batch_size` rows in a batch (32), of which each rank copies only its own;
            a tf.data.Dataset of batches, or of samples and with a `batch_size`, shuffled by its own
            means, with a seed; or a PyDataset, a generator, or an iterable such as torch's
            DataLoader, whose batches every rank makes. A PyDataset is shuffled by the batch.
        seed: of the order of arrays and PyDatasets. The same seed gives the same orders.
        backup_dir: a directory that all epochs are backed up to
            (`keras.callbacks.BackupAndRestore`), and that training continues from when the job is
            started again, to the weights of an undisturbed job if nothing but `fit` shuffles.
            Callbacks go on with the best value, patience, and the like that they had.
        check: ``"step"``: try the training step on a few rows before the first one, and warn where
            N ranks do not train as one process does, whatever the cause
            (docs/guides/train-step.md). ``"data"``: compare what ranks read: arrays before
            training, batches as they are read, of which only y where there is one, since x may be
            random on purpose. Both, and True, the default, which is both: compare the weights of
            all ranks after training, and before steps that would hide a difference
            (``shard_state=True`` of the optimizer, elastic jobs), if a callback has changed some.
            False does nothing of that.
        per_rank_data: `x` holds this rank's own batches, a part of the data that no other rank has,
            such as ``ray.train.get_dataset_shard("train").to_tf(...)``: a batched tf.data.Dataset,
            in which ranks may have different numbers of batches and samples. A rank that runs out
            of batches goes on without data until all have. So is `validation_data`.
        batch_share: this rank's share of each global batch. ``"equal"``, the default;
            ``"measured"``: the ranks measure for 10 steps how fast each of them computes, and
            divide later batches in that proportion, which rank 0 prints; or a number above 0, such
            as 2.0 on a rank that is twice as fast as one with 1.0. Every rank gets at least one
            row. Gradients, losses and metrics count by rows, so the result stays that of one
            process. For ``jit_compile=True`` XLA compiles again when the shares change.
        profile: measure where the time of steps goes, by `rr.callbacks.Profile`, as
            ``ringreduce run --profile`` does for all training.

    A model whose class has a `fit` of its own is trained by that: it gets the whole data, and where
    it calls ``super().fit``, what it passes is divided. So are `validation_data`, batch by batch,
    before its own `evaluate` gets them.

    An epoch of `steps_per_epoch` goes on where the last one ended, and ends early with the data, as
    Keras's does; the next begins the data anew. Other arguments are those of ``model.fit``;
    data for validation may have each of these forms.

    Returns:
        The `keras.callbacks.History`, equal on all ranks; where training has continued from a
        backup, of the epochs before too.

    Raises:
        ConfigError: the data cannot be divided, arguments do not go together, the model is not
            compiled, its optimizer is a plain one, or its own `fit` does not call ``super().fit``.
        MismatchError: ranks were given different data or arguments, or have optimizers with
            different settings; or their weights differ after training, since a callback has changed
            something on some ranks only.
    """
    given = FitArguments(**locals())
    ring = communicator or default_communicator()
    require_compiled(model)
    require_distributed(model, ring)
    if is_overridden(model, "fit"):
        return fit_through_own(model, fit, given.without_model, ring)
    _require_ready(given, ring)
    least = elastic_minimum() if ring.size > 1 else None
    own_callbacks, recording = _callbacks_of(given_callbacks(callbacks, backup_dir), ring)
    who, is_elastic = Training.of(model, ring), least is not None
    agreed = _agreed(given, who, own_callbacks, is_elastic=is_elastic)
    looked = look(given)
    # Also a rank that has the data alone may be one of several that have pieces of the model.
    builds = ring.size > 1 or ring.parent is not None or recording is not None
    problem = _problem_of_building(model, looked.spec) if builds else None
    if problem is not None and who.alike is not None:
        raise problem  # The others of its group may wait for this rank in what they build.
    before, who = who, Training.of(model, ring)
    if who.everyone.members != before.everyone.members:
        # Layers were made, and split, in their first call: now more ranks are known to train it.
        agreed = _agreed(given, who, own_callbacks, is_elastic=is_elastic)
    is_own_loop, restores, backs_up, shares = agreed
    try:
        training, validation = feeds_of(
            given, looked, who, shares, is_elastic=is_elastic, may_count=is_own_loop
        )
    except (MismatchError, PeerError) as error:
        if problem is None:
            raise
        if isinstance(error, MismatchError):
            raise error from problem  # Other data may have caused it.
        raise problem from error
    if problem is not None:
        raise problem
    if ring.size > 1:
        note_sharding(ring)
    if builds:
        refuse_states_of_rows(model, ring)
        if not per_rank_data:
            refuse_fixed_rows(model, ring, training.rows)
    # Where ranks know no better, they tell each other how many rows they have.
    exchanges = ring.size > 1 and not (training.is_even or training.is_counted)
    exchanges = least is None and (per_rank_data or exchanges)
    weighs = exchanges and not per_rank_data
    _make_ready(model, who, training, weighs=weighs)
    with contextlib.ExitStack() as block:
        steps = looks = notice = None
        # A part of a job's ranks cannot stop the job.
        if is_own_loop and (is_elastic or backs_up) and who.everyone.size == job_size(ring):
            notice = block.enter_context(heard(ring, is_elastic=is_elastic))
        if least is not None:
            block.enter_context(ending_together(ring))
            batches = training.dataset.element_spec
            steps = block.enter_context(Elastic(model, ring, least, batches, own_callbacks))
        if notice is not None:
            has_places = training.has_places and not (per_rank_data or shares.is_measured)
            # Validation takes seeds of the same shuffle, if there is one.
            has_places &= validation_data is not x
            looks = LooksInFit(
                *(model, who, notice, own_callbacks),
                stops_in_epochs=has_places and not is_alone(model),
                minimum=least,
                part=None if steps is None else steps.part,
            )
        around = _around(
            given, who, training, validation, shares, own_callbacks, restores, is_own_loop
        )
        growing = None
        if steps is not None and looks is not None:
            [together] = [each for each in around if isinstance(each, Together)]
            parts = Parts(model, ring, steps, looks, together, (training, validation))
            unlike = _why_it_only_shrinks(given, training, validation, recording is not None)
            growing = block.enter_context(growing_of(parts, unlike))
        trial = None
        # What the others have found is among what they give it.
        is_newcomer = isinstance(growing, Newcomer)
        if who.everyone.size > 1 and not is_newcomer:
            trial = Trial(
                model,
                training,
                who.everyone,
                has_own_data=per_rank_data,
                tries=given.tries_step,
                compares=given.compares_data,
            )
        # Keras's loop, and an execution of several steps, read by themselves.
        is_read_ahead = is_own_loop and model.steps_per_execution == 1
        if trial is not None and not is_read_ahead:
            around.insert(0, AfterFirst(trial))
        if recording is not None:
            around.append(
                Record(*recording, given.settings.found, who.everyone, training, model, trial)
            )
        if steps is not None and verbose:
            around.append(OnRankZero(keras.callbacks.ProgbarLogger(), ring))
        return fit_on(
            model,
            training,
            validation,
            who if is_own_loop else None,
            around,
            trial if is_read_ahead else None,
            exchanges=exchanges,
            makes=steps,
            looks=looks,
            growing=growing,
            epochs=epochs,
            verbose=verbose if who.is_first or steps is not None else 0,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_freq=validation_freq,
        )


def _why_it_only_shrinks(
    given: FitArguments, training: Feed, validation: Feed | None, is_recorded: bool
) -> str:
    """Why no newcomer can come into an elastic training with these; equal on all ranks."""
    reasons = {
        "its data go on across epochs, or cannot begin at another place": not training.has_places,
        "its validation data are shuffled, or drawn, by TensorFlow": (
            validation is not None and validation.source is not None
        ),
        "its validation data cannot begin at another place": (
            validation is not None and not validation.has_places
        ),
        "its steps are measured (profile)": given.profile or profile_wanted(),
        "its steps are recorded (ringreduce verify)": is_recorded,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _require_ready(given: FitArguments, ring: Communicator) -> None:
    """Raise unless what this rank was given can be trained."""
    given.require_known(ring)
    refuse_other_ring(given.model, "rr.fit", ring)
    if given.check:
        refuse_other_optimizer(given.model, ring)


def _problem_of_building(model: keras.Model, spec: Any) -> Exception | None:
    """Build `model` for batches of `spec`; why it cannot be."""
    try:
        build(model, map_arrays(of_any_rows, spec))
    except Exception as error:
        return error
    return None


def _around(
    given: FitArguments,
    who: Training,
    training: Feed,
    validation: Feed | None,
    shares: Shares,
    own_callbacks: list[Any],
    restores: bool,
    is_own_loop: bool,
) -> list[Any]:
    """The callbacks that `fit` adds, in order, around those of the user."""
    model, ring, check, validate = given.model, who.data, given.check, None
    around: list[Any] = []
    if shares.is_measured:
        around.append(Measure(shares, ring, given.verbose))
    if validation is not None:
        # Before what exchanges metrics when a rank's own validation ends.
        around.append(Answering(model, ring, partial(example_of, training.spec)))
        validate = partial(_validate, model, validation) if is_repeating(ring) else None
    around.append(
        Together(
            own_callbacks,
            given.communicator,
            profile=given.profile,
            validate=validate,
            is_global=not given.per_rank_data,
            check=False,  # It does so itself, as `VerifyReplicas`.
            compares=bool(check),
            may_restore=restores,
            is_last=is_own_loop,  # The fit of another package may add some.
        )
    )
    return [*around, *([VerifyReplicas(None, ring)] if check else [])]


def _agreed(
    given: FitArguments, who: Training, callbacks: list[Any], *, is_elastic: bool
) -> tuple[bool, bool, bool, Shares]:
    """Whether the loop is ours, may restore something, and backs up; shares of batches.

    One exchange.

    Raises, on all ranks, unless these have the same settings, and their shares go with the rest.
    """
    ring, every, settings = who.data, who.everyone, given.settings
    # A package may have replaced `fit` on some ranks: all have the same loop.
    is_plain = private.has_plain_fit(given.model)
    has = may_restore(callbacks), bool(backups(callbacks))
    own = digest_of([settings]), is_plain, *has, told_share(given.batch_share)
    told = every.all_gather_object(own) if every.size > 1 else [own]
    digests, are_plain, restoring, backing_up, of_ranks = zip(*told, strict=True)
    refuse_unlike([settings], digests, every)
    by_rank = dict(zip(every.members, of_ranks, strict=True))
    shares = agreed_shares([by_rank[rank] for rank in ring.members], ring)
    if is_elastic:
        share = "equal" if shares.is_equal else given.batch_share
        refuse(ring, {"per_rank_data": given.per_rank_data, "batch_share": share})
    if shares.is_measured and who.everyone is not ring:
        raise ConfigError(
            'got batch_share="measured" for a model with split layers, whose ranks must have the '
            "same rows",
            **ring.config.who,
            remedy="Pass a number, the same on all ranks of a model group.",
        )
    # Rank 0 decides: others may have left out what acts on rank 0 only.
    return all(are_plain), restoring[0], backing_up[0], shares


def _callbacks_of(
    callbacks: list[Any], ring: Communicator
) -> tuple[list[Any], tuple[int, str] | None]:
    """Select the callbacks that act, and what `ringreduce verify` wants recorded, if anything."""
    # Also if a loop was there before, which has made fewer steps.
    recording = recording_wanted(takes=True) or given_up() if ring.parent is None else None
    if recording is not None:
        # A trial leaves no files, and begins with none.
        writers = [c for c in callbacks if acts_once(c) or isinstance(c, OnRankZero)]
        callbacks = [c for c in callbacks if c not in writers]
    return callbacks, recording


def _make_ready(model: keras.Model, who: Training, training: Feed, *, weighs: bool) -> None:
    """Make alike, and compare, what ranks begin with; with `weighs` they exchange their rows."""
    ring = who.data
    make_alike(model.weights, who.alike)
    if who.everyone.size == 1:
        return
    if model.run_eagerly and model.optimizer is not None:
        # In a graph the first step does it before it computes gradients.
        model.optimizer.build(model.trainable_variables)
    if not wrappers_in(model):
        # Else its optimizer compares that in the first step.
        require_same_settings(settings_of_model(model), ring)
    draw_apart(model, ring)
    if weighs:
        is_counted = int(training.dataset.cardinality()) >= 0
        weigh_steps(model, ring, is_counted)


def _validate(model: keras.Model, validation: Feed) -> dict[str, Any]:
    """Validate once more, with what is this rank's now; the logs, none without any batch."""
    validation.begin(0)
    logs: dict[str, Any] = {}
    if int(validation.dataset.cardinality()):
        logs = model.evaluate(validation.dataset, verbose=0, return_dict=True)
    else:
        list(validation.dataset)  # It takes a seed of data that is shuffled, as on other ranks.
    validation.end()
    return logs


def fit_on(
    model: keras.Model,
    training: Feed,
    validation: Feed | None,
    who: Training | None,
    callbacks: list[Any],
    trial: Trial | None = None,
    exchanges: bool = False,
    makes: MakesSteps | None = None,
    looks: LooksInFit | None = None,
    growing: Growing | None = None,
    **options: Any,
) -> Any:
    """``model.fit`` on what feeds give; an error that a feed has met is raised as it was.

    By our loop if it is told `who` trains the model, before whose first step the `trial` runs; else
    by Keras's.
    """
    evaluated = validation or Feed()  # Which does nothing.
    # As callbacks, since a model's own `evaluate` may make several passes.
    passes = keras.callbacks.LambdaCallback(
        on_test_begin=lambda logs=None: evaluated.begin(0),
        on_test_end=lambda logs=None: evaluated.end(),
    )
    try:
        with _quiet_without(validation):
            if who is not None:
                how: Any = {"exchanges": exchanges, "makes": makes, "looks": looks}
                loop = Loop(model, training, who, trial, growing=growing, **how)
                # Another rank could not go on with a bar of Keras's list.
                options["adds_bar"] = makes is None
                return loop.run([passes, *callbacks], validation=validation, **options)
            epochs = keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs=None: training.begin(epoch),
                on_epoch_end=lambda epoch, logs=None: training.end(),
            )
            return model.fit(
                training.dataset,
                callbacks=[epochs, passes, *callbacks],
                validation_data=None if validation is None else validation.dataset,
                shuffle=False,
                **options,
            )
    except Exception:
        for feed in (training, evaluated):
            if feed.failure is not None:
                raise feed.failure from None
        raise


@contextlib.contextmanager
def _quiet_without(validation: Feed | None) -> Iterator[None]:
    """Where this rank has no batch for validation, Keras does not warn that data ran out."""
    dataset = None if validation is None else validation.dataset
    if not isinstance(dataset, tf.data.Dataset) or int(dataset.cardinality()) != 0:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield
