"""The public object: checks arguments, guards the life cycle, counts, and breaks cleanly.

All ranks must make the same calls in the same order with agreeing arguments. A call completes on
this rank or raises; after any error but a refused argument the communicator is broken, and each
later call raises that error at once.

Threads: calls from several threads exclude each other; their order must be equal on all ranks, so
use one thread per communicator. A call runs in the caller's thread, after all that the engine was
given before it; with ``async_op`` in the engine's thread (`ringreduce.engine.engine`).

Over 400 lines, because the life cycle that the methods share has to be read in one place.
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
from ringreduce.collectives.shared_memory import SharedMemoryCollectives
from ringreduce.communicator import varying
from ringreduce.communicator.formation import form
from ringreduce.communicator.statistics import Statistics
from ringreduce.effects.dumping import FlightFile
from ringreduce.effects.recorder import Recorder
from ringreduce.engine.engine import Engine
from ringreduce.engine.watch import Watcher
from ringreduce.pure.buckets import ALIGNMENT
from ringreduce.pure.claims import Claim
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

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Explainer(Protocol):
    """Explains a mismatch better than two signatures do; see `Communicator.explain_with`."""

    def explain(self, error: MismatchError) -> RingReduceError | None:
        """A better error, or None."""


class Communicator:
    """One rank's handle on a formed ring; `ringreduce.init` makes the usual one.

    Making one forms the ring: it returns when all ranks of the job have done so and passed a
    first barrier. A context manager that closes it.

    Raises:
        RendezvousError: not all ranks joined in time, or this one was refused.
        ConfigError: `transport` is ``shm`` and not all ranks share memory, a secret is missing, or
            the limit of open files is too low.
        MismatchError: the ranks run different versions or settings.
        PeerError: the ranks met, but the ring did not work.
        NativeError: libzmq cannot be called or has no encryption, or the native library is broken.
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
        self._collectives: Collectives = SharedMemoryCollectives(None, rank=0, size=1)
        self._transport, self._shares_memory = "none", False
        # Not `_lock`: the engine holds that during a collective, and handing over must not wait.
        self._engine_lock = threading.Lock()
        self._engine: Engine | None = None
        self._is_closing = False
        self._blocked_s = 0.0
        self._watcher: Watcher | None = None
        self._has_aborted = False
        # The thread that is in a call; why it leaves the ring after that call, None: it stays.
        self._caller: int | None = None
        self._leaves_with: str | None = None
        if config.size > 1:
            try:
                self._form(config)
            except BaseException as error:
                if self._failure is None:  # Else `_break` has dumped it.
                    self._record(error)
                self._flight.close()
                raise
        _open.add(self)

    def _form(self, config: Config) -> None:
        formed = form(config)
        self._collectives, self._transport = formed.collectives, formed.transport
        self._shares_memory = formed.shares_memory
        self._flight.transport = formed.transport
        self.local_rank, self.local_size = formed.local_rank, formed.local_size
        _formed.add(self)
        try:
            try:
                self._watcher = Watcher(
                    formed.control,
                    self._recorder,
                    self._collectives,
                    self,
                    patience=formed.patience,
                    link_timeout_s=config.link_timeout_s,
                )
            except BaseException:  # No thread could be started, for example.
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
        """The background thread, started by its first use. Raises ClosedError after `close`."""
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

        Ranks that share memory reduce such an array in place, without copies into and out of
        shared memory, if all of them pass one. Without shared memory, or when it is exhausted
        (which is logged), it is an ordinary array, aligned to 64 bytes.

        Returns:
            A new array, C-contiguous, owned by the caller. Its memory is freed with the last view
            of it, also after `close`.
        """
        kind = np.dtype(dtype)
        dimensions = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(dimensions) * kind.itemsize
        # Without the lock, which the engine holds during a collective.
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

        Takes 2 (size - 1) steps and moves 2 nbytes (size - 1) / size each way on every link. The
        order of additions is fixed: results are bit-identical on all ranks and in every run.

        Args:
            array: any shape, C-contiguous, writable; equal shape and dtype on all ranks. Changed
                in place; must not be touched by others until this returns.
            op: how elements combine. 16-bit floats accumulate in float32.
            signature: 64 bits that must be equal on all ranks, such as a hash of a name.
            async_op: return at once; the engine's thread runs it, after what it was given before.
                All ranks must hand over in the same order.

        Returns:
            `array` itself; with `async_op` a `Work`, whose ``wait()`` returns it.

        Raises:
            ArrayError: the array's dtype or layout, or the operator, is not supported.
            MismatchError: the previous rank makes another call.
            PeerTimeoutError: a rank made no progress within ``timeout_s``, or was in user code
                for longer than ``busy_timeout_s``.
            PeerLostError: a rank died or closed its communicator.
            ProtocolError: something else talks on this rank's port.
            ClosedError: `close` was called.

        See: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", JPDC 2009.
        """
        how = reduce_op(op)
        flat = flat_view(array, "all_reduce")
        self._check_mean(how, array.dtype)
        run = self._collectives.all_reduce
        return self._run("all_reduce", array, signature, async_op, run, flat, how)

    def reduce_scatter(
        self,
        array: np.ndarray,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        signature: int = 0,
        async_op: bool = False,
    ) -> Any:
        """Reduce `array` over all ranks and leave each rank its own chunk of the result.

        The array, flattened in C order, is split into `size` chunks whose lengths differ by at
        most one element; rank r gets chunk r. The rest of `array` holds nothing of use afterwards.
        Takes size - 1 steps and moves nbytes (size - 1) / size each way on every link.

        Args, Raises: as for `all_reduce`.

        Returns:
            View on `array`, shape (chunk length,): this rank's part of the result. Empty if there
            are fewer elements than ranks and this rank has none.
        """
        how = reduce_op(op)
        flat = flat_view(array, "reduce_scatter")
        self._check_mean(how, array.dtype)
        run = self._collectives.reduce_scatter
        return self._run("reduce_scatter", array, signature, async_op, run, flat, how)

    def all_gather(self, array: np.ndarray, *, signature: int = 0, async_op: bool = False) -> Any:
        """Join the arrays of all ranks along the first dimension, in rank order.

        A short exchange of the first dimensions, then size - 1 steps that move the bytes of all
        but one rank on every link.

        Args:
            array: C-contiguous. Only first dimensions may differ between ranks. An array without
                dimensions counts as one of shape (1,). Only read, and only while this runs.
            signature, async_op: as for `all_reduce`.

        Returns:
            A new array of shape (sum of first dimensions, ...), owned by the caller.

        Raises: as `all_reduce`, and ArrayError when the result does not fit in memory.
        """
        flat = flat_view(array, "all_gather", writable=False)
        arguments = varying.all_gather, self._collectives, array, flat, self.rank, self.size
        return self._run("all_gather", array, signature, async_op, *arguments)

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

        Raises: as `all_reduce`; ArrayError also when `root` is not a rank.
        """
        root = checked_root(root, self.rank, self.size)
        flat = flat_view(array, "broadcast", writable=self.rank != root)
        arguments = self._collectives.broadcast, Kind.BROADCAST, flat, root
        return self._run("broadcast", array, signature, async_op, *arguments)

    def barrier(self) -> None:
        """Return once every rank has called it; raises as `all_reduce`, except ArrayError."""
        self._call("barrier", 0, self._collectives.barrier)

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """The object that rank `root` passed, on every rank.

        Args:
            value: on `root`, anything that msgspec encodes as MessagePack: numbers, text, bytes,
                lists, dicts, dataclasses (which arrive as dicts). Ignored elsewhere.
            root: the rank whose object is sent; equal on all ranks.

        Returns:
            `value` itself on `root`, a decoded copy elsewhere.

        Raises:
            As `all_reduce`; ArrayError on `root` alone when `value` cannot be encoded or is over
            64 MiB. The other ranks still wait for it, so let that error end the process.
        """
        root = checked_root(root, self.rank, self.size)
        payload = encode(value) if self.rank == root else np.empty(0, np.uint8)
        arguments = self._collectives, payload, self.rank, root
        received = self._call(
            "broadcast_object", payload.size, varying.broadcast_object, *arguments
        )
        return value if self.rank == root else decode(received)

    def all_gather_object(self, value: Any, *, signature: int = 0) -> list[Any]:
        """The objects that all ranks passed, in rank order: `size` decoded copies.

        Args:
            value: as for `broadcast_object`.
            signature: as for `all_reduce`.

        Raises: as `broadcast_object`.
        """
        payload = encode(value)
        arguments = self._collectives, payload, self.rank, self.size, signature
        gathered = self._call(
            "all_gather_object", payload.size, varying.all_gather_object, *arguments
        )
        return [decode(each) for each in gathered]

    def claim(self, key: str, value: bytes, text: str, remedy: str) -> None:
        """Say that this rank has `value` for `key`, where all ranks should have the same.

        No collective: from any thread, at any time, without waiting. Neighbours on the ring compare
        what both have claimed; a difference breaks the ring with a MismatchError of `text`, in
        which ``{peer}`` becomes the other rank, and `remedy`. What only one has claimed, or what is
        still under way when a rank leaves, is not compared.

        Args:
            key: up to 1024 characters.
            value: up to 64 bytes.
        """
        if self._watcher is not None and not self._closed:
            self._watcher.claim(Claim(key, value, text, remedy))

    def fail(self, error: RingReduceError) -> RingReduceError:
        """Break the ring with `error` from a layer above; return the error to raise.

        That is `error`, or what has broken the ring before. Every other rank gets it from its
        present or next call.
        """
        if self._closed:
            return error
        if self._failure is not None:
            return _again(self._failure)
        self._failure = error
        if self._watcher is not None:
            self._watcher.abort(error)
        # A call in another thread ends and releases the lock.
        self._collectives.interrupt(error)
        if self._caller != threading.get_ident():
            with self._lock:
                self._break(error)
        # Else this is a signal handler, and the call that it has interrupted breaks the ring.
        return error

    def ring_ended(self, error: RingReduceError) -> None:
        """Record the watcher's error. Called in the watcher's thread, so takes no lock."""
        if self._failure is None:
            self._failure = error
        self._collectives.interrupt(error)
        engine = self._engine
        if engine is not None:
            # A call may have failed first: every waiter must see the same error.
            engine.fail(self._failure)
        if self._recorder.standing().operation is None:
            # In user code no call fails, so it is recorded here.
            self._record(self._failure)

    def explain_with(self, explainer: Explainer) -> None:
        """Ask `explainer` what it means when ranks are in different calls.

        For integrations, which know what signatures stand for. Called in the thread of the failed
        call, before the other ranks are notified: every rank then raises the error that it
        returns, unless that is None. Only a weak reference is kept.
        """
        self._explainers.add(explainer)

    def _explained(self, error: RingReduceError) -> RingReduceError:
        """A better error for `error` from an integration or the watcher, or `error` itself."""
        if isinstance(error, MismatchError) and error.origin is None:
            for explainer in list(self._explainers):
                if (better := explainer.explain(error)) is not None:
                    return better
        return error if self._watcher is None else self._watcher.explain(error)

    def statistics(self) -> Statistics:
        """A snapshot of what this communicator has done so far."""
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
        """Add time that a training step spent reducing gradients itself; for integrations."""
        self._blocked_s += seconds

    def close(self) -> None:
        """Leave the ring and free sockets and threads; calling it again does nothing.

        Another rank gets a MismatchError from a call that this rank has not made. On this rank a
        call that runs in another thread or in the engine gets a PeerLostError, and one that has
        not begun a ClosedError. Never raises; takes at most about two seconds.
        """
        self._end_with(_ending_error())

    def _leave(self, why: str) -> None:
        """Close; `why` describes the exception that makes this rank leave, empty for none."""
        if self._process != os.getpid():
            return  # The sockets are the parent's.
        self._collectives.interrupt()
        if self._caller == threading.get_ident():
            # A signal handler: the interrupted call still uses what would be freed here.
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
                # It came in user code. A goodbye would look like an ordinary end.
                self._has_aborted = True
                self._collectives.abort(self._failure)
            # Read first: errors that others raise because of the goodbye are not this rank's.
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
        """Return the communicator; leaving the block closes it."""
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
        """Rank, size and state."""
        state = "closed" if self._closed else "broken" if self._failure else "open"
        return f"<Communicator rank {self.rank} of {self.size}, {state}>"

    def _run(
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
            return self.engine.submit(lambda: self._run(*now))
        result = self._call(name, array.nbytes, run, *arguments, signature)
        return array if result is None else result

    def _call(
        self, name: str, nbytes: int, run: Callable[..., _Result], *arguments: Any
    ) -> _Result:
        """Run one collective under the lock; break the communicator if it fails.

        Kept fast: in shared memory a small collective takes microseconds.
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
                    # The watcher's error was better or earlier; later calls raise the same one.
                    raise _again(self._failure or error) from error
                except BaseException as error:
                    self._break(self._cut(error))
                    raise
                finally:
                    # In this order: a signal handler between the two lines leaves the ring itself.
                    self._caller = None
                    leaves = self._leaves_with
                self._recorder.end()
        finally:
            # Without the lock: this waits for the engine, which may be waiting for the lock.
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
        """The error when something such as Ctrl-C ends a collective: ranks are out of step."""
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
            # Last: neither the other ranks nor this one's threads should wait for a disk.
            self._flight.dump(_described(error))

    def _end_with(self, error: BaseException | None) -> None:
        """Leave, because of `error` if there is one, which is recorded and sent to the others."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._leave("")  # The usual end of a program.
            return
        if self._failure is None and not self._closed and self._process == os.getpid():
            self._record(error)
        self._leave(_described(error))

    def _record(self, error: BaseException) -> None:
        """Record `error` in memory and, with a `log_dir`, on disk; from any thread."""
        self._recorder.fail(error)
        self._flight.dump(_described(error))

    def _check_mean(self, op: ReduceOp, dtype: np.dtype) -> None:
        """Refuse a mean whose divisor the dtype cannot hold, before anything is sent."""
        if op is ReduceOp.MEAN and dtype.kind in "iu" and self.size > np.iinfo(dtype).max:
            raise ArrayError(
                f"cannot divide {dtype.name} by {self.size} ranks",
                rank=self.rank,
                size=self.size,
                remedy="Convert the array to a wider dtype.",
            )


def _again(error: RingReduceError) -> RingReduceError:
    """A copy of `error` to raise, so that tracebacks do not pile up on one object."""
    anew = copy.copy(error)
    anew.__cause__ = error
    return anew


def _ending_error() -> BaseException | None:
    """The exception that makes the caller leave: the handled one, or the one that ends Python."""
    error = sys.exc_info()[1]
    if error is None and not threading.main_thread().is_alive():
        # Only when Python ends: before, an interactive session may have left an old one.
        error = getattr(sys, "last_value", None)
    return error


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
# Those with sockets live until they are closed: a context of libzmq that is collected as garbage
# waits forever for its sockets.
_formed: set[Communicator] = set()


@atexit.register
def _close_all() -> None:
    """At exit, notify the ranks that wait for this one and release waiting framework threads."""
    for communicator in list(_open):
        communicator.close()
