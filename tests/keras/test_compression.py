"""Compression between hosts, and none within one. Sockets count as two hosts."""

import contextlib
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import ConfigError, NumericsError
from ringreduce.tensorflow.codecs import Codec
from tests.jobs import facts_in, run_job
from tests.programs.shared import digest
from tests.ranks import on_ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

REWRITES_GRAPHS = True

SGD = keras.optimizers.SGD
# More than travels as it is.
COUNT = 5003
THIN = rr.PowerSGD(4, start_step=0)
over_sockets = on_ranks(2, RINGREDUCE_TRANSPORT="zmq")


def wrapped(compression, inner=SGD, **options):
    return rr.DistributedOptimizer(inner(1.0), compression=compression, **options)


def zeros(shape):
    return tf.Variable(tf.zeros(shape), name="kernel")


def stepping(optimizer, variables, way="graph", samples=None):
    def step(*gradients):
        with contextlib.nullcontext() if samples is None else rr.step_weight(samples):
            optimizer.apply(list(gradients), variables)

    traced = step if way == "eager" else tf.function(step, jit_compile=way == "jit")
    return lambda *gradients: traced(*(tf.constant(each, tf.float32) for each in gradients))


def noise(step, number=0, shape=COUNT):
    generator = np.random.default_rng([rr.rank(), step, number])
    return generator.standard_normal(shape).astype(np.float32)


def are_equal(arrays, others):
    return all(np.all(a == b) for a, b in zip(arrays, others, strict=True))


def warnings_of_compression():
    """A list that grows."""
    texts, handler = [], logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    handler.addFilter(lambda record: "compression" in record.getMessage())
    logging.getLogger("ringreduce").addHandler(handler)
    return texts


EXACT = [-60000.0, 60000.0, -0.5, -2.0, -1 - 2.0**-9]
# 8 significant bits.
SHORT = [-59904.0, 59904.0, -0.5, -2.0, -1.0]


def rounded(compression, way="eager"):
    """The weights after a step with values that fit no encoding, or only one, or whose sum does."""
    variable = zeros(5 * COUNT)
    values = [60000.0, -60000.0, float(rr.rank()), 2.0, 1 + 2.0**-9]
    stepping(wrapped(compression), [variable], way)(np.tile(values, COUNT))
    return np.unique(variable.numpy().reshape(COUNT, 5), axis=0).tolist()


@pytest.mark.parametrize(
    ("compression", "expected", "way"),
    [
        ("none", EXACT, "eager"),
        # Twice 60000 is more than float16 holds.
        ("fp16", EXACT, "eager"),
        *(("bf16", SHORT, way) for way in ("eager", "graph", "jit")),
    ],
)
@over_sockets
def test_gradients_are_rounded_and_overflow_by_no_sum(compression, expected, way):
    warned = warnings_of_compression()
    assert rounded(compression, way) == [expected]
    assert warned == []


def kept_by(optimizer, variable):
    """This rank's residuals of a variable: of what it gave, and of what it sent as a result."""
    thin = optimizer._bridge.low_rank
    residuals = optimizer._bridge._residuals if thin is None else thin.residuals
    residuals._put_away()
    residuals._used_by = None
    residuals._laid_out.clear()
    none = variable, np.zeros((2, int(np.prod(variable.shape))))
    _, kept = residuals._stored.get(id(variable), none)
    # PowerSGD has none of the second kind.
    return kept[0].astype(float), kept[1].astype(float) if len(kept) > 1 else 0.0


FLAT = ((COUNT,), (7,), (70_001,), (300_017,))
# The fourth does not become half as many bytes; the last has a bucket to itself.
MATRICES = ((200, 101), (7,), (3, 3, 16, 33), (9, 8), (701, 503))


