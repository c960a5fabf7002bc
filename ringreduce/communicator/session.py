"""One rank's part of a ring, from forming it to leaving it: state, calls, failure, threads.

A `Communicator` is the user's handle on a session; `ringreduce.communicator.lifecycle` has the
states. A call runs in the caller's thread or in the engine's (`ringreduce.engine.engine`); the
watcher's (`ringreduce.engine.watch`) notices what happens elsewhere. All end when it is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from ringreduce.collectives.base import Collectives
from ringreduce.collectives.shared_memory import SharedMemoryCollectives
from ringreduce.commands.launch import handover
from ringreduce.commands.launch.worker_records import Joins
from ringreduce.communicator.calls import Calls
from ringreduce.communicator.formation import Formed, Job
from ringreduce.communicator.lifecycle import LifeCycle, SessionState
from ringreduce.communicator.refusals import (
    again,
    closed,
    described,
    ending_error,
    forked,
    not_joined,
)
from ringreduce.communicator.send_recv import Messages
from ringreduce.communicator.statistics import Statistics
from ringreduce.communicator.uneven import Uneven
from ringreduce.effects.dumping import FlightFile
from ringreduce.effects.events import Events
from ringreduce.effects.notice import EndsInOrder
from ringreduce.effects.recorder import Recorder
from ringreduce.effects.tracing import Trace
from ringreduce.engine.engine import Engine
from ringreduce.engine.watch import Watcher
from ringreduce.pure.claims import Claim
from ringreduce.pure.membership import Membership
from ringreduce.pure.slowness import slow_link, slow_rank
from ringreduce.pure.spans import SpanKind
from ringreduce.pure.timeouts import Timeouts
from ringreduce.pure.watcher_messages import FORMS_ANEW
from ringreduce.transport import inherited
from ringreduce.transport.stalls import Waiting
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.errors import MismatchError, PeerLostError, RingReduceError

_log = logging.getLogger(__name__)

# Sessions of this process, to be closed when Python ends.
_opened: weakref.WeakSet[Session] = weakref.WeakSet()
# Those with sockets live until closed: libzmq's context, as garbage, would wait for them forever.
_formed: set[Session] = set()


class Explainer(Protocol):
    """Explains calls that differ, by an integration's knowledge of their signatures."""

    def explain(self, error: MismatchError) -> RingReduceError | None:
        """Return a better error for all ranks than `error`, of ranks in different calls, or None.

        Called in the thread of the failed call, before the other ranks are notified.
        """


class Lasting:
    """What one communicator's sessions use one after the other, as its ring is formed anew."""

    def __init__(self) -> None:
        self.events = Events()  # what its calls were
        # The background thread, with the plans of traced steps; None until it is needed.
        self.engine: Engine | None = None
        self.explainers: weakref.WeakSet[Explainer] = weakref.WeakSet()


