"""The sends and recvs of a session, which run beside its collectives.

Each direction with each rank has an order of its own: calls run in the caller's thread, one after
the other; with ``async_op`` in a thread of that direction, which its first such call starts, and
later calls come after them. A call that fails breaks the session.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ringreduce.communicator.refusals import interrupted
from ringreduce.effects.handoff import PlainQueue
from ringreduce.engine.engine import Executor
from ringreduce.pure.payload import TAG_MAX, checked_lengths
from ringreduce.pure.spans import SpanKind
from ringreduce.pure.watcher_messages import Pending
from ringreduce.pure.wire import Header, Kind
from ringreduce.transport.shm_pairs import ShmEnd, ShmPairs
from ringreduce.transport.small_calls import SmallCalls
from ringreduce.vocabulary.errors import ArrayError, MismatchError, RingReduceError
from ringreduce.vocabulary.types import dtype_code

if TYPE_CHECKING:
    from ringreduce.communicator.session import Session

_Result = TypeVar("_Result")
_KEPT = 64  # distinct messages remembered for each direction; a pipeline has a few


class _Direction:
    """The calls in one direction with rank `peer` of the job; the one that runs has the lock."""

    def __init__(self, session: Session, sends: bool, group_rank: int) -> None:
        self._session, self._sends, self._group_rank = session, sends, group_rank
        self.peer = session.membership.members[group_rank]
        self.lock = threading.Lock()
        self.caller: int | None = None  # the thread of that call; None while none runs
        # The tag of that call, if it runs in the thread that made it, and not in C.
        self.tag: int | None = None
        # The thread for calls in the background, once there was one.
        self.executor: Executor | None = None
        self.was_used = False  # arrays went this way before, one at a time
        # Runs calls in C, once it was used; None where there is none.
        self.end: ShmEnd | None = None
        self._pairs, self._place = session.collectives.pairs_with(group_rank)
        self.header = lru_cache(_KEPT)(self._make_header)

    def transfer(self, kind: Kind, tag: int, flat: np.ndarray) -> None:
        header = self.header(kind, flat.dtype, flat.size, tag)
        self._pairs.transfer(self._place, header, flat, sends=self._sends)

    def transfer_in_c(self, small: SmallCalls, array: np.ndarray, tag: int) -> bool:
        """Send `array`, or receive into it; False: C does not know it, and nothing was begun."""
        done = small.run(array, tag)
        if done is False:
            self.tag = tag
            self.transfer(Kind.SEND, tag, array.reshape(-1))
        return done is not None

    def teach(self, tag: int, flat: np.ndarray) -> None:
        """Have `transfer_in_c` know arrays like this one with `tag`, where there is C to call."""
        self.was_used = True
        if self.end is None and isinstance(self._pairs, ShmPairs):
            self.end = self._pairs.end(self._place, is_sending=self._sends)
        if self.end is not None:
            with self.lock:
                self.end.teach(self.header(Kind.SEND, flat.dtype, flat.size, tag), flat, tag)

    def traced(self, run: Callable[..., _Result], *arguments: Any) -> _Result:
        """The result of a call, recorded unless C does not know it."""
        began_s = time.monotonic()
        result = run(*arguments)
        if result is not False:
            [array] = [value for value in (*arguments, result) if isinstance(value, np.ndarray)]
            kind, ended_s = SpanKind.SEND if self._sends else SpanKind.RECV, time.monotonic()
            part = self._session.events.part
            part(kind, began_s, ended_s, nbytes=array.nbytes, other=self.peer)
        return result

    def waits_in(self) -> Pending | None:
        """The call that a thread of the program waits in; from any thread."""
        tag = self.tag
        if tag is None and self.end is not None and self.end.small is not None:
            tag = self.end.small.running
        return None if tag is None else Pending(self._sends, self.peer, tag)

    def _make_header(self, kind: Kind, dtype: np.dtype, count: int, tag: int) -> Header:
        session = self._session
        assert session.job is not None
        return Header(
            kind=kind,
            job=session.job.number,
            rank=session.group_rank if self._sends else self._group_rank,
            group=session.membership.group,
            epoch=session.membership.epoch,
            dtype=dtype_code(dtype),
            count=count,
            signature=tag,
        )

    def close(self) -> None:
        """Wait for the call that runs, which has been interrupted, and end the thread."""
        if self.executor is not None:
            self.executor.close()
        if self.caller != threading.get_ident():
            with self.lock:
                pass


class Messages:
    """The sends and recvs of the session `session`; from any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.RLock()
        self._directions: dict[tuple[bool, int], _Direction] = {}

    def again(self, sends: bool, group_rank: Any, tag: Any, array: np.ndarray) -> bool:
        """Send or receive in a direction that was used before; False: nothing was begun.

        The short way of calls as most are. False also says that arguments may be wrong.
        """
        direction = self._directions.get((sends, group_rank)) if type(group_rank) is int else None
        if direction is None or not direction.was_used or direction.executor is not None:
            return False
        if direction.end is not None and (small := direction.end.small) is not None:
            return self._call(direction, None, direction.transfer_in_c, small, array, tag)
        is_usual = type(array) is np.ndarray and array.flags.carray
        if not is_usual or type(tag) is not int or not 0 <= tag <= TAG_MAX:
            return False
        self._call(direction, tag, direction.transfer, Kind.SEND, tag, array)
        return True

    def array(
        self, sends: bool, group_rank: int, tag: int, flat: np.ndarray, async_op: bool, result: Any
    ) -> Any:
        """Send `flat` to that rank, or receive it; return `result`, or its `Work`."""
        self._session.check()
        direction = self._direction(sends, group_rank)
        if async_op:

            def run() -> Any:
                self._call(direction, None, direction.transfer, Kind.SEND, tag, flat)
                return result

            with self._lock:
                if direction.executor is None:
                    config, way = self._session.config, "to" if sends else "from"
                    name = f"ringreduce {way} {direction.peer} {config.rank}/{config.size}"
                    direction.executor = Executor(name, PlainQueue())
            return direction.executor.submit(run)
        self._call(direction, tag, direction.transfer, Kind.SEND, tag, flat)
        if direction.executor is None:
            direction.teach(tag, flat)
        return result

    def object(self, sends: bool, group_rank: int, tag: int, payload: np.ndarray) -> np.ndarray:
        """Send the bytes of an object, `payload`, or receive those of one; return them."""
        self._session.check()
        direction, kind = self._direction(sends, group_rank), Kind.SEND_OBJECT

        def run() -> np.ndarray:
            length = np.array([payload.size], np.int64)
            direction.transfer(kind, tag, length)
            memory = payload if sends else np.empty(checked_lengths(length)[0], np.uint8)
            direction.transfer(kind, tag, memory)
            return memory

        return self._call(direction, tag, run)

    def _call(
        self,
        direction: _Direction,
        tag: int | None,
        run: Callable[..., _Result],
        *arguments: Any,
    ) -> _Result:
        """Run a call, after all of its direction; `tag` is None in the background, or in C."""
        session = self._session
        if direction.caller == threading.get_ident():
            raise MismatchError(
                "made a send or recv in a signal handler, within another one of the same direction",
                **session.config.who,
                peer=direction.peer,
                remedy="Note in the handler that it has run, and send afterwards.",
            )
        if tag is not None and direction.executor is not None:
            direction.executor.drain()
        try:
            with direction.lock:
                session.check()
                direction.caller, direction.tag = threading.get_ident(), tag
                try:
                    if session.events.is_traced:
                        return direction.traced(run, *arguments)
                    return run(*arguments)
                except ArrayError:
                    raise  # Before anything was sent.
                except RingReduceError as error:
                    failure = session.message_failed(error)
                    if failure is error:
                        raise
                    raise failure from error
                except BaseException as error:
                    session.message_failed(interrupted(session.config, error, "a send or recv"))
                    raise
                finally:
                    direction.tag = direction.caller = None
        finally:
            session.leave_if_due()

    def _direction(self, sends: bool, group_rank: int) -> _Direction:
        direction = self._directions.get((sends, group_rank))
        if direction is None:
            with self._lock:
                made = _Direction(self._session, sends, group_rank)
                direction = self._directions.setdefault((sends, group_rank), made)
        return direction

    def pending(self) -> Pending | None:
        # One C call under the GIL.
        for direction in list(self._directions.values()):
            if (pending := direction.waits_in()) is not None:
                return pending
        return None

    @property
    def callers(self) -> list[int | None]:
        """The threads that are in a send or recv."""
        return [direction.caller for direction in list(self._directions.values())]

    def close(self) -> None:
        """End all threads; calls that run have been interrupted."""
        with self._lock:
            directions = list(self._directions.values())
        for direction in directions:
            direction.close()
