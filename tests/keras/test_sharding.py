"""A sharded update trains to the bits of one that is not, and keeps a part of the state."""

import functools
import gc
import os
import pickle
import signal
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.layers import Dense
from keras.optimizers import SGD, Adagrad, Adam, AdamW, RMSprop

import ringreduce.keras as rr
from ringreduce import ConfigError, MismatchError
from ringreduce.keras.optimizer.sharded import weights_to_divide
from ringreduce.keras.training import loop
from tests.programs.shared import difference, digest
from tests.ranks import on_ranks
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

RATE = 0.01
# The last batch is short: ranks count by their rows.
generator = np.random.default_rng(0)
X = generator.normal(size=(50, 20)).astype("float32")
Y = generator.normal(size=(50, 3)).astype("float32")
PAIR = {"size": 2}
SEVERAL = [
    {"size": 3, "RINGREDUCE_TRANSPORT": "zmq"},
    {"size": 4, "hosts": "0011"},
    {"size": 4, "hosts": "0001"},
]
on_all_layouts = pytest.mark.parametrize("layout", [PAIR, *map(in_full, SEVERAL)])
EAGERLY = {"run_eagerly": True}


def network(policy="float32"):
    """A model of odd sizes, of which some ranks have nothing."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    widths = 37, 32, 53, 1, 3  # Of which XLA has 37 x 32 and 32 x 53 reduced in place.
    layers = [Dense(width, "tanh", name=f"dense{width}") for width in widths]
    model = keras.Sequential([keras.Input((20,)), *layers])
    keras.config.set_dtype_policy("float32")
    return model


def wrap(model, inner, sharded=True, compiled=EAGERLY, **options):
    """Compile with small buckets."""
    loop._CALL_S = 1.0 if rr.rank() else 1e-6  # Where nobody looks, ranks make other calls.
    optimizer = rr.DistributedOptimizer(inner, shard_state=sharded, bucket_bytes=4096, **options)
    model.compile(optimizer, "mse", **compiled)
    return model


def make(sharded=True, inner=Adam, policy="float32", **options):
    return wrap(network(policy), inner(RATE), sharded, **options)


def fit(model, epochs=1, **options):
    return rr.fit(model, X, Y, batch_size=16, epochs=epochs, verbose=0, **options)


def trained(sharded, _, then=lambda model: None, **options):
    model = make(sharded, **options)
    fit(model)
    then(model)
    fit(model, seed=5)
    return model


def in_a_graph(sharded, folder, **options):
    """With a callback that saves after each epoch, where ranks make other calls between."""
    model = make(sharded, compiled={}, **options)
    path = str(folder / f"{sharded}.keras")
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path)] if sharded else [])
    fit(model, seed=5)
    return model


def thaw(model):
    """Leave one layer out for an epoch."""
    for trainable in (False, True):
        model.get_layer("dense53").trainable = trainable
        model.compile(model.optimizer, "mse")
        fit(model, seed=3)


def in_a_loop(sharded, _):
    model = make(sharded)
    model.optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            # The one before the last has no gradient.
            loss = tf.reduce_mean((model.layers[1](model.layers[0](x)) - y[:, :1]) ** 2)
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)

    for _ in range(3):
        step(X[rr.rank() :: rr.size()], Y[rr.rank() :: rr.size()])
    return model


class Two(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        for optimizer, layers in zip(self.two, (self.layers[:1], self.layers[1:]), strict=True):
            variables = [v for layer in layers for v in layer.trainable_variables]
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def by_two_optimizers(sharded, _):
    """As a GAN has: each shards what it trains."""
    model = make(sharded)
    two = Two(model.layers)
    two.two = [model.optimizer, rr.DistributedOptimizer(SGD(RATE), shard_state=sharded)]
    two.compile(model.optimizer, "mse")
    rr.fit(two, X[:48], Y[:48], batch_size=16, epochs=2, verbose=0, shuffle=False)
    return two


def apply_ones(inner, model):
    inner.apply([tf.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)


def decayed(sharded, _, is_built):
    """Also where the optimizer was built, and used, by itself."""
    inner, model = AdamW(RATE, weight_decay=0.3), network()
    wrap(model, inner, sharded)
    inner.exclude_from_weight_decay(var_list=[model.layers[0].kernel], var_names=["bias"])
    if is_built:
        apply_ones(inner, model)
    fit(model)
    return model


def not_finite(sharded, _):
    """An infinity of one rank reaches all, and all skip alike."""
    model, x = make(sharded, policy="mixed_float16"), X.copy()
    x[3] = np.inf
    rr.fit(model, x, Y, batch_size=16, epochs=2, verbose=0, check=False)
    return model


def begun(sharded, _, is_built):
    """State that only rank 0 has when training begins is that of all ranks."""
    inner, model = Adam(RATE), network()
    if is_built or rr.rank() == 0:
        inner.build(model.trainable_variables)
    if rr.rank() == 0:
        apply_ones(inner, model)
    fit(wrap(model, inner, sharded))
    inner.learning_rate = RATE / 10  # The user's own is the one that updates.
    fit(model, seed=7)
    return model


def with_pieces(sharded, folder):
    """Split layers on pairs of ranks keep their pieces whole, in files too."""
    comm = rr.init()
    group, data = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    keras.utils.set_random_seed(1)
    layer = rr.ColumnParallelDense(30, gather_output=True, communicator=group)
    model = keras.Sequential([keras.Input((20,)), layer, Dense(3)])
    model.compile(rr.DistributedOptimizer(Adam(RATE), data, shard_state=sharded), "mse")
    fit(model, communicator=data)
    path = str(folder / f"pieces{sharded}.keras")
    rr.on_rank_zero(lambda: model.save(path))
    plain = keras.models.load_model(path)
    shapes = [variable.shape for variable in plain.optimizer.variables]
    assert shapes[2:6] == [(20, 30), (20, 30), (30,), (30,)]
    return plain


def compare(train, folder, most=0.0, **options):
    """Train sharded and not; return the weights' digest."""
    sharded, plain = (train(kind, folder, **options) for kind in (True, False))
    assert difference(sharded, plain) <= most, train
    return digest(sharded.get_weights())


