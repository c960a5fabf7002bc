"""The collectives in a ring of threads, against their naive twins.

Data are whole numbers small enough for every dtype, so that sums do not depend on their
order and equality is exact. One ring serves many cases: forming it is the dear part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from ringreduce import testing
from ringreduce.collectives import encoded, hierarchical, ring
from ringreduce.communicator.communicator import Communicator
from ringreduce.effects import native
from ringreduce.pure.encodings import Coding, encoding_of
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.testing import ring_of_threads
from ringreduce.transport.zeromq import ZmqLink
from ringreduce.transport.zmq_pairs import ZmqPairs
from ringreduce.vocabulary.types import ReduceOp
from tests import naive
from tests.scope import in_full

pytestmark = pytest.mark.usefixtures("way")

SEALED = in_full("zmq, sealed")
WAYS = ("zmq", "shm", "shm+zmq")
# Payloads up to this ride inline.
INLINE_BYTES = 16384


def by_way(*sizes: int, full: tuple[int, ...] = ()) -> Any:
    """Rings of each size, by each way of its own: one rank has none, and two have no levels."""
    found = [(way, size) for size in sizes for way in WAYS[:size]]
    rare = [(way, size) for size in full for way in (*WAYS, "zmq, sealed")]
    rare += [("zmq, sealed", size) for size in sizes if size > 1]
    cases = [*found, *(in_full(*each) for each in rare)]
    return pytest.mark.parametrize(("way", "size"), cases, indirect=["way"])


OF_TWO = pytest.mark.parametrize("way", ["zmq", SEALED, "shm"], indirect=True)
# What is only done there, or alike wherever data come from.
OVER_SOCKETS = pytest.mark.parametrize("way", ["zmq", SEALED], indirect=True)
# Shared memory has no segments.
SEGMENTED = pytest.mark.parametrize(
    ("way", "size", "segment_bytes"),
    [
        *(("zmq", 1, 1 << 19), ("zmq", 2, 1 << 19), ("zmq", 3, 64)),
        *(("shm", 2, 1 << 19), ("shm", 3, 1 << 19), ("shm+zmq", 3, 64)),
        *(in_full("zmq", size, 4096) for size in (2, 3, 4, 5)),
        *(in_full("zmq, sealed", *each) for each in ((2, 64), (3, 1 << 19))),
        *(in_full(way, 5, 1 << 19) for way in ("shm", "shm+zmq")),
    ],
    indirect=["way"],
)
# Each operator and dtype with each third of the lengths, or with all.
THIRDS = pytest.mark.parametrize("step", [3, in_full(1)])


def lengths(size: int) -> list[int]:
    return sorted({0, 1, size - 1, size, size + 1, 1009, 100_003})


def combinations(firsts: Iterable[Any], counts: list[int], step: int) -> list[tuple]:
    """Of operators or roots, dtypes and lengths: each two of a kind meet."""
    return [
        (first, dtype, count)
        for one, first in enumerate(firsts)
        for other, dtype in enumerate(naive.DTYPES.values())
        for count in counts[(one + other) % step :: step]
    ]


@pytest.fixture(params=[SEALED, *WAYS])
def way(request, monkeypatch):
    """Rings of this module use each way to reach each other, as `Communicator.transport` says."""
    if "shm" in request.param and native.library() is None:
        pytest.skip(native.why_missing())

    def form(size, work, **settings):
        # Ranks alternate between two hosts, so that those of one host do not lie together.
        levels = request.param == "shm+zmq" and size > 2
        hosts = [f"host {rank % 2}" for rank in range(size)] if levels else ()

        def checked(comm):
            usual = "shm" if "shm" in request.param else "zmq"
            assert comm.transport == ("none" if size == 1 else "shm+zmq" if levels else usual)
            return work(comm)

        transport = "auto" if "shm" in request.param else "zmq"
        encryption = "on" if "sealed" in request.param else "auto"
        usual = {"transport": transport, "encryption": encryption}
        return testing.ring_of_threads(size, checked, hosts=hosts, **(usual | settings))

    monkeypatch.setattr(request.module, "ring_of_threads", form)
    return request.param


@pytest.fixture
def always_ring(monkeypatch):
    """Small all-reduces go around the ring in chunks too, like large ones."""
    monkeypatch.setattr(ring, "SMALL_BYTES_MAX", -1)
    monkeypatch.setattr(ring, "SMALL_BYTES_MAX_OF_TWO", -1)


def assert_all_reduced(size: int, cases: list[tuple[Any, np.dtype, int]], **settings: Any) -> None:
    """Run an all-reduce for each case (op, dtype, length) in one ring, and check all ranks."""

    def work(comm: Communicator) -> list[np.ndarray]:
        inputs = [naive.integer_valued(comm.rank, count, dtype) for _, dtype, count in cases]
        return [comm.all_reduce(array, op) for array, (op, _, _) in zip(inputs, cases, strict=True)]

    results = ring_of_threads(size, work, **settings)
    for index, (op, dtype, count) in enumerate(cases):
        inputs = [naive.integer_valued(rank, count, dtype) for rank in range(size)]
        expected = naive.all_reduce(op, inputs)
        for rank in range(size):
            got = results[rank][index]
            assert got.dtype == dtype
            assert np.array_equal(got, expected), f"rank {rank}, {op!r}, {dtype.name}[{count}]"


@THIRDS
@by_way(1, 2, 3, 5, full=(4,))
def test_all_reduce_of_every_operator_dtype_and_length(size, step):
    assert_all_reduced(size, combinations(ReduceOp, lengths(size), step))


@THIRDS
@by_way(1, 2, 3, full=(4, 5))
@pytest.mark.usefixtures("always_ring")
def test_short_all_reduce_around_the_ring_gives_the_same(size, step):
    """Chunks of no or one element, which the short way otherwise hides."""
    assert_all_reduced(size, combinations(ReduceOp, lengths(size)[:-1], step))


@by_way(2, 3, full=(4, 7))
def test_all_reduce_on_both_sides_of_the_small_limit(size):
    limit = ring.SMALL_BYTES_MAX_OF_TWO if size == 2 else ring.SMALL_BYTES_MAX
    dtypes = [naive.DTYPES[name] for name in ("float16", "float32", "int8")]
    assert_all_reduced(
        size,
        [
            (ReduceOp.MEAN, dtype, limit // dtype.itemsize + more)
            for dtype in dtypes
            for more in (-1, 0, 1)
        ],
    )


@OVER_SOCKETS
def test_all_reduce_whose_rows_would_not_fit_a_frame_goes_around_the_ring(monkeypatch):
    """Two rows travel in the second step of three ranks or more."""
    monkeypatch.setattr(ring, "EXCHANGE_BYTES_MAX", 1000)
    dtype = np.dtype(np.int8)
    assert_all_reduced(4, [(ReduceOp.SUM, dtype, count) for count in (499, 500, 501, 1001)])


@OVER_SOCKETS
@pytest.mark.parametrize("size", [6, in_full(7), 8, 9])
def test_small_all_reduce_of_a_larger_ring(size):
    """Rings whose last step sends all rows, some of them, or one."""
    kinds = [
        (ReduceOp.MEAN, "int8"),
        (ReduceOp.MAX, "bfloat16"),
        (ReduceOp.MAX, "float32"),
        (ReduceOp.MEAN, "float64"),
    ]
    counts = (0, 1, size, 1009)
    assert_all_reduced(
        size, [(op, naive.DTYPES[name], count) for op, name in kinds for count in counts]
    )


@OVER_SOCKETS
@pytest.mark.parametrize(
    ("size", "streams"), [(2, 3), (3, 2), *(in_full(*each) for each in ((3, 3), (4, 2), (5, 3)))]
)
def test_collectives_over_several_streams(size, streams):
    """Fewer segments than streams, as many, and more; lengths at a segment's end."""
    dtype = np.dtype(np.float32)
    segment = 4096 // dtype.itemsize
    counts = [size * segment * number + more for number in (1, 2, 3, 7) for more in (-1, 0, 1)]
    cases = [(ReduceOp.SUM, dtype, count) for count in [0, 1, 100_003, *counts]]
    assert_all_reduced(size, cases, segment_bytes=4096, streams=streams)


