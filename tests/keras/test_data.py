"""`rr.shard`: each rank's part of data in every form, and data that differs between ranks."""

import itertools
import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import MismatchError
from ringreduce.keras.checks import warnings as our_warnings
from ringreduce.testing import ring_of_threads
from tests.models import passes_until_refused

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:rr.shard leaves out"),
]
SIZE = 3
COUNT = 70  # more than one group of elements


class Batches(keras.utils.PyDataset):
    def __init__(self, count=10, shuffle=None):
        super().__init__()
        self.order = np.arange(4 * count)
        self.shuffle = shuffle

    def __len__(self):
        return len(self.order) // 4

    def __getitem__(self, index):
        rows = self.order[4 * index : 4 * index + 4]
        return rows, -rows

    def on_epoch_end(self):
        if self.shuffle:
            self.shuffle.shuffle(self.order)


def ragged(count):
    return tf.data.Dataset.range(count).map(lambda n: tf.zeros(n % 3, tf.int64) + n)


@pytest.mark.parametrize(
    ("count", "known", "even"),
    [
        (0, False, True),
        (SIZE, True, True),
        (COUNT + 1, True, False),
        (COUNT + 1, False, True),
        (COUNT, False, False),
    ],
)
def test_every_element_goes_to_one_rank(count, known, even):
    def work(comm):
        data = tf.data.Dataset.range(count).shuffle(COUNT, seed=1)
        data = data if known else data.filter(lambda _: True)
        parts = [rr.shard(data, comm, even=even) for _ in range(2)]
        return [[int(number) for number in part] for part in parts]

    for parts in zip(*ring_of_threads(SIZE, work), strict=True):
        found = sorted(number for part in parts for number in part)
        if even:
            assert {len(part) for part in parts} == {count // SIZE}
            assert len(set(found)) == len(found)
        else:
            assert found == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


FEW = {
    "files": lambda count: tf.data.Dataset.from_tensor_slices([str(n) for n in range(count)]),
    "rows": np.arange,
    "batches": lambda count: Batches(count),
}


@pytest.mark.parametrize("make", FEW.values(), ids=FEW)
def test_fewer_elements_than_ranks_are_refused_unless_some_may_have_none(make):
    def work(comm):
        with pytest.raises(rr.ConfigError, match=r"got 2 \w+ to shard among 3 ranks"):
            rr.shard(make(2), comm)
        part = rr.shard(make(2), comm, even=False)
        return part.num_batches if isinstance(part, keras.utils.PyDataset) else len(part)

    assert ring_of_threads(SIZE, work) == [1, 1, 0]


@pytest.mark.parametrize("make", FEW.values(), ids=FEW)
def test_what_is_left_out_is_said_on_rank_0_where_it_is_much(make):
    def work(comm):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for count, options in ((8, {}), (9, {}), (1000, {}), (8, {"even": False})):
                rr.shard(make(count), comm, check=False, **options)
            comm.barrier()
        return [str(each.message) for each in found if each.category is rr.DataWarning]

    told = next(filter(None, ring_of_threads(SIZE, work)))
    assert len(told) == 1
    assert "leaves out the last 2 of 8 " in told[0]
    assert "each of 3 ranks gets 2" in told[0]


@pytest.mark.parametrize("is_divided", [True, False])
def test_data_that_a_group_divides_is_divided_for_the_whole_job(is_divided):
    """As of a model in parts, whose optimizer is the job's and whose rows are a group's."""

    def work(comm):
        group = comm.split(0)
        if is_divided:
            rr.shard(np.arange(9), group)
        our_warnings.warn_of_whole_data(SimpleNamespace(name="towers"), comm)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ring_of_threads(SIZE, work)
    told = [str(each.message) for each in found if each.category is rr.DataWarning]
    assert is_divided or "nothing has divided the data that towers.fit trains on" in told[0]
    assert len(told) == (not is_divided)


def test_a_cache_file_that_another_rank_writes_is_named_with_what_to_do(tmp_path):
    (tmp_path / "rows_0.lockfile").touch()

    def work(comm):
        data = iter(tf.data.Dataset.range(4).cache(str(tmp_path / "rows")))
        step = tf.function(lambda: rr.all_reduce(next(data), communicator=comm))
        with pytest.raises(rr.ConfigError, match=r"rows_0\.lockfile\. Give each rank"):
            step()

    ring_of_threads(2, work)


@pytest.mark.parametrize(("even", "lengths"), [(True, [3, 3, 3]), (False, [4, 3, 3])])
def test_batches_of_a_py_dataset_are_divided(even, lengths):
    def work(comm):
        part = rr.shard(Batches(), comm, even=even)
        return [part[index][0].tolist() for index in range(part.num_batches)]

    parts = ring_of_threads(SIZE, work)
    assert [len(part) for part in parts] == lengths
    assert parts[1][0] == [4, 5, 6, 7]
    assert parts[2][1] == [20, 21, 22, 23]


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda rank: tf.data.Dataset.range(COUNT).shuffle(COUNT), "elements 1 to 64"),
        (lambda rank: ragged(COUNT).shuffle(COUNT), "element "),  # Many are alike: empty.
        (lambda rank: tf.data.Dataset.range(COUNT).map(lambda n: n + rank * (n // 69)), "65 to 70"),
        (lambda rank: ragged(COUNT).map(lambda n: n + rank * (n // 68)), "65 to 70"),
    ],
    ids=["shuffled", "of unequal shapes", "at its end", "of unequal shapes at its end"],
)
def test_a_dataset_that_differs_between_ranks_ends_the_job(make, where):
    def work(comm):
        data = rr.shard(make(comm.rank), comm, even=False)
        passes_until_refused(comm, lambda: list(data))

    with pytest.raises(MismatchError, match="read different data") as caught:
        ring_of_threads(SIZE, work)
    for text in ("the data given to rr.shard (test_data.py:", where, "shuffle after sharding"):
        assert text in str(caught.value)


def test_a_dataset_that_differs_from_the_second_pass_on_ends_the_job():
    def work(comm):
        data = rr.shard(Batches(shuffle=np.random.default_rng(comm.rank)), comm)

        def read():
            data.on_epoch_begin()
            data.on_epoch_end()

        passes_until_refused(comm, read)

    with pytest.raises(MismatchError, match="differs in element 1 of pass 2"):
        ring_of_threads(SIZE, work)


@pytest.mark.parametrize(
    ("is_known", "where"), [(True, "elements 1 to 5 of pass 2"), (False, "element 1 of pass 2")]
)
def test_elements_that_differ_from_the_second_pass_on_end_the_job(is_known, where):
    """Where it is known which element is the last, one comparison has all of them."""

    def work(comm):
        passes = itertools.count()

        def read():
            apart = 5 * comm.rank * (next(passes) > 0)
            yield from ([apart + number] for number in range(5))

        # Elements of unknown shape are not read in groups.
        spec = tf.TensorSpec((None,), tf.int64)
        data = tf.data.Dataset.from_generator(read, output_signature=spec)
        if is_known:
            data = data.apply(tf.data.experimental.assert_cardinality(5))
        part = rr.shard(data, comm, even=False)
        passes_until_refused(comm, lambda: list(part))

    with pytest.raises(MismatchError, match=where):
        ring_of_threads(SIZE, work)


def test_arrays_that_differ_between_ranks_end_the_job():
    def work(comm):
        rr.shard(np.arange(9) + comm.rank // 2, comm)

    with pytest.raises(MismatchError, match="rank 2 has other values than rank 0"):
        ring_of_threads(SIZE, work)


def test_nothing_is_compared_where_that_is_not_wanted():
    def work(comm):
        data = rr.shard(tf.data.Dataset.range(COUNT).shuffle(COUNT), comm, check=False)
        for _ in range(20):
            list(data)
            comm.barrier()
        return rr.shard(np.arange(6) + comm.rank, comm, check=False).tolist()

    assert ring_of_threads(SIZE, work) == [[0, 3], [2, 5], [4, 7]]


def test_a_rank_may_read_alone_and_ahead():
    def work(comm):
        data = rr.shard(tf.data.Dataset.range(COUNT).shuffle(COUNT, seed=2), comm)
        if comm.rank == 0:
            next(iter(data))
        if comm.rank == 1:
            list(tf.data.Dataset.zip(data, data))
        comm.barrier()

    ring_of_threads(SIZE, work)


@pytest.mark.parametrize("divided", ["job", "group"])
def test_a_warning_of_whole_data_knows_what_other_groups_divide(divided, monkeypatch):
    warned = []
    monkeypatch.setattr(our_warnings, "warn_at_users_line", lambda text, kind: warned.append(text))
    model = keras.Sequential(name="towers")

    def work(comm):
        whole, trains = comm.split(0), comm.split(0)
        trains, other = (trains, comm) if divided == "job" else (comm, trains)
        if comm.rank == 0:
            our_warnings.warn_of_whole_data(model, whole)
            assert len(warned) == 1
            assert "towers.fit trains on" in warned.pop()
            rr.shard(np.zeros(4), check=False, communicator=other)
            our_warnings.warn_of_whole_data(model, trains)
            assert not warned
        comm.barrier()

    ring_of_threads(2, work)


def test_what_cannot_be_divided_is_refused():
    def work(comm):
        for data in ([1.0, 2.0], "text", iter([1])):
            with pytest.raises(rr.ConfigError, match="to shard"):
                rr.shard(data, comm)

    ring_of_threads(2, work)


@pytest.mark.parametrize(
    ("make", "dense"),
    [
        (tf.constant, lambda part: part.numpy()),
        (tf.sparse.from_dense, lambda part: tf.sparse.to_dense(part).numpy()),
        (tf.RaggedTensor.from_tensor, lambda part: part.to_tensor().numpy()),
    ],
)
def test_arrays_and_tensors_of_any_kind_are_divided_in_their_structure(make, dense):
    rows = np.arange(1, 15).reshape(7, 2)
    data = {"a": rows, "b": [rows + 1, make(rows)]}
    parts = ring_of_threads(SIZE, lambda comm: rr.shard(data, comm, even=False))
    for rank, part in enumerate(parts):
        mine = rows[rank::SIZE].tolist()
        assert [part["a"].tolist(), (part["b"][0] - 1).tolist()] == [mine] * 2
        assert dense(part["b"][1]).tolist() == mine
