"""The engine's queue: one contract for both kinds, and the native one's buckets.

What the library does by itself (orders of plans, misuse, plans that are given up) is tested in C:
native/tests/handoff_test.c.
"""

import ctypes
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringreduce.effects import handoff, native
from ringreduce.effects.events import Events
from ringreduce.effects.handoff import (
    Area,
    BucketItem,
    Layout,
    NativeQueue,
    PlainQueue,
    Queue,
    RoundFailed,
)
from ringreduce.pure.buckets import Slot
from ringreduce.pure.spans import SpanKind
from ringreduce.pure.wire import Kind
from tests.processes import wait_until
from tests.recorded import parts_of

# Nothing here takes a hundredth of it; it only ends a test that would hang.
DEADLINE_S = 20.0

needs_library = pytest.mark.skipif(native.library() is None, reason="needs the native library")


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Run `call` in a thread of its own; its result, to wait for with a deadline.

    The kernel's number of the thread is `future.thread`.
    """
    future: Future[Any] = Future()
    begun = threading.Event()

    def run() -> None:
        future.thread = threading.get_native_id()  # type: ignore[attr-defined]
        begun.set()
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    begun.wait()
    return future


# --- What every queue does ------------------------------------------------------------------


@pytest.fixture(params=[PlainQueue, pytest.param(NativeQueue, marks=needs_library)])
def queue(request: pytest.FixtureRequest) -> Iterator[Queue]:
    made = request.param(*([Events()] if request.param is NativeQueue else []))
    yield made
    made.close("the test is over")


def test_jobs_come_out_in_the_order_in_which_they_were_put_in(queue):
    jobs = [7, 0, 3, 2**40]
    assert all(queue.post(job) for job in jobs)
    assert take_all(queue, len(jobs)) == jobs


def take_all(queue: Queue, count: int) -> list[Any]:
    taken = []
    for _ in range(count):
        taken.append(queue.take())
        queue.finish()
    return taken


def test_jobs_of_many_threads_each_come_out_once(queue):
    threads = [
        in_thread(lambda start=start: [queue.post(start + i) for i in range(100)])
        for start in range(0, 400, 100)
    ]
    taken = take_all(queue, 400)
    assert all(all(thread.result(DEADLINE_S)) for thread in threads)
    # Each thread's own are in its order.
    assert sorted(taken, key=lambda job: job // 100) == list(range(400))


def test_queue_is_idle_before_its_first_job_and_after_its_last(queue):
    assert queue.wait_idle(0.0)
    queue.post(1)
    assert not queue.wait_idle(0.001)
    queue.post(2)
    for left in (1, 0):
        queue.take()
        assert not queue.wait_idle(0.001)
        queue.finish()
        assert queue.wait_idle(0.001) == (left == 0)


@pytest.mark.parametrize("job", [5, None])
def test_take_waits_for_a_job_or_the_end(queue, job):
    taken = in_thread(queue.take)
    assert not taken.done()
    queue.close("enough") if job is None else queue.post(job)
    assert taken.result(DEADLINE_S) == job


@pytest.mark.parametrize("end", ["finish", "close"])
def test_wait_for_idleness_is_ended_by_the_last_job_and_by_close(queue, end):
    queue.post(1)
    queue.take()
    idle = in_thread(lambda: queue.wait_idle(DEADLINE_S))
    queue.finish() if end == "finish" else queue.close("enough")
    assert idle.result(DEADLINE_S / 2)


def test_after_close_nothing_is_taken_or_put_in_but_what_was_taken_may_be_finished(queue):
    queue.post(1)
    queue.post(2)
    queue.take()
    queue.close("enough")
    queue.close("more than enough")
    assert queue.post(3) is False
    queue.finish()
    assert queue.take() is None


def test_jobs_go_on_after_a_failure(queue):
    """They are told by the communicator; a queue fails buckets alone."""
    queue.post(1)
    queue.fail("broken")
    queue.post(2)
    assert take_all(queue, 2) == [1, 2]


def test_queue_is_native_where_there_is_a_library(monkeypatch):
    kind = PlainQueue if native.library() is None else NativeQueue
    assert type(handoff.open_queue(Events())) is kind
    monkeypatch.setattr(handoff, "library", lambda: None)
    assert type(handoff.open_queue(Events())) is PlainQueue


# --- Buckets --------------------------------------------------------------------------------

# RR_HANDOFF_... of native/include/ringreduce.h.
DONE, CLOSED, FAILED, MISUSED, REFUSED = 0, 100, 101, 102, 105
WHY_BYTES = 2048
# Two gradients of 5 and 3 floats in a bucket of 32, with padding between and after them.
SLOTS = (Slot(0, 0, 5), Slot(1, 16, 3))
COUNT = 32


class Part(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("nbytes", ctypes.c_uint64))


@dataclass
class Answer:
    """What start or wait has returned: its code, its text and, of a wait, the gradients."""

    code: int
    why: str
    gradients: list[np.ndarray] = field(default_factory=list)


def call(
    name: str, plan: int, bucket: int, value: float = 0.0, counts: tuple[int, ...] = (5, 3)
) -> Answer:
    """``rr_handoff_start`` or ``rr_handoff_wait`` as a framework's thread calls it."""
    library = native.library()
    assert library is not None
    function = native.declare(
        library,
        f"rr_handoff_{name}",
        ctypes.c_int,
        [
            *(ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32),
            *([ctypes.c_void_p] * (name == "wait")),
            ctypes.c_char_p,
        ],
    )
    gradients = [np.full(count, value, np.float32) for count in counts]
    parts = (Part * len(counts))(*[Part(each.ctypes.data, each.nbytes) for each in gradients])
    why = ctypes.create_string_buffer(WHY_BYTES)
    lender = [None] if name == "wait" else []
    code = function(plan, bucket, ctypes.addressof(parts), len(counts), *lender, why)
    return Answer(code, why.value.decode(), gradients)


