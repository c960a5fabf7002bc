"""Shared memory: registered arrays, what is done when there is none, and hostile neighbours."""

import ctypes
import errno
import gc
import itertools
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.communicator import opened_sockets
from ringreduce.effects import native
from ringreduce.effects.handoff import Area
from ringreduce.pure.wire import Kind
from ringreduce.testing import ring_of_threads
from ringreduce.transport import shm
from ringreduce.transport.segment import Heap, Segment, address_of, functions
from ringreduce.transport.unix import Mesh
from tests import naive
from tests.processes import run_python
from tests.rings import Ring, on_each_rank
from tests.scope import in_full

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the native library")

MIB = 1 << 20


@pytest.fixture
def heap():
    return Heap(Segment.create(4096, 4 * MIB))


# --- Registered arrays ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, in_full(5)])
@on_each_rank()
def test_registered_arrays_give_what_ordinary_ones_do(comm, size):
    """Small, odd and large, of several dtypes, also when some ranks' arrays are ordinary."""
    dtypes = [naive.DTYPES[name] for name in ("float32", "float16", "int8")]
    kinds = [*itertools.product(dtypes, (0, 1, size, 1009, 100_003)), (dtypes[0], 3_000_017)]
    cases = [
        [naive.integer_valued(rank, count, dtype) for rank in range(size)] for dtype, count in kinds
    ]
    expected = [naive.all_reduce(rr.ReduceOp.MEAN, inputs) for inputs in cases]
    for inputs, result in zip(cases, expected, strict=True):
        for ordinary_ranks in (0, 1):
            array = comm.empty(result.size, result.dtype)
            if comm.rank < ordinary_ranks:
                array = np.empty_like(result)
            array[:] = inputs[comm.rank]
            assert comm.all_reduce(array, "mean") is array
            assert np.array_equal(array, result)


@on_each_rank(3)
def test_registered_array_may_be_a_part_at_another_place_on_each_rank(comm):
    table = comm.empty((4, 50_000))
    table[:] = -1
    table[comm.rank + 1] = comm.rank
    comm.all_reduce(table[comm.rank + 1])
    assert (table[comm.rank + 1] == 3).all()
    assert (np.delete(table, comm.rank + 1, axis=0) == -1).all()


@on_each_rank(3)
def test_reduce_scatter_of_registered_arrays_leaves_the_rest_alone(comm):
    array = comm.empty(90_000)
    array[:] = comm.rank + 1
    own = comm.reduce_scatter(array)
    assert (own == 6).all()
    assert np.count_nonzero(array == 6) == own.size


