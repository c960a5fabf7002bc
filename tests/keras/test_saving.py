"""A model trained under the wrapper is saved as if that were not there, and goes on unbroken."""

import copy
import itertools
import json
import pickle
import subprocess
import sys
import zipfile
from functools import partial

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers
from keras.optimizers import LossScaleOptimizer

import ringreduce
import ringreduce.keras as rr
from ringreduce.keras.strategies import EveryStep
from ringreduce.testing import ring_of_threads
from tests.models import INPUTS, TARGETS, assert_equal_state, make_model
from tests.processes import clean_environment
from tests.scope import in_full


@pytest.fixture(autouse=True)
def _world_of_one():
    with ringreduce.init():
        yield
    ringreduce.shutdown()


class Doubled(optimizers.SGD):
    """A user's own class, which a file can only name."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(2 * gradient, variable, learning_rate)


@keras.saving.register_keras_serializable("tests")
class Tripled(optimizers.SGD):
    """Another, which Keras knows by a name of its own."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(3 * gradient, variable, learning_rate)


# What a model may be trained with, and saved, with state of its own.
KINDS = {
    "adam": lambda: optimizers.Adam(0.1, beta_1=0.5),
    "averages": lambda: optimizers.SGD(0.1, momentum=0.5, use_ema=True),
    "loss scale": lambda: LossScaleOptimizer(
        optimizers.Adam(0.1), initial_scale=4.0, dynamic_growth_steps=2
    ),
    "schedule": lambda: optimizers.SGD(
        optimizers.schedules.ExponentialDecay(0.5, 2, 0.5), momentum=0.5
    ),
}
if hasattr(optimizers, "MultiOptimizer"):
    KINDS["several"] = lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.SGD(0.1, momentum=0.5), {"(.*/)?first/.*": optimizers.Adam(0.1)}
        )
    )


def fit(model, optimizer=None, epochs=1):
    """Train batch by batch in Python: tracing, or `fit`, would take most of the time here."""
    if optimizer is not None:
        model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
    for _ in range(epochs):
        for start in range(0, len(INPUTS), 6):
            model.train_on_batch(INPUTS[start : start + 6], TARGETS[start : start + 6])
    return model


# Each state that is saved in a way of its own now, the others in full.
ONCE = [kind for kind in ("loss scale", "several") if kind in KINDS]
every_kind = pytest.mark.parametrize(
    "kind", [k if k in ONCE else in_full(k) for k in sorted(KINDS)]
)


def trained(kind, wrap=rr.DistributedOptimizer, epochs=1):
    keras.backend.clear_session(free_memory=False)
    return fit(make_model(), wrap(KINDS[kind]()), epochs=epochs)


def plain(optimizer):
    return optimizer


# Copies.


