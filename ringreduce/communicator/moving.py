"""The calls of a `Communicator` that move arrays and objects, and compute nothing.

Objects travel as MessagePack. Errors and threads are as `ringreduce.communicator.communicator`
describes, but of calls between two ranks: a send or recv waits for no collective and holds none up,
nor does one direction the other. What a rank sends to another one is received in the order in which
it was sent: calls with one rank in one direction run one after the other, those with ``async_op``
in a thread of their own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.communicator.session import Session
from ringreduce.pure.payload import (
    checked_counts,
    checked_peer,
    checked_root,
    checked_tag,
    decode,
    encode,
    encode_refusal,
    flat_view,
)
from ringreduce.pure.wire import Kind
from ringreduce.vocabulary.errors import ArrayError


class MovingCalls:
    """The base of `Communicator`: its session, this rank's place, and these calls."""

    def _use(self, session: Session) -> None:
        self._session, self._config = session, session.config
        self._rank, self._size = session.group_rank, session.size

    def _refused(self, problem: str, remedy: str) -> ArrayError:
        return ArrayError(problem, **self._config.who, remedy=remedy)

    @property
    def rank(self) -> int:
        """This process's number in this communicator, 0 to size - 1."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

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

    def _checked(self, peer: int, tag: int) -> tuple[int, int]:
        who = self._config.who
        return checked_peer(peer, self.rank, self.size, who), checked_tag(tag, who)
