"""Warns of likely mistakes: when training begins, and of ranks that trained apart.

Rank 0 warns, once, at the line of the user's program.
"""

import gc
import itertools
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator, is_initialized
from ringreduce.keras import private
from ringreduce.keras.checks.model_in_fit import model_in_fit
from ringreduce.keras.checks.seeds import is_seed_state
from ringreduce.keras.checks.settings import saved_beside_weights
from ringreduce.keras.checks.users_line import (
    DataWarning,
    ParityWarning,
    is_users,
    users_frame,
    warn_at_users_line,
)
from ringreduce.keras.layers.normalization import SyncBatchNormalization
from ringreduce.keras.metric_states import Entries
from ringreduce.pure.wire import signature_of
from ringreduce.tensorflow import GradientBridge
from ringreduce.tensorflow.draws import Draw
from ringreduce.tensorflow.kept import kept
from ringreduce.tensorflow.variables import differing, digest_of, path_of
from ringreduce.vocabulary.words import for_rr, named

_log = logging.getLogger(__name__)


class _Data:
    """Flags that a job and its groups share: data may be divided among others."""

    is_divided = False  # by `rr.shard` or `rr.fit`
    is_warned_of = False
    is_compared = False  # by the gradients of a loop's first steps


_MADE_EQUAL = (
    "Call rr.broadcast_variables(model.variables) after building the model (and after "
    "Normalization.adapt, which sees only its rank's data), or seed all ranks alike with "
    "keras.utils.set_random_seed."
)
_SAME = "Adapt layers to the same data on every rank, and give what draws them the same seed."
_SYNC = "rr.SyncBatchNormalization"
# Reductions of losses that give no mean over samples.
NO_MEANS = ("mean_with_sample_weight", "sum")


def note_sharding(ring: Communicator) -> None:
    """Note that this rank has its part of some data."""
    kept(ring.config, _Data).is_divided = True


def warn_of_whole_data(model: Any, ring: Communicator) -> None:
    """Warn on rank 0, once, unless data was divided; `model` is being trained by its `fit`."""
    data = kept(ring.config, _Data)
    if ring.size == 1 or ring.rank != 0 or data.is_divided or data.is_warned_of:
        return
    data.is_warned_of = True
    warn_at_users_line(
        f"nothing has divided the data that {model.name}.fit trains on, so all {ring.size} ranks "
        "may be training on all of it. Call rr.fit(model, ...) with the same arguments, whose "
        "batches are global; or give fit rr.shard(data). If each rank reads data of its own "
        'already, ignore this: warnings.simplefilter("ignore", rr.DataWarning).',
        DataWarning,
    )


def compare_rows(bridge: GradientBridge, ring: Communicator) -> None:
    """Have ranks compare the first gradients of a loop of one's own; they warn of equal ones.

    Unless data was divided: then an error says where ranks have read other data.
    """
    data = kept(ring.config, _Data)
    if ring.size > 1 and not (data.is_divided or data.is_compared) and model_in_fit() is None:
        data.is_compared = True
        frame = users_frame()
        bridge.compares_rows_of = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def warn_of_same_rows(digests: Sequence[str], ring: Communicator) -> None:
    """Log on rank 0 which ranks have equal `digests` of what metrics hold; "" tells nothing.

    Also where data was divided: a file may give all ranks the part of one. No warning of Python's,
    which may be ignored since each rank reads data of its own.
    """
    ranks: dict[str, list[int]] = {}
    for rank, digest in zip(ring.members, digests, strict=True):
        ranks.setdefault(digest, []).append(rank)
    same = [them for digest, them in ranks.items() if digest and len(them) > 1]
    if same and ring.rank == 0:
        _log.warning(
            "[%d/%d] %s have trained on the same rows: their losses and metrics of the first "
            "epoch are equal to the last bit. Call rr.fit(model, ...) with data that are the same "
            "on all ranks, or give fit rr.shard(data); look at what shards yours by rank. A file "
            "that the ranks share after that, of .cache(file) or .save(), has one rank's part: let "
            'each have its own, .cache(f"name-{rr.rank()}").',
            *ring.config.who.values(),
            " and ".join(named("rank", them) for them in same),
        )


