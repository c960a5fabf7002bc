"""A model trained under the wrapper is saved as if that were not there, and goes on unbroken."""

import copy
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
from keras.optimizers import SGD, Adam, LossScaleOptimizer

import ringreduce.keras as rr
from ringreduce import ConfigError
from ringreduce.keras import DistributedOptimizer
from ringreduce.keras.optimizer import saving
from ringreduce.keras.strategies.base import EveryStep
from ringreduce.testing import ring_of_threads
from tests.models import INPUTS, TARGETS, assert_equal_state, make_model
from tests.processes import clean_environment
from tests.scope import in_full

pytestmark = pytest.mark.usefixtures("world_of_one")


class Doubled(SGD):
    """A user's own class, which a file can only name."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(2 * gradient, variable, learning_rate)


@keras.saving.register_keras_serializable("tests")
class Tripled(SGD):
    """Another, which Keras knows by a name of its own."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(3 * gradient, variable, learning_rate)


# What a model may be trained with, and saved, with state of its own.
KINDS = {
    "adam": lambda: Adam(0.1, beta_1=0.5),
    "averages": lambda: SGD(0.1, momentum=0.5, use_ema=True),
    "loss scale": lambda: LossScaleOptimizer(Adam(0.1), initial_scale=4.0, dynamic_growth_steps=2),
    "schedule": lambda: SGD(optimizers.schedules.ExponentialDecay(0.5, 2, 0.5), momentum=0.5),
}
if hasattr(optimizers, "MultiOptimizer"):
    KINDS["several"] = lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(SGD(0.1, momentum=0.5), {"(.*/)?first/.*": Adam(0.1)})
    )


def compiled(optimizer):
    model = make_model()
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
    return model


def fit(model, epochs=1):
    """Train batch by batch in Python: tracing, or `fit`, would take most of the time here."""
    for _ in range(epochs):
        for start in range(0, len(INPUTS), 6):
            model.train_on_batch(INPUTS[start : start + 6], TARGETS[start : start + 6])
    return model


# Each state that is saved in a way of its own now, the others in full.
ONCE = [kind for kind in ("loss scale", "several") if kind in KINDS]
every_kind = pytest.mark.parametrize(
    "kind", [k if k in ONCE else in_full(k) for k in sorted(KINDS)]
)


def untrained(kind, wrap):
    keras.backend.clear_session(free_memory=False)
    return compiled(wrap(KINDS[kind]()))


def trained(kind, wrap=DistributedOptimizer, epochs=1):
    return fit(untrained(kind, wrap), epochs)


def plain(optimizer):
    return optimizer


wrapped = DistributedOptimizer