@OVER_SOCKETS
def test_borrowed_segments_on_several_streams_are_free_once_the_call_has_returned():
    def work(comm: Communicator) -> None:
        array = np.empty(300_007)
        for turn in range(20):
            array[:] = turn + comm.rank
            comm.all_reduce(array)
            assert (array == 3 * turn + 3).all()
            comm.broadcast(array, root=turn % 3)
            array[:] = -1e9

    ring_of_threads(3, work, segment_bytes=1 << 16, streams=3)


@OVER_SOCKETS
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_with_chunks_on_both_sides_of_the_inline_limit(size):
    dtype = np.dtype(np.float32)
    edge = size * INLINE_BYTES // dtype.itemsize
    more = (-size, -1, 0, 1, size)
    assert_all_reduced(size, [(ReduceOp.SUM, dtype, edge + extra) for extra in more])


@OVER_SOCKETS
@pytest.mark.parametrize(
    ("segment_bytes", "count"),
    [
        *((64, 5003), (4096, 50_021)),
        *((size, 50_021) for size in (INLINE_BYTES, INLINE_BYTES + 64, 1 << 15)),
    ],
)
def test_all_reduce_in_many_segments(segment_bytes, count):
    """Inline segments and borrowed ones, full ones and a shorter last, of elements of each size."""
    dtypes = [naive.DTYPES[name] for name in ("int8", "bfloat16", "float32", "float64")]
    cases = [(ReduceOp.MEAN, dtype, count) for dtype in dtypes]
    assert_all_reduced(3, cases, segment_bytes=segment_bytes)


