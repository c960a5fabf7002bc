"""All private names of Keras that this package uses, checked on import; it changes none.

Of names of modules a version that nobody has tried may lack some: what needs them fails by name.
Attributes must be there: one that we set, or a method that we override, would have no effect.
"""

from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

import keras

from ringreduce.tensorflow.private import Absent, named
from ringreduce.vocabulary.errors import ConfigError

_FOLDER = str(Path(str(keras.__file__)).parent)


def _missing(name: str) -> ConfigError:
    return ConfigError(
        f"Keras {keras.__version__} has no {name}, which ringreduce needs for this",
        remedy="Install Keras 3.12 to 3.16.",
    )


_DATA_ADAPTERS = "keras.src.trainers.data_adapters"
# Names under which a user has registered classes.
registered_names = named("keras.src.saving.object_registration", "GLOBAL_CUSTOM_NAMES", _missing)
# Names under which Keras exports classes of its own, which it writes into files.
exported_names = named("keras.src.api_export", "REGISTERED_OBJS_TO_NAMES", _missing)
# The `tf.TensorSpec` of a list of batches, with any number of rows.
spec_of_batches = named(f"{_DATA_ADAPTERS}.data_adapter_utils", "get_tensor_spec", _missing)
# Makes (x, y, weights) of (x, y), by the weight of each class.
with_class_weights = named(
    f"{_DATA_ADAPTERS}.tf_dataset_adapter", "make_class_weight_map_fn", _missing
)
_global_attribute = named("keras.src.backend.common.global_state", "get_global_attribute", _missing)
# A base of objects that Keras saves as a group of their own.
KerasSaveable = named("keras.src.saving.keras_saveable", "KerasSaveable", _missing)
if isinstance(KerasSaveable, Absent):
    KerasSaveable = object  # Then the state of strategies is not saved.
# Makes a tf.data.Dataset of a PyDataset, with its workers; to be told of epochs.
adapter_of_py_dataset = named(f"{_DATA_ADAPTERS}.py_dataset_adapter", "PyDatasetAdapter", _missing)


# Whether an optimizer decays a variable, by its key; the first name is that of Keras 3.16.
_DECAYED = "_weight_decay_by_var_key"


def _has(owner: type, name: str) -> bool:
    """Whether instances have `name`: as a member of the class, or set by one of its methods."""
    members = [member for kind in owner.__mro__ for member in vars(kind).values()]
    codes = [code for member in members if (code := getattr(member, "__code__", None)) is not None]
    return hasattr(owner, name) or any(name in code.co_names for code in codes)


if not _has(keras.optimizers.Optimizer, _DECAYED):
    _DECAYED = "_exclude_from_weight_decay_cache"

for _owner, _names in (
    (keras.optimizers.Optimizer, ("_trainable_variables", "_iterations", "_learning_rate")),
    # For TensorFlow's checkpoints.
    (keras.optimizers.Optimizer, ("_lookup_dependency", "_trackable_children")),
    (keras.optimizers.Optimizer, ("_maybe_initialize_trackable",)),
    (keras.optimizers.Optimizer, ("_var_key", "_trainable_variables_indices", "_variables")),
    (keras.optimizers.RMSprop, ("_momentums",)),
    (keras.optimizers.Optimizer, ("_use_weight_decay", _DECAYED)),
    (keras.Variable, ("_value", "_path")),
    (keras.Layer, ("_trainable_variables", "_non_trainable_variables")),
    (keras.layers.BatchNormalization, ("_moments",)),
    (keras.layers.MultiHeadAttention, ("_output_dense", "_dropout_layer")),
    (keras.layers.GroupQueryAttention, ("_output_dense", "_dropout_layer")),
    (keras.callbacks.BackupAndRestore, ("_weights_path", "_training_metadata_path")),
    (keras.callbacks.BackupAndRestore, ("_save_model", "_current_epoch")),
    (keras.Layer, ("_flatten_layers", "_layers")),
    (keras.Model, ("_initial_epoch", "_compile_loss")),
    (keras.Model, ("_should_eval", "_distribute_strategy")),
    (keras.callbacks.TensorBoard, ("_start_batch", "_stop_batch")),
    (keras.callbacks.ProgbarLogger, ("_maybe_init_progbar", "progbar")),
    (keras.utils.Progbar, ("_start",)),
):
    for _name in _names:
        if not _has(_owner, _name):
            raise _missing(f"{_owner.__name__}.{_name}")


_VERSION = tuple(map(int, keras.__version__.split(".")[:2]))
# Whether Keras warns of data that end although nobody has said how many steps an epoch has.
WARNS_OF_ANY_END = _VERSION < (3, 16)

# The variables that a built optimizer is built for.
trained_variables: Callable[[Any], list[Any]] = attrgetter("_trainable_variables")
# A variable's place, by its key, in each of `lists_of_state` of a built optimizer.
places_in_lists: Callable[[Any], dict[Any, int]] = attrgetter("_trainable_variables_indices")
# A layer's variables that were trainable when they were made, and may be frozen now.
made_to_be_trained: Callable[[Any], list[Any]] = attrgetter("_trainable_variables")
# And those that were not, of the layer itself.
made_not_to_be_trained: Callable[[Any], list[Any]] = attrgetter("_non_trainable_variables")
# The whole loss of a compiled model, by targets and outputs.
compiled_loss: Callable[[Any], Any] = attrgetter("_compile_loss")
# The epoch that BackupAndRestore has told a model's `fit` to begin with.
initial_epoch_of: Callable[[Any], int | None] = attrgetter("_initial_epoch")
# Where BackupAndRestore keeps weights, and as JSON the epoch.
files_of_backup: Callable[[Any], tuple[str, str]]
files_of_backup = attrgetter("_weights_path", "_training_metadata_path")


