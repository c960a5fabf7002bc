"""One rank's part of a ring, from forming it to leaving it: state, calls, failure, threads.

A `Communicator` is the user's handle on a session. `ringreduce.communicator.lifecycle` has the
states. Threads: a call runs in the caller's thread under `_calling`, or in the engine's
(`ringreduce.engine.engine`); the watcher's (`ringreduce.engine.watch`) notices what happens
elsewhere. All end when the session is closed.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from ringreduce.collectives.base import Collectives
from ringreduce.collectives.shared_memory import SharedMemoryCollectives
from ringreduce.communicator import registry, varying
from ringreduce.communicator.formation import Formed, Job
from ringreduce.communicator.lifecycle import LifeCycle, State
from ringreduce.communicator.messages import Messages
from ringreduce.communicator.refusals import (
    again,
    closed,
    described,
    ending_error,
    forked,
    interrupted,
)
from ringreduce.communicator.statistics import Statistics
from ringreduce.effects.dumping import FlightFile
from ringreduce.effects.events import Events
from ringreduce.effects.recorder import Recorder
from ringreduce.engine.engine import Engine
from ringreduce.engine.watch import Watcher
from ringreduce.pure.claims import Claim
from ringreduce.pure.membership import Membership
from ringreduce.pure.notification import encode_goodbye
from ringreduce.pure.payload import decode, encode, flat_view
from ringreduce.pure.spans import CODES, SpanKind
from ringreduce.pure.unreceived import describe
from ringreduce.pure.wire import Kind
from ringreduce.transport.small_calls import SmallCalls
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import (
    ArrayError,
    MismatchError,
    PeerLostError,
    RingReduceError,
)
from ringreduce.vocabulary.types import ReduceOp, reduce_op

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

# Why work of a session is refused whose ring was formed anew.
FORMED_ANEW = "the ring was formed anew"


class Explainer(Protocol):
    """Explains a mismatch better than two signatures do; see `Session.explain_with`."""

    def explain(self, error: MismatchError) -> RingReduceError | None:
        """A better error, or None."""


class Session:
    """Forms a ring, runs collectives on it one after the other, and breaks cleanly.

    Attributes:
        config: the job's settings, with this rank's number in the job.
        membership: the ranks that take part.
        place, size: what users see as this rank and the number of ranks; `identity` has both.
        collectives: what a call runs.
        events: what its calls were.
        transport: ``shm``, ``zmq``, ``shm+zmq``; ``none`` when alone.
        shares_memory: whether this rank shares memory with another.
        former_failures: of the sessions whose place this one has taken.
        is_inherited: whether this is a forked child's copy; asking the system takes 0.2 us.
        local_rank, local_size: this rank's number on its host, and how many there are.

    Raises: as `Communicator`.
    """

    def __init__(
        self,
        config: Config,
        membership: Membership,
        job: Job | None,
        form: Callable[[], Formed] | None,
    ) -> None:
        self.config, self.membership = config, membership
        self.place, self.size = membership.place(config.rank), membership.size
        self.identity = varying.Identity(self.place, self.size, config.who)
        self.is_inherited = False
        self._life = LifeCycle()
        self.former_failures: tuple[RingReduceError, ...] = ()
        # Held during a collective.
        self._calling = threading.RLock()
        self._explainers: weakref.WeakSet[Explainer] = weakref.WeakSet()
        self.events = Events()
        self._recorder = Recorder(config.rank, config.size, self.events, membership)
        self._flight = self._open_flight(job)
        self.local_rank, self.local_size = config.local_rank or 0, config.local_size or 1
        self.collectives: Collectives = SharedMemoryCollectives(None)
        self._job = job
        self._groups: weakref.WeakSet[Session] = weakref.WeakSet()
        self.transport, self.shares_memory = "none", False
        self._hosts: tuple[tuple[int, ...], ...] = ((0,),)
        self._engine: Engine | None = None
        self._watcher: Watcher | None = None
        self._has_aborted = False
        # The thread that is in a call; why it leaves the ring after that call, None: it stays.
        self._caller: int | None = None
        self._leaves_with: str | None = None
        self.messages = Messages(self)
        if form is not None:
            try:
                self._form(form())
            except BaseException as error:
                if self.failure is None:  # Else `_break` has dumped it.
                    self._record(error)
                self._close_flight()
                raise
        self._life.advance(State.OPEN)
        registry.opened.add(self)

    def _open_flight(self, job: Job | None) -> FlightFile:
        """The flight record of this rank, which is the whole job's."""
        if self.membership.group == 0:
            return FlightFile(self.config, self._recorder)
        if job is None or job.flight is None:
            return FlightFile(replace(self.config, log_dir=""), self._recorder)
        job.flight.add(self._recorder)
        return job.flight

    def _close_flight(self) -> None:
        if self.membership.group == 0:
            self._flight.close()
        else:
            self._flight.remove(self._recorder)

    def _form(self, formed: Formed) -> None:
        self._job = formed.job
        self._job.flight = self._flight
        self.collectives, self.transport = formed.collectives, formed.transport
        self.shares_memory, self._hosts = formed.shares_memory, formed.hosts
        self.collectives.record(self.events)
        self._recorder.transport = formed.transport
        self.local_rank, self.local_size = formed.local_rank, formed.local_size
        registry.formed.add(self)
        try:
            try:
                self._watcher = Watcher(
                    formed.control,
                    self._recorder,
                    self.collectives,
                    self,
                    membership=self.membership,
                    elsewhere=functools.partial(self._flight.elsewhere, self._recorder),
                    pending=self.messages.pending,
                    patience=formed.patience,
                    link_timeout_s=self.config.link_timeout_s,
                )
            except BaseException:  # No thread could be started, for example.
                formed.control.close()
                raise
            self._recorder.peers = self._watcher.peers
            self._recorder.pending = self.messages.pending
            self.call("barrier", 0, self.collectives.barrier)
        except BaseException:
            self.leave("")
            if self.membership.epoch == 0:  # Else it may be tried again.
                self._close_standby()
            raise
        finally:
            formed.finish()

    @property
    def failure(self) -> RingReduceError | None:
        """The error that has broken it; None while it works."""
        return self._life.failure

    @property
    def is_closed(self) -> bool:
        """Whether no call can begin any more, because it was closed."""
        return self._life.state is State.CLOSED

    @property
    def engine(self) -> Engine:
        """The background thread, started by its first use. Raises ClosedError after `close`."""
        if self.is_inherited:
            raise forked(self.config)
        with self._life.lock:
            if self._life.state >= State.LEAVING:
                raise closed(self.config)
            if self._engine is None:
                name = f"ringreduce {self.config.rank}/{self.config.size}"
                self._engine = Engine(name, self, self.collectives, self.events)
            return self._engine

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
            return self.engine.submit(lambda: self.run(*now))
        result = self.call(name, array.nbytes, run, *arguments, signature)
        return array if result is None else result

    def call(self, name: str, nbytes: int, run: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run one collective, after all that the engine was given before; break if it fails.

        Kept fast: in shared memory a small collective takes microseconds.
        """
        if self.is_inherited:
            raise forked(self.config)
        if self._engine is not None:
            self._engine.drain()
        result: _Result = self._within(self._run, name, nbytes, run, *arguments)
        return result

    def all_reduce(self, array: np.ndarray, option: ReduceOp | str) -> bool:
        """All-reduce `array` by one C function; False: that does not know it, nothing was begun.

        So a small call takes a third of the time that it takes in `call`.
        """
        small = self.collectives.small
        if small is None or self._engine is not None or self.is_inherited:
            return False
        done: bool = self._within(self._run_small, small, array, option)
        return done

    def _within(self, run: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run what makes up a call, while no other thread is in one."""
        try:
            with self._calling:
                is_nested = self._caller is not None
                try:
                    if is_nested:
                        raise MismatchError(
                            "made a call in a signal handler, within another call",
                            **self.config.who,
                            remedy="Note in the handler that it has run, and call afterwards.",
                        )
                    # From here on a signal handler that closes this leaves it to `_leave_late`.
                    self._caller = threading.get_ident()
                    return run(*arguments)
                finally:
                    if not is_nested:
                        self._caller = None
        finally:
            if self._leaves_with is not None:
                self._leave_late()

    def _run_small(self, small: SmallCalls, array: np.ndarray, option: ReduceOp | str) -> bool:
        try:
            if not self._life.is_working:
                return False
            done = small.run(array, option)
            if done:
                self._log_call("all_reduce", array.nbytes)
                return True
            if done is None:
                return False
            flat, op = flat_view(array, "all_reduce"), reduce_op(option)
            self._finish("all_reduce", array.nbytes, self.collectives.all_reduce, flat, op)
            return True
        except BaseException as error:
            if self._life.is_working:
                # From a signal handler. The call may have been begun, so it cannot be made again.
                if not isinstance(error, RingReduceError):
                    self._break(interrupted(self.config, error, "a collective"))
                else:
                    self._break(error)
            raise

    def teach(self, array: np.ndarray, option: ReduceOp | str, op: ReduceOp) -> None:
        """Have `all_reduce` know arrays like this one with `option`, which means `op`."""
        if self.collectives.small is not None and self._engine is None:
            with self._calling:
                self.collectives.teach(array, option, op)

    def _run(self, name: str, nbytes: int, run: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a collective, in the thread that is `_caller`."""
        if not self._life.is_working:
            self._refuse()
        return self._finish(name, nbytes, run, *arguments)

    def _finish(
        self, name: str, nbytes: int, run: Callable[..., _Result], *arguments: Any
    ) -> _Result:
        """Run a collective, or the rest of it; what has ended the session meanwhile ends it."""
        self.events.begin(CODES[name], nbytes)
        try:
            result = run(*arguments)
        except RingReduceError as error:
            self._break(self._explained(error))
            if self.failure is error:
                raise
            # The watcher's error was better or earlier; later calls raise the same one.
            raise again(self.failure or error) from error
        except BaseException as error:
            self._break(interrupted(self.config, error, "a collective"))
            raise
        self.events.end()
        self._log_call(name, nbytes)
        return result

    def _log_call(self, name: str, nbytes: int) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            number, elapsed_s = self._recorder.calls - 1, self._recorder.elapsed_s
            _log.debug(
                "[%d/%d] %s #%d, %d bytes, %.3f ms",
                *(self.config.rank, self.config.size, name, number, nbytes, elapsed_s * 1e3),
            )

    def _leave_late(self) -> None:
        """Leave after the call during which a signal handler has closed this.

        Without the lock: this waits for the engine, which may be waiting for the lock.
        """
        if self._caller is None:
            why, self._leaves_with = self._leaves_with, None
            self.leave(why or "")

    def gather(self, kind: Kind, value: Any, signature: int = 0) -> list[Any]:
        """The objects that all ranks passed, decoded copies, in the order of their places."""
        payload = encode(value)
        arguments = self.collectives, kind, payload, self.identity, signature
        gathered = self.call(kind.label, payload.size, varying.all_gather_object, *arguments)
        return [decode(each) for each in gathered]

    @property
    def job(self) -> Job | None:
        """What is known of all ranks of the job; None for one that is alone."""
        return self._job

    def adopt(self, group: Session) -> None:
        """Close `group` with this session."""
        self._groups.add(group)

    def claim(self, claim: Claim) -> None:
        """Have the neighbours compare a value with theirs; from any thread, without waiting."""
        if self._watcher is not None and not self.is_closed:
            self._watcher.claim(claim)

    def explain_with(self, explainer: Explainer) -> None:
        """Ask `explainer` what it means when ranks are in different calls.

        For integrations, which know what signatures stand for. Called in the thread of the failed
        call, before the other ranks are notified: every rank then raises the error that it
        returns, unless that is None. Only a weak reference is kept.
        """
        self._explainers.add(explainer)

    def statistics(self) -> Statistics:
        """A snapshot of what this session has done so far."""
        traffic, standing = self.collectives.traffic(), self.events.standing()
        return Statistics(
            reducing_s=self.events.seconds(SpanKind.REDUCE),
            waited_s=self.events.seconds(SpanKind.BLOCKED),
            collectives=standing.calls,
            seconds=standing.seconds,
            frames_received=traffic.frames_received,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            hosts=self._hosts,
        )

    def blocked_for(self, seconds: float) -> None:
        """Add time that a training step spent reducing gradients itself."""
        now = time.monotonic()
        for kind in (SpanKind.REDUCE, SpanKind.BLOCKED):
            self.events.part(kind, now - seconds, now)

    # --- Failure --------------------------------------------------------------------------------

    def fail(self, error: RingReduceError) -> RingReduceError:
        """Break the ring with `error` from a layer above; return the error to raise.

        That is `error`, or what has broken the ring before. Every other rank gets it from its
        present or next call.
        """
        if self.is_closed:
            return error
        if not self._life.fail(error):
            return again(self.failure or error)
        if self._watcher is not None:
            self._watcher.abort(error)
        # A call in another thread ends and releases the lock.
        self.collectives.interrupt(error)
        if self._caller != threading.get_ident():
            with self._calling:
                self._break(error)
        # Else this is a signal handler, and the call that it has interrupted breaks the ring.
        return error

    def ring_ended(self, error: RingReduceError) -> None:
        """Record the watcher's error. Called in the watcher's thread, so never waits for a call."""
        self._life.fail(error)
        self.collectives.interrupt(error)
        # A call may have failed first: every waiter must see the same error.
        first = self.failure or error
        engine = self._engine
        if engine is not None:
            engine.fail(first)
        if self._recorder.standing().operation is None:
            # In user code no call fails, so it is recorded here.
            self._record(first)

    def _break(self, error: RingReduceError) -> None:
        """Notify all ranks and threads of the first error, once; under `_calling`."""
        if self.membership.group and error.group is None:
            error.group = self.membership.name
        self._life.fail(error)
        error = self.failure or error
        self._recorder.fail(error)
        if self._has_aborted:
            return
        self._has_aborted = True
        if self._watcher is not None:
            self._watcher.abort(error)
        try:
            self.collectives.abort(error)
        finally:
            if self._engine is not None:
                self._engine.fail(error)
            # Last: neither the other ranks nor this one's threads should wait for a disk.
            self._flight.dump(described(error))

    def _explained(self, error: RingReduceError) -> RingReduceError:
        """A better error for `error` from an integration or the watcher, or `error` itself."""
        if isinstance(error, MismatchError) and error.origin is None:
            for explainer in list(self._explainers):
                if (better := explainer.explain(error)) is not None:
                    return better
        return error if self._watcher is None else self._watcher.explain(error)

    def message_failed(self, error: RingReduceError) -> RingReduceError:
        """Break the ring with the error of a send or recv; return the error to raise.

        A call that ends because this rank leaves breaks nothing.
        """
        if self._life.state >= State.LEAVING:
            return error
        if self._watcher is not None and isinstance(error, PeerLostError):
            error = self._watcher.explain(error)
        return self.fail(error)

    def check(self) -> None:
        """Raise the error of a call that may not begin."""
        if self.is_inherited:
            raise forked(self.config)
        if not self._life.is_working:
            self._refuse()

    def _refuse(self) -> None:
        if self.failure is None or self.is_closed:
            raise closed(self.config)
        raise again(self.failure)

    def _record(self, error: BaseException) -> None:
        """Record `error` in memory and, with a `log_dir`, on disk; from any thread."""
        self._recorder.fail(error)
        self._flight.dump(described(error))

    # --- Leaving --------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave, because of the exception that is being handled, if there is one."""
        self.close_with(ending_error())

    def give_way(self) -> None:
        """Leave, so that the ring of this job can be formed anew."""
        self.leave("", FORMED_ANEW)

    def close_with(self, error: BaseException | None) -> None:
        """Leave, because of `error` if there is one, which is recorded and sent to the others."""
        self._close_standby()
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.leave("")  # The usual end of a program.
            return
        if self.failure is None and not self.is_closed and not self.is_inherited:
            self._record(error)
        self.leave(described(error))

    def _close_standby(self) -> None:
        if self._job is not None and self.membership.group == 0:
            self._job.standby.close()

    def leave(self, why: str, said: str = "the communicator was closed") -> None:
        """Close; `why` describes the exception that makes this rank leave, empty for none.

        What is still to run in the engine gets an error that says `said`.
        """
        if self.is_inherited:
            return  # The sockets are the parent's.
        for group in list(self._groups):
            group.leave(why)
        with self._life.lock:
            self._life.advance(State.LEAVING)
            engine = self._engine
        self.collectives.interrupt()
        # In a signal handler the interrupted call still uses what would be freed here.
        if self._caller == threading.get_ident():
            self._leaves_with = why
            return
        if self.messages.leaves_later(why):
            return
        if engine is not None:
            who = f"rank {self.config.rank} of {self.config.size}"
            engine.close(f"{who}: {said}")
        self.messages.close()
        with self._calling:
            if not self._life.advance(State.CLOSED):
                return
            calls = self._recorder.calls
            if self.failure is not None and not self._has_aborted:
                # It came in user code. A goodbye would look like an ordinary end.
                self._has_aborted = True
                self.collectives.abort(self.failure)
            # Read first: errors that others raise because of the goodbye are not this rank's.
            goodbye = b"" if self.failure is not None else encode_goodbye(calls, why)
            if self._watcher is not None:
                self._watcher.leave(calls, why)
            self.collectives.close(goodbye)
            if self.failure is None and not why:
                for text in (*self.messages.unsent(), *describe(self.collectives.unreceived())):
                    _log.warning("[%d/%d] %s", self.config.rank, self.config.size, text)
            if self._watcher is not None:
                self._watcher.join()
            self._close_flight()
            registry.formed.discard(self)
            if self.size > 1:
                _log.info(
                    "[%d/%d] ring closed after %s",
                    *(self.config.rank, self.config.size, self.statistics()),
                )
