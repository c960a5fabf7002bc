"""Evaluation and prediction shared out to ranks, against one process; in rings of threads.

Steps run in Python, since tracing them would take most of the time, but for one of each kind.
Between processes the moving averages are looked at in test_callbacks.py.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce
import ringreduce.keras as rr
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.errors import ConfigError
from tests.scope import in_full

pytestmark = pytest.mark.timeout(120)
# Keras's own warning, for a dataset whose length it has to find out.
RAN_OUT = pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")


def rows(count):
    """Inputs and labels of which all sums are exact."""
    rng = np.random.default_rng(count)
    return rng.integers(0, 5, (count, 2)).astype("float32") / 4, rng.integers(0, 2, (count, 1))


def make_model(run_eagerly=True):
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)]
    )
    metrics = ["mae", keras.metrics.BinaryAccuracy(name="hits")]
    model.compile(loss="mse", metrics=metrics, run_eagerly=run_eagerly)
    return model


def make_traced():
    return make_model(run_eagerly=False)


def by_all(size, work, make=make_model):
    """`work(model, communicator)` of every rank, each with a model of its own."""
    models = [make() for _ in range(size)]
    return ring_of_threads(size, lambda comm: work(models[comm.rank], comm))


def eager(model, loss="mse", metrics=None):
    model.compile(loss=loss, metrics=metrics, run_eagerly=True)
    return model


def nested_inputs():
    """Its result is a number, since it has no metrics."""
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((2,), name="b")}
    return eager(keras.Model(inputs, keras.layers.Add()([inputs["a"], inputs["b"]])))


def several_outputs():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, {"a": inputs * 2, "b": inputs * 4})
    return eager(model, {"a": "mse", "b": "mae"}, {"a": ["mae"], "b": ["mse"]})


def dataset(count, known=True):
    data = slices(*rows(count)).batch(4)
    return data if known else data.filter(lambda *_: True)


def slices(*parts):
    return tf.data.Dataset.from_tensor_slices(parts if len(parts) > 1 else parts[0])


def assert_equal_outputs(ours, theirs):
    """They have the same structure, types and bits."""
    keras.tree.assert_same_structure(ours, theirs)
    for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
        assert a.flags.writeable


IN_FOURS = {"batch_size": 4}
MADE = (1, make_model), (5, make_traced), (13, make_model)


@RAN_OUT
@pytest.mark.parametrize(
    ("size", "make", "data", "options"),
    [
        (1, make_model, rows(13), IN_FOURS),
        (2, make_model, rows(1), IN_FOURS),
        in_full(2, make_traced, rows(5), IN_FOURS),
        (2, make_model, rows(23), {"batch_size": 5, "steps": 3}),
        (2, make_model, [dataset(1)], {}),
        (2, make_model, [dataset(13, known=False)], {}),
        (2, make_model, [dataset(8).repeat()], {"steps": 3}),
        (3, nested_inputs, ({"a": tf.constant(rows(7)[0]), "b": rows(7)[0]}, rows(7)[1]), {}),
        # On 4 ranks one has nothing, and so never gets to know its metrics.
        (4, several_outputs, (rows(3)[0], {"a": rows(3)[0], "b": rows(3)[0]}), {}),
        *(
            in_full(size, make, rows(count), IN_FOURS)
            for size, (count, make) in itertools.product((1, 2, 3), MADE)
        ),
        *(
            in_full(size, make_model, [dataset(count, known)], {})
            for size, count, known in itertools.product((1, 2, 3), (1, 4, 23), (True, False))
        ),
    ],
)
def test_evaluation_and_prediction_are_those_of_one_process(size, make, data, options):
    model = make()
    expected = model.evaluate(*data, verbose=0, **options)
    outputs = model.predict(data[0], verbose=0, **options)

    def work(model, comm):
        result = rr.evaluate(model, *data, communicator=comm, **options)
        return result, rr.predict(model, data[0], communicator=comm, **options)

    for result, predicted in by_all(size, work, make):
        assert result == expected
        assert_equal_outputs(predicted, outputs)


def test_results_by_name_with_weights_of_samples_are_those_of_one_process():
    x, y = rows(23)
    options = {"sample_weight": np.arange(23) % 4, "batch_size": 4, "return_dict": True}
    expected = make_model().evaluate(x, y, verbose=0, **options)
    results = by_all(2, lambda m, comm: rr.evaluate(m, x, y, communicator=comm, **options))
    assert results == [expected] * 2


def test_a_test_step_of_ones_own_is_averaged_over_ranks_that_had_data():
    class Model(keras.Sequential):
        def test_step(self, data):
            x, _ = data
            return {"most": tf.reduce_max(x)}

    def make():
        return eager(Model([keras.Input((1,)), keras.layers.Dense(1)]))

    x = np.array([[1.0], [4.0]])
    options = {"batch_size": 1}
    with pytest.warns(rr.ParityWarning, match="a test_step of your own returns most beside"):
        results = by_all(
            3, lambda m, comm: rr.evaluate(m, x, x, communicator=comm, **options), make
        )
    assert results == [2.5] * 3


def test_what_looks_at_whole_batches_gets_those_of_one_process():
    """A metric that is a function of a batch, and outputs that depend on the rows beside."""

    def share(y, outputs):
        return tf.reduce_sum(tf.cast(y, tf.float32) * outputs) / 8.0

    class Mixing(keras.Model):
        def call(self, x):
            return x - tf.reduce_mean(x)

    def make():
        model = eager(Mixing())
        model.compile(loss="mse", metrics=[share], run_eagerly=True)
        return model

    x, y = rows(23)
    how = {"batch_size": 4}
    expected = make().evaluate(x, y, verbose=0, **how), make().predict(x, verbose=0, **how)

    def work(model, comm):
        evaluated = rr.evaluate(model, x, y, communicator=comm, **how)
        return evaluated, rr.predict(model, x, communicator=comm, **how)

    for evaluated, predicted in by_all(3, work, make):
        np.testing.assert_allclose(evaluated, expected[0], 1e-6)
        assert_equal_outputs(predicted, expected[1])


def test_own_states_stay_after_an_evaluation():
    """Metrics hold this rank's share; where there is none, nothing."""
    x, y = rows(5)

    def work(model, comm):
        rr.evaluate(model, x[:1], y[:1], communicator=comm)
        return [float(metric.variables[1].numpy()) for metric in model.metrics[:1]]

    assert by_all(2, work) == [[1.0], [0.0]]


