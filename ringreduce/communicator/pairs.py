"""The calls of a `Communicator` between two ranks."""

from typing import Any

import numpy as np

from ringreduce.communicator.handle import Handle
from ringreduce.pure.payload import checked_peer, checked_tag, decode, encode, flat_view


class PairCalls(Handle):
    """Errors are as `ringreduce.communicator.communicator` describes; threads are not.

    A send or recv waits for no collective and holds none up, nor does one direction the other. What
    a rank sends to another one is received in the order in which it was sent: calls with one rank
    in one direction run one after the other, those with ``async_op`` in a thread of their own.
    """

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
        return decode(self._session.messages.object(False, peer, number, nothing))

    def _checked(self, peer: int, tag: int) -> tuple[int, int]:
        who = self._config.who
        return checked_peer(peer, self.rank, self.size, who), checked_tag(tag, who)