def compare_in_turn(trains, folder):
    return [compare(train, folder) for train in trains]


def by(inner, **options):
    return case(in_graphs, inner=case(inner, **options))


case = functools.partial
in_graphs = case(trained, compiled={})
by_xla = case(trained, compiled={"jit_compile": True})
halved = case(trained, then=lambda m: m.set_weights([w / 2 for w in m.get_weights()]))
OFTEN = [in_a_graph, in_a_loop, case(trained), by_xla]
ACCUMULATED = case(in_graphs, gradient_accumulation_steps=2)
WIDELY = [*OFTEN, ACCUMULATED, by(RMSprop)]
RARE = [
    ACCUMULATED,
    *(case(train, is_built=True) for train in (decayed, begun)),
    *(halved, case(begun, is_built=False)),
    *(by(SGD), by(SGD, momentum=0.9), by(SGD, momentum=0.9, nesterov=True)),
    *(by(AdamW, weight_decay=0.3), by(Adagrad), by(RMSprop), case(trained, inner=RMSprop)),
    *(case(in_graphs, op="sum"), case(in_graphs, policy="mixed_float16")),
    *(case(in_graphs, then=thaw), by_two_optimizers, not_finite),
    *(case(by_xla, gradient_accumulation_steps=2), case(by_xla, policy="mixed_float16")),
    case(by_xla, then=thaw),
]


@pytest.mark.parametrize(
    ("layout", "trains"),
    [
        in_full(PAIR, [in_a_graph]),
        (PAIR, [in_a_loop]),
        (PAIR, [case(trained)]),
        in_full(PAIR, [by_xla]),
        (PAIR, [case(decayed, is_built=False)]),
        *(in_full(PAIR, RARE[start::3]) for start in range(3)),
        *(in_full(layout, WIDELY[start::2]) for layout in SEVERAL[:2] for start in range(2)),
        in_full(SEVERAL[2], [in_a_graph, in_a_loop]),
        in_full(SEVERAL[1], [with_pieces]),
    ],
)
def test_it_trains_to_the_same_bits(ranks, tmp_path, layout, trains):
    for digests in zip(*ranks.ring(**layout)(compare_in_turn, trains, tmp_path), strict=True):
        assert len({*digests}) == 1


class Looking(keras.Sequential):
    def compute_metrics(self, *_, **__):
        return {"first": tf.convert_to_tensor(self.trainable_variables[0])[0, 0]}


@on_ranks(2)
def test_what_looks_at_weights_within_a_step_sees_updated_ones():
    """Else XLA leaves it to the graph around a step to take them."""
    model = wrap(Looking(network().layers), Adam(RATE), compiled={"jit_compile": True})
    first = fit(model, epochs=2).history["first"][-1]
    assert first == model.get_weights()[0][0, 0]


@pytest.mark.parametrize(
    ("layout", "limit"),
    [
        (PAIR, {"global_clipnorm": 0.5}),
        in_full(PAIR, {"clipnorm": 0.05}),
        *(in_full(layout, {"global_clipnorm": 0.5}) for layout in SEVERAL),
    ],
)
def test_norms_of_pieces_are_those_of_wholes(ranks, layout, limit):
    """But for the order in which they are added up."""
    inner = functools.partial(Adam, **limit)
    ends = ranks.ring(**layout)(compare, trained, None, most=1e-6, inner=inner)
    assert len({*ends}) == 1


