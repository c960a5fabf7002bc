"""The calls of a `Communicator` on objects, which travel as MessagePack."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.communicator.session import Handle
from ringreduce.pure.payload import checked_root, decode, encode, encode_or_refuse, encode_refusal
from ringreduce.pure.wire import Kind
from ringreduce.vocabulary.errors import ArrayError


class ObjectCalls(Handle):
    """Errors and threads are as `ringreduce.communicator.communicator` describes."""

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
        payload, refusal = np.empty(0, np.uint8), None
        if self.rank == root:
            payload, refusal = encode_or_refuse(value, self._config.who)
        arguments = self._session.uneven.broadcast, Kind.BROADCAST_OBJECT, payload, root, 0
        received = self._session.calls.call("broadcast_object", payload.size, *arguments)
        if refusal is not None:
            raise refusal
        return value if self.rank == root else decode(received, self._config.who)

    def all_gather_object(self, value: Any, *, signature: int = 0) -> list[Any]:
        """The objects that all ranks passed, in rank order: `size` decoded copies.

        Args:
            value: as for `broadcast_object`.
            signature: as for `all_reduce`.

        Raises: as `broadcast_object`.
        """
        return self._session.gather(Kind.ALL_GATHER_OBJECT, value, signature)

    def gather_object(self, value: Any, root: int = 0) -> list[Any] | None:
        """The objects that all ranks passed, in rank order, on rank `root`; None elsewhere.

        Args:
            value: as for `broadcast_object`.
            root: the rank that gets them, as decoded copies; equal on all ranks.

        Raises: as `broadcast_object`; ArrayError only on the rank whose value it is, and on `root`.
        """
        root = checked_root(root, self.size, self._config.who)
        payload, refusal = encode_or_refuse(value, self._config.who)
        run = self._session.uneven.gather_object
        gathered = self._session.calls.call("gather_object", payload.size, run, payload, root)
        if refusal is not None:
            raise refusal
        who = self._config.who
        return [decode(each, who) for each in gathered] if self.rank == root else None

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