def by_pickle(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize(
    ("kind", "copied"),
    [(ONCE[-1], by_pickle), *(in_full(kind, copy.deepcopy) for kind in sorted(KINDS))],
)
def test_a_copy_is_wrapped_alike_and_begins_anew(kind, copied):
    model = trained(kind, wrap=partial(DistributedOptimizer, bucket_bytes=64))
    again = copied(model.optimizer)
    assert isinstance(again, DistributedOptimizer)
    assert again.get_config() == model.optimizer.get_config()
    assert again._bridge._bucket_bytes == 64
    assert not again.built
    assert int(again.iterations) == 0
    assert_equal_state(model, fit(compiled(again)))


def test_a_communicator_is_shared_by_deepcopy_and_refused_by_pickle():
    def work(comm):
        optimizer = DistributedOptimizer(SGD(0.5), comm)
        with pytest.raises(ConfigError, match="communicator of its own cannot be pick"):
            pickle.dumps(optimizer)
        return copy.deepcopy(optimizer).communicator is comm

    assert ring_of_threads(1, work) == [True]


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_local_variables_belong_to_one_model(copied):
    optimizer = DistributedOptimizer(SGD(0.5))
    optimizer.register_local_var(keras.Variable(np.zeros(2)))
    with pytest.raises(ConfigError, match="with local variables cannot be copied"):
        copied(optimizer)


@pytest.mark.parametrize("copied", [copy.deepcopy, in_full(by_pickle)])
def test_a_copy_of_a_compiled_model_has_the_plain_optimizer_and_its_state(copied):
    """Keras copies a model as it saves it."""
    model = trained("adam")
    other = copied(model)
    assert type(other.optimizer) is Adam
    assert_equal_state(model, other)


@every_kind
def test_serialized_it_is_the_inner_optimizer(kind):
    inner = KINDS[kind]()
    config = keras.saving.serialize_keras_object(DistributedOptimizer(inner))
    assert config == optimizers.serialize(DistributedOptimizer(inner))
    readers = optimizers.deserialize, optimizers.get, keras.saving.deserialize_keras_object
    for again in (read(copy.deepcopy(config)) for read in readers):
        assert type(again) is type(inner)
        assert again.get_config() == inner.get_config()


def named_in(config):
    """What a configuration says of classes, at any depth."""
    if isinstance(config, dict):
        keys = "module", "class_name", "registered_name"
        return {k: v if k in keys else named_in(v) for k, v in config.items()}
    return list(map(named_in, config)) if isinstance(config, list) else None


@pytest.mark.parametrize("make", [*KINDS.values(), lambda: Doubled(0.1), lambda: Tripled(0.1)])
@pytest.mark.parametrize("suffix", ["keras", "h5"])
def test_a_file_names_what_plain_keras_names(make, suffix, tmp_path):
    """Not the module of Keras's that a class is in."""
    named = []
    for wrap in (plain, wrapped):
        model = compiled(wrap(make()))
        model.save(tmp_path / f"model.{suffix}")
        if suffix == "keras":
            config = json.loads(zipfile.ZipFile(tmp_path / "model.keras").read("config.json"))
            named.append(named_in(config["compile_config"]))
        else:
            with h5py.File(tmp_path / "model.h5") as file:
                named.append(named_in(json.loads(file.attrs["training_config"])))
        named[-1] = named[-1], named_in(keras.saving.serialize_keras_object(model.optimizer))
    assert named[0] == named[1]


def test_an_optimizer_that_was_saved_by_a_private_name_loads(tmp_path):
    """As an older ringreduce wrote it."""
    model = trained("adam")
    model.save(tmp_path / "new.keras")
    old = tmp_path / "old.keras"
    with zipfile.ZipFile(tmp_path / "new.keras") as new, zipfile.ZipFile(old, "w") as copy:
        for name in new.namelist():
            text = new.read(name)
            if name == "config.json":
                config = json.loads(text)
                names = {"module": Adam.__module__, "registered_name": "Adam"}
                config["compile_config"]["optimizer"] |= names
                text = json.dumps(config)
            copy.writestr(name, text)
    loaded = rr.load_model(old)
    assert type(loaded.optimizer)._inner_class is Adam
    assert_equal_state(fit(model), fit(loaded))


@pytest.mark.parametrize("is_zipped", [True, False])
@pytest.mark.parametrize("is_ours", [True, False])
def test_layers_are_replaced_in_files_of_ours_and_of_plain_keras(is_ours, is_zipped, tmp_path):
    """A file is the same with our layers as with Keras's, which it names as Keras does."""
    kinds = [keras.layers.Dense, keras.layers.BatchNormalization]
    ours = [rr.ColumnParallelDense, rr.SyncBatchNormalization]
    layers = [ours[0](2), ours[1]()] if is_ours else [kinds[0](2), kinds[1]()]
    model = keras.Sequential([keras.Input((3,)), *layers])
    optimizer = LossScaleOptimizer(Adam(0.1))
    model.compile(DistributedOptimizer(optimizer) if is_ours else optimizer, "mse")
    model.optimizer.build(model.trainable_variables)
    path = tmp_path / ("model.keras" if is_zipped else "folder")
    model.save(path, zipped=is_zipped)
    text = zipfile.ZipFile(path).read("config.json") if is_zipped else path.joinpath("config.json")
    config = json.loads(text if is_zipped else text.read_text())
    assert [layer["module"] for layer in config["config"]["layers"]] == ["keras.layers"] * 3
    assert {layer["registered_name"] for layer in config["config"]["layers"]} == {None}
    loaded = rr.load_model(path, replace=dict(zip(kinds, ours, strict=True)))
    assert [type(layer) for layer in loaded.layers] == ours
    assert isinstance(loaded.optimizer, DistributedOptimizer)
    assert_equal_state(model, loaded)
    assert [type(layer) for layer in rr.load_model(path).layers] == kinds


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def from_checkpoint(model, kind, wrap, folder, is_built=True):
    """Restore another model; return it, and what to check after its next step."""
    path = checkpoint(model).save(folder / "checkpoint")
    other = untrained(kind, wrap)
    if is_built:
        other.optimizer.build(other.trainable_variables)
    return other, checkpoint(other).restore(path).assert_consumed


def before_it_is_built(*arguments):
    return from_checkpoint(*arguments, is_built=False)


def from_weights(model, kind, wrap, folder):
    model.save_weights(folder / "model.weights.h5")
    other = trained(kind, wrap, epochs=2)
    other.load_weights(folder / "model.weights.h5")
    assert_equal_state(model, other)
    return other, None


def from_file(model, kind, wrap, folder):
    """The loaded model is wrapped, also if plain Keras has saved it."""
    model.save(folder / "model.keras")
    loaded = rr.load_model(folder / "model.keras")
    assert isinstance(loaded.optimizer, wrap)
    assert_equal_state(model, loaded)
    return loaded, None


# What the wrapper has written goes to plain Keras where ringreduce is not installed, below.
@pytest.mark.parametrize(
    ("way", "kind", "writer", "reader"),
    [
        (before_it_is_built, "averages", plain, wrapped),
        (from_checkpoint, "loss scale", wrapped, plain),
        (from_weights, "loss scale", plain, wrapped),
        (from_file, "adam", plain, wrapped),
        *((from_file, kind, wrapped, wrapped) for kind in ONCE),
        in_full(from_weights, ONCE[-1], wrapped, wrapped),
        *(
            in_full(way, kind, writer, reader)
            for way in (from_checkpoint, before_it_is_built, from_weights)
            for kind in ("adam", "schedule")
            for writer, reader in ((plain, wrapped), (wrapped, plain), (wrapped, wrapped))
        ),
    ],
)
def test_a_model_goes_on_from_what_another_has_saved(way, kind, writer, reader, tmp_path):
    model = trained(kind, writer)
    other, check = way(model, kind, reader, tmp_path)
    assert_equal_state(fit(model), fit(other))
    if check:
        check()


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
    contents = []
    for wrap in (plain, wrapped):
        model, path = trained(kind, wrap), tmp_path / wrap.__name__
        files = [path.with_suffix(suffix) for suffix in (".keras", ".weights.h5")]
        model.save(files[0])
        model.save_weights(files[1])
        variables = tf.train.list_variables(checkpoint(model).save(tmp_path / "model"))
        contents.append([*map(names_in, files), sorted(variables)])
    assert contents[0] == contents[1]


ELSEWHERE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ringreduce":
            raise ModuleNotFoundError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())

