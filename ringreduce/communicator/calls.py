"""The collectives of a session: one after the other, recorded, and broken off when one fails.

With ``async_op`` a call runs in the engine's thread, else in its caller's, after the engine's work.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ringreduce.communicator.refusals import again, forked, interrupted
from ringreduce.pure.payload import decode, encode_or_refuse, flat_view
from ringreduce.pure.spans import CODES
from ringreduce.pure.wire import Kind
from ringreduce.transport.small_calls import SmallCalls
from ringreduce.vocabulary.errors import ArrayError, MismatchError, RingReduceError
from ringreduce.vocabulary.types import ReduceOp, reduce_op

if TYPE_CHECKING:
    from ringreduce.collectives.base import Shared
    from ringreduce.communicator.session import Session

_SIGNED_KEPT = 64  # as many as C knows at a time

_Result = TypeVar("_Result")


class Calls:
    """The collectives of a session, which hold `lock`; from any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.lock = threading.RLock()
        # The thread that is in a call, 0 for none; C writes it too.
        self._caller = ctypes.c_uint64()
        self._small: SmallCalls | None = None  # all-reduces wholly in C, once there are some
        self._in_c: Callable[[np.ndarray, Any], bool | None] = lambda *_: None
        self._end_in_c: Callable[[], None] = lambda: None
        self._engine_thread = 0
        self._signed = lru_cache(_SIGNED_KEPT)(lambda *option: option)

    @property
    def caller(self) -> int | None:
        return self._caller.value or None

    @contextmanager
    def kept_from_c(self) -> Iterator[None]:
        """Within the block calls of this thread are left to Python; others wait for its end."""
        with self.lock:
            # As in a call: another one within it is not for C.
            before, self._caller.value = self._caller.value, threading.get_ident()
            try:
                yield
            finally:
                self._caller.value = before

    def use(self, small: SmallCalls) -> None:
        """Run calls that `small` knows wholly in C."""
        small.exclude(functools.partial(self.lock.acquire, False), self.lock.release, self._caller)
        self._small, self._in_c, self._end_in_c = small, small.run, small.end

    def keep_to(self, engine_thread: int) -> None:
        """Begin calls in C in the engine's thread alone: those of others come after its work."""
        self._engine_thread = engine_thread
        if self._small is not None:
            self._small.keep_to(engine_thread)

    def use_python(self) -> None:
        """Begin no call in C any more: each needs a check, or is refused."""
        if self._small is not None:
            self._small.close()

    def run(
        self,
        name: str,
        array: np.ndarray,
        signature: int,
        async_op: bool,
        run: Callable[..., Any],
        *arguments: Any,
    ) -> Any:
        """Run a collective on `array`, here or in the engine; its result, or `array` for None."""
        if not 0 <= signature < 1 << 64:
            raise ArrayError(f"got signature {signature}", remedy="It must fit 64 bits, unsigned.")
        if async_op:
            now = (name, array, signature, False, run, *arguments)
            return self._session.engine.submit(lambda: self.run(*now))
        result = self.call(name, array.nbytes, run, *arguments, signature)
        return array if result is None else result

    def reduce_shares(self, flat: np.ndarray, signature: int) -> None:
        """Make this rank's share of `flat` the mean over all ranks: `Collectives.shares`."""
        reduce = self._session.collectives.reduce_shares
        self.call("reduce_scatter", flat.nbytes, reduce, flat, ReduceOp.MEAN, signature)

    def gather_shares(self, flat: np.ndarray, signature: int) -> None:
        """Fill `flat` with all ranks' shares of it."""
        gather = self._session.collectives.gather_shares
        self.call("all_gather", flat.nbytes, gather, flat, signature)

    def share(self, sizes: Sequence[int]) -> list[Shared] | None:
        """Return memory of the ranks of each host: `Collectives.share`."""
        return self.call("broadcast", 16, self._session.collectives.share, sizes)

    def call(self, name: str, nbytes: int, run: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run one collective, after all that the engine was given before; break if it fails."""
        session = self._session
        if session.is_inherited:
            raise forked(session.config)
        if (engine := session.lasting.engine) is not None:
            engine.drain()
        try:
            with self.lock:
                if self.caller is not None:
                    session.check()
                    raise MismatchError(
                        "made a call in a signal handler, within another call",
                        **session.config.who,
                        remedy="Note in the handler that it has run, and call afterwards.",
                    )
                try:
                    # From here on a signal handler that closes the session leaves it to this call.
                    self._caller.value = threading.get_ident()
                    session.check()
                    session.events.begin(CODES[name], nbytes)
                    return self._finish(run, *arguments)
                finally:
                    self._caller.value = 0
        finally:
            session.leave_if_due()

    def gather(self, kind: Kind, value: Any, signature: int = 0) -> list[Any]:
        """The objects that all ranks passed, decoded copies, in the order of their places."""
        who = self._session.config.who
        gathered = self.objects(kind, value, self._session.uneven.all_gather_object, signature)
        return [decode(encoded, who) for encoded in gathered]

    def objects(
        self, kind: Kind, value: Any, run: Callable[..., _Result], *arguments: Any
    ) -> _Result:
        """Run a collective on the encoded `value`, and only then raise why that cannot be sent."""
        payload, refusal = encode_or_refuse(value, self._session.config.who)
        result = self.call(kind.label, payload.size, run, kind, payload, *arguments)
        if refusal is not None:
            raise refusal
        return result

    def all_reduce(self, array: np.ndarray, option: ReduceOp | str, signature: int = 0) -> bool:
        """All-reduce `array` by one C function; False: that does not know it, nothing was begun.

        So a small call takes a third of the time that it takes in `call`.
        """
        try:
            done = self._in_c(array, self._known_by(option, signature) if signature else option)
            if done:
                return True
            if done is None:
                return False
            # Another rank is late. C has taken the lock, and recorded the beginning.
            flat, op = flat_view(array, "all_reduce"), reduce_op(option)
            run = self._session.collectives.all_reduce
            self._finish(run, flat, op, signature)
            self._end_in_c()
        except BaseException as error:
            self._interrupted(error)
            raise
        self._session.leave_if_due()
        return True

    def _interrupted(self, error: BaseException) -> None:
        """End `all_reduce` after an error.

        If it comes from a signal handler, the call may have been begun, so it cannot be made again.
        """
        session = self._session
        with self.lock:
            if session.is_working:
                if not isinstance(error, RingReduceError):
                    error = interrupted(session.config, error, "a collective")
                session.broke(error)
            self._end_in_c()
        self._session.leave_if_due()

    def teach(
        self, array: np.ndarray, option: ReduceOp | str, op: ReduceOp, signature: int
    ) -> None:
        """Have `all_reduce` know arrays like this one with `option`, which means `op`."""
        known = self._known_by(option, signature) if signature else option
        if self._small is not None and self._small.begins_here and known is not None:
            with self.lock:
                self._session.collectives.teach(array, known, op, signature)

    def _known_by(self, option: ReduceOp | str, signature: int) -> object:
        """One object for both, by which C finds a call of the engine's; None in other threads.

        Those that the engine makes are of buckets, and few; others may be numbered.
        """
        is_ours = threading.get_ident() == self._engine_thread
        return self._signed(option, signature) if is_ours else None

    def _finish(self, run: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a recorded collective, or its rest; what has ended the session meanwhile ends it."""
        session = self._session
        try:
            result = run(*arguments)
        except RingReduceError as error:
            session.broke(session.explained(error))
            if session.failure is error:
                raise
            # The watcher's error was better or earlier; later calls raise the same one.
            raise again(session.failure or error) from error
        except BaseException as error:
            session.broke(interrupted(session.config, error, "a collective"))
            raise
        session.events.end()
        return result