def by_pickle(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


every_way = pytest.mark.parametrize(
    "copied", [copy.deepcopy, by_pickle], ids=["deepcopy", "pickle"]
)


@pytest.mark.parametrize(
    ("kind", "copied"),
    [
        *(in_full(kind, copy.deepcopy) for kind in sorted(KINDS)),
        *((k, by_pickle) if k == "several" else in_full(k, by_pickle) for k in sorted(KINDS)),
    ],
)
def test_a_copy_is_wrapped_alike_and_begins_anew(kind, copied):
    model = trained(kind, wrap=partial(rr.DistributedOptimizer, bucket_bytes=64))
    again = copied(model.optimizer)
    assert isinstance(again, rr.DistributedOptimizer)
    assert again.get_config() == model.optimizer.get_config()
    assert again._bridge._bucket_bytes == 64
    assert not again.built
    assert int(again.iterations) == 0
    assert_equal_state(model, fit(make_model(), again))


def test_a_copy_is_independent():
    model = trained("adam")
    before = [v.numpy() for v in model.optimizer.variables]
    again = copy.deepcopy(model.optimizer)
    again.learning_rate = 0.5
    fit(make_model(), again)
    for one, other in zip(before, model.optimizer.variables, strict=True):
        assert (one == other.numpy()).all()
    assert float(again.learning_rate) == 0.5


def test_a_communicator_is_shared_by_deepcopy_and_refused_by_pickle():
    def work(comm):
        optimizer = rr.DistributedOptimizer(optimizers.SGD(0.5), comm)
        with pytest.raises(ringreduce.ConfigError, match="communicator of its own cannot be pick"):
            pickle.dumps(optimizer)
        return copy.deepcopy(optimizer).communicator is comm

    assert ring_of_threads(1, work) == [True]


@every_way
def test_local_variables_belong_to_one_model(copied):
    optimizer = rr.DistributedOptimizer(optimizers.SGD(0.5))
    optimizer.register_local_var(keras.Variable(np.zeros(2)))
    with pytest.raises(ringreduce.ConfigError, match="with local variables cannot be copied"):
        copied(optimizer)


@pytest.mark.parametrize("copied", [copy.deepcopy, in_full(by_pickle)], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_compiled_model_has_the_plain_optimizer_and_its_state(copied):
    """Keras copies a model as it saves it."""
    model = trained("adam")
    other = copied(model)
    assert type(other.optimizer) is optimizers.Adam
    assert_equal_state(model, other)


@every_kind
def test_serialized_it_is_the_inner_optimizer(kind):
    inner = KINDS[kind]()
    config = keras.saving.serialize_keras_object(rr.DistributedOptimizer(inner))
    assert config == optimizers.serialize(rr.DistributedOptimizer(inner))
    for again in (
        optimizers.deserialize(copy.deepcopy(config)),
        optimizers.get(copy.deepcopy(config)),
        keras.saving.deserialize_keras_object(copy.deepcopy(config)),
    ):
        assert type(again) is type(inner)
        assert again.get_config() == inner.get_config()


# Checkpoints of TensorFlow's.


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


# Keras itself does not put what a MultiOptimizer holds into a checkpoint, and scales the first loss
# by the initial scale where it builds the optimizer only after that.
IN_CHECKPOINTS = sorted(KINDS.keys() - {"several"})
WRITERS_AND_READERS = [
    (plain, rr.DistributedOptimizer),
    (rr.DistributedOptimizer, plain),
    (rr.DistributedOptimizer, rr.DistributedOptimizer),
]
CHECKPOINTS = list(itertools.product(IN_CHECKPOINTS, WRITERS_AND_READERS))
QUICK = [("averages", WRITERS_AND_READERS[0]), ("loss scale", WRITERS_AND_READERS[1])]


@pytest.mark.parametrize("built", [in_full(True), False], ids=["built", "unbuilt"])
@pytest.mark.parametrize(
    ("kind", "ways"), [case if case in QUICK else in_full(*case) for case in CHECKPOINTS]
)
def test_checkpoints_are_interchangeable(kind, ways, built, tmp_path):
    writer, reader = ways
    model = trained(kind, writer)
    path = checkpoint(model).save(tmp_path / "checkpoint")
    keras.backend.clear_session(free_memory=False)
    other = make_model()
    other.compile(optimizer=reader(KINDS[kind]()), loss="mse", run_eagerly=True)
    if built or kind == "loss scale":
        other.optimizer.build(other.trainable_variables)
    status = checkpoint(other).restore(path)
    assert_equal_state(fit(model), fit(other))
    status.assert_consumed()


def test_a_checkpoint_manager_keeps_and_restores_the_latest(tmp_path):
    model = trained("adam", epochs=1)
    manager = tf.train.CheckpointManager(checkpoint(model), tmp_path, max_to_keep=1)
    for _ in range(2):
        fit(model)
        manager.save()
    assert len(manager.checkpoints) == 1
    other = make_model()
    other.compile(optimizer=rr.DistributedOptimizer(KINDS["adam"]()), loss="mse", run_eagerly=True)
    again = tf.train.CheckpointManager(checkpoint(other), tmp_path, max_to_keep=1)
    assert again.restore_or_initialize() == manager.latest_checkpoint
    assert_equal_state(fit(model), fit(other))


# Keras's files.


def names_in(path):
    """Paths of all arrays in a file of weights, or in that of a saved model."""
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            path = archive.extract("model.weights.h5", path.parent / f"{path.stem} unpacked")
    names = []
    with h5py.File(path) as file:
        file.visititems(lambda name, item: names.append((name, getattr(item, "shape", None))))
    return sorted(names)


@every_kind
def test_a_file_or_checkpoint_holds_the_same_as_without_the_wrapper(kind, tmp_path):
    """The optimizer's state once, as often as Keras itself does."""
    found = []
    for wrap in (plain, rr.DistributedOptimizer):
        model, path = trained(kind, wrap), tmp_path / wrap.__name__
        model.save(path.with_suffix(".keras"))
        model.save_weights(path.with_suffix(".weights.h5"))
        names = [names_in(path.with_suffix(suffix)) for suffix in (".keras", ".weights.h5")]
        variables = tf.train.list_variables(checkpoint(model).save(tmp_path / "model"))
        found.append([*names, sorted(variables)])
    assert found[0] == found[1]


# What the wrapper has written goes to plain Keras where ringreduce is not installed, below.
@pytest.mark.parametrize(
    ("writer", "reader"),
    [WRITERS_AND_READERS[0], *(in_full(*ways) for ways in WRITERS_AND_READERS[1:])],
)
@pytest.mark.parametrize("kind", [k if k == "loss scale" else in_full(k) for k in sorted(KINDS)])
def test_weights_are_interchangeable(kind, writer, reader, tmp_path):
    model = trained(kind, writer, epochs=2)
    model.save_weights(tmp_path / "model.weights.h5")
    other = trained(kind, reader, epochs=1)
    other.load_weights(tmp_path / "model.weights.h5")
    assert_equal_state(model, other)
    assert_equal_state(fit(model), fit(other))


ELSEWHERE = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ringreduce":
            raise ModuleNotFoundError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())

import warnings
import keras, numpy
from keras import optimizers

folder, kinds = sys.argv[1], sys.argv[2:]
with numpy.load(f"{folder}/data.npz") as data:
    inputs, targets = data["inputs"], data["targets"]
arrays, classes = {}, {}

def keep(name, variables):
    arrays.update({f"{name}.{i:02}": v.numpy() for i, v in enumerate(variables)})

for kind in kinds:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = keras.models.load_model(f"{folder}/{kind}.keras")
        classes[kind] = type(model.optimizer).__module__ + "." + type(model.optimizer).__name__
        keep(f"{kind} loaded", [*model.variables, *model.optimizer.variables])
        model.load_weights(f"{folder}/{kind}.weights.h5")
        keep(f"{kind} weights", [*model.variables, *model.optimizer.variables])
    assert model.run_eagerly
    for start in range(0, len(inputs), 6):
        model.train_on_batch(inputs[start : start + 6], targets[start : start + 6])
    keep(f"{kind} trained", [*model.variables, *model.optimizer.variables])
model = keras.models.load_model(f"{folder}/normalized.keras")
assert type(model.layers[-1]) is keras.layers.BatchNormalization
assert model.layers[-1].momentum == 0.5
arrays["normalized."] = model.predict(inputs, verbose=0)
assert not any(name.partition(".")[0] == "ringreduce" for name in sys.modules)
numpy.savez(f"{folder}/elsewhere.npz", **arrays)
print(json.dumps(classes))
"""


def test_files_load_and_train_on_where_ringreduce_is_not_installed(tmp_path):
    """They have Keras's own optimizers and layers there."""
    np.savez(tmp_path / "data.npz", inputs=INPUTS, targets=TARGETS)
    expected = {}

    def keep(name, model):
        expected[name] = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]

    for kind in ONCE:
        model = trained(kind)
        model.save(tmp_path / f"{kind}.keras")
        model.save_weights(tmp_path / f"{kind}.weights.h5")
        keep(f"{kind} loaded", model)
        keep(f"{kind} weights", model)
        keep(f"{kind} trained", fit(model))
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(4), rr.SyncBatchNormalization(momentum=0.5)]
    model = keras.Sequential([keras.Input(INPUTS.shape[1:]), *layers])
    expected["normalized"] = [model.predict(INPUTS, verbose=0)]
    model.save(tmp_path / "normalized.keras")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path), *ONCE],
        capture_output=True,
        text=True,
        timeout=100,
        env=clean_environment(),
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "elsewhere.npz") as found:
        for name, arrays in expected.items():
            keys = [key for key in sorted(found.files) if key.startswith(f"{name}.")]
            assert len(arrays) > 6 or name == "normalized"
            assert [a.tobytes() for a in arrays] == [found[key].tobytes() for key in keys], name
    classes = {kind: type(KINDS[kind]()) for kind in ONCE}
    names = {kind: f"{inner.__module__}.{inner.__name__}" for kind, inner in classes.items()}
    assert json.loads(done.stdout.splitlines()[-1]) == names


