"""Models whose class has a `fit`, `evaluate` or `predict` of its own around Keras's."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD

import ringreduce.keras as rr
from ringreduce import ConfigError
from tests.models import EAGERLY
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

# All sums and means in these tests are exact.
ROWS = np.arange(40).reshape(20, 2) % 3 % 2
X, Y = ROWS.astype(str), ROWS[:, :1].astype("float32")
VALIDATION = X[:12], Y[:12]


def as_dataset(x, y, batch_size):
    if isinstance(x, tf.data.Dataset):
        return x
    return tf.data.Dataset.from_tensor_slices((x, y) if y is not None else x).batch(batch_size)


class Preprocesses:
    """As models of packages that take text: each method preprocesses, and calls Keras's."""

    def compile(self, optimizer, loss, *, sampler="top_k", **options):
        self.sampler = sampler
        super().compile(optimizer, loss, **options)

    def preprocessed(self, x, y=None, batch_size=32):
        def numbers(x, *y):
            return (tf.strings.to_number(x), *y) if y else tf.strings.to_number(x)

        return as_dataset(x, y, batch_size or 32).map(numbers).prefetch(tf.data.AUTOTUNE)

    def fit(self, x=None, y=None, batch_size=None, validation_data=None, **options):
        if validation_data is not None:
            validation_data = as_dataset(*validation_data, batch_size)
        x = self.preprocessed(x, y, batch_size)
        return super().fit(x, batch_size=None, validation_data=validation_data, **options)

    def evaluate(self, x=None, y=None, batch_size=None, **options):
        options.pop("_use_cached_eval_dataset", None)
        return super().evaluate(self.preprocessed(x, y, batch_size), **options)

    def predict(self, x=None, batch_size=None, **options):
        return super().predict(self.preprocessed(x, None, batch_size), **options) * 2


class Task(Preprocesses, keras.Model):
    """Of inputs and outputs."""


class LateTask(Preprocesses, keras.Model):
    """Its weights are made when it is first called on what is preprocessed."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def build(self, shape=None):
        self.built = True

    def call(self, x):
        return self.dense(x)


def early():
    inputs = keras.Input((2,))
    return Task(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))


def numbers(model, how, validation):
    """What `how` has as its functions, rr or the methods of the model itself, give."""
    fit, evaluate, predict = how
    history = fit(X, Y, batch_size=8, verbose=0, shuffle=False, validation_data=validation).history
    weights = [weight.numpy().tolist() for weight in model.weights]
    results = evaluate(X, Y, batch_size=8, verbose=0), evaluate(as_dataset(X, Y, 8), verbose=0)
    outputs = predict(X, batch_size=8, verbose=0), predict(as_dataset(X, None, 8), verbose=0)
    return history, weights, results, [output.tolist() for output in outputs]


@pytest.mark.parametrize(
    ("size", "make"), [(1, early), (1, LateTask), (2, early), in_full(2, LateTask)]
)
@on_ranks()
def test_they_prepare_the_whole_data_and_what_they_pass_on_is_divided(make):
    plain, ours = make(), make()
    plain.compile(SGD(0.5), "mse", sampler="greedy", metrics=["mae"], **EAGERLY)
    expected = numbers(plain, (plain.fit, plain.evaluate, plain.predict), VALIDATION)
    ours.compile(rr.DistributedOptimizer(SGD(0.5)), "mse", metrics=["mae"], **EAGERLY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        methods = [lambda *a, f=f, **o: f(ours, *a, **o) for f in (rr.fit, rr.evaluate, rr.predict)]
        assert numbers(ours, methods, VALIDATION) == expected
    assert type(ours) is type(plain)
    assert ours.sampler == "top_k"


@on_ranks(2)
def test_an_evaluate_alone_that_maps_arrays_warns_of_no_end_of_data():
    class Evaluates(keras.Sequential):
        def evaluate(self, x=None, y=None, batch_size=None, **options):
            options.pop("_use_cached_eval_dataset", None)
            halves = as_dataset(x, y, batch_size).map(lambda x, y: (x / 2, y))
            return super().evaluate(halves, **options)

    # Of one batch and of three: a rank may have none.
    x, y = ROWS.astype("float32"), Y
    how = {"batch_size": 8, "shuffle": False, "verbose": 0}
    for count in (8, 20):
        models = []
        for optimizer in (SGD(0.5), rr.DistributedOptimizer(SGD(0.5))):
            dense = keras.layers.Dense(1, kernel_initializer="ones")
            models.append(Evaluates([keras.Input((2,)), dense]))
            models[-1].compile(optimizer, "mse", **EAGERLY)
        plain, ours = models
        expected = plain.fit(x, y, validation_data=(x[:count], y[:count]), **how).history
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = rr.fit(ours, x, y, validation_data=(x[:count], y[:count]), **how).history
        assert found == expected


@on_ranks(2)
def test_each_call_of_keras_s_is_divided_and_what_is_saved_between_is_of_the_class(tmp_path):
    @keras.saving.register_keras_serializable("tests")
    class Twice(keras.Sequential):
        def fit(self, *arguments, **options):
            super().fit(*arguments, **options)
            self.save(path)
            return super().fit(*arguments, **options)

    path = str(tmp_path / f"{rr.rank()}.keras")
    model = Twice([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(rr.DistributedOptimizer(SGD(0.5)), "mse", **EAGERLY)
    seen = []
    look = keras.callbacks.LambdaCallback(on_train_end=lambda logs: seen.append(type(model)))
    rr.fit(model, X.astype("float32"), Y, batch_size=10, verbose=0, callbacks=[look])
    assert seen == [Twice, Twice]
    assert int(model.optimizer.iterations) == 4
    assert type(rr.load_model(path)) is Twice


def by_name(self, *arguments, **options):
    return keras.Model.fit(self, *arguments, **options)


def single_batches(self, x, y, **_):
    self.train_on_batch(x, y)


def nothing(self, x, y, **_):
    return None


@pytest.mark.parametrize("own", [by_name, single_batches, nothing])
@pytest.mark.usefixtures("world_of_one")
def test_one_that_does_not_train_by_super_is_refused_before_a_step(own):
    kind = type("Own", (keras.Sequential,), {"fit": own})
    model = kind([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(rr.DistributedOptimizer(SGD(0.5)), "mse", **EAGERLY)
    x = ROWS.astype("float32")
    with pytest.raises(ConfigError, match=rf"own fit \({own.__name__}\).*super\(\).fit.*rr.shard"):
        rr.fit(model, x, Y, verbose=0)
    assert not int(model.optimizer.iterations)
    assert type(model) is kind
    model.train_on_batch(x, Y)  # As before.
    assert int(model.optimizer.iterations) == 1


@pytest.mark.usefixtures("world_of_one")
def test_an_error_of_its_own_leaves_the_model_as_it_was():
    class Fails(keras.Sequential):
        def fit(self, *arguments, **options):
            raise LookupError("mine")

    model = Fails([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(rr.DistributedOptimizer(SGD(0.5)), "mse", **EAGERLY)
    with pytest.raises(LookupError, match="mine"):
        rr.fit(model, ROWS, Y)
    assert type(model) is Fails
    assert "make_train_function" not in vars(model)
