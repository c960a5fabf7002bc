"""None for an optional input is as in plain Keras, in each form of data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from tests.models import EAGERLY
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]

X = np.arange(20.0, dtype="float32").reshape(10, 2)
Y = X[:, :1]


class Plus(keras.layers.Layer):
    def call(self, one, other=None):
        return one if other is None else one + other


def model(optimizer, named=False, **options):
    one, other = keras.Input((2,), name="a"), keras.Input((2,), name="b", optional=True)
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(Plus()(one, other))
    made = keras.Model({"a": one, "b": other} if named else [one, other], outputs)
    made.compile(optimizer, "mse", **options)
    return made


def generated():
    for start in (0, 4, 8):
        yield (X[start : start + 4], None), Y[start : start + 4]


def batches():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    return data.map(lambda x, y: ((x, None), y))


FORMS = {
    "list": lambda: ([X, None], Y),
    "dict": lambda: ({"a": X, "b": None}, Y),
    "dataset": lambda: (batches(), None),
    "unknown dataset": lambda: (batches().filter(lambda *_: True), None),
    "generator": lambda: (generated(), None),
}


def run(form, methods, optimizer, **how):
    fit, evaluate, predict = methods
    made = model(optimizer, form == "dict", **how)

    def data():
        x, y = FORMS[form]()
        more = {} if y is None else {"batch_size": 4}
        return x, y, more

    x, y, more = data()
    validation = data()[:2] if more else data()[0]
    fitted = fit(made, x, y, validation_data=validation, shuffle=False, verbose=0, **more)
    x, y, _ = data()
    loss = evaluate(made, x, y, verbose=0, **more)
    outputs = predict(made, data()[0], verbose=0, **more)
    return [*fitted.history["loss"], *fitted.history["val_loss"], loss, *outputs.ravel().tolist()]


@pytest.mark.parametrize(
    ("size", "form", "how"),
    [
        *((2, form, EAGERLY) for form in ("list", "dataset")),
        *(in_full(2, form, EAGERLY) for form in ("dict", "unknown dataset", "generator")),
        *(in_full(size, "list", {}) for size in (1, 2, 3)),
    ],
)
@on_ranks()
def test_none_is_as_in_plain_keras(form, how):
    plain = keras.Model.fit, keras.Model.evaluate, keras.Model.predict
    rate = 2.0**-10
    expected = run(form, plain, keras.optimizers.SGD(rate), **how)
    optimizer = rr.DistributedOptimizer(keras.optimizers.SGD(rate))
    found = run(form, (rr.fit, rr.evaluate, rr.predict), optimizer, **how)
    assert len(found) == 3 + len(X)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    return found


@on_ranks(2)
def test_dealt_elements_keep_their_none():
    """Of data of unknown length each rank gets whole rounds only."""
    parts = list(rr.shard(batches().filter(lambda *_: True)))
    assert [other for (_, other), _ in parts] == [None]
    start = 4 * rr.rank()
    assert (parts[0][0][0].numpy() == X[start : start + 4]).all()
