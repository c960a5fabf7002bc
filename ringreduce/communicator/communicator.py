"""The public object: checks arguments and says what each call does.

All ranks must make the same calls in the same order with agreeing arguments. A call completes on
this rank or raises; after any error but a refused argument the communicator is broken, and each
later call raises that error at once.

Threads: calls from several threads exclude each other; their order must be equal on all ranks, so
use one thread per communicator. A call runs in the caller's thread, after all that the engine was
given before it; with ``async_op`` in the engine's thread (`ringreduce.communicator.session`).

Calls between two ranks are apart from that: a send or recv waits for no collective and holds none
up, nor does one direction the other. What a rank sends to another one is received in the order in
which it was sent: calls with one rank in one direction run one after the other, those with
``async_op`` in a thread of their own. Objects travel as MessagePack.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringreduce.communicator import groups
from ringreduce.communicator.formation import form
from ringreduce.communicator.refusals import ending_error
from ringreduce.communicator.session import Lasting, Session
from ringreduce.communicator.statistics import Statistics
from ringreduce.pure.encodings import Coding
from ringreduce.pure.membership import Membership
from ringreduce.pure.payload import (
    aligned,
    checked_counts,
    checked_peer,
    checked_root,
    checked_tag,
    decode,
    encode,
    encode_refusal,
    flat_view,
)
from ringreduce.pure.wire import Kind, signature_of
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import ArrayError, RingReduceError
from ringreduce.vocabulary.types import ReduceOp, reduce_op
from ringreduce.vocabulary.worker_environment import parents_ring

if TYPE_CHECKING:
    from ringreduce.communicator.arrival import Arrival
    from ringreduce.communicator.journal import BeforeTraining, Journal

_log = logging.getLogger(__name__)


# What else `tensorflow/` and `keras/` use is in `ringreduce.communicator.integration`.
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

    _parent: Communicator | None = None
    # In an elastic job: what gets its calls until it trains, and what keeps them for newcomers.
    _before_training: BeforeTraining | None = None
    _journal: Journal | None = None
    _arrival: Arrival | None = None  # of a newcomer

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
    def rank(self) -> int:
        """This process's number in this communicator, 0 to size - 1."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

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
        arguments = self._session.uneven.all_gather, array, flat
        return self._session.calls.run("all_gather", array, signature, async_op, *arguments)

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
        root = checked_root(root, self.size, self._config.who)
        flat = flat_view(array, "broadcast", writable=self.rank != root)
        arguments = self._session.collectives.broadcast, Kind.BROADCAST, flat, root
        return self._session.calls.run("broadcast", array, signature, async_op, *arguments)

    def all_to_all(
        self,
        array: np.ndarray,
        counts: Sequence[int] | np.ndarray | None = None,
        *,
        out: np.ndarray | None = None,
        signature: int = 0,
        async_op: bool = False,
    ) -> Any:
        """Send a part of `array` to each rank, and join the parts that all ranks send to this one.

        `array` is cut along its first dimension: the first part goes to rank 0, the next to rank 1,
        and so on; the result has the part of rank 0 first.

        Args:
            array: C-contiguous, with at least one dimension. Only first dimensions may differ
                between ranks, and only with `counts`. Only read, and only while this runs.
            counts: rows for each rank, which add up to the first dimension; then all ranks pass
                some. None: the same number for each. Or, where all ranks know all counts, so that
                they need not be exchanged, an array of shape (size, size), equal on all: the rows
                from each rank for each.
            out: where the result goes, in place of a new array: C-contiguous, writable, of its
                shape and dtype, apart from `array`.
            signature, async_op: as for `all_reduce`.

        Returns:
            The result, owned by the caller: of the shape of `array`. With `counts` a pair: the
            result, of shape (sum of rows, ...), and a list of the rows that came from each rank.

        Raises: as `all_reduce`; ArrayError also when `counts` or `out` do not fit.
        """
        flat = flat_view(array, "all_to_all", writable=False)
        rows = array.shape[0] if array.shape else -1
        if rows < 0:
            raise self._refused("all_to_all got an array without dimensions", "Pass one with rows.")
        known_counts = np.asarray(counts) if counts is not None and np.ndim(counts) == 2 else None
        own_counts: Any = counts
        if known_counts is not None:
            if known_counts.shape != (self.size, self.size) or known_counts.min() < 0:
                text = f"all_to_all got counts of all ranks of shape {known_counts.shape}"
                raise self._refused(text, f"Pass {self.size} x {self.size} numbers from 0 on.")
            own_counts = known_counts[self.rank].tolist()
        parts: Any = checked_counts(own_counts, rows, self.size, self._config.who)
        if out is not None:
            flat_view(out, "all_to_all as `out`")
            fits = out.dtype == array.dtype and out.shape[1:] == array.shape[1:] and out.shape
            if not fits or (counts is None and out.shape != array.shape):
                raise self._refused(
                    f"all_to_all got `out` of {out.dtype.name} {out.shape} for an array of "
                    f"{array.dtype.name} {array.shape}",
                    "Pass an array of the result's shape and dtype.",
                )
            if np.may_share_memory(out, array):
                raise self._refused("all_to_all got `out` that shares memory with its array", "")
        session = self._session
        arguments: tuple[Any, ...] = session.uneven.all_to_all, array, flat, out
        if known_counts is not None:
            parts = known_counts.astype(np.int64)
        if counts is not None:
            arguments = session.uneven.all_to_all_uneven, array, flat, out, parts
        return session.calls.run("all_to_all", array, signature, async_op, *arguments)

    def gather(
        self, array: np.ndarray, root: int = 0, *, signature: int = 0, async_op: bool = False
    ) -> Any:
        """Join the arrays of all ranks along the first dimension, in rank order, on rank `root`.

        Args:
            array: as for `all_gather`.
            root: the rank that gets them; equal on all ranks.
            signature, async_op: as for `all_reduce`.

        Returns:
            On `root` a new array of shape (sum of first dimensions, ...), owned by the caller;
            elsewhere one of shape (0, ...).

        Raises: as `all_gather`; ArrayError also when `root` is not a rank.
        """
        root = checked_root(root, self.size, self._config.who)
        flat = flat_view(array, "gather", writable=False)
        arguments = self._session.uneven.gather, array, flat, root
        return self._session.calls.run("gather", array, signature, async_op, *arguments)

    def scatter(
        self,
        array: np.ndarray | None = None,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        signature: int = 0,
        async_op: bool = False,
    ) -> Any:
        """Give each rank a part of the array of rank `root`: the first to rank 0, and so on.

        Args:
            array: on `root`, C-contiguous, with at least one dimension, along which it is cut; only
                read, and only while this runs. Ignored elsewhere.
            root: the rank whose array it is; equal on all ranks.
            counts: on `root`, rows for each rank; None: the same number. Ignored elsewhere.
            signature, async_op: as for `all_reduce`.

        Returns:
            This rank's part, shape (rows, ...): a new array, owned by the caller.

        Raises:
            As `all_reduce`; ArrayError on `root` alone when `array` or `counts` is refused. The
            other ranks still wait for it, so let that error end the process.
        """
        root = checked_root(root, self.size, self._config.who)
        source, parts = np.empty(0, np.uint8), [0] * self.size
        if self.rank == root:
            if not isinstance(array, np.ndarray) or not array.shape:
                what = "()" if hasattr(array, "shape") else type(array).__name__
                raise self._refused(
                    f"scatter got {what} on its root", "Pass a numpy array with rows there."
                )
            source = array
            parts = checked_counts(counts, len(array), self.size, self._config.who)
        flat = flat_view(source, "scatter", writable=False)
        arguments = self._session.uneven.scatter, source, flat, parts, root
        return self._session.calls.run("scatter", source, signature, async_op, *arguments)

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """The object that rank `root` passed, on every rank.

        Args:
            value: on `root`, anything that msgspec encodes as MessagePack: numbers, text, bytes,
                lists, dicts, dataclasses (which arrive as dicts). Ignored elsewhere.
            root: the rank whose object is sent; equal on all ranks.

        Returns:
            `value` itself on `root`, a decoded copy elsewhere.

        Raises:
            As `all_reduce`; ArrayError, on all ranks, when `value` cannot be encoded or is over
            64 MiB. The communicator still works.
        """
        root = checked_root(root, self.size, self._config.who)
        sent, run = value if self.rank == root else None, self._session.uneven.broadcast
        received = self._session.calls.objects(Kind.BROADCAST_OBJECT, sent, run, root, 0)
        return value if self.rank == root else decode(received, self._config.who)

    def all_gather_object(self, value: Any, *, signature: int = 0) -> list[Any]:
        """The objects that all ranks passed, in rank order: `size` decoded copies.

        Args:
            value: as for `broadcast_object`.
            signature: as for `all_reduce`.

        Raises: as `broadcast_object`.
        """
        return self._session.calls.gather(Kind.ALL_GATHER_OBJECT, value, signature)

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """The objects that all ranks passed, in rank order, on rank `root`; None elsewhere.

        Args:
            value: as for `broadcast_object`.
            root: the rank that gets them, as decoded copies; equal on all ranks.

        Raises: as `broadcast_object`; ArrayError only on the rank whose value it is, and on `root`.
        """
        root = checked_root(root, self.size, self._config.who)
        run, who = self._session.uneven.gather_object, self._config.who
        gathered = self._session.calls.objects(Kind.GATHER_OBJECT, value, run, root)
        return [decode(encoded, who) for encoded in gathered] if self.rank == root else None

    def scatter_object(self, values: Sequence[Any] | None = None, root: int = 0) -> Any:
        """One of the objects that rank `root` passed: the first on rank 0, and so on.

        Args:
            values: on `root`, one object for each rank, as for `broadcast_object`. Ignored
                elsewhere.
            root: the rank whose objects they are; equal on all ranks.

        Returns:
            A decoded copy, also on `root`.

        Raises: as `broadcast_object`; ArrayError on `root` alone when there are not `size` values.
        """
        root, who = checked_root(root, self.size, self._config.who), self._config.who
        payloads: list[np.ndarray] = []
        refusal = None
        if self.rank == root:
            if values is None or len(values) != self.size:
                count = "None" if values is None else f"{len(values)} objects"
                raise self._refused(
                    f"scatter_object got {count} on its root",
                    f"Pass a list of {self.size}, one for each rank, there.",
                )
            try:
                payloads = [encode(value) for value in values]
            except ArrayError as error:
                refusal, payloads = error, [encode_refusal(error, who)] * self.size
        nbytes = sum(payload.size for payload in payloads)
        run = self._session.uneven.scatter_object
        received = self._session.calls.call("scatter_object", nbytes, run, payloads, root)
        if refusal is not None:
            raise refusal
        return decode(received, who)

    def send(self, array: np.ndarray, to: int, *, tag: int = 0, async_op: bool = False) -> Any:
        """Send `array` to rank `to`, which calls `recv`.

        Returns when the array may be changed again. That may be before it was received, or only
        then: two ranks that send to each other before they receive need `async_op`. What nobody has
        received when the ranks close is lost.

        Args:
            array: C-contiguous; only read, and only while this runs.
            to: another rank.
            tag: a number that the receiver passes too, 0 to 2**63 - 1.
            async_op: return at once; a thread sends it, after all that was to be sent there before.

        Returns:
            None, or a `Work` that owns the array until it is done.

        Raises:
            ArrayError: the array's dtype or layout is not supported, or `to` is not another rank,
                or `tag` is not such a number; nothing was sent.
            MismatchError: that rank receives another count, dtype or tag next, or has left.
            PeerTimeoutError: it received nothing for ``timeout_s``, or did something else for
                ``busy_timeout_s``.
            PeerLostError, ProtocolError, ClosedError: as `all_reduce`.
        """
        messages = self._session.messages
        if not async_op and messages.again(True, to, tag, array):
            return None
        peer, number = self._checked(to, tag)
        flat = flat_view(array, "send", writable=False)
        return messages.array(True, peer, number, flat, async_op, None)

    def recv(self, array: np.ndarray, source: int, *, tag: int = 0, async_op: bool = False) -> Any:
        """Fill `array` with the next array that rank `source` sends to this one.

        Args:
            array: C-contiguous, writable, of as many elements of the same dtype as the one sent;
                its shape may differ. Must not be touched by others until this returns.
            source: another rank.
            tag: the number that the sender passes.
            async_op: return at once; a thread receives it, after all that was to be received from
                there before.

        Returns:
            `array` itself; with `async_op` a `Work`, whose ``wait()`` returns it.

        Raises: as `send`; MismatchError if another count, dtype or tag was sent, PeerTimeoutError
            if that rank sent nothing in time.
        """
        messages = self._session.messages
        if not async_op and messages.again(False, source, tag, array):
            return array
        peer, number = self._checked(source, tag)
        flat = flat_view(array, "recv")
        return messages.array(False, peer, number, flat, async_op, array)

    def send_object(self, value: Any, to: int, *, tag: int = 0) -> None:
        """Send an object to rank `to`, which calls `recv_object`.

        Args:
            value: as for `broadcast_object`.
            to, tag: as for `send`.

        Raises: as `send`; ArrayError also when `value` cannot be encoded or is over 64 MiB.
        """
        peer, number = self._checked(to, tag)
        self._session.messages.object(True, peer, number, encode(value))

    def recv_object(self, source: int, *, tag: int = 0) -> Any:
        """The next object that rank `source` sends to this one, a decoded copy.

        Args, Raises: as `recv`.
        """
        peer, number = self._checked(source, tag)
        nothing = np.empty(0, np.uint8)
        payload = self._session.messages.object(False, peer, number, nothing)
        return decode(payload, self._config.who)

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

    def _use(self, session: Session) -> None:
        self._session, self._config = session, session.config
        self._rank, self._size = session.group_rank, session.size

    def _refused(self, problem: str, remedy: str) -> ArrayError:
        return ArrayError(problem, **self._config.who, remedy=remedy)

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

    def _checked(self, peer: int, tag: int) -> tuple[int, int]:
        who = self._config.who
        return checked_peer(peer, self.rank, self.size, who), checked_tag(tag, who)
