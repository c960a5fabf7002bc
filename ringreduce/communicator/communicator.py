"""The public object: checks arguments and says what each call does.

All ranks must make the same calls in the same order with agreeing arguments. A call completes on
this rank or raises; after any error but a refused argument the communicator is broken, and each
later call raises that error at once.

Threads: calls from several threads exclude each other; their order must be equal on all ranks, so
use one thread per communicator. A call runs in the caller's thread, after all that the engine was
given before it; with ``async_op`` in the engine's thread (`ringreduce.communicator.session`).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.communicator import groups
from ringreduce.communicator.formation import form
from ringreduce.communicator.moving import MovingCalls
from ringreduce.communicator.refusals import ending_error
from ringreduce.communicator.session import Lasting, Session
from ringreduce.communicator.statistics import Statistics
from ringreduce.pure.encodings import Coding
from ringreduce.pure.membership import Membership
from ringreduce.pure.payload import aligned, flat_view
from ringreduce.pure.wire import signature_of
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import ArrayError, RingReduceError
from ringreduce.vocabulary.types import ReduceOp, reduce_op
from ringreduce.vocabulary.worker_environment import parents_ring

_log = logging.getLogger(__name__)


# `tensorflow/` and `keras/` also use its `_session`, which a ring formed anew replaces.
class Communicator(MovingCalls):
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

    _parent: Communicator | None = None

    def __init__(self, config: Config) -> None:
        inherited = parents_ring(config)
        chosen, members = inherited or (config, range(config.size))
        make = functools.partial(form, config) if config.size > 1 and not inherited else None
        session = Session(chosen, Membership(tuple(members)), None, make, Lasting())
        if inherited:
            session.close_inherited()
        self._use(session)
        self._config = config

    @property
    def config(self) -> Config:
        """The settings of the job, with this process's number in it."""
        return self._config

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the job that are in it, in the order of their ranks here."""
        return self._session.membership.members

    @property
    def parent(self) -> Communicator | None:
        """The communicator that this group was split from; None for that of the job."""
        return self._parent

    @property
    def transport(self) -> str:
        """How ranks reach each other: ``shm``, ``zmq``, ``shm+zmq``; ``none`` when alone."""
        return self._session.transport

    @property
    def local_rank(self) -> int:
        """This process's number among those of its host."""
        return self._session.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return self._session.local_size

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._session.is_closed

    @property
    def failure(self) -> RingReduceError | None:
        """The error that has broken this communicator; None while it works."""
        return self._session.failure

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
        session = self._session
        memory = None if self.closed or nbytes == 0 else session.collectives.empty(nbytes)
        if memory is None:
            shares = any(self.rank in host and len(host) > 1 for host in session.hosts)
            if shares and nbytes and not self.closed and not self.failure:
                text = "[%d/%d] no shared memory is left for %d bytes; ordinary memory is used"
                _log.warning(text, self.rank, self.size, nbytes)
            memory = aligned(nbytes)
        result: np.ndarray = memory.view(kind).reshape(dimensions)
        return result

    def all_reduce(
        self,
        array: np.ndarray,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        signature: int = 0,
        async_op: bool = False,
        coding: Coding | None = None,
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
            coding: what `array`, float32, is encoded to where it travels between hosts; equal on
                all ranks, but for residuals. Up to 16 KiB travel as they are.

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
        session = self._session
        if not async_op and session.calls.all_reduce(array, op, signature):
            return array
        how, flat = self._reducible("all_reduce", array, op)
        run: Any = session.collectives.all_reduce
        if coding is not None:
            if flat.dtype != np.float32:
                problem = f"cannot encode {flat.dtype.name}"
                raise ArrayError(problem, remedy="Encode float32, or nothing.")
            run = functools.partial(run, coding=coding)
            # A caller's signature covers the encoding too.
            signature = signature or signature_of(coding.encoding.name)
        result = session.calls.run("all_reduce", array, signature, async_op, run, flat, how)
        if not async_op:
            session.calls.teach(array, op, how, signature)
        return result

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
        how, flat = self._reducible("reduce_scatter", array, op)
        run = self._session.collectives.reduce_scatter
        return self._session.calls.run("reduce_scatter", array, signature, async_op, run, flat, how)

    def barrier(self) -> None:
        """Return once every rank has called it; raises as `all_reduce`, except ArrayError."""
        self._session.calls.call("barrier", 0, self._session.collectives.barrier)

    def split(self, color: int | str | None, key: int | None = None) -> Communicator | None:
        """Form a group of the ranks that pass the same color; all ranks must call this.

        The group is a communicator of its own, with ranks from 0 on: its collectives, its failure
        and its end are its members' alone. Groups that share ranks must be used in the same
        relative order on all ranks that they share. A group closes when this communicator closes.
        Errors and logs name the ranks of the job.

        Args:
            color: a whole number or text; None: this rank takes no part.
            key: ranks of a group are ordered by it, then by their order here; None: 0.

        Returns:
            The group's communicator, owned by the caller; None where `color` is.

        Raises:
            ArrayError: `color` or `key` is of another type; nothing was sent, the other ranks wait.
                Or the job has used up its 65,535 groups, on all ranks.
            RendezvousError: a rank could not open what it needs.
            As `all_reduce` and `Communicator`.
        """
        nothing = type(None)
        if not isinstance(color, (int, str, nothing)) or not isinstance(key, (int, nothing)):
            raise self._refused(
                f"cannot split by color {color!r} and key {key!r}",
                "Pass whole numbers; a color may also be text, or None to take no part.",
            )
        session = groups.split(self._session, color, key or 0)
        if session is None:
            return None
        group = Communicator.__new__(Communicator)
        group._use(session)
        group._parent = self
        return group

    def statistics(self) -> Statistics:
        """A snapshot of what this communicator has done so far."""
        return self._session.statistics()

    def close(self) -> None:
        """Leave the ring and free sockets and threads; calling it again does nothing.

        Another rank gets a MismatchError from a call that this rank has not made. On this rank a
        call that runs in another thread or in the engine gets a PeerLostError, and one that has
        not begun a ClosedError. Never raises; takes at most about two seconds.
        """
        self._session.close(ending_error())

    def __enter__(self) -> Communicator:
        """Return the communicator; leaving the block closes it."""
        return self

    def __exit__(self, kind: object, value: BaseException | None, traceback: object) -> None:
        """Close; the other ranks receive the exception that ended the block, if one did."""
        self._session.close(value)

    def __repr__(self) -> str:
        """Rank, size and state."""
        state = "closed" if self.closed else "broken" if self.failure else "open"
        group = f", ranks {self.members} of the job" if self._session.membership.group else ""
        return f"<Communicator rank {self.rank} of {self.size}{group}, {state}>"

    def _reducible(
        self, operation: str, array: np.ndarray, op: ReduceOp | str
    ) -> tuple[ReduceOp, np.ndarray]:
        """The operator and a flat view; refuses also a mean whose divisor the dtype cannot hold."""
        how, flat = reduce_op(op), flat_view(array, operation)
        dtype = flat.dtype
        if how is ReduceOp.MEAN and dtype.kind in "iu" and self.size > np.iinfo(dtype).max:
            problem = f"cannot divide {dtype.name} by {self.size} ranks"
            raise self._refused(problem, "Convert the array to a wider dtype.")
        return how, flat
