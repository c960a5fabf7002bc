"""Has callbacks act on rank 0 alone, such as those that write; the next rank 0 takes them over."""

import contextlib
import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.process import default_communicator
from ringreduce.communicator.rank_zero import on_rank_zero
from ringreduce.keras import private
from ringreduce.keras.callbacks.watching import HOOKS, that_look
from ringreduce.keras.elastic.fields import plain_fields
from ringreduce.keras.layers.groups import training_ranks
from ringreduce.keras.layers.part import has_parts
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import brief

# Keras's own; Orbax is optional in it.
_NAMES = ("ModelCheckpoint", "BackupAndRestore", "TensorBoard", "CSVLogger", "OrbaxCheckpoint")
WRITERS = tuple(writer for name in _NAMES if (writer := getattr(keras.callbacks, name, None)))
_ORBAX = getattr(keras.callbacks, "OrbaxCheckpoint", ())  # Keras 3.12 has none.
# Packages whose callbacks record a run, print, or write. None is imported: a class is known by its
# module, and so is a subclass of it.
_RECORDERS = {
    *("aim", "clearml", "comet_ml", "dagshub", "dvclive", "guild", "livelossplot", "mlflow"),
    *("neptune", "neptunecontrib", "neptune_tensorflow_keras", "polyaxon", "swanlab"),
    *("tensorboard", "tqdm", "trains", "verta", "wandb"),
}


def acts_once(callback: Any) -> bool:
    """Whether only rank 0 should call it, as far as its class says."""
    packages = {base.__module__.partition(".")[0] for base in type(callback).__mro__}
    return isinstance(callback, WRITERS) or not packages.isdisjoint(_RECORDERS)


class Forwarding(keras.callbacks.Callback):
    """Interface: a callback that calls hooks of others, `members`, in each of its own."""

    looks_at_batches = False  # For itself.
    members: Sequence[Any] = ()

    def run(self, hook: str, *arguments: Any, **options: Any) -> None:
        """Call `hook` of the members, with its arguments."""
        raise NotImplementedError


def _forwarding(hook: str) -> Callable[..., None]:
    def forward(self: Forwarding, *arguments: Any, **options: Any) -> None:
        if hook.startswith("set_"):
            getattr(keras.callbacks.Callback, hook)(self, *arguments, **options)
        self.run(hook, *arguments, **options)

    forward.__name__ = hook
    forward.__doc__ = f"Calls `{hook}` of the others."
    return forward


# Not written out, so that a hook which a later Keras adds is forwarded too.
for _hook in dir(keras.callbacks.Callback):
    if _hook.startswith(("on_", "set_")):
        setattr(Forwarding, _hook, _forwarding(_hook))