@pytest.mark.parametrize(
    ("compression", "shapes"), [("int8", FLAT), (rr.PowerSGD(3, start_step=2), MATRICES)]
)
@over_sockets
def test_nothing_is_lost_between_steps_routes_and_buckets(compression, shapes):
    """Eager, then in a graph, then compiled, with other buckets."""
    variables = [zeros(shape) for shape in shapes]
    optimizer = wrapped(compression, bucket_bytes=1 << 18)
    given = [np.zeros(shape) for shape in shapes]
    for turn, way in enumerate(("eager", "graph", "jit", "eager")):
        step = stepping(optimizer, variables, way)
        for number in range(2):
            own = [noise(10 * turn + number, i, shape) for i, shape in enumerate(shapes)]
            given = [total + each for total, each in zip(given, own, strict=True)]
            step(*own)
    kept = [kept_by(optimizer, variable) for variable in variables]
    for variable, total, (first, second) in zip(variables, given, kept, strict=True):
        applied = rr.init().all_reduce(total.ravel() - first - second * rr.size())
        # Rounding of float32 sums up to 30.
        assert np.abs(variable.numpy().ravel() * rr.size() + applied).max() < 1e-3
    most = [np.abs(first).max() for first, _ in kept]
    if compression == "int8":
        # The second is so short that it is never encoded; its bucket is, with others.
        assert 0 < min(most) <= max(most) < 0.1
    else:
        assert [each > 0 for each in most] == [True, False, True, False, True]
    return digest(variables)


@pytest.mark.parametrize(("compression", "shape"), [("int8", (COUNT,)), (THIN, (60, 90))])
@over_sockets
def test_models_of_the_same_names_keep_their_own(compression, shape):
    pair, twin = [zeros(shape), zeros(shape)], zeros(shape)
    optimizer = wrapped(compression)
    optimizer.build(pair)
    first, second = (stepping(optimizer, [variable]) for variable in pair)
    alone = stepping(wrapped(compression), [twin])
    for number in range(5):
        first(noise(number, 0, shape))
        second(noise(number, 1, shape))
        alone(noise(number, 0, shape))
    assert (pair[0].numpy() == twin.numpy()).all()


def poisoned(values, poison=np.nan):
    """Rank 1's, not finite in one place."""
    if rr.rank() == 1:
        values[(10,) * values.ndim] = poison
    return values


@pytest.mark.parametrize(
    ("compression", "shape", "way", "poison"),
    [
        ("int8", (COUNT,), "graph", np.nan),
        ("int8", (COUNT,), "eager", np.inf),
        (THIN, (60, 90), "graph", np.nan),
    ],
)
@over_sockets
def test_what_is_not_finite_is_seen_by_all_and_not_kept(compression, shape, way, poison):
    def kept():
        thin = optimizer._bridge.low_rank
        across = [] if thin is None else [thin.across(variable, 0, 0).copy()]
        return [*kept_by(optimizer, variable), *across]

    variable, optimizer = zeros(shape), wrapped(compression)
    step = stepping(optimizer, [variable], way)
    for number in range(5):
        step(noise(number, 0, shape))
    before, value = kept(), variable.numpy()
    step(poisoned(noise(5, 0, shape), poison))
    assert not np.isfinite(variable.numpy()[(10,) * len(shape)])
    assert are_equal(kept(), before)
    variable.assign(value)
    step(noise(6, 0, shape))
    assert np.isfinite(variable.numpy()).all()
    return digest([variable])


def meeting_residuals(optimizer):
    """This rank's residuals of its one round of meetings, as `kept_by`."""
    (round_,) = optimizer._running._rounds.values()
    return [each.copy() for each in round_._meeting._coding.residuals]


@over_sockets
def test_nothing_is_lost_between_meetings():
    """In which ranks count by samples."""
    sizes = (COUNT, 7, (1 << 20) + 3)
    variables = [zeros(size) for size in sizes]
    optimizer = wrapped("int8", strategy=rr.LocalSGD(3, 1))
    share = (rr.rank() + 1) * rr.size() / sum(range(rr.size() + 1))
    given = np.zeros(sum(sizes))
    step = stepping(optimizer, variables, "eager", rr.rank() + 1.0)
    for number in range(8):
        own = [noise(number, i, size) for i, size in enumerate(sizes)]
        given += share * np.concatenate(own)
        step(*own)
    optimizer.settle()
    first, second = meeting_residuals(optimizer)
    everyone = rr.init().all_reduce(given - first - second.astype(float) * rr.size())
    applied = np.concatenate([each.numpy() for each in variables]).astype(float) * rr.size()
    assert np.abs(applied + everyone).max() < 1e-3
    most = [np.abs(part).max() for part in (first, second)]
    assert 0 < min(most) <= max(most) < 0.2
    return digest(variables)