@OVER_SOCKETS
@pytest.mark.parametrize("segment_bytes", [64, 4096])
@pytest.mark.usefixtures("always_ring")
def test_all_reduce_whose_chunks_end_at_or_near_a_segments_end(segment_bytes):
    dtype = np.dtype(np.int16)
    edge = 5 * 3 * segment_bytes // dtype.itemsize
    cases = [(ReduceOp.SUM, dtype, edge + more) for more in (-5, -1, 0, 1, 5)]
    assert_all_reduced(5, cases, segment_bytes=segment_bytes)


def test_all_reduce_of_a_half_buffer_in_several_blocks(monkeypatch):
    """Long half buffers are widened a block at a time."""
    monkeypatch.setattr(encoded, "BLOCK", 10_000)
    monkeypatch.setattr(hierarchical, "BLOCK", 10_000)
    halves = [naive.DTYPES[name] for name in naive.HALVES]
    cases = [(op, dtype, 30_011) for dtype in halves for op in (ReduceOp.SUM, ReduceOp.MEAN)]
    assert_all_reduced(3, cases)


@OVER_SOCKETS
def test_all_reduce_takes_operators_as_text():
    dtype = np.dtype(np.float64)

    def work(comm: Communicator) -> np.ndarray:
        return comm.all_reduce(naive.integer_valued(comm.rank, 10, dtype), "Mean")

    expected = naive.all_reduce(
        ReduceOp.MEAN, [naive.integer_valued(rank, 10, dtype) for rank in range(2)]
    )
    assert all(np.array_equal(result, expected) for result in ring_of_threads(2, work))


def test_all_reduce_works_in_place_on_any_shape():
    def work(comm: Communicator) -> None:
        for shape in ((), (3, 4, 5), (0, 7), (100, 101)):
            array = np.full(shape, comm.rank + 1.0)
            assert comm.all_reduce(array) is array
            assert array.shape == shape
            assert (array == 6).all()

    ring_of_threads(3, work)


@OF_TWO
def test_all_reduce_writes_nothing_beyond_a_view():
    def work(comm: Communicator) -> None:
        for count in (10, 100_003):
            memory = np.full(count + 20, -1.0)
            view = memory[10:-10]
            view[:] = comm.rank
            comm.all_reduce(view)
            assert (view == 1).all()
            assert (memory[:10] == -1).all()
            assert (memory[-10:] == -1).all()

    ring_of_threads(2, work)


def test_callers_buffer_is_free_to_change_once_the_call_has_returned():
    """What is still queued for the next rank must not be what the caller writes next."""

    def work(comm: Communicator) -> None:
        array = np.empty(200_003)
        for turn in range(20):
            array[:] = turn + comm.rank
            comm.all_reduce(array)
            assert (array == 3 * turn + 3).all()
            array[:] = -1e9

    ring_of_threads(3, work)


