"""Who may connect: keys made from the job's secret, and the authenticator that asks for them.

A job has one secret, known to its ranks alone. Three things follow from it:

- The rendezvous is always encrypted (CURVE). Both of its key pairs are derived from the secret
  and the job id, so whoever lacks either cannot finish the handshake; keys are announced there.
- Every rank makes a fresh key pair for each ring and announces its public half. Each socket that
  others connect to has a domain and a list of the ranks that are due there, and a rank is
  whoever holds the key that was announced for it.
- What the data sockets speak is `mechanism`: CURVE proves both sides and encrypts; PLAIN proves
  the connecting side by a password that holds for this sender, this receiver and these keys;
  NULL, without a secret, proves nothing and is for loopback addresses alone.

libzmq asks the authenticator over ZAP (https://rfc.zeromq.org/spec/27) before it lets a connection
in. Once it is closed there is nobody to ask, and libzmq refuses everyone (ZAP_ENFORCE_DOMAIN).

Nothing here logs, shows or raises a key, a password or the secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils import z85

from ringreduce.transport.address import is_loopback, resolve
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.errors import ConfigError, NativeError, RendezvousError
from ringreduce.vocabulary.times import milliseconds

__all__ = ["MECHANISMS", "OVERHEAD_BYTES", "Authenticator", "Security"]

_log = logging.getLogger(__name__)

MECHANISMS = ("NULL", "PLAIN", "CURVE")
# What CURVE adds to a message is 33 bytes.
OVERHEAD_BYTES = 64
MEETING = "meeting"

_BACKLOG = 128
_KEY_BYTES = 32
_KEY_TEXT = 40
# Requests that may wait for the ranks to meet; a rank expects one connection for each domain.
_HELD_MAX = 1024
_LOGGED_EACH = 8


class Security:
    """One rank's keys, and what it asks of those who connect.

    Args:
        secret: the job's; empty: nobody is asked for anything.
        job_id: what the job is called.
        rank, size: this rank, and the number of ranks.
        is_encrypted: whether data sockets speak CURVE rather than PLAIN; needs a secret.
        hold_s: how long someone who connects before the ranks have met is kept waiting.

    Attributes:
        mechanism: one of `MECHANISMS`, of the data sockets.

    Raises:
        NativeError: there is a secret, and libzmq was built without encryption.
    """

    def __init__(
        self,
        *,
        secret: str = "",
        job_id: str = "",
        rank: int = 0,
        size: int = 1,
        is_encrypted: bool = False,
        hold_s: float = 30.0,
    ) -> None:
        self._rank, self._size, self._hold_s = rank, size, hold_s
        self.mechanism = "NULL"
        self._public = self._private = b""
        self._keys: tuple[bytes, ...] = ()
        if not secret:
            return
        if not zmq.has("curve"):
            raise NativeError(
                "has a secret, but this libzmq was built without encryption (CURVE)",
                rank=rank,
                size=size,
                remedy="Install pyzmq from its wheel, which has it.",
            )
        self.mechanism = "CURVE" if is_encrypted else "PLAIN"
        # Secrets may be longer than BLAKE2b's keys, job ids are anything.
        master = hashlib.blake2b(secret.encode(errors="surrogatepass")).digest()
        self._job_key = hashlib.blake2b(
            job_id.encode(errors="surrogatepass"), key=master, person=b"ringreduce job"
        ).digest()
        self._public, self._private = zmq.curve_keypair()

    @classmethod
    def of(cls, config: Config) -> Security:
        """What `config` asks for; a fresh key pair each time.

        Raises:
            ConfigError: the ranks would meet on a network without a secret.
            RendezvousError: the rendezvous host's name does not resolve.
            NativeError: libzmq was built without encryption.
        """
        is_local = config.size == 1 or is_loopback(resolve(config)[1][0])
        if not config.secret and (not is_local or config.encryption == "on"):
            what = (
                f"would let anybody on the network join at {config.rendezvous}: "
                "that is no loopback address, and the job has no secret"
                if not is_local
                else "has no secret to encrypt with"
            )
            raise ConfigError(
                what,
                rank=config.rank,
                size=config.size,
                remedy="Give all ranks the same RINGREDUCE_SECRET, or a RINGREDUCE_SECRET_FILE "
                "of mode 600; `openssl rand -hex 32` makes one.",
            )
        return cls(
            secret=config.secret,
            job_id=config.job_id,
            is_encrypted=config.encryption == "on"
            or (config.encryption == "auto" and not is_local),
            hold_s=config.join_timeout_s,
            rank=config.rank,
            size=config.size,
        )

    @property
    def public(self) -> str:
        """This rank's public key as Z85 text, for the others; empty without a secret."""
        return self._public.decode()

    def learn(self, keys: Sequence[str]) -> None:
        """Take over every rank's `public`, as the meeting has told them.

        Raises:
            RendezvousError: they are not one key for each rank, with this rank's own in place.
        """
        if self.mechanism == "NULL":
            return
        found = tuple(key.encode(errors="replace") for key in keys)
        if (
            len(found) != self._size
            or len(set(found)) != self._size
            or not all(_is_key(key) for key in found)
            or not hmac.compare_digest(found[self._rank], self._public)
        ):
            raise RendezvousError(
                "was told keys that are not one for each rank",
                rank=self._rank,
                size=self._size,
                peer=0,
                remedy="Start all ranks with the same ringreduce and the same secret.",
            )
        self._keys = found

    def serve(self, socket: zmq.Socket[Any], domain: str) -> None:
        """Have `socket` ask those who will connect to it; call it before ``bind``.

        Args:
            domain: what an authenticator of the socket's context is told to `Authenticator.allow`.
        """
        _limit(socket)
        if self.mechanism == "CURVE":
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._private)
        elif self.mechanism == "PLAIN":
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        else:
            return
        _enforce(socket, domain)

    def join(self, socket: zmq.Socket[Any], peer: int) -> None:
        """Have `socket` show who we are; call it after `learn` and before ``connect``.

        Args:
            peer: the rank that it will connect to.
        """
        if self.mechanism == "CURVE":
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys[peer])
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._private)
        elif self.mechanism == "PLAIN":
            socket.setsockopt(zmq.PLAIN_USERNAME, str(self._rank).encode())
            socket.setsockopt(zmq.PLAIN_PASSWORD, self._password(self._rank, peer))

    def authenticator(self, context: zmq.Context[Any]) -> Authenticator:
        """Who answers for all sockets of `context`; have it before the first of them binds."""
        return Authenticator(
            None if self.mechanism == "NULL" else context, self._is_rank, self._hold_s
        )

    def serve_meeting(self, socket: zmq.Socket[Any], context: zmq.Context[Any]) -> Authenticator:
        """Rank 0's side of the rendezvous: let in whoever has the secret; before ``bind``."""
        _limit(socket, max(_BACKLOG, self._size))
        if self.mechanism == "NULL":
            return Authenticator(None, _nobody, 0.0)
        member, _ = self._derived(b"rr member")
        keeper = Authenticator(
            context,
            lambda _, mechanism, shown: (
                mechanism == b"CURVE"
                and len(shown) == 1
                and hmac.compare_digest(_text_of(shown[0]), member)
            ),
            0.0,
        )
        keeper.allow(MEETING, [0])
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._derived(b"rr rank 0")[1])
        _enforce(socket, MEETING)
        return keeper

    def join_meeting(self, socket: zmq.Socket[Any]) -> None:
        """The other ranks' side of the rendezvous; before ``connect``."""
        if self.mechanism == "NULL":
            return
        public, private = self._derived(b"rr member")
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._derived(b"rr rank 0")[0])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, private)

    def _derived(self, name: bytes) -> tuple[bytes, bytes]:
        """The job's key pair of that name, public and private."""
        digest = hashlib.blake2b(key=self._job_key, person=name, digest_size=_KEY_BYTES).digest()
        private = z85.encode(digest)
        return zmq.curve_public(private), private

    def _password(self, sender: int, receiver: int) -> bytes:
        """What `sender` shows `receiver`; the keys in it are new for each ring."""
        message = struct.pack("<QQ", sender, receiver) + self._keys[sender] + self._keys[receiver]
        digest = hashlib.blake2b(message, key=self._job_key, person=b"rr password", digest_size=32)
        return digest.hexdigest().encode()

    def _is_rank(self, rank: int, mechanism: bytes, shown: list[bytes]) -> bool:
        """Whether credentials are those of `rank`."""
        if mechanism.decode(errors="replace") != self.mechanism or not self._keys:
            return False
        if self.mechanism == "CURVE":
            return len(shown) == 1 and hmac.compare_digest(_text_of(shown[0]), self._keys[rank])
        return (
            len(shown) == 2
            and hmac.compare_digest(shown[0], str(rank).encode())
            and hmac.compare_digest(shown[1], self._password(rank, self._rank))
        )