class Session:
    """Forms a ring, runs collectives on it one after the other, and breaks cleanly.

    Users see `group_rank` as this rank, and `size` as the number of ranks; `local_rank` is its
    number among the `local_size` ranks of its host. `lasting` is what it has of the session before
    it; `job`, what is known of all ranks, is None for a rank alone. `state` is the one that it
    begins in. Raises as `Communicator`.
    """

    def __init__(
        self,
        config: Config,
        membership: Membership,
        job: Job | None,
        form: Callable[[Waiting], Formed] | None,
        lasting: Lasting,
        state: SessionState = SessionState.WORKING,
    ) -> None:
        self.config, self.membership = config, membership
        self.group_rank, self.size = membership.group_rank(config.rank), membership.size
        self.is_inherited = False  # whether this is a child's copy; asking the system takes 0.2 us
        self._life = LifeCycle(state)
        self.lasting = lasting
        self.events = lasting.events
        self._waiting = Waiting(Timeouts(config.timeout_s, config.busy_timeout_s), self.events)
        self._recorder = Recorder(config.rank, config.size, self.events, membership)
        self._flight, self._trace = self._open_flight(job), Trace(config, self._recorder)
        self.local_rank, self.local_size = config.local_rank or 0, config.local_size or 1
        self._use(SharedMemoryCollectives(None))
        self.job = job
        self.groups: weakref.WeakSet[Session] = weakref.WeakSet()  # closed with this one
        self.transport = "none"
        self.hosts: tuple[tuple[int, ...], ...] = ((0,),)
        self._watcher: Watcher | None = None
        self._has_aborted = False
        self._refusal: tuple[int, Exception] | None = None  # of a thread's calls
        # The thread that leaves after the call in which it is, and why.
        self._leaves_later: tuple[int, str] | None = None
        self.calls, self.messages = Calls(self), Messages(self)
        self._recorder.pending = self.messages.pending
        inherited.watch(self)
        if form is not None:
            try:
                self._form(form(self._waiting))
            except BaseException as error:
                if isinstance(error, Exception) and membership.epoch == 0:
                    handover.tell(Joins(self.size, "failed"))
                if self.failure is None:  # Else `broke` has dumped it.
                    self._record(error)
                self._close_flight()
                raise
        if lasting.engine is not None:
            self.calls.keep_to(lasting.engine.thread)
            lasting.engine.follow(self)
        _opened.add(self)

    def _open_flight(self, job: Job | None) -> FlightFile:
        """This rank's flight record, which holds its groups too."""
        if self.membership.group == 0:
            return FlightFile(self.config, self._recorder)
        if job is None or job.flight is None:
            return FlightFile(replace(self.config, log_dir=""), self._recorder)
        job.flight.add(self._recorder)
        return job.flight

    def _close_flight(self) -> None:
        self._trace.close()
        if self.membership.group == 0:
            self._flight.close()
        else:
            self._flight.remove(self._recorder)

    def _use(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.uneven = Uneven(collectives, self.group_rank, self.size, self.config.who)

    def _form(self, formed: Formed) -> None:
        self.job = formed.job
        self.job.flight = self._flight
        self._use(formed.collectives)
        self.transport, self.hosts = formed.transport, formed.hosts
        if self.collectives.small is not None:
            self.calls.use(self.collectives.small)
        self._recorder.transport = formed.transport
        self.local_rank, self.local_size = formed.local_rank, formed.local_size
        _formed.add(self)
        try:
            self._watcher = Watcher(
                formed.control,
                self._recorder,
                self.collectives,
                self,
                elsewhere=functools.partial(self._flight.elsewhere, self._recorder),
                waiting=self._waiting,
                link_timeout_s=self.config.link_timeout_s,
            )
            # Else a group of one host, whose ranks are known to be connected.
            if formed.rendezvous is not None or formed.link is not None:
                self.calls.call("barrier", 0, self.collectives.barrier)
            handover.tell(Joins(self.size, "formed"))
            self.events.formed()  # Ranks start at different times, and some compile.
        except BaseException:
            self.leave("", gives_way=True)
            if self._watcher is None:  # No thread could be started, for example.
                formed.control.close()
            if self.membership.epoch == 0:  # Else it may be tried again.
                self._close_standby()
            raise
        finally:
            formed.finish()

    @property
    def _own_job(self) -> Job | None:
        """The job, if this is its session and not that of a group."""
        return None if self.membership.group else self.job

    @property
    def failure(self) -> RingReduceError | None:
        return self._life.failure

    @property
    def is_closed(self) -> bool:
        """Whether no call can begin any more, because it was closed."""
        return self._life.state is SessionState.CLOSED

    @property
    def is_working(self) -> bool:
        return self._life.state is SessionState.WORKING

    @property
    def engine(self) -> Engine:
        """The background thread, started by its first use. Raises ClosedError after `close`."""
        if self.is_inherited:
            raise forked(self.config)
        with self._life.lock:
            if self._life.state >= SessionState.LEAVING:
                raise closed(self.config)
            if self.lasting.engine is None:
                name = f"ringreduce {self.config.rank}/{self.config.size}"
                self.lasting.engine = Engine(name, self, self.events)
                self.calls.keep_to(self.lasting.engine.thread)
            return self.lasting.engine

    def close_inherited(self) -> None:
        """In a child: refuse to work, since its parent is the rank, and has the sockets."""
        self.is_inherited = True
        self.calls.use_python()

    def blocked_for(self, seconds: float, reducing_s: float) -> None:
        """Add time that a training step was blocked by reducing, which took that in any thread."""
        now = time.monotonic()
        self.events.part(SpanKind.BLOCKED, now - seconds, now)
        self.events.part(SpanKind.REDUCE, now - reducing_s, now)

    def claim(self, claim: Claim) -> None:
        """Have the neighbours on the ring compare a value with theirs.

        No collective: from any thread, at any time, without waiting. Its key has at most 1024
        characters, its value 64 bytes. A difference breaks the ring with a MismatchError. What
        only one has claimed, or what is still under way when a rank leaves, is not compared.
        """
        if self._watcher is not None and not self.is_closed:
            self._watcher.post(claim)

    def statistics(self) -> Statistics:
        events, current = self.events, self.events.current_call()
        traffic = self.collectives.traffic()
        heartbeats = [] if self._watcher is None else self._watcher.heartbeats()
        links = {each.rank: each.sent_to_next for each in heartbeats if each.sent_to_next}
        return Statistics(
            collectives=current.calls,
            seconds=current.seconds,
            frames_received=traffic.frames_received,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            reducing_s=events.seconds(SpanKind.REDUCE),
            waited_s=events.seconds(SpanKind.BLOCKED),
            stopped_s=events.stopped_s(),
            slow_rank=slow_rank(heartbeats),
            slow_link=slow_link(links),
            hosts=self.hosts,
            sent_to_next=links.get(self.config.rank),
        )

    def fail(self, error: RingReduceError) -> RingReduceError:
        """Break the ring with `error` from a layer above; return it, or what has broken it before.

        Every other rank gets that from its present or next call.
        """
        if self.is_closed:
            return error
        if not self._fail(error):
            return again(self.failure or error)
        if self._watcher is not None:
            self._watcher.abort(error)
        self._waiting.interrupt(error)  # A call in another thread ends and releases the lock.
        if self.calls.caller != threading.get_ident():
            with self.calls.lock:
                self.broke(error)
        # Else this is a signal handler, and the call that it has interrupted breaks the ring.
        return error

    def _fail(self, error: RingReduceError) -> bool:
        """Record the first error; return False if another came first."""
        hosts, peer = () if self.job is None else self.job.hosts, error.peer
        if peer is not None and len(set(hosts)) > 1:
            # An error that another rank has sent may say so itself.
            is_said = f"Rank {peer} is on {hosts[peer]}" in error.message
            error.host = None if is_said else hosts[peer]
        is_first = self._life.fail(error)
        if is_first:
            handover.note_failure(error)
        self.calls.use_python()
        return is_first

    def ring_ended(self, error: RingReduceError) -> None:
        """Record the watcher's error. Called in the watcher's thread, so never waits for a call."""
        self._fail(error)
        self._waiting.interrupt(error)
        # A call may have failed first: every waiter must see the same error.
        first = self.failure or error
        if (engine := self.lasting.engine) is not None:
            engine.fail(self, first)
        # The others may form the ring anew before a call fails here: in user code none does, nor
        # does one whose result is there.
        job, is_over = self._own_job, self._life.state >= SessionState.LEAVING
        if job is not None and job.has_ended is not None and not is_over:
            job.answer(is_busy=True)
        if self._recorder.current_call().operation is None:
            self._record(first)

    def broke(self, error: RingReduceError) -> None:
        """Notify all ranks and threads of the first error, once; under the calls' lock."""
        if self.membership.group and error.group is None:
            error.group = self.membership.name
        self._fail(error)
        error = self.failure or error
        self._recorder.fail(error)
        if self._has_aborted:
            return
        self._has_aborted = True
        if self._watcher is not None:
            self._watcher.abort(error)
        try:
            self.collectives.abort()
        finally:
            if self.lasting.engine is not None:
                self.lasting.engine.fail(self, error)
            # Last: neither the other ranks nor this one's threads should wait for a disk.
            self._flight.dump(described(error))

    def explained(self, error: RingReduceError) -> RingReduceError:
        """A better error for `error` from an integration or the watcher, or `error` itself."""
        if isinstance(error, MismatchError) and error.origin is None:
            explained = (explainer.explain(error) for explainer in list(self.lasting.explainers))
            if (better := next(filter(None, explained), None)) is not None:
                return better
        return error if self._watcher is None else self._watcher.explain(error)

    def message_failed(self, error: RingReduceError) -> RingReduceError:
        """Break the ring with the error of a send or recv; return the error to raise.

        A call that ends because this rank leaves breaks nothing.
        """
        if self._life.state >= SessionState.LEAVING:
            return error
        if self._watcher is not None and isinstance(error, PeerLostError):
            error = self._watcher.explain(error)
        return self.fail(error)

    def check(self) -> None:
        """Raise the error of a call that may not begin."""
        if self.is_inherited:
            raise forked(self.config)
        if self._refusal is not None and self._refusal[0] == threading.get_ident():
            raise self._refusal[1]
        if self._life.state is not SessionState.WORKING:
            if self._life.state is SessionState.COMING:
                raise not_joined(self.config)
            if self.failure is None or self.is_closed:
                raise closed(self.config)
            raise again(self.failure)

    @contextlib.contextmanager
    def refusing(self, error: Exception) -> Iterator[None]:
        """Within the block all calls of this thread raise `error`, before anything is sent.

        Those of groups too. Calls of other threads wait for its end.
        """
        sessions = [each for each in list(_opened) if each.config is self.config]
        with contextlib.ExitStack() as stack:
            for session in sessions:
                stack.enter_context(session.calls.kept_from_c())
                session._refusal = threading.get_ident(), error
            try:
                yield
            finally:
                for session in sessions:
                    session._refusal = None

    def check_soon(self) -> None:
        """As `check`, once other ranks have had time to tell why the ring has ended."""
        self._waiting.await_cause(TIMES.explain_s)
        self.check()

    def _record(self, error: BaseException) -> None:
        """Record `error` in memory and, with a `log_dir`, on disk; from any thread."""
        self._recorder.fail(error)
        self._flight.dump(described(error))

    def close(self, error: BaseException | None) -> None:
        """Leave, because of `error` if there is one, which is recorded and sent to the others."""
        self._close_standby()
        is_ordered = isinstance(error, EndsInOrder)
        if error is None or is_ordered or (isinstance(error, SystemExit) and not error.code):
            # The usual end of a program, unless others still train with it.
            job = self._own_job
            trains = job is not None and job.has_ended is False
            why = "a call of close() in training" if trains else ""
            self.leave(described(error) if error else handover.exiting or why)
            return
        if self.failure is None and not self.is_closed and not self.is_inherited:
            self._record(error)
        self.leave(described(error))

    def go(self, why: str) -> None:
        """Leave for good while the others form the ring anew, which all ranks know.

        The standby port closes first: else they would wait for this rank there.
        """
        self._close_standby()
        self.leave(why)

    def _close_standby(self) -> None:
        if (job := self._own_job) is not None:
            job.standby.close()
            if not self.is_inherited:  # Else the parent goes on.
                job.stand(is_gone=True)
                job.left_behind = None
                job.neighbours.clear()

    def leave(self, why: str, *, gives_way: bool = False) -> None:
        """Close; `why` describes the exception that makes this rank leave, empty for none.

        What is still to run in the engine fails; it goes on if the session `gives_way` to another.
        """
        if self.is_inherited:
            return  # The sockets are the parent's.
        for group in list(self.groups):
            group.leave(why)
        with self._life.lock:
            self._life.advance(SessionState.LEAVING)
            self.calls.use_python()
            engine = self.lasting.engine
        self._waiting.interrupt()
        if threading.get_ident() in (self.calls.caller, *self.messages.callers):
            # In a signal handler the interrupted call still uses what would be freed here.
            self._leaves_later = threading.get_ident(), why
            return
        if engine is not None:
            who = f"rank {self.config.rank} of {self.config.size}"
            if gives_way:
                engine.let_go(f"{who}: {FORMS_ANEW}")
            else:
                engine.close(f"{who}: the communicator was closed")
        self.messages.close()
        with self.calls.lock:
            if not self._life.advance(SessionState.CLOSED):
                return
            calls = self._recorder.current_call().calls
            if self.failure is not None and not self._has_aborted:
                self._has_aborted = True  # It came in user code, and no call has given up for it.
                self.collectives.abort()
            if self._watcher is not None:
                self._watcher.leave(calls, why)
            self.collectives.close()
            if self._watcher is not None:
                self._watcher.join()
            self._close_flight()
            _formed.discard(self)
            if self.size > 1 and self.job is not None:
                text = "[%d/%d] ring closed after %s"
                _log.info(text, self.config.rank, self.config.size, self.statistics())

    def leave_if_due(self) -> None:
        """Leave after a call in which a signal handler wanted that; call it without locks."""
        if self._leaves_later is not None and self._leaves_later[0] == threading.get_ident():
            (_, why), self._leaves_later = self._leaves_later, None
            self.leave(why)


@atexit.register
def _close_all() -> None:
    """At exit, notify the ranks that wait for this one and release waiting framework threads."""
    for session in list(_opened):
        session.close(ending_error())