@over_sockets
def test_a_rank_whose_weights_become_nan_poisons_the_next_meeting_and_no_other():
    variable = zeros(COUNT)
    optimizer = wrapped("int8", strategy=rr.LocalSGD(3))
    step, before = stepping(optimizer, [variable]), None
    for number in range(6):
        if number == 3:
            before = meeting_residuals(optimizer)
        step(poisoned(noise(number)) if number == 4 else noise(number))
    assert np.isnan(variable.numpy()[10])
    after = meeting_residuals(optimizer)
    optimizer.settle()
    variable.assign(tf.zeros(COUNT))
    for number in range(3):
        step(noise(number, 1))
    assert are_equal(before, after)
    assert np.isfinite([*before, *after, variable.numpy()]).all()
    return digest([variable])


@pytest.mark.parametrize(
    ("shape", "options", "most", "zeros_before"),
    [
        ((40, 1), {}, 1e-5, 0),
        ((40, 1), {}, 1e-5, 1),
        ((40, 30), {}, np.inf, 0),
        ((40, 30), {"start_step": 1}, 0, 0),
        ((40, 30), {"exclude": ["ker", "nel$"]}, 0, 0),
        ((40,), {}, 0, 0),
    ],
    ids=["low rank", "after zeros", "noise", "start", "excluded", "vector"],
)
@over_sockets
def test_matrices_of_low_rank_arrive_whole_and_others_nearly(shape, options, most, zeros_before):
    """A start, vectors and what is excluded go as they are."""
    gradient = np.random.default_rng(rr.rank()).integers(-9, 10, shape)
    if shape == (40, 1):
        gradient = np.repeat(gradient, 30, 1)
    variable = zeros(gradient.shape)
    optimizer = wrapped(rr.PowerSGD(2, **{"start_step": 0, **options}))
    step = stepping(optimizer, [variable], "eager")
    for _ in range(zeros_before):
        step(np.zeros(gradient.shape))  # From which nothing is learned.
    step(gradient)
    off = np.abs(variable.numpy() + rr.init().all_reduce(gradient.astype("float32"), "mean")).max()
    assert 1 < off < most if most == np.inf else off <= most
    return digest([variable])


@over_sockets
def test_what_is_equal_on_all_ranks_is_saved(tmp_path):
    """Q and the number of steps go on from a file, which plain Keras reads too."""
    path, from_plain = (tmp_path / f"{name}{rr.rank()}.keras" for name in ("ours", "plain"))
    thin = rr.PowerSGD(2, start_step=1)

    def made(compression):
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(40)])
        model.compile(wrapped(compression))
        model.optimizer.build(model.trainable_variables)
        return model

    def low_rank(model):
        return model.optimizer._bridge.low_rank

    first, other = made(thin), made(rr.PowerSGD(3, start_step=1))
    step = stepping(first.optimizer, first.trainable_variables, "eager")
    for number in range(4):
        step(*(noise(number, i, v.shape) for i, v in enumerate(first.trainable_variables)))
    first.save(path)
    plain, second = keras.models.load_model(path), rr.load_model(path, compression=thin)
    other.load_weights(path)
    plain.save(from_plain)
    third = rr.load_model(from_plain, compression=thin)
    assert [low_rank(model).step for model in (second, other, third)] == [4, 4, 0]
    across, expected = (
        low_rank(model).across(model.trainable_variables[0], 40, 0) for model in (second, first)
    )
    assert (across == expected).all()
    assert len({digest(model.weights) for model in (first, plain, second, third)}) == 1


