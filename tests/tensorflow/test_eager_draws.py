"""Random numbers of eager ops, by rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from ringreduce.tensorflow.eager_draws import Draws, seen

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(60)]

ROWS, FIRST = 12, 4
DROPOUT, GENERATOR = keras.layers.Dropout(0.5, seed=2), tf.random.Generator.from_seed(3)
BY_ROW = {
    "keras": lambda rows: keras.random.normal((rows, 3)),
    "keras bfloat16": lambda rows: keras.random.normal((rows, 3), dtype="bfloat16"),
    "dropout": lambda rows: DROPOUT(tf.ones((rows, 3)), training=True),
    "tf": lambda rows: tf.random.uniform((rows, 2)),
    "integers": lambda rows: tf.random.uniform((rows,), maxval=99, dtype=tf.int32),
    "truncated": lambda rows: tf.random.truncated_normal((rows, 2)),
    "generator": lambda rows: GENERATOR.normal((rows, 2)),
    "categorical": lambda rows: tf.random.categorical(tf.zeros((rows, 9)), 2),
    "gamma": lambda rows: keras.random.gamma((rows, 2), 1.0),
    "in a function": lambda rows: eagerly(lambda: FUNCTION(tf.ones((rows, 2)))),
}
FUNCTION = tf.function(lambda values: values + tf.random.normal(tf.shape(values)))


def eagerly(call):
    tf.config.run_functions_eagerly(True)
    try:
        return call()
    finally:
        tf.config.run_functions_eagerly(False)


def drawn(draw):
    """What is drawn for all rows, for the first, and for the rest."""
    draws = Draws(ROWS)
    with draws.made():
        whole = draw(ROWS)
    parts = []
    for first, end in ((0, FIRST), (FIRST, ROWS)):
        with draws.given(np.arange(first, end)):
            parts.append(draw(end - first))
    return draws, *(np.asarray(tensor) for tensor in (whole, *parts))


@pytest.mark.parametrize("draw", BY_ROW.values(), ids=BY_ROW)
def test_a_row_gets_the_same_draw_alone_and_with_others(draw):
    draws, whole, first, rest = drawn(draw)
    assert draws.unfit == ""
    assert (np.concatenate([first, rest]) == whole).all()
    assert len(np.unique(whole)) > 1


def test_a_second_run_on_all_rows_draws_the_same():
    draws, draw = Draws(ROWS), lambda: np.asarray(tf.random.normal((ROWS, 2)))
    with draws.made():
        once = draw()
    with draws.made():
        again = draw()
    assert (once == again).all()
    assert (draw() != once).any()


@pytest.mark.parametrize("shape", [lambda rows: (), lambda rows: (2 * rows,)], ids=["one", "twice"])
def test_what_is_not_by_row_is_one_number(shape):
    _, *parts = drawn(lambda rows: tf.random.normal(shape(rows)))
    assert len({float(value) for part in parts for value in part.reshape(-1)}) == 1


@pytest.mark.parametrize(
    "draw",
    [
        lambda rows: tf.random.shuffle(tf.range(rows)),
        lambda rows: tf.random.normal((rows, 2 + rows)),
        lambda rows: tf.random.normal((rows,)) if rows == ROWS else tf.random.uniform(()),
    ],
    ids=["an order", "other columns", "another draw"],
)
def test_what_belongs_to_no_row_is_named(draw):
    draws = Draws(ROWS)
    with draws.made():
        draw(ROWS)
    with draws.given(np.arange(FIRST)):
        draw(FIRST)
    assert draws.unfit


@pytest.mark.parametrize(
    ("draw", "keeps_place"),
    [
        (lambda: tf.random.uniform((2,)), True),
        (lambda: tf.random.shuffle(tf.range(3)), True),
        (lambda: tf.function(lambda: tf.random.normal((2,), seed=1))(), True),
        (lambda: tf.random.stateless_uniform((2,), [1, 2]), False),
        (lambda: keras.random.normal((2,), seed=keras.random.SeedGenerator(1)), False),
        (lambda: tf.ones(3) + 1, False),
    ],
)
def test_ops_with_a_place_in_random_numbers_are_seen(draw, keeps_place):
    with seen() as kinds:
        draw()
    assert bool(kinds) is keeps_place, kinds


def test_a_function_may_be_traced_where_draws_are_watched():
    with seen(), Draws(4).made(), seen():
        traced = tf.function(lambda x: x + tf.random.stateless_uniform((), [1, 2]))
        assert traced(tf.zeros(4)).shape == (4,)
