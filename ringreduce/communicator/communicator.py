"""The public object: checks arguments, guards the life cycle, counts, and breaks cleanly.

Every collective must be called by all ranks in the same order with agreeing arguments. A
call either completes on this rank or raises; once one has failed for any reason but a bad
argument, the communicator is broken and each later call raises that error again at once.

Threads: calls from several threads exclude each other; which goes first must not differ between
ranks, so one thread per communicator is the rule. A call runs in the caller's thread, after
all that was handed to the engine before it; with ``async_op`` it is handed to the engine
itself (`ringreduce.engine.engine`). The engine's thread and the link's I/O threads end in `close`.

Longer than other files: the methods are the public interface, and the life cycle that they share
(who breaks, leaves and closes, under which lock) has to be read in one place.
"""

from __future__ import annotations

import atexit
import copy
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np

from ringreduce.collectives.base import Collectives
from ringreduce.collectives.ring import Ring
from ringreduce.communicator import varying
from ringreduce.communicator.formation import form
from ringreduce.communicator.statistics import Statistics
from ringreduce.effects.dumping import FlightFile
from ringreduce.effects.recorder import Recorder
from ringreduce.engine.engine import Engine
from ringreduce.engine.watch import Watcher
from ringreduce.pure.buckets import ALIGNMENT
from ringreduce.pure.notification import encode_goodbye
from ringreduce.pure.payload import checked_root, decode, encode, flat_view
from ringreduce.pure.wire import Kind
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import (
    ArrayError,
    ClosedError,
    MismatchError,
    PeerLostError,
    RingReduceError,
)
from ringreduce.vocabulary.types import ReduceOp, reduce_op

__all__ = ["Communicator"]

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Explainer(Protocol):
    """What knows more of a mismatch than two signatures; see `Communicator.explain_with`."""

    def explain(self, error: MismatchError) -> RingReduceError | None:
        """A better error, or None."""


