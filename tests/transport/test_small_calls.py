"""Calls wholly in C: found only for the arrays that they were taught, and as exact as Python's."""

import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.effects import native
from ringreduce.testing import ring_of_threads
from ringreduce.transport.small_calls import Kind, SmallCalls, are_possible
from tests import naive
from tests.rings import on_each_rank

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the native library")

NATIVE = Path(__file__).parents[2] / "native" / "src"
OPS = [rr.ReduceOp.SUM, "mean", rr.ReduceOp.MIN, "max", rr.ReduceOp.PRODUCT]


def test_this_python_and_numpy_are_laid_out_as_expected():
    """On another interpreter this test fails and calls run in Python, which is slower only."""
    assert are_possible()


def test_our_declarations_are_those_of_python_and_numpy(tmp_path):
    headers = Path(sysconfig.get_path("include"))
    compiler = shutil.which("cc")
    if compiler is None or not (headers / "Python.h").exists():
        pytest.skip("no C compiler, or no headers of Python")
    source = f"""
        #include <stddef.h>
        #include <Python.h>
        #define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
        #include <numpy/arrayobject.h>
        #include "{NATIVE}/python_api.h"
        #define SAME(ours, theirs)                                                              \\
            _Static_assert(offsetof(rr_array, ours) == offsetof(PyArrayObject_fields, theirs) && \\
                sizeof(((rr_array *)0)->ours) == sizeof(((PyArrayObject_fields *)0)->theirs), #ours)
        SAME(data, data); SAME(dimensions, nd); SAME(shape, dimensions); SAME(strides, strides);
        SAME(base, base); SAME(dtype, descr); SAME(flags, flags);
        _Static_assert(RR_ARRAY_USUAL == NPY_ARRAY_CARRAY, "flags");
        _Static_assert(METH_FASTCALL == 0x80 && sizeof(rr_object) == sizeof(PyObject), "object");
        void *(*save)(void) = (void *(*)(void))(PyThreadState *(*)(void))PyEval_SaveThread;
    """
    file = tmp_path / "check.c"
    file.write_text(source)
    command = [compiler, "-fsyntax-only", f"-I{headers}", f"-I{np.get_include()}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("size", [2, 3])
@on_each_rank()
def test_calls_that_were_taught_give_what_numpy_gives(comm, size):
    """Twice each, other arrays the second time; shapes of one length share what was taught."""
    names = ("float32", "float16", "int8", "int64")
    shapes = ((0,), (1,), (size + 1,), (2, 3), (6,), (1009,))
    for name, shape, op, repeat in itertools.product(names, shapes, OPS, (0, 1)):
        if op == "mean" and naive.DTYPES[name].kind == "i":
            continue
        inputs = [
            (np.arange(np.prod(shape)) % 5 + rank + repeat).astype(naive.DTYPES[name])
            for rank in range(size)
        ]
        own = inputs[comm.rank].copy().reshape(shape)
        assert comm.all_reduce(own, op) is own
        how = op if isinstance(op, rr.ReduceOp) else rr.ReduceOp[op.upper()]
        expected = naive.all_reduce(how, inputs)
        np.testing.assert_array_equal(own.reshape(-1), expected, strict=True)
    assert comm._session.collectives.small.nbytes > 0


@on_each_rank(2)
def test_a_taught_call_is_counted_and_recorded_like_any_other(comm):
    before = comm.statistics()
    for _ in range(10):
        comm.all_reduce(np.ones(6, np.float32))
    after = comm.statistics()
    assert after.collectives - before.collectives == 10
    assert after.seconds > before.seconds
    assert after.bytes_sent - before.bytes_sent == 10 * 24
    calls = comm._session._recorder.entries()[-10:]
    assert [(call.operation, call.nbytes) for call in calls] == [("all_reduce", 24)] * 10
    assert all(call.seconds is not None and call.seconds > 0 for call in calls)
    assert len({call.number for call in calls}) == 10


@on_each_rank(2)
def test_what_is_not_as_taught_is_for_python(comm):
    for _ in range(2):
        comm.all_reduce(np.ones(6, np.float32))
    frozen = np.ones(6, np.float32)
    frozen.flags.writeable = False
    for bad in (frozen, np.ones(12, np.float32)[::2], [1.0] * 6, np.ones(6, ">f4"), None):
        with pytest.raises(rr.ArrayError):
            comm.all_reduce(bad)
    with pytest.raises(rr.ArrayError, match="reduction operator"):
        comm.all_reduce(np.ones(6, np.float32), "total")
    derived = np.ones(6, np.float32).view(np.recarray)
    assert comm.all_reduce(derived) is derived
    np.testing.assert_array_equal(np.asarray(derived), np.full(6, comm.size))


@on_each_rank(2)
def test_ranks_in_different_taught_calls_learn_of_it(comm):
    for count in (5, 6):
        for _ in range(2):
            comm.all_reduce(np.ones(count))
    with pytest.raises(rr.MismatchError, match=r"5 float64.*6 float64|6 float64.*5 float64"):
        comm.all_reduce(np.ones(5 + comm.rank))
    with pytest.raises(rr.MismatchError):
        comm.all_reduce(np.ones(5))


@on_each_rank(2)
def test_a_taught_call_is_refused_once_the_ring_is_closed_or_in_a_forked_child(comm):
    for _ in range(2):
        comm.all_reduce(np.ones(3))
    small = comm._session.collectives.small
    comm._session.close_inherited()
    with pytest.raises(Exception, match="child process"):
        comm.all_reduce(np.ones(3))
    comm._session.is_inherited = False
    comm.close()
    assert small.run(np.ones(3), rr.ReduceOp.SUM) is None
    with pytest.raises(Exception, match=r"after close\(\)"):
        comm.all_reduce(np.ones(3))


@on_each_rank(2)
def test_calls_of_several_threads_exclude_each_other(comm):
    """Each adds up the same array, so that any order is right, and no two at once are."""
    threads, calls = 3, 300
    comm.all_reduce(np.ones(500))
    before = comm.statistics()

    def call():
        for _ in range(calls):
            np.testing.assert_array_equal(comm.all_reduce(np.ones(500)), np.full(500, 2))

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(call) for _ in range(threads)]:
            done.result()
    after = comm.statistics()
    assert after.collectives - before.collectives == threads * calls
    assert after.bytes_sent - before.bytes_sent == threads * calls * 500 * 8
    assert comm._session.calls.caller is None