def test_repeated_small_all_reduce_starts_afresh_each_time():
    """Its memory is kept from call to call; nothing of the last result may remain."""

    def work(comm: Communicator) -> list[float]:
        return [comm.all_reduce(np.full(5, float(turn + comm.rank)))[0] for turn in range(10)]

    assert ring_of_threads(3, work) == [[3.0 * turn + 3 for turn in range(10)]] * 3


# With two ranks the order of additions does not matter.
@by_way(3, full=(4, 5))
def test_results_are_bit_identical_on_all_ranks_and_from_run_to_run(size):
    """With numbers whose sum depends on the order of additions."""

    def work(comm: Communicator) -> list[bytes]:
        generator = np.random.default_rng(comm.rank)
        inputs = [generator.standard_normal(count) for count in (1009, 50_021)]
        dtypes = [naive.DTYPES[name] for name in ("float16", "bfloat16", "float32", "float64")]
        arrays = [numbers.astype(dtype) for numbers in inputs for dtype in dtypes]
        return [comm.all_reduce(array, "mean").tobytes() for array in arrays]

    first, second = ring_of_threads(size, work), ring_of_threads(size, work)
    assert first == [first[0]] * size
    assert first == second


def test_nan_of_one_rank_is_nan_on_all():
    names = ("float16", "bfloat16", "float32", "float64")

    def work(comm: Communicator) -> None:
        for op, name, count in itertools.product(ReduceOp, names, (10, 20_011)):
            array = np.ones(count, naive.DTYPES[name])
            array[[0, 5, -1]] = np.nan if comm.rank == 1 else 1
            comm.all_reduce(array, op)
            where = np.flatnonzero(np.isnan(array.astype(np.float32)))
            assert where.tolist() == [0, 5, count - 1], f"{op!r}, {name}[{count}]"

    ring_of_threads(3, work)


def test_halves_are_summed_in_float32():
    """Ones added singly to a number whose neighbours are 2 away would be lost one by one."""
    largest = {naive.DTYPES["float16"]: 2048, naive.DTYPES["bfloat16"]: 256}
    assert all(dtype.type(n) + dtype.type(1) == dtype.type(n) for dtype, n in largest.items())

    def work(comm: Communicator) -> None:
        for (dtype, large), count in itertools.product(largest.items(), (10, 20_011)):
            # The large number comes from another rank at each element, so from each place in the
            # order of additions.
            array = np.where(np.arange(count) % 5 == comm.rank, large, 1).astype(dtype)
            for reduce in (comm.all_reduce, comm.reduce_scatter):
                assert (reduce(array.copy()).astype(np.float64) == large + 4).all()

    ring_of_threads(5, work)


@OF_TWO
def test_mean_of_float16_does_not_overflow_on_the_way():
    def work(comm: Communicator) -> None:
        for count in (10, 20_011):
            assert (comm.all_reduce(np.full(count, 60_000, np.float16), "mean") == 60_000).all()

    ring_of_threads(2, work)


@pytest.mark.parametrize(
    ("name", "way", "size"),
    [
        *(("int8", "zmq", 2), *(("int8", way, 3) for way in WAYS)),
        *(("bf16", way, 3) for way in ("zmq", "shm+zmq")),
        *(in_full("fp16", way, size) for way in ("zmq", "shm+zmq") for size in (2, 3)),
        *(in_full("int8", *each) for each in (("zmq", 1), ("zmq, sealed", 3), ("shm+zmq", 5))),
        *(in_full(name, "zmq", size) for name in ("bf16", "int8") for size in (4, 5)),
    ],
    indirect=["way"],
)
def test_encoded_results_are_equal_and_their_ledger_is_even(name, size, way, monkeypatch):
    """All that ranks gave in ten steps is in the results and in what the ranks have kept."""
    # So that there are several blocks and spans, the last shorter.
    monkeypatch.setattr(encoded, "SPAN", 1 << 14)
    monkeypatch.setattr(encoded, "BLOCK", 1 << 11)
    encoding, counts, steps = encoding_of(name), (0, 5, size, 4099, 30_011), 10

    def work(comm: Communicator) -> list[Any]:
        found = []
        for count in counts:
            kept = np.zeros((2, count), np.float32)
            residuals = kept if encoding.has_residuals else None
            given, got, bits = np.zeros(count), np.zeros(count), b""
            for step in range(steps):
                own = np.random.default_rng([comm.rank, step]).standard_normal(count)
                own = own.astype(np.float32)
                given += own
                comm.all_reduce(own, "mean", coding=Coding(encoding, residuals))
                got, bits = got + own, bits + own.tobytes()
            found.append((given, got, kept, bits))
        return found

    results = ring_of_threads(size, work)
    for index in range(len(counts)):
        given, got, kept, bits = zip(*(result[index] for result in results), strict=True)
        assert bits == (bits[0],) * size
        left = sum(first + second.astype(float) * size for first, second in kept)
        # Of 16 bits there are no residuals: half a step of numbers up to 4 in each step.
        atol = 1e-3 if encoding.has_residuals else steps * size * 8 * 2.0**-9
        np.testing.assert_allclose(got[0] * size + left, sum(given), atol=atol)
    is_coded = "zmq" in way and size > (2 if "shm" in way else 1)
    assert any(kept.any() for *_, kept, _ in results[0]) == (is_coded and name == "int8")