# load_model.


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        ("adam", plain),
        *(
            (kind, rr.DistributedOptimizer)
            if kind in ONCE
            else in_full(kind, rr.DistributedOptimizer)
            for kind in sorted(KINDS)
        ),
    ],
)
def test_a_loaded_model_trains_on_as_if_it_had_not_been_saved(kind, wrap, tmp_path):
    """Wrapped, also if plain Keras has saved it."""
    model = trained(kind, wrap)
    model.save(tmp_path / "model.keras")
    loaded = rr.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, rr.DistributedOptimizer)
    assert_equal_state(model, loaded)
    assert_equal_state(fit(model), fit(loaded))


def test_options_are_those_of_the_wrapper(tmp_path):
    trained("adam").save(tmp_path / "model.keras")
    loaded = rr.load_model(tmp_path / "model.keras", bucket_bytes=64)
    assert loaded.optimizer._bridge._bucket_bytes == 64
    with pytest.raises(ringreduce.ConfigError, match="bucket_bytes is 0"):
        rr.load_model(tmp_path / "model.keras", bucket_bytes=0)


def trained_with(inner=None, **options):
    wrap = partial(rr.DistributedOptimizer, inner or KINDS["adam"](), **options)
    model = fit(make_model(), wrap())
    model.optimizer.settle()
    return model


