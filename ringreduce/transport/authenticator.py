"""The thread that decides which connections libzmq accepts.

libzmq asks it over ZAP (https://rfc.zeromq.org/spec/27). Once it is closed, libzmq refuses all
further connections (ZAP_ENFORCE_DOMAIN). Nothing here logs, shows or raises a key or a password.
"""

import contextlib
import hmac
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq

from ringreduce.vocabulary.config import TIMES

_log = logging.getLogger(__name__)

# Requests that may wait for the ranks to meet; a rank expects one connection for each domain.
_HELD_MAX = 1024
_LOGGED_EACH = 8


@dataclass(frozen=True)
class Credentials:
    """The proof that a rank shows when it connects, in libzmq's terms."""

    rank: int
    mechanism: bytes  # ``CURVE`` or ``PLAIN``
    # A public key of 32 bytes, or a name and a password.
    shown: tuple[bytes, ...] = field(repr=False)

    def fit(self, mechanism: bytes, shown: Sequence[bytes]) -> bool:
        """Whether `shown` is correct; the comparison takes constant time."""
        return (
            mechanism == self.mechanism
            and len(shown) == len(self.shown)
            and all([hmac.compare_digest(*pair) for pair in zip(shown, self.shown, strict=True)])
        )


class _Held(NamedTuple):
    """A connection that waits for the ranks to meet."""

    envelope: list[bytes]
    request: list[bytes]  # of ZAP 1.0, from libzmq itself: nobody else connects within the process
    until_s: float


class Authenticator:
    """Accepts or refuses connections, for all sockets of one context; see `Security`.

    Runs a thread until `close`; without a `context` it does nothing. `allow` and `close` may be
    called from any thread. A request may wait `hold_s` for `allow`; `refused` counts refusals.
    """

    def __init__(self, context: zmq.Context[Any] | None, hold_s: float) -> None:
        self.refused = 0
        self._hold_s = hold_s
        self._allowed: dict[bytes, Credentials | None] = {}
        self._held: list[_Held] = []
        self._logged_s = 0.0
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        if context is None:
            return
        # A ROUTER, not the usual REP, so that a request that waits does not delay others. What the
        # thread is to do comes the same way.
        self._requests, self._waker = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        for socket in (self._requests, self._waker):
            socket.setsockopt(zmq.LINGER, 0)
        self._requests.bind("inproc://zeromq.zap.01")
        self._waker.connect("inproc://zeromq.zap.01")
        name = "ringreduce authenticator"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def allow(self, domain: str, credentials: Credentials | None) -> None:
        """Accept this rank, or nobody, from now on; a password is good for one connection."""
        with self._lock:
            if self._thread is not None:
                self._allowed[domain.encode()] = credentials
                self._wake(b"allow")

    def close(self) -> None:
        """End the thread; all further connections are refused. Call it before the context ends."""
        with self._lock:
            if self._thread is None:
                return
            self._wake(b"close")
            self._thread.join()
            self._waker.close()
            self._thread = None

    def _wake(self, order: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # The thread has ended already.
            self._waker.send(order, zmq.DONTWAIT)

    def _run(self) -> None:
        try:
            while True:
                wait_ms = None
                if self._held:
                    until_s = min(held.until_s for held in self._held)
                    wait_ms = max(1, int((until_s - time.monotonic()) * 1000))
                if self._requests.poll(wait_ms):
                    parts = self._requests.recv_multipart()
                    if parts[1:] == [b"close"]:
                        return
                    if parts[1:] != [b"allow"]:
                        held = _Held(parts[:2], parts[2:], time.monotonic() + self._hold_s)
                        self._held.append(held)
                waiting, self._held = self._held, []
                for held in waiting:
                    self._answer(held)
        except zmq.ZMQError as error:
            # The context has ended: all are refused, as intended.
            _log.debug("the authenticator ends: %s", error.strerror)
        finally:
            self._requests.close()

    def _answer(self, held: _Held) -> None:
        """Accept, refuse, or keep waiting."""
        _, _, domain, _, _, mechanism, *shown = held.request
        if domain not in self._allowed:
            if time.monotonic() < held.until_s and len(self._held) < _HELD_MAX:
                self._held.append(held)
            else:
                self._reply(held, None, "that came before the ranks had met")
            return
        credentials = self._allowed[domain]
        if credentials is not None and credentials.fit(mechanism, shown):
            if mechanism == b"PLAIN":
                # An eavesdropper knows the password now, and a rank connects only once.
                self._allowed[domain] = None
            self._reply(held, credentials.rank, "")
        else:
            self._reply(held, None, "without the key of a rank that is due there")

    def _reply(self, held: _Held, rank: int | None, why: str) -> None:
        version, number, _, address, *_ = held.request
        verdict = (b"400", b"refused", b"") if rank is None else (b"200", b"OK", b"%d" % rank)
        # Counted before the reply, so that the refused side finds it counted.
        self.refused += rank is None
        with contextlib.suppress(zmq.ZMQError):  # The one that asked may have left.
            self._requests.send_multipart([*held.envelope, version, number, *verdict, b""])
        now = time.monotonic()
        is_told = self.refused <= _LOGGED_EACH or now - self._logged_s >= TIMES.refusal_pause_s
        if rank is None and is_told:
            self._logged_s = now
            text = "refused a connection from %s %s (%d so far)"
            _log.warning(text, address.decode(errors="backslashreplace"), why, self.refused)
