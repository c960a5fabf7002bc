"""The background threads of a communicator: of collectives and gradient buckets, and of messages.

There is one thread for collectives and one order, because all ranks must make the same calls in the
same order: so the order in which work is submitted must not differ between ranks. The thread waits
at the queue, without the GIL, and ends in `close`, at the latest when Python exits.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from ringreduce.effects import handoff
from ringreduce.effects.events import Events
from ringreduce.pure.spans import SpanKind
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import (
    ClosedError,
    MismatchError,
    PeerTimeoutError,
    RingReduceError,
)

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Work(Generic[_Result]):
    """A collective that runs in the background.

    It owns the array that was passed until `wait` has returned or `done` is True.
    """

    def __init__(self, run: Callable[[], _Result]) -> None:
        self._run = run
        self.submitted_s = time.monotonic()
        self._over = threading.Event()
        self._result: _Result | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> _Result:
        """Return the result of the call, once it is done.

        Args:
            timeout_s: how long to wait; None: as long as the collective itself, which gives up
                after the communicator's ``timeout_s`` without progress (``busy_timeout_s`` while
                the rank that it waits for is in user code).

        Raises:
            PeerTimeoutError: it was not done in `timeout_s`. It continues; you may wait again.
            RingReduceError: what the collective raised.
        """
        if not self._over.wait(timeout_s):
            raise PeerTimeoutError(
                f"waited {timeout_s:g} s for a collective in the background, which goes on",
                remedy="Wait again, or longer.",
            )
        if self._error is not None:
            # Each wait starts from the same traceback, which would else grow.
            raise self._error.with_traceback(self._traceback)
        return self._result  # type: ignore[return-value]

    def do(self) -> None:
        """Run it, in the thread that this work was given to."""
        try:
            self._result = self._run()
        except BaseException as error:
            self._error, self._traceback = error, error.__traceback__  # Raised by `wait`.
        self._end()

    def fail(self, error: BaseException) -> None:
        """End it with `error` instead of running it."""
        self._error = error
        self._end()

    def _end(self) -> None:
        del self._run  # and with it the array, where nobody else has it
        self._over.set()


class Executor:
    """A thread, named `name`, that runs work of `queue` in order until `close`; from any thread."""

    _noun, _this = "send or recv", "call"  # what errors call its work

    def __init__(self, name: str, queue: handoff.Queue) -> None:
        self._queue, self._lock = queue, threading.Lock()
        self._work: deque[Work[Any]] = deque()  # as many as there are jobs in the queue
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], _Result]) -> Work[_Result]:
        """Have the thread call `run`, after all earlier work; ClosedError after `close`."""
        work = Work(run)
        with self._lock:
            if not self._queue.post(0):
                raise ClosedError(f"called a {self._noun} after close()")
            self._work.append(work)
        return work

    def drain(self) -> None:
        """Return once all work is done; at once in the thread itself."""
        if threading.current_thread() is self._thread:
            return
        while not self._queue.wait_idle(TIMES.poll_s):
            pass

    def close(self, why: str = "") -> None:
        """End the thread; work not begun fails with ClosedError.

        Call it once a running call has been interrupted, and not in a forked child, since the
        thread and the waiting callers are its parent's.
        """
        if threading.current_thread() is self._thread:
            self._queue.finish()  # Callers that learn of the end may reuse the memory.
        self._queue.close(why)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._lock:
            left, self._work = self._work, deque()
        for work in left:
            work.fail(ClosedError(f"was closed before this {self._this} had begun"))

    def _loop(self) -> None:
        while (item := self._queue.take()) is not None:
            failed: handoff.RoundFailed | None = None
            try:
                failed = self._do(item)
            finally:
                self._queue.finish(failed)
                self._tidy()

    def _do(self, item: Any) -> handoff.RoundFailed | None:
        with self._lock:
            work = self._work.popleft()
        self._begin(work)
        work.do()
        return None

    def _begin(self, work: Work[Any]) -> None:
        """Called before each work; and `_tidy` once nothing is in progress."""

    def _tidy(self) -> None:
        pass


class Owner(Protocol):
    """The session, as the engine and the watcher notify it from their threads."""

    def fail(self, error: RingReduceError) -> object:
        """This rank has failed with `error`: notify all ranks."""

    def ring_ended(self, error: RingReduceError) -> None:
        """The ring has ended with `error`, and the other ranks know. Takes no lock."""


class Engine(Executor):
    """The background thread of one communicator, which outlives its sessions.

    `events` get how long work waited, and what happens to buckets; `owner` is notified of errors.
    """

    _noun = _this = "collective"

    def __init__(self, name: str, owner: Owner, events: Events) -> None:
        self._owner, self._events = owner, events
        self._plans: dict[int, Callable[[handoff.BucketItem], None]] = {}
        self._unwanted: set[int] = set()
        super().__init__(name, handoff.open_queue(events))

    def follow(self, owner: Owner) -> None:
        """Work, with the same plans, for a session in place of one that was left; see `let_go`."""
        self._owner = owner
        self._queue.reopen()

    def let_go(self, why: str) -> None:
        """End, with `why`, what is under way for a session whose calls have been interrupted."""
        self._queue.fail(why)
        self.drain()

    @property
    def thread(self) -> int:
        assert self._thread.ident is not None
        return self._thread.ident

    @property
    def native(self) -> handoff.NativeQueue | None:
        """The queue, if a framework's threads can put buckets into it."""
        return self._queue if isinstance(self._queue, handoff.NativeQueue) else None

    def serve(self, plan: int, reduce: Callable[[handoff.BucketItem], None]) -> None:
        """Have the thread call `reduce` for each packed bucket of a plan.

        The thread that waits for the bucket receives its `RoundFailed`; other errors break the
        ring.
        """
        self._plans[plan] = reduce

    def forget(self, plan: int) -> None:
        """Remove a plan that is no longer used, once none of its buckets is in progress."""
        self._unwanted.add(plan)
        self._tidy()

    def _tidy(self) -> None:
        for plan in self._unwanted.copy():
            if self.native is None or self.native.unregister(plan):
                self._unwanted.discard(plan)
                self._plans.pop(plan, None)

    def fail(self, owner: Owner, error: RingReduceError) -> None:
        """Fail every bucket with `error` of the session `owner`, unless another has its place."""
        if owner is self._owner:
            self._queue.fail(str(error))
            self._tidy()

    def close(self, why: str = "") -> None:
        """End like an `Executor`; all waits for buckets end with the error `why`."""
        super().close(why)
        self._plans.clear()

    def _begin(self, work: Work[Any]) -> None:
        self._events.part(SpanKind.QUEUE, work.submitted_s, time.monotonic())

    def _do(self, item: Any) -> handoff.RoundFailed | None:
        if isinstance(item, handoff.BucketItem):
            return self._reduce(item)
        if item != handoff.COMPLAINT:
            return super()._do(item)
        text = (
            "began another step while gradients of the one before were still under way: that step "
            "failed midway, and this rank has gone on"
        )
        remedy = "After an error inside a training step, let it end the process."
        self._give_up(MismatchError(text, operation="gradient reduction", remedy=remedy))
        return None

    def _reduce(self, item: handoff.BucketItem) -> handoff.RoundFailed | None:
        try:
            self._plans[item.plan](item)
        except handoff.RoundFailed as failed:
            return failed
        except RingReduceError as error:
            self._give_up(error)
        except BaseException as error:  # a bug of ours: no caller may wait for ever
            _log.exception("the engine failed")
            self._give_up(MismatchError(f"failed in the engine: {type(error).__name__}: {error}"))
        return None

    def _give_up(self, error: RingReduceError) -> None:
        try:
            self._owner.fail(error)
        except Exception:
            _log.exception("the engine could not tell the other ranks")
        finally:
            # In any case, else `finish` would hand out the bucket as reduced.
            self.fail(self._owner, error)