def test_accumulation_goes_on_in_a_loaded_model(tmp_path):
    trained_with(accumulate_steps=2).save(tmp_path / "model.keras")
    loaded = rr.load_model(tmp_path / "model.keras")
    assert int(fit(loaded, epochs=2).optimizer.iterations) == 1 + 2
    again = rr.load_model(tmp_path / "model.keras", accumulate_steps=1)
    assert int(fit(again, epochs=2).optimizer.iterations) == 1 + 4


@pytest.mark.parametrize(
    "options",
    [
        in_full({"strategy": rr.LocalSGD(3, overlap=1)}),
        {"strategy": rr.DiLoCo(1), "compression": "int8"},
        {"compression": rr.PowerSGD(2, exclude=["bias"])},
        {"compression": "fp16", "op": "sum", "bucket_bytes": 64},
        {"update_rows": "touched", "check_numerics": "warn", "scale_local_gradients": True},
        in_full({"sparse_as_dense": True}),
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.filterwarnings("ignore::ringreduce.keras.mistakes.ParityWarning")
def test_options_stay_in_a_loaded_model(options, tmp_path):
    model = trained_with(**options)
    model.save(tmp_path / "first.keras")
    loaded = rr.load_model(tmp_path / "first.keras")
    assert loaded.optimizer.settings() == model.optimizer.settings()
    assert_equal_state(model, loaded)
    # Every option is in the file, so nothing is left out where it is saved again.
    loaded.save(tmp_path / "second.keras")
    assert names_in(tmp_path / "first.keras") == names_in(tmp_path / "second.keras")
    plain_again = keras.models.load_model(tmp_path / "second.keras")
    assert_equal_state(model, plain_again)
    assert type(plain_again.optimizer) is optimizers.Adam


@pytest.mark.parametrize("inner", [in_full(Doubled), Tripled, in_full("several")])
def test_momentum_of_the_outer_optimizer_stays_in_a_loaded_model(inner, tmp_path):
    """Also with a class of the user's, or several optimizers in one."""
    plain_one = KINDS[inner]() if isinstance(inner, str) else inner(0.125)
    model = trained_with(plain_one, strategy=rr.DiLoCo(2))
    model.save(tmp_path / "model.keras")
    loaded = rr.load_model(tmp_path / "model.keras", custom_objects={"Doubled": Doubled})
    assert_equal_state(fit(model), fit(loaded))


def test_local_variables_stay_so_in_a_loaded_model(tmp_path):
    model = make_model()
    model.compile(rr.DistributedOptimizer(optimizers.SGD(0.5)), loss="mse", run_eagerly=True)
    model.optimizer.register_local_var(model.trainable_variables[1])
    fit(model).save(tmp_path / "model.keras")
    loaded = rr.load_model(tmp_path / "model.keras")
    first, _, *others = loaded.trainable_variables
    shared = loaded.optimizer.shared(loaded.trainable_variables)
    assert [id(each) for each in shared] == [id(each) for each in (first, *others)]


class Whole(EveryStep):
    """A strategy of the user's, which a file cannot restore."""


@pytest.mark.parametrize(
    "strategy", [Whole(), rr.DiLoCo(1, outer=optimizers.SGD(0.5))], ids=["own", "outer"]
)
def test_what_a_file_cannot_restore_is_asked_for(strategy, tmp_path):
    trained_with(strategy=strategy).save(tmp_path / "model.keras")
    with pytest.raises(ringreduce.ConfigError, match=r"rr\.load_model\(path, strategy=\.\.\.\)"):
        rr.load_model(tmp_path / "model.keras")
    loaded = rr.load_model(tmp_path / "model.keras", strategy=strategy)
    assert isinstance(loaded.optimizer, rr.DistributedOptimizer)
    loaded = rr.load_model(tmp_path / "model.keras", compile=False)
    assert getattr(loaded, "optimizer", None) is None


def test_options_are_found_in_a_folder_too(tmp_path):
    model = trained_with(accumulate_steps=2)
    keras.saving.save_model(model, tmp_path / "folder", zipped=False)
    loaded = rr.load_model(tmp_path / "folder")
    assert loaded.optimizer.settings() == model.optimizer.settings()


def test_a_model_without_optimizer_stays_without(tmp_path):
    make_model().save(tmp_path / "bare.keras")
    assert getattr(rr.load_model(tmp_path / "bare.keras"), "optimizer", None) is None


def test_a_custom_optimizer_needs_custom_objects(tmp_path):
    model = fit(make_model(), rr.DistributedOptimizer(Doubled(0.125, momentum=0.5)))
    model.save(tmp_path / "model.keras")
    with pytest.raises(TypeError, match="Could not locate class 'Doubled'"):
        rr.load_model(tmp_path / "model.keras")
    loaded = rr.load_model(tmp_path / "model.keras", custom_objects={"Doubled": Doubled})
    assert type(loaded.optimizer.inner_optimizer) is Doubled
    assert_equal_state(fit(model), fit(loaded))


class Own(keras.Model):
    """A model that wraps its optimizer by itself when it is loaded."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)

    def compile_from_config(self, config):
        self.compile(
            optimizer=rr.DistributedOptimizer(optimizers.SGD(0.5)), loss="mse", run_eagerly=True
        )


def test_what_is_wrapped_already_is_left_as_it_is(tmp_path):
    fit(Own(), optimizers.SGD(0.5)).save(tmp_path / "model.keras")
    loaded = rr.load_model(tmp_path / "model.keras", custom_objects={"Own": Own})
    assert type(loaded.optimizer.inner_optimizer) is optimizers.SGD


def test_after_loading_all_ranks_go_on_from_rank_0(tmp_path):
    """Even where they found different files."""
    for rank in (0, 1):
        model = trained("averages", epochs=1 + rank)
        model.save(tmp_path / f"{rank}.keras")

    def work(comm):
        loaded = rr.load_model(tmp_path / f"{comm.rank}.keras", communicator=comm)
        before = [v.numpy() for v in (*loaded.weights, *loaded.optimizer.variables)]
        loaded.optimizer.build(loaded.trainable_variables)
        return before, [v.numpy() for v in (*loaded.weights, *loaded.optimizer.variables)]

    (zero, first), (one, second) = ring_of_threads(2, work)
    assert any((a != b).any() for a, b in zip(zero, one, strict=True))
    for expected, *actual in zip(zero, first, second, strict=True):
        assert all(expected.tobytes() == a.tobytes() for a in actual)