class OnRankZero(Forwarding):
    """Lets a callback act on rank 0 only, such as one that writes files.

    On other ranks none of its hooks is called, so it must not make collective calls itself. If the
    model or its optimizer has parts, the others wait in each hook that it has, but for those of
    validation batches, and give theirs if it saves. Within
    `Together`, what it changes in ``on_train_begin`` (weights, optimizer, initial epoch) goes to
    all ranks.

    Raises:
        ConfigError: `callback` is no Keras callback.
    """

    def __init__(self, callback: Any, communicator: Communicator | None = None) -> None:
        super().__init__()
        self.callback = checked(callback)
        self.members = [self.callback]
        self._communicator = communicator
        # Whether training has begun on this rank without it; the end of an epoch that rank 0's may
        # not have seen.
        self._has_missed, self._epoch, self._began = False, 0, 0.0
        self._ending: Callable[[], None] | None = None
        # Numbers and texts by name that rank 0's has had since the last epoch.
        self.state: dict[str, Any] = {}

    def run(self, hook: str, *arguments: Any, **options: Any) -> None:
        """Call a hook of it, on rank 0; with parts in the model the others wait and help."""
        call = partial(getattr(self.callback, hook), *arguments, **options)
        every = every_rank(self)
        if hook == "on_train_begin":
            self._has_missed = every.rank != 0
        elif hook == "on_epoch_begin":
            self._epoch, self._began = arguments[0], time.time()
        if hook.startswith("set_") or self.model is None or not self._needs_all(hook):
            if every.rank == 0:
                if self._has_missed and not hook.startswith("set_"):
                    self._take_over()
                    if hook != "on_epoch_begin":
                        self._begin_epoch()
                call()
            elif hook == "on_epoch_end":  # Later callbacks add to logs, such as the rate.
                self._ending = partial(call.func, *map(copy.copy, arguments), **options)
        elif getattr(type(self.callback), hook) is not getattr(keras.callbacks.Callback, hook):
            on_rank_zero(call, communicator=every)

    @property
    def is_acting(self) -> bool:
        """Whether this rank calls it."""
        return every_rank(self).rank == 0

    def _needs_all(self, hook: str) -> bool:
        """Whether all ranks call this hook at the same point, and have parts to save in it.

        Raises ConfigError for a callback that would save rank 0's parts as if they were the whole.
        """
        if not has_parts(self.model):
            return False
        if isinstance(self.callback, _ORBAX):
            raise ConfigError(
                "OrbaxCheckpoint cannot save this model: of some variables, or of its optimizer's, "
                "each rank has a piece, and it would write those of rank 0 alone",
                **every_rank(self).config.who,
                remedy="Use keras.callbacks.ModelCheckpoint, to which all ranks give their pieces.",
            )
        # Ranks make other numbers of calls where nobody looks at batches, and of validation's.
        is_apart = "batch" in hook and not (hook in HOOKS and that_look([self.callback]))
        return not is_apart

    def _take_over(self) -> None:
        """Have it go on where that of the rank 0 that was lost has ended its last epoch."""
        callback = self.callback
        callback.set_params(self.params)
        callback.set_model(self.model)
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True
        if not isinstance(callback, keras.callbacks.BackupAndRestore):  # Which would restore.
            callback.on_train_begin()
        if not isinstance(callback, keras.callbacks.CSVLogger):  # Whose file says all.
            vars(callback).update(self.state)
        self._has_missed = False

    def _begin_epoch(self) -> None:
        """Begin the epoch for it that all ranks are in."""
        self.callback.on_epoch_begin(self._epoch)
        if isinstance(self.callback, keras.callbacks.ProgbarLogger):
            # Else it would divide the time since now by all steps of the epoch.
            private.count_from(self.callback, self._began)

    def state_now(self) -> list[Any]:
        """Class and `state`, on rank 0; if another was lost before, its epoch ends once more."""
        if self._ending is not None:
            if isinstance(self.callback, keras.callbacks.CSVLogger):
                drop_rows(self.callback, self._epoch)
            self._take_over()
            self._begin_epoch()
            self._ending()
            self._ending = None
        return [type(self.callback).__name__, plain_fields(self.callback)]


def states_now(members: Sequence[OnRankZero], ring: Communicator) -> list[Any]:
    """What the next rank 0 needs of rank 0's `members`; nothing on other ranks."""
    return [member.state_now() for member in members] if ring.rank == 0 else []


def take_states(members: Sequence[OnRankZero], states: Sequence[Any]) -> None:
    """Keep what rank 0 has told by `states_now`; in a loop ranks may lack some of `members`."""
    for member, (kind, state) in zip(members, states, strict=False):
        member._ending = None
        if kind == type(member.callback).__name__:
            member.state = state
            vars(member.callback).update(state)  # Which the next training may begin with.


def drop_rows(logger: keras.callbacks.CSVLogger, epoch: int) -> None:
    """Take what it has written of `epoch` and later ones, and half a row, out of its file."""

    def is_kept(row: str) -> bool:
        number = row.partition(logger.sep)[0]
        return row.endswith("\n") and not (number.isdigit() and int(number) >= epoch)

    with contextlib.suppress(FileNotFoundError):
        with open(logger.filename, newline="") as file:
            rows = [row for row in file if is_kept(row)]
        with open(logger.filename, "w", newline="") as file:
            file.writelines(rows)


def every_rank(callback: Any) -> Communicator:
    """All ranks that train its model, also those with other pieces of it."""
    model, ring = callback.model, callback._communicator or default_communicator()
    return ring if model is None else training_ranks(model.weights, ring)


def checked(callback: Any) -> Any:
    """Return `callback` if it is a Keras callback, else raise ConfigError."""
    if not isinstance(callback, keras.callbacks.Callback):
        remedy = "Pass callbacks alone, such as keras.callbacks.EarlyStopping(patience=3)."
        if isinstance(callback, type):
            remedy = f"Pass a callback, not its class: {callback.__name__}(...)."
        text = f"got {brief(callback)}, which is no keras.callbacks.Callback"
        raise ConfigError(text, remedy=remedy)
    return callback