@dataclass
class _Held:
    """Someone who waits for the ranks to meet."""

    envelope: list[bytes]
    request: list[bytes]
    until_s: float


class Authenticator:
    """A thread that decides who gets in, for all sockets of one context; see `Security`.

    Thread: its own, from making to `close`. `allow` and `close` may be called from any.

    Args:
        context: whose sockets it answers for; None: nobody is asked, and nothing is done.
        is_rank: whether ``(rank, mechanism, credentials)`` are that rank's.
        hold_s: how long a request may wait for its domain to be allowed.

    Attributes:
        refused: number of those who were turned away.
    """

    def __init__(
        self,
        context: zmq.Context[Any] | None,
        is_rank: Callable[[int, bytes, list[bytes]], bool],
        hold_s: float,
    ) -> None:
        self.refused = 0
        self._is_rank, self._hold_s = is_rank, hold_s
        self._allowed: dict[bytes, tuple[int, ...]] = {}
        self._held: list[_Held] = []
        self._logged_s = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if context is None:
            return
        name = f"inproc://authenticator.{secrets.token_hex(8)}"
        with contextlib.ExitStack() as opened:
            # A router rather than the usual REP, so that one who is kept waiting keeps nobody else.
            self._requests = opened.enter_context(context.socket(zmq.ROUTER))
            self._requests.setsockopt(zmq.LINGER, 0)
            self._requests.bind("inproc://zeromq.zap.01")
            self._bell = opened.enter_context(context.socket(zmq.PAIR))
            self._bell.setsockopt(zmq.LINGER, 0)
            self._bell.bind(name)
            self._button = opened.enter_context(context.socket(zmq.PAIR))
            self._button.setsockopt(zmq.LINGER, 0)
            self._button.connect(name)
            opened.pop_all()
        self._thread = threading.Thread(target=self._run, name="ringreduce door", daemon=True)
        self._thread.start()

    def allow(self, domain: str, ranks: Collection[int]) -> None:
        """Let `ranks` into the sockets of `domain`, those included who wait already."""
        with self._lock:
            if self._thread is not None:
                self._allowed[domain.encode()] = tuple(ranks)
                self._ring(b"allow")

    def close(self) -> None:
        """End; whoever connects from now on is refused. Call it before the context goes."""
        with self._lock:
            if self._thread is None:
                return
            self._ring(b"close")
            self._thread.join()
            self._button.close()
            self._thread = None

    def _ring(self, word: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # The thread has ended already.
            self._button.send(word, zmq.DONTWAIT)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._requests, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(self._wait_ms()))
                if self._bell in ready and self._bell.recv() == b"close":
                    return
                if self._requests in ready:
                    parts = self._requests.recv_multipart()
                    held = _Held(parts[:2], parts[2:], time.monotonic() + self._hold_s)
                    self._held.append(held)
                waiting, self._held = self._held, []
                for held in waiting:
                    self._answer(held)
        except zmq.ZMQError as error:
            # The context has ended under us: nobody is let in, which is what remains to be done.
            _log.debug("the authenticator ends: %s", error.strerror)
        finally:
            self._requests.close()
            self._bell.close()

    def _wait_ms(self) -> int | None:
        if not self._held:
            return None
        until_s = min(held.until_s for held in self._held)
        return max(1, int((until_s - time.monotonic()) * 1000))

    def _answer(self, held: _Held) -> None:
        """Say yes or no, or keep waiting."""
        request = held.request
        if (
            len(held.envelope) != 2
            or held.envelope[1] != b""
            or not 6 <= len(request) <= 8
            or request[0] != b"1.0"
            or any(len(part) > 255 for part in request)
        ):
            self._reply(held, None, "that asks in another way than ZAP 1.0")
            return
        domain, mechanism, shown = request[2], request[5], request[6:]
        ranks = self._allowed.get(domain)
        if ranks is None:
            if time.monotonic() < held.until_s and len(self._held) < _HELD_MAX:
                self._held.append(held)
            else:
                self._reply(held, None, "that came before the ranks had met")
            return
        # All are compared, whichever it is, so that the time tells nothing.
        fitting = [rank for rank in ranks if self._is_rank(rank, mechanism, shown)]
        if fitting:
            self._reply(held, fitting[0], "")
        else:
            self._reply(held, None, "without the key of a rank that is due there")

    def _reply(self, held: _Held, rank: int | None, why: str) -> None:
        number = held.request[1] if len(held.request) > 1 else b""
        verdict = (b"400", b"refused", b"") if rank is None else (b"200", b"OK", b"%d" % rank)
        # Counted before it is said: whoever has been refused finds it counted.
        self.refused += rank is None
        with contextlib.suppress(zmq.ZMQError):  # Whoever asked may have left.
            self._requests.send_multipart([*held.envelope, b"1.0", number, *verdict, b""])
        if rank is None:
            self._tell(held.request, why)

    def _tell(self, request: list[bytes], why: str) -> None:
        """Log a refusal: the first few, then now and then with their number."""
        now = time.monotonic()
        if self.refused <= _LOGGED_EACH or now - self._logged_s >= TIMES.refusal_pause_s:
            self._logged_s = now
            sender = request[3][:64].decode(errors="replace") if len(request) > 3 else "unknown"
            _log.warning(
                "refused a connection from %s %s (%d so far)",
                *(sender.encode("unicode_escape").decode(), why, self.refused),
            )


def _limit(socket: zmq.Socket[Any], backlog: int = _BACKLOG) -> None:
    """Bound what those who have proven nothing yet can cost a listening socket."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(TIMES.handshake_s))
    socket.setsockopt(zmq.BACKLOG, backlog)


def _enforce(socket: zmq.Socket[Any], domain: str) -> None:
    socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
    # Without it a socket whose context has no authenticator lets everybody in.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _nobody(rank: int, mechanism: bytes, shown: list[bytes]) -> bool:
    return False


def _text_of(key: bytes) -> bytes:
    """A key as ZAP gives it, as Z85 text; nothing of the right form when it is none."""
    return z85.encode(key) if len(key) == _KEY_BYTES else b""


def _is_key(text: bytes) -> bool:
    if len(text) != _KEY_TEXT:
        return False
    try:
        return len(z85.decode(text)) == _KEY_BYTES
    except (KeyError, ValueError, struct.error):
        return False