@pytest.mark.parametrize("size", [2, 3, in_full(5)])
@on_each_rank()
def test_all_to_all_reads_registered_and_ordinary_arrays_alike(comm, size):
    """Also when some ranks' arrays are ordinary, from nothing to more than a cache holds."""
    own, collectives, numbers = comm.rank, comm._session.collectives, np.random.default_rng(size)
    matrices = [np.full((size, size), count) for count in (0, 1, size, 1009, 60_013)]
    matrices += [numbers.integers(0, 90_001, (size, size)) for _ in range(2)]
    matrices[-1][0] = matrices[-2][:, 1] = 0
    large = np.full((size, size), (2 << 20) // size**2 + 1)
    cases = [(naive.DTYPES[n], c) for n in ("float64", "float16", "int8") for c in matrices]
    for dtype, counts in [*cases, (np.dtype(float), large)]:
        rows = [naive.integer_valued(each, counts[each].sum(), dtype) for each in range(size)]
        starts = np.cumsum(counts, axis=1) - counts
        due = np.concatenate([rows[i][starts[i, own] :][: counts[i, own]] for i in range(size)])
        for ordinary_ranks in (0, 1, size):
            source = comm.empty(rows[own].shape, dtype)
            if own < ordinary_ranks:
                source = np.empty_like(source)
            source[:] = rows[own]
            target = np.empty_like(due)
            collectives.all_to_all(Kind.ALL_TO_ALL, source, target, counts)
            source[:] = 1  # Nobody reads it any more.
            assert np.array_equal(target, due)


@pytest.mark.parametrize("size", [1, 2])
@on_each_rank()
def test_empty_has_shape_and_dtype_and_is_aligned(comm, size):
    for shape in (0, 7, (3, 4), (0, 5), ()):
        array = comm.empty(shape, np.float64)
        usual = np.empty(shape, np.float64)
        assert (array.shape, array.dtype) == (usual.shape, usual.dtype)
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.size == 0 or array.ctypes.data % 64 == 0


def test_registered_array_outlives_its_communicator():
    for array in ring_of_threads(2, lambda comm: comm.empty(MIB)):
        array[:] = 1
        assert array.sum() == MIB


@pytest.mark.parametrize("kind", ["ordinary", "empty", "read-only", "bfloat16"])
def test_address_of_any_array_is_its_first_byte(kind):
    array = np.zeros(10, naive.DTYPES["bfloat16" if kind == "bfloat16" else "float32"])[1:]
    array.flags.writeable = kind != "read-only"
    array = array[:0] if kind == "empty" else array
    assert address_of(array) == array.ctypes.data


def test_memory_of_a_registered_array_goes_back_with_its_last_view(heap):
    def blocks():
        return os.fstat(heap.segment.descriptor).st_blocks * 512

    before = blocks()
    view = heap.empty(MIB)[10:20]
    gc.collect()
    assert blocks() >= before + MIB
    del view
    gc.collect()
    assert blocks() == before


def test_freed_places_are_joined_and_used_again(heap):
    held = [heap.empty(MIB) for _ in range(4)]
    assert heap.empty(1) is None
    del held[1], held[0]
    gc.collect()
    held.append(heap.empty(2 * MIB))
    assert all(array is not None for array in held)
    assert heap.empty(1) is None


def test_exhausted_heap_gives_ordinary_memory_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(shm, "heap_bytes", lambda: MIB)

    def work(comm):
        array = comm.empty(MIB)
        array[:] = comm.rank
        assert (comm.all_reduce(array) == 1).all()

    ring_of_threads(2, work)
    assert "no shared memory is left for 4194304 bytes" in caplog.text


def test_garbage_that_is_found_while_memory_is_given_out_is_no_deadlock():
    """A collection can run at any line, also where the heap holds its own lock."""
    program = """
import gc
from ringreduce.transport.segment import Heap, Segment, address_of, functions

class Cycle:
    def __init__(self, array):
        self.array, self.itself = array, self

heap = Heap(Segment.create(4096, 4 << 20))
for threshold in range(1, 60):
    gc.set_threshold(threshold)
    for _ in range(30):
        Cycle(heap.empty(4096))
gc.collect()
print(heap.empty(4 << 20).size)
"""
    done = run_python(program, timeout_s=20)
    assert (done.stdout, done.stderr) == (f"{4 << 20}\n", "")


@on_each_rank(2, transport="shm")
def test_no_memory_for_a_channel_of_messages_is_said_before_anything_is_sent(comm, monkeypatch):
    if comm.rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(Heap, "reserve", lambda heap, nbytes: None)
            with pytest.raises(rr.ArrayError, match="no shared memory left to send to rank 1"):
                comm.send(np.ones(10), 1)
    comm.recv(np.ones(10), 0) if comm.rank else comm.send(np.ones(10), 1)


# --- The end of a link ----------------------------------------------------------------------


def shared_descriptors() -> int:
    """How many descriptors of segments this process has."""
    targets = (os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd"))
    return sum("/memfd:ringreduce" in target for target in targets)


@pytest.mark.parametrize("size", [2, 3])
@on_each_rank()
def test_shared_memory_is_the_same_on_all_ranks(comm, size):
    """Of what each writes nothing needs to be copied; odd sizes, and one beyond a page."""
    sizes = 24 * size, 0, 8 * 1009 * size
    for memory, nbytes in zip(comm._session.calls.share(sizes), sizes, strict=True):
        values = memory.array.view(np.int64)
        assert (values.nbytes, values.any()) == (nbytes, False)
        own = len(values) // size
        comm.barrier()
        values[own * comm.rank : own * (comm.rank + 1)] = comm.rank + 1
        comm._session.calls.gather_shares(values, 0)
        assert values.tolist() == np.repeat(np.arange(1, size + 1), own).tolist()
        comm.barrier()
        assert memory.marks.view(np.uint32)[:, 1].tolist() == [1] * size
    comm.barrier()  # It is the first rank's.


def test_without_room_no_memory_is_shared(monkeypatch):
    monkeypatch.setattr(Heap, "empty", lambda *_: None)
    found = ring_of_threads(2, lambda comm: comm._session.calls.share([8]), transport="shm")
    assert found == [None, None]


def test_shared_memory_is_used_until_all_ranks_have_dropped_it():
    def work(comm):
        [memory] = comm._session.calls.share([MIB])
        memory.array[comm.rank] = 5
        comm.barrier()
        return Area(*memory)

    first, second = ring_of_threads(2, work, transport="shm")
    assert second.array[:3].tolist() == [5, 5, 0]
    assert (first.is_used, second.is_used) == (True, False)  # It is the first rank's.
    del second
    gc.collect()
    assert not first.is_used


def test_closed_communicator_keeps_no_segment():
    gc.collect()
    before = shared_descriptors()
    communicators = ring_of_threads(3, lambda comm: comm, transport="shm")
    assert shared_descriptors() == before
    assert all(comm.closed for comm in communicators)


@on_each_rank(2, transport="shm")
def test_statistics_stay_after_close(comm):
    comm.all_reduce(np.ones(100_000))
    before = comm.statistics()
    assert before.bytes_sent > 0
    comm.close()
    assert comm.statistics() == before


def test_statistics_in_another_thread_do_not_outlive_the_memory(monkeypatch):
    """The group is not freed while somebody looks at it."""
    looking, freed, go = threading.Event(), threading.Event(), threading.Event()
    look, free = functions()["shm_look"], functions()["shm_free"]
    groups: list[int] = []

    def slow_look(group, facts):
        if threading.current_thread().name == "asking":
            looking.set()
            assert go.wait(10)
        look(group, facts)

    def seen_free(group):
        if group in groups:
            freed.set()
        free(group)

    monkeypatch.setitem(functions(), "shm_look", slow_look)
    monkeypatch.setitem(functions(), "shm_free", seen_free)

    def work(comm):
        if comm.rank == 0:
            groups.append(comm._session.collectives._link._ranks.group)
            asking = threading.Thread(target=comm.statistics, name="asking")
            asking.start()
            assert looking.wait(10)
            comm.close()
            assert not freed.is_set()
            go.set()
            asking.join()

    ring_of_threads(2, work, transport="shm")
    gc.collect()
    assert freed.is_set()


@on_each_rank(2, transport="shm")
def test_statistics_do_not_disturb_a_call_that_runs_in_another_thread(comm):
    """What the call has found (progress, and who is late) is its own."""
    link = comm._session.collectives._link
    found = link._look()
    found.progress = 12345
    comm.statistics()
    assert found.progress == 12345


@on_each_rank(2, transport="shm")
def test_registered_array_of_a_failed_call_is_not_given_out_again(comm):
    """Ranks that come late may still write into it."""
    array = comm.empty(MIB + comm.rank)
    place = array.ctypes.data
    with pytest.raises(rr.MismatchError):
        comm.all_reduce(array)
    del array
    gc.collect()
    assert comm.empty(MIB).ctypes.data != place


def anonymous_bytes(array: np.ndarray) -> int:
    """Memory of this process's own in the mapping that `array` lies in."""
    address, found = array.__array_interface__["data"][0], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, _, end = line.partition(" ")[0].partition("-")
            found = int(start, 16) <= address < int(end, 16)
        elif found and line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise AssertionError("not mapped")


def test_detached_arrays_keep_address_and_contents_and_are_out_of_reach(heap):
    others = Segment(os.dup(heap.segment.descriptor))
    array = heap.empty(MIB)
    offset = array.ctypes.data - heap.segment.address
    theirs = (ctypes.c_uint8 * MIB).from_address(others.address + offset)
    view = array[::2]
    array[:] = 7
    assert theirs[5] == 7
    assert heap.detach() == 0
    ctypes.memset(theirs, 1, MIB)
    assert (array == 7).all()
    array[0] = 8
    assert (view[0], view[1], theirs[0]) == (8, 7, 1)
    assert heap.empty(1) is None


def test_memory_of_a_detached_array_goes_back_with_its_last_view(heap):
    kept, given_up = heap.empty(MIB), heap.empty(MIB)
    address = given_up[-1:].__array_interface__["data"][0]
    heap.detach()
    probe = np.frombuffer((ctypes.c_uint8 * 1).from_address(address), np.uint8)
    before = anonymous_bytes(probe)
    assert before >= MIB
    del given_up
    gc.collect()
    assert anonymous_bytes(probe) <= before - MIB
    assert kept.sum() == 0


def test_arrays_that_cannot_be_detached_are_counted_and_said(monkeypatch, caplog):
    monkeypatch.setitem(functions(), "segment_detach", lambda *_: -errno.ENOMEM)

    def work(comm):
        array = comm.empty(MIB + comm.rank)
        with pytest.raises(rr.MismatchError):
            comm.all_reduce(array)

    ring_of_threads(2, work, transport="shm")
    assert "no memory to take 4194304 bytes of registered arrays out" in caplog.text


# --- No memory to share ---------------------------------------------------------------------


def failing_once(call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """`call`, except that it raises `error` for the first rank that gets there."""
    first = iter([error])

    def attempt(*arguments: Any, **options: Any) -> Any:
        if (due := next(first, None)) is not None:
            raise due
        return call(*arguments, **options)

    return attempt


@pytest.fixture
def no_memory(monkeypatch):
    """The first rank to ask for a segment is told that there is no memory left."""
    error = OSError(28, "No space left on device")
    monkeypatch.setattr(Segment, "create", failing_once(Segment.create, error))


@pytest.mark.usefixtures("no_memory")
def test_rank_without_memory_is_reached_over_sockets(caplog):
    def work(comm):
        return comm.transport, bool((comm.all_reduce(np.ones(100_000)) == 3).all())

    assert ring_of_threads(3, work) == [("shm+zmq", True)] * 3
    assert "has no memory to share (No space left on device)" in caplog.text


@pytest.mark.usefixtures("no_memory")
def test_rank_without_memory_is_an_error_where_shared_memory_is_insisted_on():
    with pytest.raises(rr.RendezvousError) as caught:
        ring_of_threads(2, rr.Communicator.barrier, transport="shm", join_timeout_s=1.0)
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "cannot get memory to share with the other ranks: No space left on device" in told


def test_shared_memory_between_hosts_is_refused_with_the_groups():
    with pytest.raises(rr.ConfigError, match=r"that share it are \(0, 2\), \(1,\)") as caught:
        ring_of_threads(3, rr.Communicator.barrier, transport="shm", hosts=["a", "b", "a"])
    assert "RINGREDUCE_TRANSPORT=auto" in str(caught.value)


def test_insisting_on_sockets_uses_no_shared_memory(monkeypatch):
    monkeypatch.setattr(Segment, "create", None)
    transports = ring_of_threads(2, lambda comm: comm.transport, transport="zmq")
    assert transports == ["zmq", "zmq"]


# --- Neighbours that are not what they should be --------------------------------------------


@pytest.mark.parametrize("payload", [b"", bytes(1 << 20), b"RRR-SHM1" + bytes(1 << 20)])
def test_foreign_segment_is_a_protocol_error_that_names_the_rank(monkeypatch, payload):
    connect = Mesh.connect

    def swap(self, names, *, rank, descriptor, **rest):
        if rank == 1:
            descriptor = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
            os.write(descriptor, payload)
        return connect(self, names, rank=rank, descriptor=descriptor, **rest)

    monkeypatch.setattr(Mesh, "connect", swap)
    with pytest.raises(rr.ProtocolError, match="cannot use the memory of rank 1") as caught:
        ring_of_threads(2, rr.Communicator.barrier, timeout_s=3.0)
    assert caught.value.peer == 1


# --- Faults in real processes ---------------------------------------------------------------


WOKEN = """
COUNT = {count}
for number in range(len(CONFIGS)):
    ring = join(number)
    data, other = ring.empty(COUNT), ring.empty(1000)
    link = ring._session.collectives._link
    segments, heap = link._ranks.mapped, link._heap
    data[:] = 0
    def call():
        ring.all_reduce(data)
        say(f"round {{number}}")
    attempt("result", lambda: until_error(call))
    if RANK == 1:
        # As a rank does that was stopped while it wrote: it goes on where it was.
        for rank in (0, 2):
            at = data.ctypes.data - segments[1].address
            ctypes.memset(segments[rank].address + at, 0xFF, data.nbytes)
        attempt("again", ring.barrier)
        say("written")
    else:
        data[:], other[:] = 5, 6
        say("filled")
        sys.stdin.readline()
        say("checked", intact=bool((data == 5).all() and (other == 6).all()))
hold()
"""


@pytest.mark.parametrize("rings", [1, in_full(2)])
def test_a_rank_woken_late_does_not_write_into_arrays_of_those_that_gave_up(tmp_path, rings):
    """Stopped at any moment, most often while it reduces into everybody's arrays."""
    program = "import ctypes\n" + WOKEN.format(count=8 << 20)
    with Ring(tmp_path, 3, program, transport="shm", timeout_s=1.0, rings=rings) as ring:
        for number in range(rings):
            ring.wait(f"round {number}", times=2)
            ring.workers[1].signal(signal.SIGSTOP)
            ring.wait("filled", [0, 2], times=number + 1)
            ring.workers[1].signal(signal.SIGCONT)
            [late] = ring.wait("again", [1], times=number + 1)
            assert late["kind"] in ("PeerTimeoutError", "PeerLostError"), late
            ring.wait("written", [1], times=number + 1)
            ring.tell(0, 2)
            for fact in ring.wait("checked", [0, 2], times=number + 1):
                assert fact["intact"]
        ring.release()


def test_one_rank_without_the_native_library_makes_all_use_sockets(monkeypatch):
    missing = failing_once(shm.ShmLink, rr.NativeError("There is no library."))
    monkeypatch.setattr(opened_sockets, "ShmLink", missing)
    assert set(ring_of_threads(2, lambda comm: comm.transport)) == {"zmq"}


def test_a_native_library_of_another_version_is_an_error_and_not_a_slow_ring(monkeypatch):
    refused = Mock(side_effect=rr.NativeError("it has ABI 1"))
    monkeypatch.setattr(opened_sockets, "library", refused)
    with pytest.raises(rr.NativeError, match="it has ABI 1"):
        ring_of_threads(2, rr.Communicator.barrier, transport="auto", join_timeout_s=1.0)