def start(plan: int, bucket: int, value: float = 1.0, **more: Any) -> Answer:
    return call("start", plan, bucket, value, **more)


def wait(plan: int, bucket: int, **more: Any) -> Answer:
    return call("wait", plan, bucket, **more)


class Plan:
    """A plan of `count` buckets in `queue`, and their memory, full of what must not be seen."""

    def __init__(self, queue: NativeQueue, count: int = 1) -> None:
        self.queue = queue
        self.memory = [np.full(4 * COUNT, 0x7F, np.uint8) for _ in range(count)]
        slots = [(4 * slot.start, 4 * slot.count) for slot in SLOTS]
        self.number = queue.register(
            [Layout([Area(memory)], memory.nbytes, slots) for memory in self.memory]
        )

    def bucket(self, index: int) -> np.ndarray:
        return self.memory[index].view(np.float32)

    def double(self) -> Any:
        """What an engine does with the next item: twice the sum, say."""
        item = self.queue.take()
        if isinstance(item, BucketItem):
            self.bucket(item.bucket)[:] *= 2
        self.queue.finish()
        return item


@pytest.fixture
def native_queue() -> Iterator[NativeQueue]:
    made = NativeQueue(Events())
    yield made
    made.close("the test is over")


def in_library(call: Callable[[], Any]) -> Future[Any]:
    """Run `call` in a thread; return once that sleeps in the library, or is done.

    The kernel tells that it sleeps. What tells that it is not the GIL it sleeps for is that it
    goes on sleeping while nobody here holds that: who waits for the GIL wakes every 5 ms.
    """
    future = in_thread(call)
    seen, since = "", time.monotonic()

    def sleeps_on() -> bool:
        nonlocal seen, since
        try:
            status = Path(f"/proc/self/task/{future.thread}/status").read_text()
        except OSError:  # It has ended.
            return True
        state = re.search(r"State:\s+(\w)", status)
        switches = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)
        assert state is not None
        assert switches is not None
        now = f"{state[1]} {switches[1]}"
        if now != seen or state[1] != "S":
            seen, since = now, time.monotonic()
        return future.done() or time.monotonic() - since > 0.05

    wait_until(sleeps_on, "a thread to wait in the library")
    return future