def sizes_of_state():
    """Return how many numbers of the optimizer's this rank keeps, and how many there are."""
    models = [make(), make(sharded=False)]
    for model in models:
        model.optimizer.build(model.trainable_variables)
    vectors = [[v for v in model.optimizer.variables if len(v.shape)] for model in models]
    return [sum(int(np.prod(variable.shape)) for variable in some) for some in vectors]


@on_all_layouts
def test_ranks_keep_their_shares_of_the_state(ranks, layout):
    kept, wholes = zip(*ranks.ring(**layout)(sizes_of_state), strict=True)
    assert sum(kept) == wholes[0]
    if layout == PAIR:
        assert max(kept) < 0.51 * wholes[0]


def saved_and_loaded(folder):
    """Save, load and train on, sharded or not; return the weights of all."""
    path = str(folder / "saved.keras")
    weights = str(folder / "saved.weights.h5")
    model, undisturbed, other = make(), make(), make()
    fit(undisturbed)
    fit(model)
    rr.on_rank_zero(lambda: model.save(path))
    rr.on_rank_zero(lambda: model.save_weights(weights))
    other.optimizer.build(other.trainable_variables)
    other.load_weights(weights)
    loaded, plain = rr.load_model(path), rr.load_model(path, shard_state=False)
    assert [one.optimizer.options["shard_state"] for one in (loaded, plain)] == [True, False]
    of_keras = keras.models.load_model(path).optimizer.variables
    assert [variable.shape for variable in of_keras[2:6]] == [(20, 37), (20, 37), (37,), (37,)]
    models = [undisturbed, model, other, loaded, plain]
    for one in models:
        one.run_eagerly = True
        fit(one, seed=5)
    return [digest(one.get_weights()) for one in models]


def backed_up_and_restarted(folder):
    def stop(epoch, logs):
        if epoch == 1:
            raise KeyError

    stops, backup = keras.callbacks.LambdaCallback(on_epoch_begin=stop), str(folder / "backup")
    first, second, undisturbed = make(), make(), make()
    with pytest.raises(KeyError):
        fit(first, 2, backup_dir=backup, callbacks=[stops])
    fit(second, 2, backup_dir=backup)
    fit(undisturbed, 2)
    return [digest(one.get_weights()) for one in (second, undisturbed)]


@on_all_layouts
@pytest.mark.parametrize("train", [saved_and_loaded, in_full(backed_up_and_restarted)])
def test_files_are_plain_and_training_goes_on_from_them(ranks, tmp_path, layout, train):
    """The next steps are those of the uninterrupted."""
    results = ranks.ring(**layout)(train, tmp_path)
    assert len({weights for models in results for weights in models}) == 1


@on_ranks(2)
def test_a_model_is_exported_without_the_optimizer(tmp_path):
    model, path = make(), str(tmp_path / "export")
    fit(model)
    rr.on_rank_zero(lambda: model.export(path, verbose=False))
    loaded = tf.saved_model.load(path)
    # Its graph may have other kernels.
    np.testing.assert_allclose(loaded.serve(X), model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


def load_on_rank_0(folder):
    """As Horovod's users do; then all ranks would have to get their pieces."""
    model, path = make(), str(folder / "rank0.weights.h5")
    fit(model)
    rr.on_rank_zero(lambda: model.save_weights(path))
    model = make()
    model.optimizer.build(model.trainable_variables)
    if rr.rank() == 0:
        model.load_weights(path)
    fit(model)


def constrain():
    model = keras.Sequential([keras.Input((20,)), Dense(3, kernel_constraint="max_norm")])
    fit(wrap(model, SGD(RATE)))


def look_up():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Embedding(9, 5, name="table")])
    wrap(model, SGD(RATE))
    rr.fit(model, np.ones((8, 2), "int32"), np.ones((8, 2, 5)), batch_size=4, verbose=0)


