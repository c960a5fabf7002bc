"""The collectives in a ring of threads, against their naive twins.

Data are whole numbers small enough for every dtype, so that sums do not depend on their
order and equality is exact. One ring serves many cases: forming it is the dear part.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import testing
from ringreduce.collectives import encoded, hierarchical, ring
from ringreduce.effects import native
from ringreduce.pure.encodings import Coding, encoding_of
from ringreduce.pure.schedule import chunk_bounds
from ringreduce.testing import ring_of_threads
from ringreduce.transport.zeromq import ZmqLink
from ringreduce.transport.zmq_pairs import ZmqPairs
from tests import naive
from tests.rings import on_each_rank
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

    def work(comm: rr.Communicator) -> list[np.ndarray]:
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
    assert_all_reduced(size, combinations(rr.ReduceOp, lengths(size), step))


@THIRDS
@by_way(1, 2, 3, full=(4, 5))
@pytest.mark.usefixtures("always_ring")
def test_short_all_reduce_around_the_ring_gives_the_same(size, step):
    """Chunks of no or one element, which the short way otherwise hides."""
    assert_all_reduced(size, combinations(rr.ReduceOp, lengths(size)[:-1], step))


@by_way(2, 3, full=(4, 7))
def test_all_reduce_on_both_sides_of_the_small_limit(size):
    limit = ring.SMALL_BYTES_MAX_OF_TWO if size == 2 else ring.SMALL_BYTES_MAX
    dtypes = [naive.DTYPES[name] for name in ("float16", "float32", "int8")]
    assert_all_reduced(
        size,
        [
            (rr.ReduceOp.MEAN, dtype, limit // dtype.itemsize + more)
            for dtype in dtypes
            for more in (-1, 0, 1)
        ],
    )


@OVER_SOCKETS
def test_all_reduce_whose_rows_would_not_fit_a_frame_goes_around_the_ring(monkeypatch):
    """Two rows travel in the second step of three ranks or more."""
    monkeypatch.setattr(ring, "EXCHANGE_BYTES_MAX", 1000)
    dtype = np.dtype(np.int8)
    assert_all_reduced(4, [(rr.ReduceOp.SUM, dtype, count) for count in (499, 500, 501, 1001)])


@OVER_SOCKETS
@pytest.mark.parametrize("size", [6, in_full(7), 8, 9])
def test_small_all_reduce_of_a_larger_ring(size):
    """Rings whose last step sends all rows, some of them, or one."""
    kinds = [
        (rr.ReduceOp.MEAN, "int8"),
        (rr.ReduceOp.MAX, "bfloat16"),
        (rr.ReduceOp.MAX, "float32"),
        (rr.ReduceOp.MEAN, "float64"),
    ]
    counts = (0, 1, size, 1009)
    assert_all_reduced(
        size, [(op, naive.DTYPES[name], count) for op, name in kinds for count in counts]
    )


def near(edge: int, far: int) -> list[int]:
    return [edge + more for more in (-far, -1, 0, 1, far)]


WIDTHS = ("int8", "bfloat16", "float32", "float64")
RARE = ("3 streams, 3 ranks", "4 ranks", "5 ranks")
# Size, dtypes and lengths, and how they are sent.
FRAMES: dict[str, tuple[int, Iterable[str], list[int], dict[str, int]]] = {
    **{
        f"on both sides of the inline limit, {size} ranks": (
            *(size, ("float32",)),
            *(near(size * INLINE_BYTES // 4, size), {}),
        )
        for size in (2, 3)
    },
    # Inline segments and borrowed ones, full ones and a shorter last, of elements of each size.
    **{
        f"segments of {nbytes}": (3, WIDTHS, [count], {"segment_bytes": nbytes})
        for nbytes, count in (
            *((64, 5003), (4096, 50_021)),
            *((nbytes, 50_021) for nbytes in (INLINE_BYTES, INLINE_BYTES + 64, 1 << 15)),
        )
    },
    **{
        f"at ends of segments of {nbytes}": (
            *(5, ("int16",)),
            *(near(5 * 3 * nbytes // 2, 5), {"segment_bytes": nbytes}),
        )
        for nbytes in (64, 4096)
    },
    # Fewer segments than streams, as many, and more; lengths at a segment's end.
    **{
        f"{streams} streams, {size} ranks": (
            *(size, ("float32",)),
            [0, 1, 100_003, *(size * 1024 * n + more for n in (1, 2, 3, 7) for more in (-1, 0, 1))],
            {"segment_bytes": 4096, "streams": streams},
        )
        for size, streams in ((2, 3), (3, 2), (3, 3), (4, 2), (5, 3))
    },
}


@OVER_SOCKETS
@pytest.mark.parametrize(
    "name", [in_full(name) if name.endswith(RARE) else name for name in FRAMES]
)
@pytest.mark.usefixtures("always_ring")
def test_all_reduce_in_frames_of_all_kinds(name):
    size, names, counts, settings = FRAMES[name]
    cases = [(rr.ReduceOp.MEAN, naive.DTYPES[each], count) for each in names for count in counts]
    assert_all_reduced(size, cases, **settings)


def test_all_reduce_of_a_half_buffer_in_several_blocks(monkeypatch):
    """Long half buffers are widened a block at a time."""
    monkeypatch.setattr(encoded, "BLOCK", 10_000)
    monkeypatch.setattr(hierarchical, "BLOCK", 10_000)
    halves = [naive.DTYPES[name] for name in naive.HALVES]
    cases = [(op, dtype, 30_011) for dtype in halves for op in (rr.ReduceOp.SUM, rr.ReduceOp.MEAN)]
    assert_all_reduced(3, cases)


@on_each_rank(3)
def test_all_reduce_works_in_place_on_any_shape(comm):
    for shape in ((), (3, 4, 5), (0, 7), (100, 101)):
        array = np.full(shape, comm.rank + 1.0)
        assert comm.all_reduce(array) is array
        assert array.shape == shape
        assert (array == 6).all()


@OF_TWO
@on_each_rank(2)
def test_all_reduce_writes_nothing_beyond_a_view(comm):
    for count in (10, 100_003):
        memory = np.full(count + 20, -1.0)
        view = memory[10:-10]
        view[:] = comm.rank
        comm.all_reduce(view)
        assert (view == 1).all()
        assert (memory[:10] == -1).all()
        assert (memory[-10:] == -1).all()


@pytest.mark.parametrize(("segment_bytes", "streams"), [(1 << 20, 1), (1 << 16, 3)])
@on_each_rank(3, given=["segment_bytes", "streams"])
def test_callers_buffer_is_free_to_change_once_the_call_has_returned(comm, segment_bytes, streams):
    """What is still queued for the next rank must not be what the caller writes next.

    And memory that is kept from call to call has nothing of the last result.
    """
    for array in (np.empty(5), np.empty(300_007)):
        for turn in range(20):
            array[:] = turn + comm.rank
            comm.all_reduce(array)
            assert (array == 3 * turn + 3).all()
            comm.broadcast(array, root=turn % 3)
            array[:] = -1e9


# With two ranks the order of additions does not matter.
@by_way(3, full=(4, 5))
def test_results_are_bit_identical_on_all_ranks_and_from_run_to_run(size):
    """With numbers whose sum depends on the order of additions."""

    def work(comm):
        generator = np.random.default_rng(comm.rank)
        inputs = [generator.standard_normal(count) for count in (1009, 50_021)]
        dtypes = [naive.DTYPES[name] for name in ("float16", "bfloat16", "float32", "float64")]
        arrays = [numbers.astype(dtype) for numbers in inputs for dtype in dtypes]
        return [comm.all_reduce(array, "mean").tobytes() for array in arrays]

    first, second = ring_of_threads(size, work), ring_of_threads(size, work)
    assert first == [first[0]] * size
    assert first == second


@on_each_rank(3)
def test_numbers_at_the_edges_of_their_types(comm):
    """A mean does not overflow on the way; integers wrap, and round down; NaN comes through."""
    floats, counts = ("float16", "bfloat16", "float32", "float64"), (10, 20_011)
    for count in counts:
        if comm.transport != "shm+zmq":  # Between hosts a host's sum travels in 16 bits.
            mean = comm.all_reduce(np.full(count, 60_000, np.float16), "mean")
            assert (mean == 60_000).all()
        mean = comm.all_reduce(np.full(count, -(comm.rank % 2)), "mean")
        assert (mean == -1).all()  # (0 - 1 + 0) / 3
        assert (comm.all_reduce(np.full(count, 100, np.int8)) == 300 - 256).all()
    for op, name, count in itertools.product(rr.ReduceOp, floats, counts):
        array = np.ones(count, naive.DTYPES[name])
        array[[0, 5, -1]] = np.nan if comm.rank == 1 else 1
        comm.all_reduce(array, op)
        where = np.flatnonzero(np.isnan(array.astype(np.float32)))
        assert where.tolist() == [0, 5, count - 1], f"{op!r}, {name}[{count}]"
    for call, value in itertools.product(
        (comm.all_reduce, comm.reduce_scatter), (np.inf, -np.inf, -0.0, 5e-324)
    ):
        result = call(np.full(7, value))
        assert (result == 3 * value).all()
        assert (np.signbit(result) == np.signbit(value)).all()


@on_each_rank(5)
def test_halves_are_summed_in_float32(comm):
    """Ones added singly to a number whose neighbours are 2 away would be lost one by one."""
    for (name, large), count in itertools.product(
        (("float16", 2048), ("bfloat16", 256)), (10, 20_011)
    ):
        dtype = naive.DTYPES[name]
        assert dtype.type(large) + dtype.type(1) == dtype.type(large)
        # The large number comes from another rank at each element, so from each place in the
        # order of additions.
        array = np.where(np.arange(count) % 5 == comm.rank, large, 1).astype(dtype)
        for reduce in (comm.all_reduce, comm.reduce_scatter):
            assert (reduce(array.copy()).astype(np.float64) == large + 4).all()


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

    def work(comm):
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
@on_each_rank(3)
def test_a_result_that_is_not_finite_leaves_residuals_as_they_were(comm, name):
    count = 40_009
    kept = np.full((2, count), 0.25, np.float32)
    own = np.ones(count, np.float32)
    own[count // 2] = np.nan if comm.rank == 1 else 1
    comm.all_reduce(own, coding=Coding(encoding_of(name), kept))
    assert not np.isfinite(own[count // 2])
    assert np.isfinite(own[:100]).all()
    assert (kept == 0.25).all()


@pytest.mark.parametrize("way", ["zmq", "shm+zmq"], indirect=True)
@pytest.mark.parametrize(("name", "most"), [("none", 1.0), ("bf16", 0.51), ("int8", 0.26)])
def test_encoded_bytes_between_hosts(name, most, way):
    """Counted on the wire, against float32."""
    count = 400_003

    def work(comm):
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


@THIRDS
@SEGMENTED
@on_each_rank(given=["segment_bytes"])
def test_reduce_scatter_gives_each_rank_its_chunk(comm, size, segment_bytes, step):
    """The result is a view of the array, where the chunk lies in it."""
    operators = (rr.ReduceOp.SUM, rr.ReduceOp.MEAN, rr.ReduceOp.MAX)
    cases = combinations(operators, lengths(size)[:-1], step)
    for op, dtype, count in [*cases, (rr.ReduceOp.SUM, naive.DTYPES["float32"], 25_013)]:
        inputs = [naive.integer_valued(rank, count, dtype) for rank in range(size)]
        bounds, array = chunk_bounds(count, size), inputs[comm.rank].copy()
        place = slice(bounds[comm.rank], bounds[comm.rank + 1])
        chunk = comm.reduce_scatter(array, op)
        assert chunk.size == 0 or np.shares_memory(chunk, array[place])
        expected = naive.all_reduce(op, inputs)[place]
        assert np.array_equal(chunk, expected), f"{op!r} {dtype.name}[{count}]"


@pytest.mark.parametrize("size", [2, 3, 4, in_full(5), in_full(6)])
@on_each_rank()
def test_shares_of_a_sum_are_those_of_an_all_reduce(comm, size):
    """To the last bit, on both sides of the limits for short ones; and all ranks get all."""
    calls = comm._session.calls
    for count in (0, 1, size - 1, size, size + 1, 64 * size, 5000, 20_011, 200_003):
        whole = np.random.default_rng(comm.rank).normal(size=count).astype(np.float32)
        flat = whole.copy()
        comm.all_reduce(whole, rr.ReduceOp.MEAN)
        calls.reduce_shares(flat, 7)
        shares = comm._session.collectives.shares(count, 4)
        covered = [element for begin, end in sorted(shares) for element in range(begin, end)]
        assert covered == list(range(count))
        begin, end = shares[comm.rank]
        kept = flat[begin:end].copy()
        assert kept.tobytes() == whole[begin:end].tobytes()
        flat[:] = np.nan
        flat[begin:end] = kept
        calls.gather_shares(flat, 8)
        assert flat.tobytes() == whole.tobytes()


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
@on_each_rank(given=["segment_bytes"])
def test_all_gather_joins_arrays_of_different_lengths(comm, size, segment_bytes):
    shapes = zip(*(gathered_shapes(rank, size) for rank in range(size)), strict=True)
    for ours, name in itertools.product(shapes, ("bfloat16", "int64", "uint8")):
        arrays = [
            naive.integer_valued(rank, int(np.prod(shape)), naive.DTYPES[name]).reshape(shape)
            for rank, shape in enumerate(ours)
        ]
        expected, got = naive.all_gather(arrays), comm.all_gather(arrays[comm.rank])
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert np.array_equal(got, expected)


@by_way(1, 3)
@on_each_rank()
def test_all_gather_returns_memory_of_the_callers_own(comm, size):
    array = np.ones(5)
    array.flags.writeable = False
    gathered = comm.all_gather(array)
    assert not np.shares_memory(gathered, array)
    gathered[:] = 2


@THIRDS
@SEGMENTED
@on_each_rank(given=["segment_bytes"])
def test_broadcast_from_each_root(comm, size, segment_bytes, step):
    cases = combinations(range(size), lengths(size)[:-1], step)
    for root, dtype, count in [*cases, *((r, np.dtype(np.float32), 10_007) for r in range(size))]:
        got = comm.broadcast(naive.integer_valued(comm.rank, count, dtype), root)
        assert np.array_equal(got, naive.integer_valued(root, count, dtype))


@on_each_rank(3)
def test_broadcast_only_reads_the_roots_array(comm):
    array = np.full(50_021, comm.rank)
    array.flags.writeable = comm.rank != 1
    assert (comm.broadcast(array, root=1) == 1).all()


@OVER_SOCKETS
@on_each_rank(3)
def test_operators_may_be_text_and_roots_numpys_integers_on_some_ranks(comm):
    total = comm.all_reduce(np.full(10, float(comm.rank)), "Mean" if comm.rank else "mean")
    assert total.tolist() == [1.0] * 10
    root = np.int64(1) if comm.rank == 0 else 1
    assert comm.broadcast(np.array([comm.rank]), root) == 1


@by_way(1, 2, 3, full=(5,))
def test_barrier_lets_nobody_pass_before_all_have_come(size):
    arrived: list[set[int]] = [set() for _ in range(50)]

    def work(comm):
        for here in arrived:
            here.add(comm.rank)
            comm.barrier()
            assert len(here) == size

    ring_of_threads(size, work)


OBJECTS = [
    *(None, True, 0, -1, 2**63, 1.5, "", "naïve ☃ 日本", b"", b"\x00\xff", [], {}),
    [1, [2, [3, None]], {"a": {"b": [b"c", "d"]}}],
    {"epoch": 3, "best": 0.25, "names": ["x", "y"]},
    "long " * 20_000,
]


@by_way(1, 2, 3, full=(5,))
@on_each_rank()
def test_objects_travel_from_each_root_and_in_the_order_of_ranks(comm, size):
    """The root gets its own object, not a copy."""
    for value in OBJECTS:
        for root in range(size):
            assert comm.broadcast_object(value if comm.rank == root else "x", root) == value
        gathered = comm.all_gather_object([comm.rank, value])
        assert gathered == [[rank, value] for rank in range(size)]
    own = {"a": 1}
    assert (comm.broadcast_object(own, size - 1) is own) is (comm.rank == size - 1)


@on_each_rank(3)
def test_all_gather_object_around_the_length_that_needs_a_second_exchange(comm):
    for length in range(499, 509):
        values = [b"", b"x" * length, b"y" * 9]
        assert comm.all_gather_object(values[comm.rank]) == values


@on_each_rank(3)
def test_mixed_collectives_follow_each_other_without_a_pause(comm):
    """Frames of the next call may wait behind those of this one; none is taken for another."""
    for turn in range(30):
        assert comm.all_gather_object(turn) == [turn] * 3
        assert (comm.all_reduce(np.full(20_011, comm.rank, np.int32)) == 3).all()
        assert comm.broadcast_object(comm.rank, root=turn % 3) == turn % 3
        comm.barrier()
        assert comm.all_gather(np.array([comm.rank])).tolist() == [0, 1, 2]
        assert (comm.reduce_scatter(np.ones(7)) == 3).all()
        assert (comm.broadcast(np.full(9, comm.rank), root=2) == 2).all()