def test_callbacks_see_this_ranks_share():
    x, y = rows(6)

    def work(model, comm):
        batches = []
        count = keras.callbacks.LambdaCallback(on_test_batch_end=lambda b, logs: batches.append(b))
        rr.evaluate(model, x, y, batch_size=1, communicator=comm, callbacks=[count])
        return batches

    assert by_all(2, work) == [[0, 1, 2]] * 2


class Outputs(keras.Model):
    """Nested outputs of several dtypes; one has no dimension but rows, one no elements."""

    def call(self, x):
        return {
            "half": tf.cast(x, tf.float16),
            "rest": (x[:, 0], [x[:, :1] > 0.5, tf.cast(x, tf.bfloat16)]),
            "empty": x[:, :0],
        }


@pytest.mark.parametrize("count", [2, in_full(7)])
def test_the_structure_of_outputs_is_kept(count):
    x, _ = rows(count)
    expected = eager(Outputs()).predict(x, verbose=0)
    results = by_all(
        3,
        lambda m, c: rr.predict(m, x, batch_size=2, communicator=c),
        lambda: eager(Outputs()),
    )
    for predicted in results:
        assert_equal_outputs(predicted, expected)


def test_ragged_outputs_are_refused():
    class Ragged(keras.Model):
        def call(self, x):
            return tf.RaggedTensor.from_row_lengths(x[:, 0], tf.ones(tf.shape(x)[0], tf.int32))

    def work(model, comm):
        with pytest.raises(ringreduce.ConfigError, match="cannot join outputs of type Ragged"):
            rr.predict(model, rows(4)[0], communicator=comm)

    by_all(2, work, lambda: eager(Ragged()))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1.0, 2.0],), "cannot share out list"),
        ((np.float32(1),), "cannot share out"),
        ((np.ones((3, 2)), np.ones((2, 1))), r"got arrays of \[2, 3\] rows"),
        ((tf.data.Dataset.range(3).batch(1), np.ones(3)), "beside a _BatchDataset"),
        ((dataset(8).repeat(),), "Pass steps"),
    ],
    ids=["numbers", "scalar", "unequal rows", "labels beside a dataset", "endless"],
)
def test_data_that_cannot_be_shared_out_are_refused(arguments, text):
    def work(model, comm):
        with pytest.raises(ringreduce.ConfigError, match=text):
            rr.evaluate(model, *arguments, communicator=comm)

    by_all(2, work)