@pytest.mark.parametrize("holds", ["lock", "caller"])
def test_nothing_begins_in_c_while_another_call_runs(holds):
    """Another thread's call has the lock; this thread's own has it too, but is the caller."""
    lock, caller = threading.RLock(), ctypes.c_uint64()
    small = SmallCalls(Kind.COLLECTIVE, 1, 0)
    small.exclude(functools.partial(lock.acquire, False), lock.release, caller)
    small.teach(np.ones(3), "sum", 1, None)
    with ThreadPoolExecutor(1) as other:
        if holds == "lock":
            other.submit(lock.acquire).result()
        else:
            lock.acquire()
            caller.value = threading.get_ident()
        assert small.run(np.ones(3), "sum") is None
        small.end()  # Of no call, so that it does nothing.
        assert other.submit(lock.acquire, False).result() is (holds == "lock")


@on_each_rank(2)
def test_no_call_begins_in_c_once_it_needs_a_check(comm):
    """The engine has calls that come first; a failed ring has an error to raise."""
    comm.all_reduce(np.ones(3))
    small = comm._session.collectives.small
    work = comm.all_reduce(np.ones(5), async_op=True)
    assert not small.begins_here
    assert small.run(np.ones(3), rr.ReduceOp.SUM) is None
    np.testing.assert_array_equal(comm.all_reduce(np.ones(3)), np.full(3, comm.size))
    work.wait()
    group = comm.split(0)
    group.all_reduce(np.ones(3))
    group.barrier()
    group._session.fail(rr.ArrayError("something else"))
    small = group._session.collectives.small
    assert not small.begins_here
    with pytest.raises(rr.ArrayError, match="something else"):
        group.all_reduce(np.ones(3))


def bucket(comm: rr.Communicator, array: np.ndarray, signature: int) -> Any:
    """Reduce `array` as the engine reduces a bucket: in its thread, with the plan's signature."""
    reduce = functools.partial(comm.all_reduce, array, "mean", signature=signature)
    return comm._session.engine.submit(reduce)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@on_each_rank(2)
