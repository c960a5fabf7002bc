"""The arguments of `rr.fit`, with their types, as what it is made of gets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.checks.settings import Settings, settings_in
from ringreduce.vocabulary.config import profile_wanted
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import brief

# Arguments, and what else must be equal on all ranks; of data where all have the same.
_EVERYWHERE = "epochs", "initial_epoch", "per_rank_data", "profile", "check", "loss", "run_eagerly"
_OF_DATA = (
    *("batch_size", "shuffle", "steps_per_epoch", "validation_split", "validation_steps"),
    *("validation_batch_size", "validation_data", "validation_freq", "seed"),
)
# Those by which the same data give the same steps.
_OF_STEPS = "batch_size", "shuffle", "steps_per_epoch", "validation_split", "seed"


@dataclass(frozen=True)
class FitArguments:
    """What `rr.fit` was given, where each is described; `Any` is what Keras takes in many forms."""

    model: keras.Model
    x: Any
    y: Any
    batch_size: int | None
    epochs: int
    verbose: str | int
    callbacks: Any
    validation_split: float
    validation_data: Any
    shuffle: bool | str
    class_weight: dict[int, float] | None
    sample_weight: Any
    initial_epoch: int
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None
    validation_freq: Any
    seed: int
    backup_dir: Any
    check: bool | str
    per_rank_data: bool
    batch_share: str | float | None
    profile: bool
    communicator: Communicator | None

    def require_known(self, ring: Communicator) -> None:
        """ConfigError if a value is none of those that are accepted."""
        if self.check not in (True, False, "data", "step"):
            text = f"check is {brief(self.check)}; accepted: True, False, 'data', 'step'"
            raise ConfigError(text, **ring.config.who)

    @property
    def compares_data(self) -> bool:
        """Whether ranks compare what they read."""
        return self.check in (True, "data")

    @property
    def tries_step(self) -> bool:
        """Whether the training step is tried before the first one."""
        return self.check in (True, "step")

    @property
    def without_model(self) -> dict[str, Any]:
        """All but the model, by name."""
        return {name: value for name, value in vars(self).items() if name != "model"}

    @property
    def of_steps(self) -> dict[str, str]:
        """Those from which, with the data, the steps of an epoch follow, as text."""
        return {name: repr(getattr(self, name)) for name in _OF_STEPS}

    @property
    def settings(self) -> Settings:
        """Those that must be equal on all ranks; of data each rank's own may differ."""
        values = {
            **vars(self),
            "profile": self.profile or profile_wanted(),
            "validation_data": "absent" if self.validation_data is None else "given",
            "loss": self.model.loss,
            "run_eagerly": self.model.run_eagerly,
        }
        names = [*_EVERYWHERE, *([] if self.per_rank_data else _OF_DATA)]
        found = settings_in({name: values[name] for name in names})
        return Settings("arguments of rr.fit and compile", found)