def refused(function, make, y=None):
    """What all ranks are told of the data that `make` gives each; the ring must stay whole."""
    x, _ = rows(12)

    def work(model, comm):
        given = () if y is None else (y,)
        with pytest.raises(ringreduce.MismatchError) as caught:
            function(model, make(comm.rank), *given, communicator=comm)
        assert "check=False" in str(caught.value)
        assert len(rr.predict(model, x, communicator=comm)) == 12
        function(model, make(comm.rank), *given, communicator=comm, check=False)
        return str(caught.value)

    return by_all(2, work)


@pytest.mark.parametrize("function", [rr.evaluate, rr.predict])
def test_what_has_a_way_of_its_own_is_refused_with_it(function):
    name = function.__name__
    pipeline = type("Pipeline", (), {name: print})()
    with pytest.raises(ConfigError, match=rf"Call its own {name}: pipeline\.{name}\(\.\.\.\)"):
        function(pipeline, np.ones((2, 4)))
    with pytest.raises(ConfigError, match=r"got 'model', which is no keras.Model. The model comes"):
        function("model", np.ones((2, 4)))
    with pytest.raises(ConfigError, match=r"Pass a model, not its class: Sequential\(\.\.\.\)"):
        function(keras.Sequential, np.ones((2, 4)))


def test_a_model_that_was_forgotten_is_named_in_place_of_the_data(world_of_one):
    x = np.ones((200, 4))
    for data in (x, tf.constant(x), [x] * 9, tf.data.Dataset.from_tensors(x)):
        for function in (rr.fit, rr.evaluate):
            with pytest.raises(ConfigError, match=r"which is no keras\.Model") as caught:
                function(data, x)
            remedy = f" The model comes first: rr.{function.__name__}(model, x, ...)."
            assert str(caught.value).endswith(remedy)
            assert len(str(caught.value)) < 200


@RAN_OUT
@pytest.mark.parametrize(
    ("function", "known"),
    [(rr.evaluate, True), in_full(rr.predict, True), in_full(rr.evaluate, False)],
)
def test_an_unseeded_shuffle_is_refused_though_all_y_are_equal(function, known):
    x = np.arange(66, dtype="float32").reshape(33, 2)
    # Of 11 batches rank 1 has none of the last two.
    dataset = slices(x, 0 * x[:, :1]).shuffle(33).batch(3)
    dataset = dataset if known else dataset.filter(lambda *_: True)
    for text in refused(function, lambda rank: dataset):
        assert "rank 1 has read the samples of rank 0 in another order" in text


class Own(keras.utils.PyDataset):
    """Batches that each rank has shuffled by itself."""

    def __init__(self, rank):
        super().__init__()
        self.x, self.y = (np.random.default_rng(rank).permutation(part) for part in rows(12))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.x[3 * index : 3 * index + 3], self.y[3 * index : 3 * index + 3]


@RAN_OUT
@pytest.mark.parametrize(
    ("make", "y"),
    [
        (lambda rank: slices(rows(12)[0], rows(12)[1] + rank).batch(4), None),
        in_full(lambda rank: Own(rank), None),
        (lambda rank: (Own(0)[i] for i in range(4 - rank)), None),
        (lambda rank: rows(12)[0] + rank, rows(12)[1]),
    ],
    ids=["other y", "PyDataset", "generator", "arrays"],
)
def test_other_data_is_refused(make, y):
    for text in refused(rr.evaluate, make, y):
        assert "rank 1 has read other samples than rank 0" in text


def test_random_x_is_compared_only_where_there_is_no_y():
    x, y = rows(12)
    generator = np.random.default_rng()

    def noise():
        # Not TensorFlow's, which draws the same for all if another test has set its seed.
        drawn = tf.numpy_function(lambda: np.float32(generator.random()), [], tf.float32)
        return tf.ensure_shape(drawn, [])

    labelled = slices(x, y).map(lambda x, y: (x + noise(), y)).batch(4)

    def work(model, comm):
        losses = rr.evaluate(model, labelled, communicator=comm)
        return losses, len(rr.predict(model, labelled, communicator=comm))

    first, second = by_all(2, work)
    assert first == second
    assert first[1] == 12
    noisy = slices(x).map(lambda x: x + noise()).batch(4)
    for text in refused(rr.predict, lambda rank: noisy):
        assert "for x that is random on purpose" in text


@pytest.mark.parametrize("function", [rr.evaluate, rr.predict])
def test_ranks_that_pass_unequal_data_get_an_error(function):
    def work(model, comm):
        text = "different data: rows is 3 on rank 0 and 4 on rank 1"
        with pytest.raises(ringreduce.MismatchError, match=text):
            function(model, rows(3 + comm.rank)[0], communicator=comm)

    by_all(2, work)