def test_small_buckets_are_reduced_in_c_with_equal_bits(comm, name):
    own = np.random.default_rng(comm.rank).standard_normal(301).astype(naive.DTYPES[name])
    # With a signature, and not in the engine: by Python.
    expected = comm.all_reduce(own.copy(), rr.ReduceOp.MEAN, signature=5)
    small = comm._session.collectives.small
    assert small.nbytes == 0
    for _ in range(50):
        assert bucket(comm, own.copy(), 5).wait().tobytes() == expected.tobytes()
    assert small.nbytes > 0


@on_each_rank(2)
def test_a_call_of_the_program_comes_after_the_buckets_before_it(comm):
    for _ in range(2):
        comm.all_reduce(np.ones(3))
        bucket(comm, np.ones(301), 5).wait()
    buckets = [bucket(comm, np.ones(301), 5) for _ in range(100)]
    comm.all_reduce(np.ones(3))
    assert all(each.done() for each in buckets)


@on_each_rank(2)
def test_buckets_of_different_plans_differ_in_c_too(comm):
    for signature in (5, 6):
        for _ in range(2):
            bucket(comm, np.ones(301), signature).wait()
    with pytest.raises(rr.MismatchError, match="with other gradients"):
        bucket(comm, np.ones(301), 5 + comm.rank).wait()


def test_more_calls_than_are_kept_all_work():
    """A call that takes another's slot frees what that one needed."""
    small = SmallCalls(Kind.COLLECTIVE, 0, 0)
    for count in range(1000):
        small.teach(np.empty(count, np.int8), "sum", 1, object())
    assert len(small._taught) <= 64

    def work(comm):
        for count in [*range(200), *range(200)]:
            array = np.full(count, comm.rank + 1)
            np.testing.assert_array_equal(comm.all_reduce(array), np.full(count, 3))

    ring_of_threads(2, work)


@on_each_rank(2)
def test_messages_that_were_taught_arrive_as_sent(comm):
    """Three times each, with tags that Python shares and one that it makes anew."""
    cases = [
        (name, shape, tag)
        for name in ("float32", "float16", "int64")
        for shape, tag in (((0,), 0), ((6,), 0), ((2, 3), 7), ((9000,), 256), ((6,), 257))
    ]
    other = 1 - comm.rank
    for repeat in range(3):
        for name, shape, tag in cases:
            sent = (np.arange(np.prod(shape)) % 7 + repeat).reshape(shape)
            sent = sent.astype(naive.DTYPES[name])
            got = np.zeros_like(sent)
            sent.flags.writeable = comm.rank == 0
            if comm.rank == 0:
                comm.send(sent, 1, tag=tag)
            assert comm.recv(got, other, tag=tag) is got
            if comm.rank == 1:
                comm.send(sent, 0, tag=tag)
            np.testing.assert_array_equal(got, sent, strict=True)
    pairs, place = comm._session.collectives.pairs_with(other)
    end = pairs.end(place, is_sending=False)
    assert end.small is not None
    assert 0 < end.small.nbytes < end.nbytes
    nbytes = sum(naive.DTYPES[name].itemsize * np.prod(shape) for name, shape, _ in cases)
    assert end.nbytes == 3 * nbytes


def message(comm: rr.Communicator, tag: int) -> None:
    """Send one from rank 0 to rank 1."""
    comm.recv(np.empty(3), 0, tag=tag) if comm.rank else comm.send(np.ones(3), 1, tag=tag)


def test_a_message_that_waits_in_c_is_known_to_wait():
    communicators: dict[int, rr.Communicator] = {}

    def work(comm):
        communicators[comm.rank] = comm
        for repeat in range(2):
            comm.barrier()
            if comm.rank == 0 and repeat == 1:
                waiting = communicators[1]._session.messages
                while (pending := waiting.pending()) is None:
                    os.sched_yield()
                assert (pending.peer, pending.tag) == (0, 5)
            message(comm, tag=5)
        assert communicators[comm.rank]._session.messages.pending() is None

    ring_of_threads(2, work)


@on_each_rank(2)
def test_another_tag_than_the_one_due_is_named_in_c_too(comm):
    for tag in (1, 1, 2, 2):
        message(comm, tag)
    if comm.rank == 0:
        message(comm, tag=1)
    with pytest.raises(rr.MismatchError, match=r"tag 1.*tag 2|tag 2.*tag 1"):
        comm.barrier() if comm.rank == 0 else message(comm, tag=2)
