"""Which random numbers of a traced step differ between ranks, and what is told of the others."""

import pytest
import tensorflow as tf

from ringreduce.tensorflow import draws

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

ROWS = tf.TensorSpec((None, 2))


def normal(rows):
    return tf.random.normal(tf.shape(rows))


def in_branch(rows):
    return tf.cond(tf.shape(rows)[0] > 0, lambda: normal(rows), lambda: rows)


def in_loop(rows):
    return tf.map_fn(lambda row: row + tf.random.normal(()), rows, parallel_iterations=1)


def in_function(rows):
    return tf.function(normal, autograph=False)(rows)


def with_own_seed(rows):
    return tf.random.uniform(tf.shape(rows), seed=7)


def shuffled(rows):
    return tf.random.shuffle(rows + tf.cumsum(tf.ones_like(rows), 0))


def dropped(rows):
    return tf.nn.dropout(tf.ones_like(rows), 0.5)


EACH = [normal, in_branch, in_loop, in_function, with_own_seed, shuffled, dropped]


def trace(step, *, rank=None, seed=3, spec=ROWS):
    """What `step` draws when it is traced for a rank, and what is told of it meanwhile."""
    tf.random.set_seed(seed)
    told = []

    def traced(rows):
        if rank is None:
            results = step(rows)
        else:
            with draws.apart(rank):
                results = step(rows)
        told.extend(draws.drawn())
        return results

    function = tf.function(traced, autograph=False).get_concrete_function(spec)
    return function(tf.zeros((16, 2))).numpy().tolist(), told


@pytest.mark.parametrize("step", EACH)
def test_ranks_draw_other_numbers_and_the_same_in_each_run(step):
    (first, of_first), (other, of_other), (again, _) = (trace(step, rank=n) for n in (0, 1, 0))
    assert first != other
    assert first == again
    assert len(of_first) == len(of_other) == 1
    assert of_first[0].seeds != of_other[0].seeds


@pytest.mark.parametrize("step", EACH)
def test_what_nothing_keeps_apart_is_told(step):
    (first, told), (again, as_much) = trace(step), trace(step)
    assert first == again
    [draw], [same] = told, as_much
    assert draw.seeds == same.seeds
    assert draw.op.type.startswith("Random")
    assert any(frame.filename == __file__ for frame in draw.op.traceback)


def test_what_is_drawn_once_for_all_rows_is_not_told():
    def once(rows):
        scale = tf.random.uniform(()) + tf.random.uniform((1, 2))
        classes = tf.ones((4, 1), tf.int64)
        negative = tf.random.log_uniform_candidate_sampler(classes, 1, 3, True, 10)[0]
        return rows * scale + tf.cast(negative[0], tf.float32)

    assert trace(once)[1] == []


def test_without_a_seed_nothing_is_alike_and_nothing_is_changed():
    with tf.Graph().as_default() as graph:
        graph.seed = None
        with draws.apart(1):
            assert graph.seed is None
            tf.random.normal((4, 2))
    [op] = [op for op in graph.get_operations() if op.type == "RandomStandardNormal"]
    assert (op.get_attr("seed"), op.get_attr("seed2")) == (0, 0)


def test_only_what_the_step_draws_differs():
    """Weights, data and an optimizer's noise stay equal."""

    def step(_, rank):
        with draws.apart(rank):
            with tf.init_scope():
                weights = tf.random.normal((4,))
            with draws.alike():
                noise = in_function(tf.zeros((4, 2))), normal(tf.zeros((4, 2)))
            own = normal(tf.zeros((4, 2)))
        return noise, own, weights

    found = []
    for rank in range(2):
        tf.random.set_seed(3)
        traced = tf.function(lambda rows, rank=rank: step(rows, rank), autograph=False)
        noise, own, weights = traced.get_concrete_function(ROWS)(tf.zeros((1, 2)))
        after = tf.random.normal((4,))
        equal = [each.numpy().tolist() for each in (*noise, weights, after)]
        found.append((equal, own.numpy().tolist()))
    (equal, own), (also_equal, others) = found
    assert equal == also_equal
    assert own != others


def test_after_a_mean_by_a_tape_ranks_draw_the_same():
    def step(rows):
        before = normal(rows)
        draws.end_apart()
        return tf.concat([before, normal(rows)], 1)

    first, other = (trace(step, rank=rank)[0] for rank in range(2))
    assert [row[:2] for row in first] != [row[:2] for row in other]
    assert [row[2:] for row in first] == [row[2:] for row in other]


def test_an_eager_step_that_draws_is_told():
    tf.random.set_seed(3)
    with draws.watched():
        assert draws.drawn() == []
        tf.random.normal((4,))
        [draw] = draws.drawn()
        assert draw.op is None
    assert draws.drawn() == []


def test_what_xla_compiles_draws_alike_whatever_the_seed():
    told = []

    def step(rows):
        with draws.apart(1):
            drawn = normal(rows)
        told.extend(draws.drawn())
        return drawn

    tf.random.set_seed(3)
    tf.function(step, jit_compile=True, autograph=False).get_concrete_function(ROWS)
    assert [draw.seeds for draw in told] == ["XLA"]


def test_what_is_drawn_around_a_compiled_function_has_its_seeds():
    told = []

    def compiled(rows):
        told.extend(draws.drawn())
        return rows

    def step(rows):
        return tf.function(compiled, jit_compile=True, autograph=False)(normal(rows))

    trace(step)
    assert len(told) == 1
    assert told[0].seeds != "XLA"