class Untrained:
    """What `model` has beside the weights `trained`: other weights, and what else layers save."""

    def __init__(self, model: Any, trained: Iterable[Any]) -> None:
        known = {id(variable) for variable in trained}
        others = {id(v): v for v in model.weights if id(v) not in known}
        # States of random generators should differ.
        self._variables = [v for v in others.values() if not is_seed_state(v)]
        self._layers = [model, *private.layers_of(model)]
        # Of Keras's own that is an error.
        self._saved = [saved_beside_weights(layer, by_keras=False) for layer in self._layers]

    def digest(self) -> int:
        """A hash of all."""
        return signature_of(digest_of(self._variables), self._saved)

    def warn_if_unlike(self, digests: Sequence[int | None], ring: Communicator) -> None:
        """Warn on rank 0 of what differs, if the ranks' `digests` do; None: one has no model.

        Collective only then.
        """
        if None in digests or len(set(digests)) == 1:
            return
        unequal = [path_of(variable) for variable in differing(self._variables, ring)]
        columns = zip(self._layers, *ring.all_gather_object(self._saved), strict=False)
        for layer, *states in columns:
            if states != states[:1] * ring.size:
                unequal.append(f"what {layer.name} saves")
        if not unequal or ring.rank != 0:
            return
        goes_on = "which training does not change or make equal: each rank goes on with its own."
        warn_at_users_line(
            f"the ranks have different values of {_first_of(unequal)}, {goes_on} "
            f"{for_rr(_MADE_EQUAL, _SAME)}",
            ParityWarning,
        )


def warn_of_equal_draws(drawn: Iterable[Draw], ring: Communicator) -> None:
    """Warn on rank 0 of random numbers that a step draws alike on several ranks."""
    if ring.rank != 0 or not (names := list(dict.fromkeys(map(_place_of, drawn)))):
        return
    warn_at_users_line(
        f"ranks draw the same random numbers for other rows, in {_first_of(names)}: what tf.random "
        "draws follows from its seeds, which are the same on all ranks, or under XLA from none. "
        "Draw by keras.random with seed=self.seed, where self.seed = keras.random.SeedGenerator(1) "
        "is an attribute of the layer or model. Or call tf.random.set_seed and train by rr.fit, in "
        "whose graphs these ops draw other numbers on each rank, unless XLA compiles them; but not "
        "in a tf.function of yours.",
        ParityWarning,
    )


def _place_of(draw: Draw) -> str:
    """Where in the user's program an op is made, and its name."""
    if draw.op is None:
        return "a step that runs eagerly (run_eagerly=True)"
    for frame in reversed(draw.op.traceback):
        if is_users(frame.filename):
            return f"{draw.op.name} ({Path(frame.filename).name}:{frame.lineno})"
    return str(draw.op.name)


def warn_of_own_numbers(variables: Sequence[Any], ring: Communicator) -> None:
    """Warn on rank 0 of whole numbers that steps have changed, to others on each rank."""
    if ring.rank == 0:
        warn_at_users_line(
            f"the ranks have different values of {_first_of(map(path_of, variables))}, whole "
            "numbers or flags that steps change: each rank keeps its own, while floating-point "
            "numbers that steps change become rank 0's at the end of an epoch. If they belong to "
            "such, as the place in a queue does, make them float32 too, or call "
            "rr.broadcast_variables([...]) in a callback's on_epoch_end.",
            ParityWarning,
        )


def warn_of_change_between_meetings(
    variable: Any, ranks: Sequence[int], ring: Communicator
) -> None:
    """Warn on rank 0 that only `ranks` have changed `variable` where all step alone."""
    if ring.rank == 0:
        warn_at_users_line(
            f"a callback has changed {path_of(variable)} on {named('rank', ranks)} only, between "
            "two meetings of ranks that step alone: the next one takes that for what was learned, "
            "and gives every rank a part of it. Change weights on all ranks, or at the end of an "
            "epoch.",
            ParityWarning,
        )


def warn_of_other_steps(unlike: Sequence[str], steps: int, epoch: int) -> None:
    """Warn that training goes on in the middle of an epoch whose other steps were of other rows."""
    warn_at_users_line(
        f"training goes on after step {steps} of epoch {epoch}, from a backup that was made with "
        f"{' and '.join(unlike)}: some samples of that epoch are used twice, or not at all. Start "
        "the job with what it had then; or ignore this if the rest of one epoch does not matter.",
        DataWarning,
    )


def warn_of_parity(
    texts: Sequence[str], ring: Communicator, who: str = "", what: str = "global batch, since "
) -> None:
    """Warn on rank 0 of what `texts` say, such as `differences`; `who` are its ranks."""
    if ring.rank == 0 and texts:
        warn_at_users_line(
            f"{who or f'{ring.size} ranks'} will not train exactly as one process does "
            f"with the same {what}" + "; ".join(texts) + ".",
            ParityWarning,
        )


def warn_of_metrics(names: Iterable[str], ring: Communicator) -> None:
    """Warn on rank 0 of metrics whose states do not combine; they are left out of logs."""
    if ring.rank == 0 and (apart := sorted(names)):
        warn_at_users_line(
            f"the metric {', '.join(apart)} is left out of what the ranks show: its state, summed "
            "over two halves of the first rows, does not give the result of both. Make its "
            "variables with another aggregation; or give its class merge_states(self, states), "
            "which returns one list of arrays, in the order of its variables, of the ranks' lists.",
            ParityWarning,
        )