import warnings
import keras, numpy

folder, *kinds = sys.argv[1:]
expected = dict(numpy.load(f"{folder}/expected.npz"))
inputs, targets = expected["inputs"], expected["targets"]

def check(name, model):
    variables = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    arrays = [expected[key] for key in sorted(expected) if key.startswith(f"{name}.")]
    assert len(arrays) > 6
    assert [a.tobytes() for a in arrays] == [v.tobytes() for v in variables], name

for kind in kinds:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = keras.models.load_model(f"{folder}/{kind}.keras")
        assert str(type(model.optimizer)) == str(expected[kind])
        check(f"{kind} saved", model)
        model.load_weights(f"{folder}/{kind}.weights.h5")
        check(f"{kind} saved", model)
    assert model.run_eagerly
    for start in range(0, len(inputs), 6):
        model.train_on_batch(inputs[start : start + 6], targets[start : start + 6])
    check(f"{kind} trained", model)
model = keras.models.load_model(f"{folder}/normalized.keras")
assert type(model.layers[-1]) is keras.layers.BatchNormalization
assert model.layers[-1].momentum == 0.5
assert (model.predict(inputs, verbose=0) == expected["normalized"]).all()
assert not any(name.partition(".")[0] == "ringreduce" for name in sys.modules)
"""


@pytest.mark.full
def test_files_load_and_train_on_where_ringreduce_is_not_installed(tmp_path):
    """They have Keras's own optimizers and layers there."""
    expected = {"inputs": INPUTS, "targets": TARGETS}

    def keep(name, model):
        for number, variable in enumerate((*model.variables, *model.optimizer.variables)):
            expected[f"{name}.{number:02}"] = variable.numpy()

    for kind in ONCE:
        model = trained(kind)
        model.save(tmp_path / f"{kind}.keras")
        model.save_weights(tmp_path / f"{kind}.weights.h5")
        expected[kind] = str(type(KINDS[kind]()))
        keep(f"{kind} saved", model)
        keep(f"{kind} trained", fit(model))
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(4), rr.SyncBatchNormalization(momentum=0.5)]
    model = keras.Sequential([keras.Input(INPUTS.shape[1:]), *layers])
    expected["normalized"] = model.predict(INPUTS, verbose=0)
    model.save(tmp_path / "normalized.keras")
    np.savez(tmp_path / "expected.npz", **expected)
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path), *ONCE]
    options = {"capture_output": True, "text": True, "timeout": 100, "cwd": tmp_path}
    done = subprocess.run(command, env=clean_environment(), check=False, **options)
    assert done.returncode == 0, done.stderr