def save_backups_by(
    backup: Any,
    save: Callable[[Any, Any, int], None],
    goes_on_after: Callable[[int | None], bool],
) -> None:
    """Have a BackupAndRestore call `save` with itself, its model and the epoch to begin with.

    Where it saves after batches, it does so if training `goes_on_after` that one; and after an
    epoch, which has no number, if it can go on there.
    """
    kind = type(backup)

    def should_save(batch: int) -> bool:
        return bool(kind._should_save_on_batch(backup, batch) and goes_on_after(batch))

    def on_epoch_end(epoch: int, logs: Any = None) -> None:
        kind.on_epoch_end(backup, epoch, logs)
        if backup.save_freq != "epoch" and goes_on_after(None):
            backup._save_model()

    backup._save_model = lambda: save(backup, backup.model, backup._current_epoch)
    backup._should_save_on_batch, backup.on_epoch_end = should_save, on_epoch_end


def count_from(bar: keras.callbacks.ProgbarLogger, began: float) -> None:
    """Have a bar whose epoch has begun show the time since `began`, of `time.time`."""
    bar._maybe_init_progbar()
    bar.progbar._start = began


def set_path(variable: Any, path: str) -> None:
    """Give a Keras variable the path of another, by which optimizers name what they keep."""
    variable._path = path


def unbuild(optimizer: keras.Optimizer) -> None:
    """Have `optimizer`, which is built, forget its state but for the step and the rate."""
    kept = optimizer._iterations, optimizer._learning_rate
    optimizer._variables[:] = [v for v in optimizer._variables if any(v is k for k in kept)]
    optimizer._trainable_variables_indices, optimizer._trainable_variables = {}, []
    optimizer.built = False


def decay_alike(optimizer: keras.Optimizer, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Have `optimizer` decay the second of each pair of variables if it would the first."""
    for variable, other in pairs if getattr(optimizer, "weight_decay", None) else ():
        if hasattr(optimizer, "_is_excluded_from_weight_decay"):
            # Keras 3.16, whose other method knows no variables but those that it is built for.
            is_decayed = not optimizer._is_excluded_from_weight_decay(variable)
        else:
            is_decayed = optimizer._use_weight_decay(variable)
        getattr(optimizer, _DECAYED)[key_of(optimizer, other)] = is_decayed


def key_of(optimizer: keras.Optimizer, variable: Any) -> Any:
    """The key by which a built optimizer finds its state for `variable`."""
    return optimizer._var_key(variable)


def lists_of_state(optimizer: keras.Optimizer) -> dict[str, list[Any]]:
    """List a built optimizer's states of its trained variables, or None, by attribute."""
    ids = {id(state) for state in optimizer.variables}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, list)
        and name != "_variables"
        and len(value) == len(trained_variables(optimizer))
        and all(each is None or id(each) in ids for each in value)
    }


def has_plain_fit(model: keras.Model) -> bool:
    """Whether `model.fit` and what that calls are Keras's own, replaced neither there nor here."""
    names = "fit", "evaluate", "make_train_function"
    methods = [getattr(model, name) for name in names]
    codes = [getattr(getattr(method, "replaces", method), "__code__", None) for method in methods]
    return all(code is not None and code.co_filename.startswith(_FOLDER) for code in codes)


def strategy_of(model: keras.Model) -> Any:
    """The strategy of tf.distribute in whose scope `model` was made; None: in no scope."""
    return getattr(model, "_distribute_strategy", None)


def is_of_keras(what: Any) -> bool:
    """Whether a class or function is Keras's or ours, not the user's."""
    return str(getattr(what, "__module__", "")).startswith(("keras.", "ringreduce."))


def logits_of(output: Any) -> Any:
    """What softmax or sigmoid has made `output` of, which Keras's losses take instead, or None."""
    return getattr(output, "_keras_logits", None)


def loss_tracker_of(model: keras.Model) -> keras.metrics.Metric:
    """The metric in which a compiled model's training step notes its loss."""
    return model._loss_tracker


def learning_rate_of(optimizer: keras.Optimizer) -> Any:
    """The learning rate as given: a variable, schedule or function; None where it has none."""
    return getattr(optimizer, "_learning_rate", None)


def layers_of(model: keras.Model) -> list[Any]:
    """All layers in `model`, those within others included, without itself."""
    return model._flatten_layers(include_self=False)  # type: ignore[no-any-return]


def layers_within(layer: keras.Layer) -> list[Any]:
    """The layers that a layer or model has itself, without those within them."""
    return layer._flatten_layers(include_self=False, recursive=False)  # type: ignore[no-any-return]


def has_layers(layer: keras.Layer) -> bool:
    """Whether other layers are within it."""
    return bool(layer._layers)


def save_as(kind: Any, plain: Any) -> None:
    """Have Keras write what it writes for the class `plain`, for another with its configuration.

    It looks up names of its own and users' classes here, and what to load for a name elsewhere: it
    loads `plain` again.
    """
    kind.__name__, kind.__module__ = plain.__name__, plain.__module__
    for names in (exported_names, registered_names):
        # Without them files have the name of `kind`.
        if not isinstance(names, Absent) and plain in names:
            names[kind] = names[plain]


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Have `fit` begin with that epoch, or where its caller says."""
    model._initial_epoch = epoch


def global_seed_generator() -> Any:
    """The generator of `keras.random` without a seed, if it was used; or None."""
    return _global_attribute("global_seed_generator")