def warn_of_functions(names: Iterable[str], ring: Communicator) -> None:
    """Warn on rank 0 of metrics that are functions of a batch; logs of training lack them."""
    if ring.rank == 0 and (apart := sorted(names)):
        warn_at_users_line(
            f"the metric {', '.join(apart)} is left out of what the ranks show of training: its "
            "value for a batch is not the mean of those for the parts of it that ranks have. Make "
            "it a keras.metrics.Metric that adds up what it counts. Validation, and evaluation "
            "by all ranks, see whole batches, as in one process.",
            ParityWarning,
        )


def warn_of_last_batches(entries: Sequence[Entries], ring: Communicator) -> None:
    """Warn on rank 0 of numbers of an evaluation that are of no metric; all ranks' `entries`."""
    every = [(name, *entry) for logs in entries for name, entry in logs.items()]
    plain = {name for name, is_metric, number in every if number is not None and not is_metric}
    if ring.rank == 0 and plain:
        warn_at_users_line(
            f"a test_step of your own returns {', '.join(sorted(plain))} beside metrics: shown is "
            "the mean of what each rank's last batch gave, where one process shows that of the "
            "last batch. Let the model keep a keras.metrics.Mean, and return its result.",
            ParityWarning,
        )


def differences(model: Any, *, knows_losses: bool = False) -> list[str]:
    """Name the parts of a compiled model that see its rank's rows only, with a remedy each.

    With `knows_losses` what losses do was tried, and is not told from how they were made.
    """
    layers = [layer for layer in private.layers_of(model) if layer.trainable]
    texts = []
    plain = [part for part in layers if isinstance(part, keras.layers.BatchNormalization)]
    if names := _named(part for part in plain if not isinstance(part, SyncBatchNormalization)):
        texts.append(f"{names}: each rank normalizes its rows (use {for_rr(_SYNC)})")
    if names := _named(filter(_is_random, [model, *layers])):
        texts.append(f"{names}: each rank draws other random numbers")
    for loss in keras.tree.flatten(getattr(model, "loss", None) or []):
        reduction = loss.reduction if isinstance(loss, keras.losses.Loss) else None
        if reduction in NO_MEANS and not knows_losses:
            how = f"with reduction={reduction!r} it is no mean over samples"
            instead = "use the default, sum_over_batch_size"
            if reduction == "sum":
                instead += ", and, unless the optimizer is Adam or alike, batch_size times the rate"
            texts.append(f"the loss {loss.name}: {how} ({instead})")
    masks = [isinstance(v, keras.layers.Masking) or getattr(v, "mask_zero", False) for v in layers]
    outputs = getattr(model, "outputs", None)
    # A subclassed model does not tell whether an output has a mask.
    is_masked = outputs is None or any(getattr(v, "_keras_mask", None) is not None for v in outputs)
    if is_masked and (names := _named(itertools.compress(layers, masks))):
        texts.append(f"{names}: if the mask reaches the loss, that is a mean over what it leaves")
    return texts


def _is_random(layer: Any) -> bool:
    if isinstance(layer, keras.layers.RNN) or hasattr(layer, "cell"):
        return False  # Their cells are layers too, and always have a generator.
    if hasattr(layer, "recurrent_dropout"):
        return bool(layer.dropout or layer.recurrent_dropout)
    kinds = keras.random.SeedGenerator, tf.random.Generator
    return any(isinstance(value, kinds) for value in vars(layer).values())


def _named(layers: Iterable[Any]) -> str:
    return _first_of(layer.name for layer in layers)


def _first_of(names: Iterable[str]) -> str:
    first, rest = (all_names := list(names))[:3], len(all_names) - 3
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


def warn_of_ranks_apart() -> None:
    """At exit, unless by an exception, log on rank 0 if it trained and nothing was exchanged."""
    if not is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    ring = default_communicator()
    if ring.size == 1 or ring.rank != 0:
        return
    done = ring.statistics()
    # One barrier forms the ring.
    if done.collectives > 1 or done.bytes_sent or done.bytes_received:
        return
    # Keras keeps no list of optimizers; to look for them takes long, so only where it is due.
    kind = keras.optimizers.Optimizer
    optimizers = (thing for thing in gc.get_objects() if issubclass(type(thing), kind))
    if any(optimizer.built and int(optimizer.iterations) > 0 for optimizer in optimizers):
        _log.warning(
            "[%d/%d] the ranks have exchanged nothing, so each has trained by itself. Wrap the "
            "optimizer, rr.DistributedOptimizer(optimizer), or the tape.",
            *ring.config.who.values(),
        )
