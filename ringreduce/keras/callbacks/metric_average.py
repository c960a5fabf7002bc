"""Replaces logs by those of all ranks together, before other callbacks read them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.keras import metric_states
from ringreduce.keras.callbacks.learning_rate import diverged, kept_rates
from ringreduce.keras.checks.warnings import (
    warn_of_functions,
    warn_of_last_batches,
    warn_of_metrics,
    warn_of_same_rows,
)
from ringreduce.keras.layers.groups import model_group
from ringreduce.keras.metric_states import MetricStates, states_of
from ringreduce.keras.model.metric_trial import names_apart, names_in_steps
from ringreduce.keras.optimizer.accepted import require_equal
from ringreduce.keras.optimizers_in import wrappers_in
from ringreduce.keras.repeating import repeated
from ringreduce.tensorflow.agreement import Difference, refuse

_VALIDATION = "val_"


class MetricAverage(keras.callbacks.Callback):
    """Makes the logs of an epoch those of all ranks' data, equal on every rank.

    Put it before callbacks that read logs: EarlyStopping, ReduceLROnPlateau, ModelCheckpoint;
    History always comes later. `Together` does that itself.

    The model's metrics, for training and validation, are computed from the sum of the ranks' states
    (total and count, say), as if one process had seen all batches. A rank whose validation data are
    empty gets the others' values. A number that a custom `train_step` logs beside metrics is
    averaged, each rank with equal weight. Other values, and logs of single batches, stay each
    rank's own. Collective, at the end of each epoch: a few short exchanges, for any number of
    metrics.

    Raises:
        MismatchError: the ranks log under different names, because only some validate or have a
            metric; or have trained with different learning rates. On all ranks.
    """

    looks_at_batches = False

    def __init__(
        self,
        communicator: Communicator | None = None,
        validate: Callable[[], dict[str, Any]] | None = None,
        is_global: bool = False,
    ) -> None:
        super().__init__()
        # validate: `fit`'s validation made once more, where the number of ranks may change.
        # is_global: `fit` divides each batch, so that rows are others if values are equal.
        self._communicator, self._validate = communicator, validate
        self._is_global = is_global
        self._members: Sequence[int] = ()
        self._latest: dict[str, Any] = {}
        self._is_first = True
        self._forget()

    def _forget(self) -> None:
        self._in_epoch, self._batches = False, 0
        # None until fit validates, and has validated.
        self._training: MetricStates | None = None
        self._validation: MetricStates | None = None

    # States are copied when they are complete, and travel only at the end of the epoch: another
    # callback may evaluate on one rank alone.

    def on_train_begin(self, logs: Any = None) -> None:
        self._latest, self._is_first = {}, True
        self._forget()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._forget()
        self._in_epoch = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1

    def on_test_begin(self, logs: Any = None) -> None:
        """Copy the training metrics, which Keras resets after this to validate."""
        self._members = (self._communicator or default_communicator()).members
        if self._in_epoch:
            self._training, self._batches = states_of(self.model, self._batches), 0

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._training is not None:
            self._batches += 1

    def on_test_end(self, logs: Any = None) -> None:
        if self._training is not None:
            self._validation = states_of(self.model, self._batches)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        ring = self._communicator or default_communicator()
        if ring.size == 1:
            self._forget()
            return
        training = self._training or states_of(self.model, self._batches)
        validated = None if self._validation is None else self._validation.batches
        validation = self._validation or MetricStates()
        self._forget()
        logs = {} if logs is None else logs

        def together() -> dict[str, Any]:
            nonlocal validation
            # Else the part of those that are gone would lack.
            is_due = validated is not None and self._members != ring.members
            if self._validate is not None and is_due:
                self._members = ring.members
                anew = _as_validation(self._validate())
                validation = states_of(self.model, len(anew))
                logs.update(anew)
            return self._combined(logs, training, validation, validated)

        combined = repeated(ring, together)
        logs.update(combined)
        for name in [name for name, value in combined.items() if value is None]:
            del logs[name]
        self._is_first = False
        self._latest = dict(logs)

    def _combined(
        self, logs: Any, training: MetricStates, validation: MetricStates, validated: int | None
    ) -> dict[str, Any]:
        """Combine `logs` into values equal on all ranks; None for what is to be left out."""
        ring = self._communicator or default_communicator()
        results = {**training.results, **_as_validation(validation.results)}
        apart_in_steps, sums = names_in_steps(self.model)
        is_telling = self._is_first and not self._is_global and not model_group(self.model.weights)
        entry = {
            "entries": metric_states.entries_of(logs, results),
            "validated": validated,
            "rates": kept_rates(self.model),
            "digest": training.digest() if is_telling else "",
            "apart": names_apart(self.model),
            "apart in steps": apart_in_steps,
        }
        gathered = ring.all_gather_object(entry)
        refuse(ring, _difference(gathered, ring.members), "averaging of metrics")
        rates = [told["rates"] for told in gathered]
        refuse(ring, diverged(self.model, rates, ring), "comparison of learning rates")
        for wrapper in wrappers_in(self.model):
            require_equal(wrapper)
        warn_of_same_rows([told["digest"] for told in gathered], ring)
        together = metric_states.combined_results(self.model, training, ring)
        if any(told["validated"] for told in gathered):
            others = metric_states.combined_results(self.model, validation, ring)
            together.update(_as_validation(others))
        apart = {name for told in gathered for name in told["apart"]}
        in_steps = {name for told in gathered for name in told["apart in steps"]}
        if self._is_first:
            warn_of_metrics(apart, ring)
            warn_of_functions(in_steps - apart, ring)
            warn_of_last_batches([_of_validation(told["entries"]) for told in gathered], ring)
        means = metric_states.merged([told["entries"] for told in gathered], together, sums)
        left_out = apart | {_VALIDATION + name for name in apart} | in_steps
        return means | {name: None for name in {**logs, **means} if name in left_out}

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Replace the values here too: Keras passes those from before the last `on_epoch_end`."""
        if logs is not None:
            logs.update(self._latest)


def _of_validation(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in logs.items() if name.startswith(_VALIDATION)}


def _as_validation(results: Mapping[str, Any]) -> dict[str, Any]:
    return {_VALIDATION + name: value for name, value in results.items()}


def _difference(gathered: list[Any], members: Sequence[int]) -> Difference | None:
    """Which ranks log under different names; of ranks without validation data in training only."""
    # 0 batches, not None: the rank validated, and had no data.
    has_data = [told["validated"] != 0 for told in gathered]
    first = has_data.index(True) if any(has_data) else 0

    def names(rank: int, *, validation: bool) -> list[str]:
        entries = gathered[rank]["entries"]
        return sorted(n for n in entries if validation or not n.startswith(_VALIDATION))

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