class Communicator:
    """One rank's handle on a formed ring; `ringreduce.init` makes the usual one.

    Making one forms the ring: it returns when all ranks of the job have done the same and
    a first barrier has gone round. Usable as a context manager, which closes it.

    Args:
        config: this rank's settings.

    Raises:
        RendezvousError: not all ranks came in time, or this one was turned away.
        MismatchError: the ranks run different versions or settings.
        PeerError: the ranks met, but the ring did not work.
        NativeError: libzmq cannot be called.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._failure: RingReduceError | None = None
        self._explainers: weakref.WeakSet[Explainer] = weakref.WeakSet()
        self._closed = False
        self._recorder = Recorder(config.rank, config.size)
        self._flight = FlightFile(config, self._recorder)
        self.local_rank, self.local_size = config.local_rank or 0, config.local_size or 1
        self._collectives: Collectives = Ring(None, rank=0, size=1)
        self._transport, self._shares_memory = "none", False
        # Made while this is held, never `_lock`: that is the engine's while it runs a collective,
        # and handing more over must not wait for it.
        self._engine_lock = threading.Lock()
        self._engine: Engine | None = None
        self._is_closing = False
        self._blocked_s = 0.0
        self._watcher: Watcher | None = None
        self._has_aborted = False
        # The thread that is in a call, and why it is to leave the ring after it, if it is.
        self._caller: int | None = None
        self._leaves_with: str | None = None
        if config.size > 1:
            try:
                self._form(config)
            except BaseException as error:
                if self._failure is None:  # Else it was dumped when it broke.
                    self._recorder.fail(error)
                    self._dump(_described(error))
                self._flight.close()
                raise
        _open.add(self)

    def _form(self, config: Config) -> None:
        formed = form(config)
        self._collectives, self._transport = formed.collectives, formed.transport
        self._shares_memory = formed.shares_memory
        self._flight.transport = formed.transport
        if config.local_rank is None:
            self.local_rank = formed.local_rank
        if config.local_size is None:
            self.local_size = formed.local_size
        _formed.add(self)
        try:
            try:
                self._watcher = Watcher(
                    formed.control,
                    self._recorder,
                    self._collectives,
                    self,
                    link_timeout_s=config.link_timeout_s,
                )
            except BaseException:  # No thread is to be had, say.
                formed.control.close()
                raise
            self._recorder.peers = self._watcher.peers
            self.barrier()
        except BaseException:
            self._leave("")
            raise
        finally:
            formed.finish()

    @property
    def rank(self) -> int:
        """This process's number, 0 to size - 1."""
        return self._config.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._config.size

    @property
    def config(self) -> Config:
        """The settings this communicator was made with."""
        return self._config

    @property
    def transport(self) -> str:
        """How ranks reach each other: ``shm``, ``zmq``, ``shm+zmq``; ``none`` when alone."""
        return self._transport

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def failure(self) -> RingReduceError | None:
        """The error that has broken this communicator; None while it works."""
        return self._failure

    @property
    def engine(self) -> Engine:
        """The background thread, which the first use of it starts; for integrations.

        Raises:
            ClosedError: `close` was called.
        """
        if self._process != os.getpid():
            raise self._forked()
        with self._engine_lock:
            if self._is_closing:
                raise self._closed_error()
            if self._engine is None:
                name = f"ringreduce {self.rank}/{self.size}"
                self._engine = Engine(name, self, self._collectives)
            return self._engine

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> np.ndarray:
        """An uninitialized array in registered memory, where there is some.

        Where ranks share memory, such an array is reduced where it lies: without the copies
        into and out of shared memory that any other costs. For that the array must be registered
        on every rank, at whatever place. Elsewhere it is an ordinary array, aligned to 64 bytes;
        so also when shared memory is exhausted, which is logged.

        Args:
            shape, dtype: as for `numpy.empty`.

        Returns:
            A new array, C-contiguous, the caller's own. Its memory goes back to the system with
            the last view of it, which may be after `close`.
        """
        kind = np.dtype(dtype)
        dimensions = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(dimensions) * kind.itemsize
        # Without the lock, which the engine holds while it runs a collective.
        found = None if self._closed or nbytes == 0 else self._collectives.empty(nbytes)
        if found is None:
            if self._shares_memory and nbytes and not self._closed and not self._failure:
                _log.warning(
                    "[%d/%d] no shared memory is left for %d bytes; ordinary memory is used",
                    *(self.rank, self.size, nbytes),
                )
            whole = np.empty(nbytes + ALIGNMENT, np.uint8)
            start = -whole.__array_interface__["data"][0] % ALIGNMENT
            found = whole[start : start + nbytes]
        result: np.ndarray = found.view(kind).reshape(dimensions)
        return result

    def all_reduce(
        self,
        array: np.ndarray,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        signature: int = 0,
        async_op: bool = False,
    ) -> Any:
        """Reduce `array` over all ranks; afterwards it holds the same result on each.

        Takes 2 (size - 1) steps and moves 2 nbytes (size - 1) / size each way on every link.
        The order of additions is fixed, so results are bit-identical on all ranks and from
        run to run.

        Args:
            array: any shape, C-contiguous, writable; equal shape and dtype on all ranks.
                Changed in place; nobody else may touch it until this returns.
            op: how elements combine. 16-bit floats accumulate in float32.
            signature: 64 bits that must be equal on all ranks, such as a hash of what the
                array stands for.
            async_op: return at once; the engine's thread does it, after what it was given
                before. All ranks must hand over in the same order.

        Returns:
            `array` itself; with `async_op` a `Work`, whose ``wait()`` returns it.

        Raises:
            ArrayError: the array's dtype or layout, or the operator, is not supported.
            MismatchError: the previous rank makes another call.
            PeerTimeoutError: a neighbour made no progress within ``timeout_s``.
            PeerLostError: a rank died or closed its communicator.
            ProtocolError: something else talks on this rank's port.
            ClosedError: `close` was called.

        See: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", JPDC 2009.
        """
        how = reduce_op(op)
        flat = flat_view(array, "all_reduce")
        self._check_mean(how, array.dtype)
        _check_signature(signature)

        def run() -> np.ndarray:
            self._call(
                "all_reduce", array.nbytes, self._collectives.all_reduce, flat, how, signature
            )
            return array

        return self.engine.submit(run) if async_op else run()

    def reduce_scatter(
        self,
        array: np.ndarray,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        signature: int = 0,
        async_op: bool = False,
    ) -> Any:
        """Reduce `array` over all ranks and leave each rank its own chunk of the result.

        The buffer is split into `size` chunks whose lengths differ by at most one element;
        rank r gets chunk r. Outside it, `array` holds partial results afterwards. Takes
        size - 1 steps and moves nbytes (size - 1) / size each way on every link.

        Args:
            array: as for `all_reduce`; flattened in C order.
            op: how elements combine.
            signature, async_op: as for `all_reduce`.

        Returns:
            View on `array`, shape (chunk length,): this rank's part of the result. Empty when
            there are fewer elements than ranks and this rank has none.

        Raises:
            As `all_reduce`.
        """
        how = reduce_op(op)
        flat = flat_view(array, "reduce_scatter")
        self._check_mean(how, array.dtype)
        _check_signature(signature)

        def run() -> np.ndarray:
            reduce_scatter = self._collectives.reduce_scatter
            return self._call("reduce_scatter", array.nbytes, reduce_scatter, flat, how, signature)

        return self.engine.submit(run) if async_op else run()

    def all_gather(self, array: np.ndarray, *, signature: int = 0, async_op: bool = False) -> Any:
        """Join the arrays of all ranks along the first dimension, in rank order.

        A short exchange of the first dimensions, then size - 1 steps that move the bytes of
        all but one rank on every link.

        Args:
            array: C-contiguous. First dimensions may differ between ranks, the others and the
                dtype may not. An array without dimensions counts as one of shape (1,). Read
                only while this runs.
            signature, async_op: as for `all_reduce`.

        Returns:
            A new array of shape (sum of first dimensions, ...), the caller's own.

        Raises:
            As `all_reduce`, and ArrayError when the result does not fit in memory.
        """
        flat = flat_view(array, "all_gather", writable=False)
        _check_signature(signature)
        arguments = self._collectives, array, flat, self.rank, self.size, signature

        def run() -> np.ndarray:
            return self._call("all_gather", array.nbytes, varying.all_gather, *arguments)

        return self.engine.submit(run) if async_op else run()

    def broadcast(
        self, array: np.ndarray, root: int = 0, *, signature: int = 0, async_op: bool = False
    ) -> Any:
        """Overwrite `array` on every rank with that of rank `root`.

        A pipeline of segments along the ring: moves nbytes on every link but one.

        Args:
            array: as for `all_reduce`; only read on `root`.
            root: the rank whose array is sent; equal on all ranks.
            signature, async_op: as for `all_reduce`.

        Returns:
            `array` itself, or a `Work`.

        Raises:
            As `all_reduce`; ArrayError also when `root` is no rank.
        """
        root = checked_root(root, self.rank, self.size)
        flat = flat_view(array, "broadcast", writable=self.rank != root)
        _check_signature(signature)
        arguments = (Kind.BROADCAST, flat, root, signature)

        def run() -> np.ndarray:
            self._call("broadcast", array.nbytes, self._collectives.broadcast, *arguments)
            return array

        return self.engine.submit(run) if async_op else run()

    def barrier(self) -> None:
        """Return once every rank has called it.

        Raises:
            As `all_reduce`, ArrayError excepted.
        """
        self._call("barrier", 0, self._collectives.barrier)

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """The object that rank `root` passed, on every rank.

        Args:
            value: on `root`, anything that msgspec encodes as MessagePack: numbers, text,
                bytes, lists, dicts, dataclasses (which arrive as dicts). Ignored elsewhere.
            root: the rank whose object is sent; equal on all ranks.

        Returns:
            `value` itself on `root`, a decoded copy elsewhere.

        Raises:
            As `all_reduce`; ArrayError on `root` alone when `value` cannot be encoded or is
            over 64 MiB. The others wait for it all the same: let that error end the process.
        """
        root = checked_root(root, self.rank, self.size)
        payload = encode(value) if self.rank == root else np.empty(0, np.uint8)

        arguments = self._collectives, payload, self.rank, root
        received = self._call(
            "broadcast_object", payload.size, varying.broadcast_object, *arguments
        )
        return value if self.rank == root else decode(received)

    def all_gather_object(self, value: Any, *, signature: int = 0) -> list[Any]:
        """The objects that all ranks passed, in rank order.

        Args:
            value: as for `broadcast_object`.
            signature: 64 bits that must be equal on all ranks, such as a hash of what the object
                is.

        Returns:
            A list of `size` decoded copies.

        Raises:
            As `broadcast_object`.
        """
        payload = encode(value)

        arguments = self._collectives, payload, self.rank, self.size, signature
        gathered = self._call(
            "all_gather_object", payload.size, varying.all_gather_object, *arguments
        )
        return [decode(each) for each in gathered]

    def fail(self, error: RingReduceError) -> RingReduceError:
        """Break the ring because of `error`, which a layer above has found.

        Every other rank gets the same error from the call it is in, or from its next.

        Returns:
            What to raise: `error`, or what has broken the ring before.
        """
        if self._closed:
            return error
        if self._failure is not None:
            return _again(self._failure)
        self._failure = error
        if self._watcher is not None:
            self._watcher.abort(error)
        # A call of another thread ends, and with it its hold of the lock.
        self._collectives.interrupt(error)
        if self._caller != threading.get_ident():
            with self._lock:
                self._break(error)
        # Else this is a signal handler's, and the call that it has interrupted breaks the ring.
        return error

    def ring_ended(self, error: RingReduceError) -> None:
        """Take note of what the watcher has found, in its thread, so without the lock."""
        if self._failure is None:
            self._failure = error
        self._collectives.interrupt(error)
        engine = self._engine
        if engine is not None:
            # The first failure, which a call may have found before: every waiter sees the same.
            engine.fail(self._failure)
        if self._recorder.standing().operation is None:
            # A call that fails is recorded when it does; in user code there is none.
            self._recorder.fail(self._failure)
            self._dump(_described(self._failure))

    def explain_with(self, explainer: Explainer) -> None:
        """Have an object asked what it means when ranks are seen to be in different calls.

        For integrations, which know what signatures stand for. Asked in the thread of the call
        that failed, before the other ranks are notified: what it returns, if anything, is
        raised there and here instead. Only a weak reference is kept.
        """
        self._explainers.add(explainer)

    def _explained(self, error: RingReduceError) -> RingReduceError:
        """What an integration, or the watcher, has to say about what this rank has run into."""
        if isinstance(error, MismatchError) and error.origin is None:
            for explainer in list(self._explainers):
                if (better := explainer.explain(error)) is not None:
                    return better
        return error if self._watcher is None else self._watcher.explain(error)

    def statistics(self) -> Statistics:
        """What this communicator has done so far; a snapshot."""
        traffic = self._collectives.traffic()
        engine = self._engine
        return Statistics(
            reducing_s=self._blocked_s + (engine.reducing_s if engine else 0.0),
            waited_s=self._blocked_s + (engine.waited_s if engine else 0.0),
            collectives=self._recorder.calls,
            seconds=self._recorder.seconds,
            frames_received=traffic.frames_received,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
        )

    def blocked_for(self, seconds: float) -> None:
        """Count time in which a training step itself reduced gradients; for integrations."""
        self._blocked_s += seconds

    def close(self) -> None:
        """Leave the ring and free sockets and threads; calling it again does nothing.

        A rank that makes a call after that, or is in one that this rank has not made, gets a
        MismatchError. A call of this rank's that runs in another thread, or in the background,
        gets a PeerLostError; what had not begun, a ClosedError. Never raises, takes at most
        about two seconds.
        """
        self._end_with(_ending_error())

    def _leave(self, why: str) -> None:
        """Close; `why` is the exception that makes this rank leave, where one does."""
        if self._process != os.getpid():
            return  # The sockets are the parent's.
        self._collectives.interrupt()
        if self._caller == threading.get_ident():
            # A signal handler, in the midst of a call, which still uses what would be freed here.
            self._leaves_with = why
            return
        with self._engine_lock:
            self._is_closing = True
            engine = self._engine
        if engine is not None:
            engine.close(f"rank {self.rank} of {self.size}: the communicator was closed")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            calls = self._recorder.calls
            if self._failure is not None and not self._has_aborted:
                # It came in user code. A goodbye would look as if this rank had left by itself.
                self._has_aborted = True
                self._collectives.abort(self._failure)
            # Read first: what the others make of the leaving is no failure of this rank's.
            goodbye = b"" if self._failure is not None else encode_goodbye(calls, why)
            if self._watcher is not None:
                self._watcher.leave(calls, why)
            self._collectives.close(goodbye)
            if self._watcher is not None:
                self._watcher.join()
            self._flight.close()
            _formed.discard(self)
            if self.size > 1:
                _log.info("[%d/%d] ring closed after %s", self.rank, self.size, self.statistics())

    def __enter__(self) -> Communicator:
        """The communicator itself; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; the other ranks receive the exception that ended the block, if one did."""
        self._end_with(value)

    def __repr__(self) -> str:
        """Place and state."""
        state = "closed" if self._closed else "broken" if self._failure else "open"
        return f"<Communicator rank {self.rank} of {self.size}, {state}>"

    def _call(
        self, name: str, nbytes: int, run: Callable[..., _Result], *arguments: Any
    ) -> _Result:
        """Run one collective under the lock; break the communicator if it fails.

        Written to be quick, since through shared memory a small collective takes microseconds.
        """
        if self._process != os.getpid():
            raise self._forked()
        if self._engine is not None:
            self._engine.drain()
        leaves: str | None = None
        try:
            with self._lock:
                if self._closed or self._failure is not None or self._leaves_with is not None:
                    self._refuse()
                self._recorder.begin(name, nbytes)
                self._caller = threading.get_ident()
                try:
                    result = run(*arguments)
                except RingReduceError as error:
                    self._break(self._explained(error))
                    if self._failure is error:
                        raise
                    # The watcher knew more, or knew it first: one error, now and ever after.
                    raise _again(self._failure or error) from error
                except BaseException as error:
                    self._break(self._cut(error))
                    raise
                finally:
                    # In this order: a handler that comes between the two leaves by itself.
                    self._caller = None
                    leaves = self._leaves_with
                self._recorder.end()
        finally:
            # Without the lock: the engine, whose end this waits for, may be waiting for that.
            if leaves is not None:
                self._leave(leaves)
        if _log.isEnabledFor(logging.DEBUG):
            number, elapsed_s = self._recorder.calls - 1, self._recorder.elapsed_s
            _log.debug(
                "[%d/%d] %s #%d, %d bytes, %.3f ms",
                *(self.rank, self.size, name, number, nbytes, elapsed_s * 1e3),
            )
        return result

    def _forked(self) -> ClosedError:
        return ClosedError(
            "is used in a forked child, whose sockets are its parent's",
            rank=self.rank,
            size=self.size,
            remedy="Start processes with spawn, or form a new communicator in the child.",
        )

    def _refuse(self) -> None:
        if self._failure is None or self._closed:
            raise self._closed_error()
        raise _again(self._failure)

    def _closed_error(self) -> ClosedError:
        return ClosedError("called a collective after close()", rank=self.rank, size=self.size)

    def _cut(self, error: BaseException) -> PeerLostError:
        """Ctrl-C in the middle of a collective, say: the ring is out of step for good."""
        return PeerLostError(
            f"was interrupted in a collective by {type(error).__name__}",
            rank=self.rank,
            size=self.size,
            peer=self.rank,
            remedy="Form a new communicator.",
        )

    def _break(self, error: RingReduceError) -> None:
        if self._failure is None:
            self._failure = error
        error = self._failure
        self._recorder.fail(error)
        if self._has_aborted:
            return
        self._has_aborted = True
        if self._watcher is not None:
            self._watcher.abort(error)
        try:
            self._collectives.abort(error)
        finally:
            if self._engine is not None:
                self._engine.fail(error)
            # Last: neither the other ranks nor the threads that wait here wait for a disk.
            self._dump(_described(error))

    def _end_with(self, error: BaseException | None) -> None:
        """Leave, because of `error` if there is one: it is recorded, and sent to the others."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._leave("")  # The usual end of a program.
            return
        if self._failure is None and not self._closed and self._process == os.getpid():
            self._recorder.fail(error)
            self._dump(_described(error))
        self._leave(_described(error))

    def _dump(self, why: str) -> None:
        """Write the flight record, where there is a `log_dir`; never raises, from any thread."""
        self._flight.dump(why)

    def _check_mean(self, op: ReduceOp, dtype: np.dtype) -> None:
        """Refuse a mean whose divisor the dtype cannot hold, before anything travels."""
        if op is ReduceOp.MEAN and dtype.kind in "iu" and self.size > np.iinfo(dtype).max:
            raise ArrayError(
                f"cannot divide {dtype.name} by {self.size} ranks",
                rank=self.rank,
                size=self.size,
                remedy="Convert the array to a wider dtype.",
            )


def _check_signature(signature: int) -> None:
    if not 0 <= signature < 1 << 64:
        raise ArrayError(f"got signature {signature}", remedy="It must fit 64 bits, unsigned.")


def _again(error: RingReduceError) -> RingReduceError:
    """A copy of `error` to raise anew, so that tracebacks do not pile up on one object."""
    anew = copy.copy(error)
    anew.__cause__ = error
    return anew


def _ending_error() -> BaseException | None:
    """The exception that makes the caller leave: the one being handled, or the program's last."""
    error = sys.exc_info()[1]
    if error is None and not threading.main_thread().is_alive():
        # Python is ending. Before that this would be an old one, of an interactive session, say.
        error = getattr(sys, "last_value", None)
    return error


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
# Those with sockets live until they are closed: collected as garbage, a context of libzmq waits
# for its sockets for ever, in whatever thread the collector runs.
_formed: set[Communicator] = set()


@atexit.register
def _close_all() -> None:
    """Ranks that wait for this one learn that it has left, and no thread of a framework's waits."""
    for communicator in list(_open):
        communicator.close()
