"""The sends and recvs of a session, which run beside its collectives.

Each direction with each rank has an order of its own: calls run in the caller's thread, one after
the other; with ``async_op`` in a thread of that direction, which its first such call starts, and
later calls come after them. A call that fails breaks the session.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from ringreduce.collectives.base import Collectives
from ringreduce.communicator.formation import Job
from ringreduce.engine.executor import Executor
from ringreduce.pure.membership import Membership
from ringreduce.pure.messages import Pending
from ringreduce.pure.wire import Header, Kind
from ringreduce.transport.pairs import ZmqPairs
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import PeerLostError, RingReduceError
from ringreduce.vocabulary.types import dtype_code

_Result = TypeVar("_Result")
# What a call does with the pairs: place, header, memory.
Transfer = Callable[[Kind, np.ndarray], None]


class Owner(Protocol):
    """The session, as its messages see it."""

    config: Config
    membership: Membership
    place: int
    collectives: Collectives

    @property
    def job(self) -> Job | None:
        """What is known of all ranks of the job."""

    def check(self) -> None:
        """Raise the error of a call that may not begin."""

    def message_failed(self, error: RingReduceError) -> RingReduceError:
        """Break the ring, unless this rank leaves; return the error to raise."""

    def leave(self, why: str) -> None:
        """Close the session."""


class _Direction:
    """The calls in one direction with one rank.

    Attributes:
        lock: held by the call that runs.
        caller: its thread; None while none runs.
        pending: the call, if it runs in the thread that made it.
        leaves_with: why this rank leaves after it, as for `Session`; None: it stays.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.lock = threading.Lock()
        self.caller: int | None = None
        self.pending: Pending | None = None
        self.leaves_with: str | None = None
        self._executor: Executor | None = None

    def executor(self) -> Executor:
        """The thread, started by its first use."""
        if self._executor is None:
            self._executor = Executor(self._name)
        return self._executor

    def drain(self) -> None:
        """Return once the calls in the background are done."""
        if self._executor is not None:
            self._executor.drain()

    def close(self) -> None:
        """Wait for the call that runs, which has been interrupted, and end the thread."""
        if self._executor is not None:
            self._executor.close()
        if self.caller != threading.get_ident():
            with self.lock:
                pass


class Messages:
    """The sends and recvs of `session`; from any thread."""

    def __init__(self, session: Owner) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._directions: dict[tuple[bool, int], _Direction] = {}

    def send(self, place: int, tag: int, run: Callable[[Transfer], Any], async_op: bool) -> Any:
        """Have `run` send arrays to the rank at `place` by calling what it is given."""
        return self._submit(True, place, tag, run, async_op)

    def recv(self, place: int, tag: int, run: Callable[[Transfer], Any], async_op: bool) -> Any:
        """Have `run` receive arrays from the rank at `place` by calling what it is given."""
        return self._submit(False, place, tag, run, async_op)

    def _submit(
        self, sends: bool, place: int, tag: int, run: Callable[[Transfer], Any], async_op: bool
    ) -> Any:
        session = self._session
        session.check()
        direction = self._direction(sends, place)
        pending = Pending(sends, session.membership.members[place], tag)

        def transfer(kind: Kind, flat: np.ndarray) -> None:
            assert session.job is not None
            header = Header(
                kind=kind,
                job=session.job.number,
                rank=session.place,
                group=session.membership.group,
                epoch=session.membership.epoch,
                dtype=dtype_code(flat.dtype),
                count=flat.size,
                signature=tag,
            )
            pairs = self._pairs(place)
            (pairs.send if sends else pairs.recv)(place, header, flat)

        if async_op:
            with self._lock:
                executor = direction.executor()
            return executor.submit(lambda: self._call(direction, pending, transfer, run, None))
        direction.drain()
        return self._call(direction, pending, transfer, run, pending)

    def _pairs(self, place: int) -> ZmqPairs:
        """What leads to the rank at `place`."""
        pairs = self._session.collectives.pairs
        assert pairs is not None
        return pairs

    def _call(
        self,
        direction: _Direction,
        name: Pending,
        transfer: Transfer,
        run: Callable[[Transfer], _Result],
        pending: Pending | None,
    ) -> _Result:
        session = self._session
        try:
            with direction.lock:
                session.check()
                direction.caller, direction.pending = threading.get_ident(), pending
                try:
                    return run(transfer)
                except RingReduceError as error:
                    failure = session.message_failed(error)
                    if failure is error:
                        raise
                    raise failure from error
                except BaseException as error:
                    session.message_failed(self._cut(name, error))
                    raise
                finally:
                    direction.pending = direction.caller = None
        finally:
            # Without the lock, for which it waits.
            why, direction.leaves_with = direction.leaves_with, None
            if why is not None:
                session.leave(why)

    def _cut(self, name: Pending, error: BaseException) -> PeerLostError:
        """The error when something such as Ctrl-C ends a call: the two ranks are out of step."""
        return PeerLostError(
            f"was interrupted in {name.describe()} by {type(error).__name__}",
            rank=self._session.config.rank,
            size=self._session.config.size,
            peer=self._session.config.rank,
            remedy="Form a new communicator.",
        )

    def _direction(self, sends: bool, place: int) -> _Direction:
        with self._lock:
            found = self._directions.get((sends, place))
            if found is None:
                config, peer = self._session.config, self._session.membership.members[place]
                what = f"{'to' if sends else 'from'} {peer}"
                name = f"ringreduce {what} {config.rank}/{config.size}"
                found = self._directions[sends, place] = _Direction(name)
            return found

    def pending(self) -> Pending | None:
        """The call that a thread of the program waits in; from any thread."""
        directions = list(self._directions.values())
        return next((d.pending for d in directions if d.pending is not None), None)

    def leaves_later(self, why: str) -> bool:
        """Have the call that this thread is in leave when it ends; False: it is in none."""
        for direction in list(self._directions.values()):
            if direction.caller == threading.get_ident():
                direction.leaves_with = why
                return True
        return False

    def close(self) -> None:
        """End all threads; calls that run have been interrupted."""
        with self._lock:
            directions = list(self._directions.values())
        for direction in directions:
            direction.close()