@needs_library
class TestBuckets:
    def test_gradients_come_back_reduced(self, native_queue):
        plan = Plan(native_queue)
        assert start(plan.number, 0, 3.0).code == DONE
        padded = np.zeros(COUNT)
        padded[0:5] = padded[16:19] = 3.0
        assert np.array_equal(plan.bucket(0), padded)
        assert plan.double() == BucketItem(plan.number, 0)
        answer = wait(plan.number, 0)
        assert answer.code == DONE
        assert [each.tolist() for each in answer.gradients] == [[6.0] * 5, [6.0] * 3]

    def test_a_round_that_failed_is_given_out_so(self, native_queue):
        plan = Plan(native_queue)
        start(plan.number, 0)
        native_queue.take()
        native_queue.finish(RoundFailed("not this time"))
        answer = wait(plan.number, 0)
        assert (answer.code, answer.why) == (REFUSED, "not this time")
        start(plan.number, 0, 3.0)
        plan.double()
        assert wait(plan.number, 0).code == DONE

    def test_results_may_lie_elsewhere(self, native_queue):
        memory = np.zeros(64, np.uint8)
        number = native_queue.register([Layout([Area(memory)], 64, [(0, 20)], [(32, 8)])])
        start(number, 0, counts=(5,))
        native_queue.take()
        memory.view(np.float32)[8:10] = 7.0, 8.0
        native_queue.finish()
        [result] = wait(number, 0, counts=(2,)).gradients
        assert result.tolist() == [7.0, 8.0]

    def test_what_happens_to_a_bucket_is_recorded(self, native_queue):
        events = native_queue._events
        for _ in range(3):  # The calls before this one.
            events.begin(Kind.BARRIER, 0)
            events.end()
        plan = Plan(native_queue, 2)
        start(plan.number, 1)
        start(plan.number, 0)
        waiting = in_library(lambda: wait(plan.number, 0))
        plan.double()
        assert waiting.result(DEADLINE_S).gradients[0][0] == 2.0
        found = {span.kind: span for span in parts_of(events)}
        names = ["QUEUE", "PACK", "REDUCE", "BLOCKED", "UNPACK"]
        assert sorted(found) == [SpanKind[name] for name in names]
        for span in found.values():
            assert (span.number, span.other, span.nbytes) == (2, 0, 4 * COUNT)
        chain = [found[SpanKind[name]] for name in ("PACK", "QUEUE", "REDUCE", "UNPACK")]
        for earlier, later in itertools.pairwise(chain):
            assert earlier.began_s <= earlier.ended_s <= later.began_s
        assert found[SpanKind.QUEUE].ended_s == found[SpanKind.REDUCE].began_s
        assert events.seconds(SpanKind.BLOCKED) > 0.0
        blocked = found[SpanKind.BLOCKED]
        assert blocked.began_s <= found[SpanKind.REDUCE].ended_s <= blocked.ended_s

    def test_totals_are_the_sums_of_spans(self, native_queue):
        events, plan = native_queue._events, Plan(native_queue, 2)
        for _ in range(5):
            for bucket in range(2):
                start(plan.number, bucket)
            for bucket in range(2):
                plan.double()
                wait(plan.number, bucket)
        spans = parts_of(events)
        assert len(spans) == 5 * 2 * 4
        for kind in SpanKind:
            total = sum(span.ended_s - span.began_s for span in spans if span.kind == kind)
            assert events.seconds(kind) == pytest.approx(total, rel=1e-9)
        # What is waited for is there already.
        assert events.seconds(SpanKind.BLOCKED) == 0.0

    def test_nothing_is_recorded_after_close(self, native_queue):
        events, plan = native_queue._events, Plan(native_queue)
        start(plan.number, 0)
        native_queue.take()
        native_queue.close("over")
        native_queue.finish()
        wait(plan.number, 0)
        assert parts_of(events) == []

    def test_time_in_which_several_wait_is_counted_once(self, native_queue):
        plan = Plan(native_queue, 2)
        began = time.monotonic()
        for bucket in range(2):
            start(plan.number, bucket)
        waiting = [in_library(lambda b=bucket: wait(plan.number, b)) for bucket in range(2)]
        both = time.monotonic()
        # So long do both wait, for certain.
        wait_until(lambda: time.monotonic() > 2 * both - began + 0.02, "that")
        for _ in waiting:
            plan.double()
        for each in waiting:
            each.result(DEADLINE_S)
        elapsed_s = time.monotonic() - began
        assert 0.0 < native_queue._events.seconds(SpanKind.BLOCKED) <= elapsed_s

    def test_a_plan_that_was_unregistered_says_so_and_its_number_is_not_used_again(
        self, native_queue
    ):
        plan = Plan(native_queue)
        native_queue.unregister(plan.number)
        answer = start(plan.number, 0)
        assert answer.code == MISUSED
        assert "given up" in answer.why
        assert Plan(native_queue).number != plan.number
        native_queue.close("closed")
        assert Plan(native_queue).number == -1
