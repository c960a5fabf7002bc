"""Feeds: each rank's part of global batches, and data that changes its form."""

import itertools
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import MismatchError
from ringreduce.keras.data.adapters import feed_of
from ringreduce.keras.data.arrays import Arrays
from ringreduce.keras.data.batch_shares import Shares, agreed_shares, told_share
from ringreduce.keras.data.division import Plan
from ringreduce.keras.rows import as_tensor
from ringreduce.pure.claims import Claim
from ringreduce.testing import ring_of_threads
from tests.models import passes_until_refused

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]
COUNT = 4
BATCH = 6


def rows(index, width=2):
    """A batch whose rows are all different."""
    numbers = np.arange(BATCH * width).reshape(BATCH, width) + 100 * index
    return numbers, numbers[:, 0]


class Changing(keras.utils.PyDataset):
    """One batch more or less after each epoch."""

    def __init__(self, more):
        super().__init__()
        self.length, self.more = COUNT, more

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return rows(index)

    def on_epoch_end(self):
        self.length += self.more


def read(given, size=2, epochs=1, is_stream=False, **options):
    """By epoch the targets that all ranks together get, in order."""

    def work(comm):
        feed = feed_of([given()], Plan(comm, "the data", **options))
        found, steps = [], options.get("steps")
        batches_read = iter(feed.dataset)
        for epoch in range(epochs):
            feed.begin(epoch)
            if steps is None or not is_stream:
                batches_read = iter(feed.dataset)
            found.append([b[1].numpy().tolist() for b in itertools.islice(batches_read, steps)])
            feed.end()
        return found

    by_rank = ring_of_threads(size, work)
    return [
        [list(itertools.chain(*parts)) for parts in itertools.zip_longest(*each, fillvalue=[])]
        for each in zip(*by_rank, strict=True)
    ]


def test_batches_of_a_generator_may_have_rows_of_any_length():
    given = lambda: (rows(index, width=2 + index) for index in itertools.count())  # noqa: E731
    assert read(given, epochs=2, is_stream=True, steps=2) == [
        [rows(index, 2 + index)[1].tolist() for index in which] for which in ((0, 1), (2, 3))
    ]


def test_a_py_dataset_may_change_its_length_as_in_keras():
    """It does so once before the first epoch."""
    for more, steps, expected in ((-1, None, [3, 2]), (-1, 2, [2, 2]), (1, 2, [2, 2])):
        found = read(partial(Changing, more), epochs=2, steps=steps)
        assert [len(epoch) for epoch in found] == expected


def test_weights_without_targets_are_refused_in_a_batch():
    with pytest.raises(rr.ConfigError, match="sample_weight and no y"):
        read(lambda: iter([(rows(0)[0], None, rows(0)[1])]), steps=1)


def test_weights_without_targets_count_nothing_as_in_keras():
    arrays = Arrays(rows(0)[0], None, rows(0)[1])
    assert arrays.parts.shape == (BATCH, 2)


def test_arrays_of_objects_that_are_no_text_are_refused():
    with pytest.raises(rr.ConfigError, match=r"Python objects \(int first\). Convert it"):
        Arrays(np.array([[1, True]], object))


def test_what_is_random_on_purpose_is_no_difference():
    def work(comm):
        inputs, targets = rows(0)
        # As augmentation by each rank's own random numbers does.
        data = tf.data.Dataset.from_tensor_slices((inputs + comm.rank, targets)).batch(2)
        feed = feed_of([data], Plan(comm, "the data"))
        assert len(list(feed.dataset)) == BATCH // 2
        # Values are compared in their order: one that differed before would be the error.
        last = Claim("last", bytes([comm.rank]), "differs from {peer} in the last", "Nothing.")
        comm._session.claim(last)
        passes_until_refused(comm)

    with pytest.raises(MismatchError, match="in the last"):
        ring_of_threads(2, work)


def test_a_py_dataset_that_differs_for_validation_ends_the_job():
    class Own(Changing):
        def __getitem__(self, index):
            return rows(index + self.more)

    def work(comm):
        feed_of([Own(comm.rank)], Plan(comm, "the data", deal=True))
        passes_until_refused(comm)

    with pytest.raises(MismatchError, match="differs in element 1"):
        ring_of_threads(2, work)