@on_ranks(2)
def test_what_would_be_wrong_is_refused(tmp_path):
    model = make()
    fit(model)
    checkpoint = tf.train.Checkpoint(optimizer=model.optimizer)
    divided = functools.partial(rr.DistributedOptimizer, model.optimizer._inner, shard_state=True)
    for text, action, *arguments in (
        (
            r"cannot save, pickle or copy .* on one rank alone: each of 2 ranks has a piece of it. "
            r"Let all .* rr.on_rank_zero\(.* rr.callbacks.OnRankZero\(callback\)",
            *(model.save, tmp_path / "alone.keras"),
        ),
        ("cannot save, pickle or copy", pickle.dumps, model),
        (
            "into a tf.train.Checkpoint, which would hold this rank's share alone",
            *(checkpoint.save, str(tmp_path)),
        ),
        ("kernel with a constraint, which looks at all of it", constrain),
        ("table/embeddings in rows. Pass sparse_as_dense=True", look_up),
        ("another DistributedOptimizer has divided the state.*Keep that one", divided),
    ):
        with pytest.raises(ConfigError, match=text):
            action(*arguments)
    text = "times that a file was loaded is 1 on rank 0 and 0 on rank 1"
    with pytest.raises(MismatchError, match=text):
        load_on_rank_0(tmp_path)


@pytest.mark.skipif(not hasattr(keras.callbacks, "OrbaxCheckpoint"), reason="an older Keras")
@on_ranks(2)
def test_orbax_is_refused_since_it_would_write_the_share_of_rank_0():
    class Checkpoint(keras.callbacks.OrbaxCheckpoint):
        def __init__(self):  # Without its package.
            keras.callbacks.Callback.__init__(self)
            self.save_freq = "epoch"

        def _save_checkpoint(self, step, logs=None):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"OrbaxCheckpoint cannot save .* Use .*ModelCheckpoint"):
        fit(make(), callbacks=[Checkpoint()])


@on_ranks(2)
def test_its_memory_goes_with_the_optimizer():
    """Though it has trained in a graph."""
    memory = weakref.ref(in_a_loop(True, None).optimizer._sharding._buckets._memory)
    gc.collect()
    rr.init().barrier()
    assert memory() is None


@pytest.mark.parametrize(
    ("inner", "options", "text"),
    [
        (keras.optimizers.Lamb, {}, r"lamb\w* \(Lamb\) looks at whole variables"),
        (keras.optimizers.Muon, {}, r"muon\w* \(Muon\) looks at whole variables"),
        (lambda: SGD(use_ema=True), {}, "with use_ema"),
        (SGD, {"strategy": rr.LocalSGD(4)}, "with strategy=LocalSGD"),
        (SGD, {"compression": "int8"}, "with compression='int8'"),
        (SGD, {"update_rows": "touched"}, "with update_rows='touched'"),
    ],
    ids=["Lamb", "Muon", "EMA", "LocalSGD", "int8", "touched"],
)
def test_what_needs_whole_variables_is_refused_by_name(inner, options, text):
    with pytest.raises(ConfigError, match=f"shard_state=True.*{text}"):
        rr.DistributedOptimizer(inner(), shard_state=True, **options)


def test_an_elastic_job_is_refused(monkeypatch):
    monkeypatch.setenv("RINGREDUCE_ELASTIC", "1")
    with pytest.raises(ConfigError, match="elastic training, in which a lost rank takes"):
        rr.DistributedOptimizer(SGD(), shard_state=True)


def test_one_rank_alone_has_a_plain_update():
    optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(), shard_state=True)
    with rr.init(rank=0, size=1):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        model.compile(optimizer, "mse")
        optimizer.build(model.trainable_variables)
        assert [tuple(each.shape) for each in optimizer.variables[2:4]] == [(3, 4), (3, 4)]
    rr.shutdown()


@pytest.mark.parametrize(
    ("inner", "options", "count"),
    [
        (keras.optimizers.Adam, {}, 16),
        (lambda: SGD(momentum=0.9), {}, 0),
        (keras.optimizers.Adam, {"compression": "bf16"}, 0),
        (keras.optimizers.Lamb, {}, 0),
    ],
    ids=["Adam", "momentum", "bf16", "Lamb"],
)
def test_it_is_recommended_where_it_pays(inner, options, count):
    optimizer = rr.DistributedOptimizer(inner(), **options)
    optimizer.build_inner([keras.Variable([[0.0] * 16])])
    assert weights_to_divide(optimizer) == count


def die_between_the_update_and_the_gather():
    model = make()
    inner, steps = model.optimizer._inner, []
    apply_gradients = inner.apply_gradients

    def apply(pairs, **options):
        apply_gradients(pairs, **options)
        steps.append(0)
        if rr.rank() == 1 and len(steps) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    inner.apply_gradients = apply
    fit(model)


def test_a_rank_that_is_killed_between_its_update_and_the_gather_is_named(ranks):
    # On a busy machine its silence may be noticed before its end.
    text = "rank 0 of 2 lost rank 1: .*, in all_gather"
    with pytest.raises(AssertionError, match=text):
        ranks(2, die_between_the_update_and_the_gather)
