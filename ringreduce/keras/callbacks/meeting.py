"""What ranks tell each other when an epoch ends: `before` its callbacks, and `after` them.

    steps, validation -- before: metrics of all ranks -- on_epoch_end -- after: what that did

Each is one exchange, unless ranks differ in what they log, or have no batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import metric_states
from ringreduce.keras.callbacks.learning_rate import diverged, kept_rates, rates_of
from ringreduce.keras.callbacks.rank_zero import OnRankZero, states_now, take_states
from ringreduce.keras.checks import seeds
from ringreduce.keras.checks.warnings import (
    warn_of_functions,
    warn_of_last_batches,
    warn_of_metrics,
    warn_of_same_rows,
)
from ringreduce.keras.elastic.fields import Fields
from ringreduce.keras.layers.groups import model_group, training_ranks
from ringreduce.keras.metric_states import Entries, MetricStates, Told
from ringreduce.keras.model.metric_trial import names_apart, names_in_steps
from ringreduce.keras.optimizer.accepted import require_equal
from ringreduce.keras.optimizers_in import wrappers_in
from ringreduce.keras.repeating import is_repeating, repeated
from ringreduce.tensorflow.agreement import Difference, refuse

VALIDATION = "val_"


class Ended(NamedTuple):
    """What an epoch has led to on this rank."""

    training: MetricStates
    validation: MetricStates
    validated: int | None  # batches of validation; None: it was not done
    members: Sequence[int]  # the ranks that there were when it began


class _Entry(NamedTuple):
    """What a rank tells of an epoch."""

    entries: Entries
    training: Told
    validation: Told
    validated: int | None
    rates: list[float]
    digest: str
    apart: list[str]
    apart_in_steps: list[str]


class EpochMeetings:
    """Those of a training of `model`, whose data the ranks of `ring` divide; all are collective.

    `is_global`: `fit` divides each batch, so that rows are others where values are equal.
    `validate` validates once more, where the number of ranks may change; its logs.
    """

    def __init__(
        self,
        model: Any,
        ring: Communicator,
        *,
        is_global: bool = False,
        validate: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._model, self._ring = model, ring
        self._is_global, self._validate = is_global, validate
        self._is_first = True

    def before(self, logs: dict[str, Any], ended: Ended) -> None:
        """Make `logs` those of all ranks' data, equal on every rank.

        MismatchError, on all: they log under different names, or went by other learning rates.
        """
        ring = self._ring
        members = ended.members

        def together() -> dict[str, Any]:
            nonlocal ended, members
            # Else the part of those that are gone would lack.
            is_due = ended.validated is not None and members != ring.members
            if self._validate is not None and is_due:
                members = ring.members
                anew = as_validation(self._validate())
                ended = ended._replace(validation=metric_states.states_of(self._model, len(anew)))
                logs.update(anew)
            return self._combined(logs, ended)

        combined = repeated(ring, together)
        logs.update(combined)
        for name in [name for name, value in combined.items() if value is None]:
            del logs[name]
        self._is_first = False

    def _combined(self, logs: Mapping[str, Any], ended: Ended) -> dict[str, Any]:
        """Combine `logs` into values equal on all ranks; None for what is to be left out."""
        ring, model = self._ring, self._model
        told = self._told(logs, ended)
        refuse(ring, _difference(told, ring.members), "averaging of metrics")
        rates = [each.rates for each in told]
        refuse(ring, diverged(model, rates, ring), "comparison of learning rates")
        for wrapper in wrappers_in(model):
            require_equal(wrapper)
        warn_of_same_rows([each.digest for each in told], ring)
        pairs = [(ended.training, [each.training for each in told])]
        pairs.append((ended.validation, [each.validation for each in told]))
        together, of_validation = metric_states.results_of_ranks(model, pairs, ring)
        together.update(as_validation(of_validation))
        apart = {name for each in told for name in each.apart}
        in_steps = {name for each in told for name in each.apart_in_steps}
        if self._is_first:
            warn_of_metrics(apart, ring)
            warn_of_functions(in_steps - apart, ring)
            warn_of_last_batches([_of_validation(each.entries) for each in told], ring)
        _, sums = names_in_steps(model)
        means = metric_states.merged([each.entries for each in told], together, sums)
        left_out = apart | {VALIDATION + name for name in apart} | in_steps
        return means | {name: None for name in {**logs, **means} if name in left_out}

    def _told(self, logs: Mapping[str, Any], ended: Ended) -> list[_Entry]:
        """What each rank tells, in rank order."""
        model = self._model
        results = {**ended.training.results, **as_validation(ended.validation.results)}
        entries = metric_states.entries_of(logs, results)
        is_telling = self._is_first and not self._is_global and not model_group(model.weights)
        apart_in_steps, _ = names_in_steps(model)
        both = ended.training, ended.validation
        names = [[name, number is not None] for name, (_, number) in entries.items()]
        further = [names, sorted(names_apart(model)), sorted(apart_in_steps)]
        known = [number for _, number in entries.values() if number is not None]
        numbers = [
            bytes(is_metric for is_metric, _ in entries.values()),
            np.array(known, np.float64).tobytes(),
            np.array(kept_rates(model), np.float64).tobytes(),
            ended.validated,
            ended.training.digest() if is_telling else "",
            metric_states.way_of_results(model),
            *([states.batches, states.packed()] for states in both),
        ]
        gathered = metric_states.gathered_alike(
            [*further, *(states.layout() for states in both)],
            [*further, *(states.compared() for states in both)],
            numbers,
            self._ring,
        )
        return [_entry(*pair) for pair in gathered]

    def after(self, acting_once: Sequence[OnRankZero], fields: Fields) -> None:
        """Agree on what callbacks have done at the end of the epoch, before the next one.

        Who wants to stop; the first rank's learning rates; seeds for random numbers that differ
        between ranks; in elastic training also what the first rank's `acting_once` know.
        MismatchError, on all: ranks have other numbers of rates, or Keras's own callbacks, which
        `fields` are of, have come to other values.
        """
        model, ring = self._model, self._ring
        every = training_ranks(model.weights, ring)
        if every.size == 1:
            return
        rates, group = rates_of(model), model_group(model.weights)
        states = [] if group is not None else seeds.states_of(model)

        kinds, digests = fields.digests()
        here = np.array([float(rate) for rate in rates], np.float64).tobytes()

        def tell() -> list[Any]:
            callbacks = states_now(acting_once, every) if is_repeating(every) else []
            alike = [zlib.crc32(" ".join(kinds).encode()), *digests]
            own = [bool(model.stop_training), here, seeds.seeds_of(states), callbacks, alike]
            return [list(every.members), every.all_gather_object(own)]

        members, told = repeated(every, tell)
        if any(stops for stops, *_ in told):
            model.stop_training = True
        _, of_first, _, callbacks, _ = told[0]
        refuse(every, _unlike_counts(members, told), "comparison of learning rates")
        refuse(every, _unlike_fields(members, told, kinds), "comparison of callbacks")
        if of_first != here:
            for rate, value in zip(rates, np.frombuffer(of_first, np.float64), strict=True):
                rate.assign(value)
        take_states(acting_once, callbacks)
        if group is not None:
            repeated(ring, lambda: seeds.fold_seeds(model, ring))
            return
        place = members.index(every.members[every.rank])
        seeds.make_unlike(states, [theirs for _, _, theirs, *_ in told], place)


def _unlike_counts(members: Sequence[int], told: Sequence[Any]) -> Difference | None:
    """Which rank has told of more or fewer learning rates than the first."""
    first, *others = (len(values) // 8 for _, values, *_ in told)
    for rank, count in zip(members[1:], others, strict=True):
        if count != first:
            return Difference(
                rank,
                f"found {first} learning rates that can be set on rank {members[0]} and {count} on "
                f"rank {rank}",
                "Compile the same optimizer on every rank, also in callbacks.",
            )
    return None


def _unlike_fields(
    members: Sequence[int], told: Sequence[Any], kinds: Sequence[str]
) -> Difference | None:
    """Which rank's callback, of these `kinds`, knows something else than the first's.

    Ranks that have others than the first are not compared.
    """
    (of_kinds, *first), *others = (each[-1] for each in told)
    for rank, (of_theirs, *digests) in zip(members[1:], others, strict=True):
        if of_theirs != of_kinds or digests == first:
            continue
        places = [n for n, pair in enumerate(zip(first, digests, strict=True)) if len({*pair}) > 1]
        # Where this rank has others itself, it knows no name.
        kind = kinds[places[0]] if len(kinds) == len(first) else "a callback"
        return Difference(
            rank,
            f"found that {kind} has come to other values on rank {members[0]} than on rank {rank}, "
            "though ranks have the same logs",
            "Give it the same arguments on every rank, and let no callback before it change logs "
            "on some ranks only.",
        )
    return None


def as_validation(results: Mapping[str, Any]) -> dict[str, Any]:
    """`results` by their names in the logs of an epoch."""
    return {VALIDATION + name: value for name, value in results.items()}


def _of_validation(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in logs.items() if name.startswith(VALIDATION)}


def _entry(described: Sequence[Any], told: Sequence[Any]) -> _Entry:
    """What a rank has told, from what has travelled."""
    names, apart, apart_in_steps, *layouts = described
    flags, numbers, rates, validated, digest, way, *both = told
    left = iter(np.frombuffer(numbers, np.float64).tolist())
    entries = {
        name: (bool(flag), next(left) if is_number else None)
        for (name, is_number), flag in zip(names, flags, strict=True)
    }
    training, validation = (
        Told(batches, layout, packed, way)
        for layout, (batches, packed) in zip(layouts, both, strict=True)
    )
    of_rates = np.frombuffer(rates, np.float64).tolist()
    return _Entry(entries, training, validation, validated, of_rates, digest, apart, apart_in_steps)


def _difference(told: Sequence[_Entry], members: Sequence[int]) -> Difference | None:
    """Which ranks log under different names; of ranks without validation data in training only."""
    # 0 batches, not None: the rank validated, and had no data.
    has_data = [each.validated != 0 for each in told]
    first = has_data.index(True) if any(has_data) else 0

    def names(rank: int, *, validation: bool) -> list[str]:
        entries = told[rank].entries
        return sorted(n for n in entries if validation or not n.startswith(VALIDATION))

    for rank, validation in enumerate(has_data):
        if names(rank, validation=validation) != names(first, validation=validation):
            here, there = (", ".join(names(r, validation=True)) for r in (first, rank))
            return Difference(
                members[rank],
                f"found that rank {members[first]} logs {here or 'nothing'} and rank "
                f"{members[rank]} logs {there or 'nothing'}",
                "Compile the same metrics on every rank, give all of them validation data or none, "
                "and let a train_step log under the same names everywhere.",
            )
    return None