def trained_with(inner=None, **options):
    model = fit(compiled(DistributedOptimizer(inner or KINDS["adam"](), **options)))
    model.optimizer.settle()
    return model


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.keras"


def test_accumulation_goes_on_in_a_loaded_model_but_where_options_are_given(path):
    trained_with(gradient_accumulation_steps=2).save(path)
    loaded = rr.load_model(path)
    assert int(fit(loaded, epochs=2).optimizer.iterations) == 1 + 2
    again = rr.load_model(path, gradient_accumulation_steps=1, bucket_bytes=64)
    assert again.optimizer._bridge._bucket_bytes == 64
    assert int(fit(again, epochs=2).optimizer.iterations) == 1 + 4
    with pytest.raises(ConfigError, match="bucket_bytes is 0"):
        rr.load_model(path, bucket_bytes=0)


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
@pytest.mark.filterwarnings("ignore::ringreduce.keras.checks.users_line.ParityWarning")
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
    assert type(plain_again.optimizer) is Adam


@pytest.mark.parametrize("inner", [Doubled, Tripled, in_full("several")])
def test_the_users_class_and_the_outer_optimizers_momentum_stay_in_a_loaded_model(inner, path):
    """Also of several optimizers in one."""
    optimizer = KINDS[inner]() if isinstance(inner, str) else inner(0.125, momentum=0.5)
    model = trained_with(optimizer, strategy=rr.DiLoCo(2))
    model.save(path)
    if inner is Doubled:
        with pytest.raises(TypeError, match="Could not locate class 'Doubled'"):
            rr.load_model(path)
    loaded = rr.load_model(path, custom_objects={"Doubled": Doubled})
    assert type(loaded.optimizer.inner_optimizer) is type(optimizer)
    assert_equal_state(fit(model), fit(loaded))


@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_options_in_a_damaged_file_are_an_error_that_says_so(text):
    file = {"optimizer/kept_options/vars/text": np.frombuffer(text, np.uint8)}
    with pytest.raises(ConfigError, match=r"damaged where it keeps .* options.*compile=False"):
        saving._options_in(file, {})


def test_local_variables_stay_so_in_a_loaded_model(path):
    model = compiled(DistributedOptimizer(SGD(0.5)))
    model.optimizer.register_local_var(model.trainable_variables[1])
    fit(model).save(path)
    loaded = rr.load_model(path)
    first, _, *others = map(id, loaded.trainable_variables)
    assert [*map(id, loaded.optimizer.shared(loaded.trainable_variables))] == [first, *others]


class Whole(EveryStep):
    """A strategy of the user's, which a file cannot restore."""


@pytest.mark.parametrize("strategy", [Whole(), rr.DiLoCo(1, outer=SGD(0.5))], ids=["own", "outer"])
def test_what_a_file_cannot_restore_is_asked_for(strategy, path):
    trained_with(strategy=strategy).save(path)
    with pytest.raises(ConfigError, match=r"rr\.load_model\(path, strategy=\.\.\.\)"):
        rr.load_model(path)
    loaded = rr.load_model(path, strategy=strategy)
    assert isinstance(loaded.optimizer, DistributedOptimizer)
    bare = rr.load_model(path, compile=False)
    bare.save(path)
    for model in (bare, rr.load_model(path)):
        assert getattr(model, "optimizer", None) is None


def test_options_are_found_in_a_folder_too(tmp_path):
    model = trained_with(gradient_accumulation_steps=2)
    keras.saving.save_model(model, tmp_path / "folder", zipped=False)
    loaded = rr.load_model(tmp_path / "folder")
    assert loaded.optimizer.settings() == model.optimizer.settings()


class Own(keras.Sequential):
    """A model that wraps its optimizer by itself when it is loaded."""

    def compile_from_config(self, config):
        self.compile(DistributedOptimizer(SGD(0.5)), loss="mse", run_eagerly=True)


def test_what_is_wrapped_already_is_left_as_it_is(path):
    model = Own([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile(SGD(0.5), "mse", run_eagerly=True)
    fit(model).save(path)
    loaded = rr.load_model(path, custom_objects={"Own": Own})
    assert type(loaded.optimizer.inner_optimizer) is SGD


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