def losses_of(compression):
    """Whole training; the losses, and a digest of the weights."""
    x = np.random.default_rng(0).normal(size=(128, 64)).astype("float32")
    y = (x[:, :8].sum(1) > 0).astype("float32")
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(1, "sigmoid")]
    model = keras.Sequential([keras.Input((64,)), *layers])
    optimizer = rr.DistributedOptimizer(keras.optimizers.Adam(0.003), compression=compression)
    model.compile(optimizer, "binary_crossentropy", run_eagerly=True)
    return rr.fit(model, x, y, 64, epochs=2, verbose=0).history["loss"], digest(model.weights)


@pytest.mark.full
@over_sockets
def test_it_trains_as_without():
    (plain, _), (int8, weights), (thin, thin_weights) = map(losses_of, ("none", "int8", THIN))
    for losses, tolerance in ((int8, 0.03), (thin, 0.2)):
        np.testing.assert_allclose(losses, plain, rtol=tolerance)
        assert losses != plain
    return weights, thin_weights


def loss_scaled(rate):
    return keras.optimizers.LossScaleOptimizer(SGD(rate))


OTHER_SCALE, PLAIN_TAPE = "Use mixed_bfloat16, which needs no scale", "with a plain tape"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: wrapped("int8", loss_scaled), OTHER_SCALE),
        (lambda: wrapped(THIN, loss_scaled), OTHER_SCALE),
        (lambda: rr.DistributedGradientTape(compression="int8"), PLAIN_TAPE),
        (lambda: rr.DistributedGradientTape(compression=THIN), PLAIN_TAPE),
        (lambda: wrapped("int4"), "accepted: none, fp16, bf16, int8, or a PowerSGD object"),
        (lambda: wrapped(THIN, strategy=rr.LocalSGD(5)), "compression='int8' or 'bf16' for meet"),
        (lambda: Codec("int8").compress(tf.zeros(3)), r"Use Compression\.fp16"),
        (lambda: rr.PowerSGD(0), "rank is 0; accepted: 1 and more"),
        (lambda: rr.PowerSGD(start_step=-1), "start_step is -1; accepted: 0 and more"),
        (lambda: rr.PowerSGD(exclude="embedding"), "Pass a list of expressions"),
    ],
)
def test_what_cannot_be_is_refused(call, text):
    with pytest.raises(ConfigError, match=text):
        call()


@over_sockets
def test_what_the_encoding_cannot_hold_is_said():
    """A finite gradient that float16 does not hold."""
    step = stepping(wrapped("fp16", check_numerics="raise"), [zeros(5 * COUNT)], "eager")
    with pytest.raises(NumericsError, match="their sum overflows float32, or compression=fp16"):
        step(np.full(5 * COUNT, 1e5))


@pytest.mark.full
@on_ranks(2)
def test_within_a_host_nothing_is_encoded_and_that_is_said_once():
    warned = warnings_of_compression()
    for compression in ("none", "fp16", "bf16"):
        assert rounded(compression) == [EXACT]
    assert losses_of("int8") == losses_of("none")
    assert len(warned) == (rr.rank() == 0)
    assert all("all ranks are on one host" in text for text in warned)


UNLIKE = ("bf16", "int8")


@pytest.mark.full
def test_unlike_processors_end_each_step_alike():
    """Ranks whose processors round differently, as numba and BLAS see them."""
    other = {1: {"NUMBA_CPU_NAME": "generic", "OPENBLAS_CORETYPE": "Prescott"}}
    environment = {"RINGREDUCE_TRANSPORT": "zmq"}
    arguments = ["tests/programs/unlike.py", *UNLIKE]
    result = run_job(2, arguments, environment=environment, unlike=other)
    assert result.exit_code == 0, result.errors
    said = {}
    for fact in facts_in(result.output):
        said.setdefault(fact["case"], {})[fact["rank"]] = fact
    assert said["processor"][1]["numba"] == "generic" != said["processor"][0]["numba"]
    for case, count in (("every step", 20), ("meetings", 4)):
        for name in UNLIKE:
            first, second = (said[f"{case} {name}"][rank]["digests"] for rank in (0, 1))
            assert len(first) == count
            assert first == second