def generated():
    return ((NUMBERS[i : i + BATCH],) * 2 for i in range(0, len(NUMBERS), BATCH))


FORMS = {
    "arrays": lambda: (NUMBERS, NUMBERS),
    "dataset": lambda: [tf.data.Dataset.from_tensor_slices((NUMBERS, NUMBERS)).batch(BATCH)],
    "generator": lambda: [generated()],
}
NUMBERS = np.arange(BATCH * 30 + 1)


def shared_batches(form, make_shares, after=None):
    """Each rank's rows of all batches, on 2 ranks; `after` is called after the 10th batch."""

    def work(comm):
        shares, steps = make_shares(comm), -(-len(NUMBERS) // BATCH)
        size = BATCH if form == "arrays" else None
        plan = Plan(comm, "the data", batch_size=size, steps=steps, shares=shares)
        found = []
        feed = feed_of(FORMS[form](), plan)
        assert not feed.is_even
        for number, (_, y) in enumerate(feed.dataset):
            found.append(y.numpy().tolist())
            if number == 9 and after is not None:
                after(shares, comm)
        return found

    parts = list(zip(*ring_of_threads(2, work), strict=True))
    assert list(itertools.chain(*itertools.chain(*parts))) == NUMBERS.tolist()
    return [[len(own) for own in batch] for batch in parts]


@pytest.mark.parametrize("form", FORMS)
def test_shares_divide_the_same_batches(form):
    lengths = shared_batches(form, lambda comm: Shares(comm, (1, 2)))
    assert lengths == [[2, 4]] * 30 + [[0, 1]]


@pytest.mark.parametrize("form", FORMS)
def test_ranks_change_to_measured_shares_at_the_same_batch(form):
    def settle(shares, comm):
        assert shares.settle((1.0, 2.0)[comm.rank]) == [4, 2]

    lengths = shared_batches(form, lambda c: Shares(c, is_measured=True), settle)
    before = lengths.index([4, 2])
    assert 10 <= before < 30
    assert lengths == [[3, 3]] * before + [[4, 2]] * (30 - before) + [[1, 0]]


def test_ranks_that_have_made_different_numbers_of_batches_ahead_change_together():
    def work(comm):
        shares = Shares(comm, is_measured=True)
        ahead = 5 + 3 * comm.rank
        found = [shares.rows(index, BATCH) for index in range(ahead)]
        shares.settle((1.0, 2.0)[comm.rank])
        found += [shares.rows(index, BATCH) for index in range(ahead, 10)]
        return found, shares.rows(0, BATCH)

    first, second = ring_of_threads(2, work)
    assert first == ([(0, 3)] * 8 + [(0, 4)] * 2, (0, 4))
    assert second == ([(3, 6)] * 8 + [(4, 6)] * 2, (4, 6))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (("measured", "mesured"), rr.ConfigError, "got batch_share='mesured' on rank 1; accepted"),
        ((0, 1.0), rr.ConfigError, "got batch_share=0 on rank 0"),
        ((-1, float("nan")), rr.ConfigError, "got batch_share=-1 on rank 0"),
        ((1.0, True), rr.ConfigError, "got batch_share=True on rank 1"),
        ((None, "measured"), MismatchError, "is equal on rank 0 and measured on rank 1"),
        ((2.0, "equal"), MismatchError, "is a number on rank 0 and equal on rank 1"),
    ],
)
def test_a_wrong_share_is_an_error_on_all_ranks(given, error, text):
    def work(comm):
        with pytest.raises(error, match=text):
            agreed_shares(list(map(told_share, given)), comm)

    ring_of_threads(2, work)


def test_equal_numbers_are_equal_shares():
    for given in (None, "equal", 1.0):
        found = ring_of_threads(2, partial(agreed_shares, [told_share(given)] * 2))
        assert all(shares.is_equal for shares in found)


def test_a_sparse_matrix_of_jax_is_a_sparse_tensor():
    # As JAX's BCOO, which need not be in order.
    matrix = type("BCOO", (), {"__module__": "jax.experimental.sparse.bcoo"})()
    matrix.indices, matrix.data, matrix.shape = np.array([[1, 0], [0, 2]]), np.ones(2), (2, 3)
    found = tf.sparse.to_dense(as_tensor(matrix)).numpy()
    assert found.tolist() == [[0, 0, 1], [1, 0, 0]]