@pytest.mark.parametrize("way", ["zmq", "shm+zmq"], indirect=True)
@pytest.mark.parametrize("name", [in_full("fp16"), in_full("bf16"), "int8"])
def test_a_result_that_is_not_finite_leaves_residuals_as_they_were(name):
    count = 40_009

    def work(comm: Communicator) -> None:
        kept = np.full((2, count), 0.25, np.float32)
        own = np.ones(count, np.float32)
        own[count // 2] = np.nan if comm.rank == 1 else 1
        comm.all_reduce(own, coding=Coding(encoding_of(name), kept))
        assert not np.isfinite(own[count // 2])
        assert np.isfinite(own[:100]).all()
        assert (kept == 0.25).all()

    ring_of_threads(3, work)


@pytest.mark.parametrize("way", ["zmq", "shm+zmq"], indirect=True)
@pytest.mark.parametrize(("name", "most"), [("none", 1.0), ("bf16", 0.51), ("int8", 0.26)])
def test_encoded_bytes_between_hosts(name, most, way):
    """Counted on the wire, against float32."""
    count = 400_003

    def work(comm: Communicator) -> int:
        coding = None if name == "none" else Coding(encoding_of(name))
        collectives = comm._session.collectives
        ways = [*collectives.links, collectives.pairs]
        wires = [each for each in ways if isinstance(each, (ZmqLink, ZmqPairs))]
        before = [each.traffic().bytes_sent for each in wires]
        comm.all_reduce(np.ones(count, np.float32), coding=coding)
        return sum(each.traffic().bytes_sent for each in wires) - sum(before)

    size = 4
    hosts = 2 if way == "shm+zmq" else size
    # By each host, 2 (hosts - 1) / hosts of the array; what ranks exchange beside it is small.
    whole = 2 * (hosts - 1) * 4 * count
    sent = sum(ring_of_threads(size, work))
    assert 0.9 * most * whole <= sent <= most * whole + 4096


@OF_TWO
def test_mean_of_integers_rounds_down():
    def work(comm: Communicator) -> None:
        for count in (10, 100_003):
            mean = comm.all_reduce(np.full(count, -comm.rank), "mean")
            assert (mean == -1).all()  # (0 - 1) / 2

    ring_of_threads(2, work)


def test_integer_sum_wraps_as_in_numpy():
    def work(comm: Communicator) -> None:
        for count in (10, 100_003):
            assert (comm.all_reduce(np.full(count, 100, np.int8)) == 300 - 256).all()

    ring_of_threads(3, work)


@THIRDS
@SEGMENTED
def test_reduce_scatter_gives_each_rank_its_chunk(size, segment_bytes, step):
    """The result is a view of the array, where the chunk lies in it."""
    operators = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX)
    cases = combinations(operators, lengths(size)[:-1], step)
    cases.append((ReduceOp.SUM, naive.DTYPES["float32"], 25_013))

    def work(comm: Communicator) -> list[np.ndarray]:
        results = []
        for op, dtype, count in cases:
            array = naive.integer_valued(comm.rank, count, dtype)
            chunk = comm.reduce_scatter(array, op)
            bounds = chunk_bounds(count, size)
            own = array[bounds[comm.rank] : bounds[comm.rank + 1]]
            assert chunk.shape == own.shape
            assert chunk.size == 0 or np.shares_memory(chunk, own)
            results.append(chunk)
        return results

    results = ring_of_threads(size, work, segment_bytes=segment_bytes)
    for index, (op, dtype, count) in enumerate(cases):
        inputs = [naive.integer_valued(rank, count, dtype) for rank in range(size)]
        joined = np.concatenate([results[rank][index] for rank in range(size)])
        assert np.array_equal(joined, naive.all_reduce(op, inputs)), f"{op!r} {dtype.name}[{count}]"


@pytest.mark.parametrize("size", [2, 3, 4, in_full(5), in_full(6)])
def test_shares_of_a_sum_are_those_of_an_all_reduce(size):
    """To the last bit, on both sides of the limits for short ones; and all ranks get all."""
    counts = [0, 1, size - 1, size, size + 1, 64 * size, 5000, 20_011, 200_003]

    def work(comm: Communicator) -> list[bool]:
        calls, share = comm._session.calls, comm._session.collectives.shares
        equal = []
        for count in counts:
            own = np.random.default_rng(comm.rank).normal(size=count).astype(np.float32)
            whole, flat = own.copy(), own.copy()
            comm.all_reduce(whole, ReduceOp.MEAN)
            calls.reduce_shares(flat, 7)
            shares = share(count, 4)
            covered = [element for begin, end in sorted(shares) for element in range(begin, end)]
            assert covered == list(range(count))
            begin, end = shares[comm.rank]
            equal.append(flat[begin:end].tobytes() == whole[begin:end].tobytes())
            kept = flat[begin:end].copy()
            flat[:] = np.nan
            flat[begin:end] = kept
            calls.gather_shares(flat, 8)
            equal.append(flat.tobytes() == whole.tobytes())
        return equal

    assert all(map(all, ring_of_threads(size, work)))


def gathered_shapes(rank: int, size: int) -> list[tuple[int, ...]]:
    """Shapes that differ between ranks in the first dimension, and one that does not."""
    return [
        (),
        (rank,),  # none on rank 0
        (size - 1 - rank, 3),
        (0, 4),
        (2, 0),
        (rank + 1, 2, 3),
        (1009 + rank,),
        (200 * rank + 1, 11),
        (5000 if rank == size - 1 else 0,),
    ]


@SEGMENTED
def test_all_gather_joins_arrays_of_different_lengths(size, segment_bytes):
    names = ("bfloat16", "int64", "uint8")

    def inputs(rank: int) -> list[np.ndarray]:
        return [
            naive.integer_valued(rank, int(np.prod(shape)), naive.DTYPES[name]).reshape(shape)
            for shape in gathered_shapes(rank, size)
            for name in names
        ]

    def work(comm: Communicator) -> list[np.ndarray]:
        return [comm.all_gather(array) for array in inputs(comm.rank)]

    results = ring_of_threads(size, work, segment_bytes=segment_bytes)
    for index, arrays in enumerate(zip(*map(inputs, range(size)), strict=True)):
        expected = naive.all_gather(arrays)
        for rank in range(size):
            got = results[rank][index]
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            assert np.array_equal(got, expected)


@by_way(1, 3)
def test_all_gather_returns_memory_of_the_callers_own(size):
    def work(comm: Communicator) -> None:
        array = np.ones(5)
        array.flags.writeable = False
        gathered = comm.all_gather(array)
        assert not np.shares_memory(gathered, array)
        gathered[:] = 2

    ring_of_threads(size, work)


@THIRDS
@SEGMENTED
def test_broadcast_from_each_root(size, segment_bytes, step):
    cases = combinations(range(size), lengths(size)[:-1], step)
    cases += [(root, naive.DTYPES["float32"], 10_007) for root in range(size)]

    def work(comm: Communicator) -> list[np.ndarray]:
        return [
            comm.broadcast(naive.integer_valued(comm.rank, count, dtype), root)
            for root, dtype, count in cases
        ]

    results = ring_of_threads(size, work, segment_bytes=segment_bytes)
    for index, (root, dtype, count) in enumerate(cases):
        expected = naive.integer_valued(root, count, dtype)
        assert all(np.array_equal(result[index], expected) for result in results)


def test_broadcast_only_reads_the_roots_array():
    def work(comm: Communicator) -> np.ndarray:
        array = np.full(50_021, comm.rank)
        array.flags.writeable = comm.rank != 1
        return comm.broadcast(array, root=1)

    assert all((result == 1).all() for result in ring_of_threads(3, work))


@OVER_SOCKETS
def test_broadcast_root_may_be_numpys_integer_on_some_ranks():
    """Equal numbers are equal roots, wherever a rank has taken its own from."""

    def work(comm: Communicator) -> int:
        root = np.int64(1) if comm.rank == 0 else 1
        return int(comm.broadcast(np.array([comm.rank]), root)[0])

    assert ring_of_threads(3, work) == [1, 1, 1]


@by_way(1, 2, 3, full=(5,))
def test_barrier_lets_nobody_pass_before_all_have_come(size):
    arrived: list[set[int]] = [set() for _ in range(50)]

    def work(comm: Communicator) -> None:
        for here in arrived:
            here.add(comm.rank)
            comm.barrier()
            assert len(here) == size

    ring_of_threads(size, work)


OBJECTS = [
    None,
    True,
    0,
    -1,
    2**63,
    1.5,
    "",
    "naïve ☃ 日本",
    b"",
    b"\x00\xff",
    [],
    {},
    [1, [2, [3, None]], {"a": {"b": [b"c", "d"]}}],
    {"epoch": 3, "best": 0.25, "names": ["x", "y"]},
    "long " * 20_000,
]


@by_way(1, 2, 3, full=(5,))
def test_broadcast_object_from_each_root(size):
    def work(comm: Communicator) -> list[list[Any]]:
        return [
            [comm.broadcast_object(v if comm.rank == root else "ignored", root) for v in OBJECTS]
            for root in range(size)
        ]

    assert ring_of_threads(size, work) == [[OBJECTS] * size] * size


@OVER_SOCKETS
def test_broadcast_object_gives_the_root_its_own_object():
    def work(comm: Communicator) -> bool:
        value = {"a": 1}
        return comm.broadcast_object(value, root=1) is value

    assert ring_of_threads(3, work) == [False, True, False]


@by_way(1, 2, 3, full=(5,))
def test_all_gather_object_keeps_the_order_of_ranks(size):
    def work(comm: Communicator) -> list[list[Any]]:
        return [comm.all_gather_object([comm.rank, value]) for value in OBJECTS]

    expected = [[[rank, value] for rank in range(size)] for value in OBJECTS]
    assert ring_of_threads(size, work) == [expected] * size


def test_all_gather_object_around_the_length_that_needs_a_second_exchange():
    def values(length):
        return [b"", b"x" * length, b"y" * 9]

    def gather(comm):
        return [comm.all_gather_object(values(n)[comm.rank]) for n in range(499, 509)]

    wanted = [values(length) for length in range(499, 509)]
    assert ring_of_threads(3, gather) == [wanted] * 3


def test_mixed_collectives_follow_each_other_without_a_pause():
    """Frames of the next call may wait behind those of this one; none is taken for another."""

    def work(comm: Communicator) -> None:
        for turn in range(30):
            assert comm.all_gather_object(turn) == [turn] * 3
            assert (comm.all_reduce(np.full(20_011, comm.rank, np.int32)) == 3).all()
            assert comm.broadcast_object(comm.rank, root=turn % 3) == turn % 3
            comm.barrier()
            assert comm.all_gather(np.array([comm.rank])).tolist() == [0, 1, 2]
            assert (comm.reduce_scatter(np.ones(7)) == 3).all()
            assert (comm.broadcast(np.full(9, comm.rank), root=2) == 2).all()

    ring_of_threads(3, work)


def test_reduction_keeps_a_signed_zero_and_an_infinity():
    def work(comm: Communicator) -> None:
        calls = (comm.all_reduce, comm.reduce_scatter)
        for call, value in itertools.product(calls, (np.inf, -np.inf, -0.0)):
            result = call(np.full(7, value))
            assert (result == value).all()
            assert (np.signbit(result) == np.signbit(value)).all()

    ring_of_threads(3, work)
