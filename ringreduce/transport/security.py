"""Who may connect, and the keys that frames are sealed with; all made from the job's secret.

docs/security.md says which socket requires what, and what that protects from. Without a secret all
use NULL, which proves nothing and is for loopback addresses alone. Nothing here logs, shows or
raises a key, a password or the secret.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import logging
import struct
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils import z85

from ringreduce.pure.membership import Membership, whole
from ringreduce.transport import sodium
from ringreduce.transport.address import resolve
from ringreduce.transport.authenticator import Authenticator, Credentials
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.endpoints import is_loopback
from ringreduce.vocabulary.errors import ConfigError, NativeError, RendezvousError
from ringreduce.vocabulary.times import milliseconds

_log = logging.getLogger(__name__)

# How data between ranks can be encrypted, as ranks compare it.
UNENCRYPTED, AEGIS, CURVE = "none", "AEGIS-128L", "CURVE"
MATERIAL_BYTES = 32  # of the session, from rank 0
OVERHEAD_BYTES = 64  # CURVE adds 33 bytes to a message
_MEETING = "meeting"

_BACKLOG = 128
_KEY_BYTES = 32


class Security:
    """One rank's keys, and what it requires of ranks that connect.

    Without a `secret` nothing is required. A connection that arrives before the ranks have met may
    wait for `hold_s`. Raises NativeError if there is a secret, and libzmq was built without
    encryption.
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
        self.rank, self.size, self.hold_s = rank, size, hold_s
        # This rank, and the number of ranks in the job, for errors.
        self.who: dict[str, Any] = {"rank": rank, "size": size}
        self._session = b""
        # This rank's public and private key, and all ranks' public ones once they have met, as Z85
        # text; fresh for each ring, and empty without a secret.
        self.public_key = self.private_key = b""
        self.keys: tuple[bytes, ...] = ()
        self._job, self._membership = 0, whole(size)
        has_aegis = sodium.load()
        self.encryption = UNENCRYPTED  # of the data, `UNENCRYPTED`, `AEGIS` or `CURVE`
        if is_encrypted and secret:
            self.encryption = AEGIS if has_aegis else CURVE
        self.seals = self.encryption == AEGIS  # whether each frame is sealed
        required = "PLAIN" if secret else "NULL"
        # What the sockets for data, and of the control channel, require.
        mechanism = "CURVE" if self.encryption == CURVE else required
        self.data = Admission(self, mechanism, seals=self.seals)
        self.control = Admission(self, required if self.encryption == UNENCRYPTED else "CURVE")
        if not secret:
            return
        if not zmq.has("curve"):
            text = "has a secret, but this libzmq was built without encryption (CURVE)"
            remedy = "Install pyzmq from its wheel, which has it."
            raise NativeError(text, **self.who, remedy=remedy)
        # Hashed, since secrets may be longer than BLAKE2b's keys, and job ids are any text.
        master = hashlib.blake2b(secret.encode(errors="surrogatepass")).digest()
        self._job_key = hashlib.blake2b(
            job_id.encode(errors="surrogatepass"), key=master, person=b"ringreduce job"
        ).digest()
        self.public_key, self.private_key = zmq.curve_keypair()

    @classmethod
    def of(cls, config: Config) -> Security:
        """Make the security that `config` requires, with a fresh key pair.

        Raises ConfigError if the ranks would meet on a network, or encrypt, without a secret;
        RendezvousError if the rendezvous host's name does not resolve; NativeError as the class.
        """
        is_local = config.size == 1 or is_loopback(resolve(config)[0][0])
        if not config.secret and (not is_local or config.encryption == "on"):
            what = (
                f"would let anybody on the network join at {config.rendezvous}: "
                "that is no loopback address, and the job has no secret"
                if not is_local
                else "has no secret to encrypt with"
            )
            raise ConfigError(
                what,
                **config.who,
                remedy="Give all ranks the same RINGREDUCE_SECRET, or a RINGREDUCE_SECRET_FILE "
                "of mode 600; `openssl rand -hex 32` makes one.",
            )
        security = cls(
            secret=config.secret,
            job_id=config.job_id,
            is_encrypted=config.encryption == "on"
            or (config.encryption == "auto" and not is_local),
            hold_s=config.join_timeout_s,
            **config.who,
        )
        security._warn(is_local)
        return security

    def _warn(self, is_local: bool) -> None:
        """Log what this choice costs or leaves open, where that may be a surprise."""
        if self.rank == 0 and self.encryption == CURVE:
            _log.warning(
                "[0/%d] encrypts with CURVE, at most about 2 GB/s: this libsodium has no "
                "AEGIS-128L, which costs almost nothing; pyzmq's own wheel brings it",
                self.size,
            )
        elif self.rank == 0 and self.encryption == UNENCRYPTED and not is_local:
            _log.warning(
                "[0/%d] sends data unencrypted (RINGREDUCE_ENCRYPTION=off): the network can read "
                "and change it, and only TCP's 16-bit checksum detects errors on the way",
                self.size,
            )

    @property
    def public(self) -> str:
        """This rank's public key as Z85 text, for the others; empty without a secret."""
        return self.public_key.decode()

    def learn(self, keys: Sequence[str], material: bytes, job: int) -> None:
        """Store every rank's `public`, and make this ring's session key, from the rendezvous.

        Raises RendezvousError if there is not one key for each rank, this rank's own differs, or
        the material has another length.
        """
        if not self.public_key:
            return
        encoded = tuple(key.encode(errors="replace") for key in keys)
        if (
            len(encoded) != self.size
            or len(set(encoded)) != self.size
            or not all(_is_key(key) for key in encoded)
            or not hmac.compare_digest(encoded[self.rank], self.public_key)
            or len(material) != MATERIAL_BYTES
        ):
            text = "was told keys that are not one for each rank"
            remedy = "Start all ranks with the same ringreduce and the same secret."
            raise RendezvousError(text, **self.who, peer=0, remedy=remedy)
        self.keys, self._job = encoded, job
        self.start_session(material)

    def accepts(self, rank: int, key: str) -> bool:
        """Whether a newcomer at that rank may have this public key: one of its own, or none."""
        if not self.public_key:
            return not key
        encoded = key.encode(errors="replace")
        return _is_key(encoded) and encoded not in (*self.keys[:rank], *self.keys[rank + 1 :])

    def admit(self, rank: int, key: str) -> None:
        """From the next ring on that rank is a newcomer, with this public key."""
        if self.public_key:
            self.keys = (*self.keys[:rank], key.encode(), *self.keys[rank + 1 :])

    def for_group(self, membership: Membership) -> Security:
        """The same ranks' security in a group's ring, which needs a session of its own."""
        anew = copy.copy(self)
        anew.data = Admission(anew, self.data.mechanism, seals=self.seals)
        anew.control = Admission(anew, self.control.mechanism)
        anew._membership, anew._session = membership, b""
        return anew

    def start_session(self, material: bytes) -> None:
        """Make the keys of this ring's frames from 32 random bytes that all members know."""
        if self.public_key:
            # The secret alone does not give it, and neither does the material.
            self._session = hashlib.blake2b(
                struct.pack("<Q", self._job) + self._job_key, key=material, person=b"rr session"
            ).digest()

    def frame_key(self, sender: int, receiver: int, channel: int) -> bytes:
        """The key, 16 bytes, of frames from rank `sender` to rank `receiver` on `channel`.

        Both ranks' fresh public keys are in it, so it is new for each ring if only one of sender,
        receiver and rank 0 draws good random numbers.
        """
        group, epoch = self._membership.group, self._membership.epoch
        message = struct.pack("<HHIII", group, epoch, sender, receiver, channel)
        return hashlib.blake2b(
            message + self.keys[sender] + self.keys[receiver],
            key=self._session,
            person=b"rr frames",
            digest_size=sodium.KEY_BYTES,
        ).digest()

    def password(self, sender: int, receiver: int, channel: int) -> bytes:
        """The password that `sender` shows `receiver`; the keys in it are new for each ring.

        Ports that are opened later have a `channel`: an eavesdropper knows the first password then.
        """
        # A group has its ranks' keys, and a password that was read would open its ports too.
        group, epoch = self._membership.group, self._membership.epoch
        message = struct.pack("<HHQQI", group, epoch, sender, receiver, channel)
        message += self.keys[sender] + self.keys[receiver]
        digest = hashlib.blake2b(message, key=self._job_key, person=b"rr password", digest_size=32)
        return digest.hexdigest().encode()

    def door_secret(self, name: str) -> str:
        """What both ends of a connection at the door of that name must know (`transport.door`).

        Without a secret of the job anybody does who knows the name.
        """
        key = self._job_key if self.public_key else b""
        return hashlib.blake2b(name.encode(), key=key, person=b"rr door").hexdigest()

    def serve_meeting(self, socket: zmq.Socket[Any], context: zmq.Context[Any]) -> Authenticator:
        """Where ranks meet: accept those that have the secret; before ``bind``."""
        _limit(socket, max(_BACKLOG, self.size))
        if not self.public_key:
            return Authenticator(None, 0.0)
        authenticator = Authenticator(context, 0.0)
        public, _ = self._derived(b"rr member")
        member = Credentials(0, b"CURVE", (z85.decode(public),))
        authenticator.allow(_MEETING, member)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._derived(b"rr rank 0")[1])
        _enforce(socket, _MEETING)
        return authenticator

    def join_meeting(self, socket: zmq.Socket[Any]) -> None:
        """The side of those that come there; before ``connect``."""
        if not self.public_key:
            return
        public, private = self._derived(b"rr member")
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._derived(b"rr rank 0")[0])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, private)

    def _derived(self, name: bytes) -> tuple[bytes, bytes]:
        """The job's key pair with that name, public and private."""
        digest = hashlib.blake2b(key=self._job_key, person=name, digest_size=_KEY_BYTES).digest()
        private = z85.encode(digest)
        return zmq.curve_public(private), private


class Admission:
    """How the sockets of one kind recognize ranks that connect.

    `mechanism` is ``CURVE``, which proves both sides and encrypts; ``PLAIN``, which proves the
    connecting side by a password; or ``NULL``, which proves nothing. `seals` says whether each
    frame is sealed.
    """

    def __init__(self, security: Security, mechanism: str, *, seals: bool = False) -> None:
        self.security, self.mechanism, self.seals = security, mechanism, seals

    def serve(self, socket: zmq.Socket[Any], domain: str) -> None:
        """Make `socket` authenticate those that connect, as `domain`; call it before ``bind``."""
        _limit(socket)
        if self.mechanism == "CURVE":
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.security.private_key)
        elif self.mechanism == "PLAIN":
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        else:
            return
        _enforce(socket, domain)

    def join(self, socket: zmq.Socket[Any], peer: int, channel: int) -> None:
        """Give `socket` what `peer` requires on `channel`: after `learn`, before ``connect``."""
        if self.mechanism == "CURVE":
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.security.keys[peer])
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.security.public_key)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.security.private_key)
        elif self.mechanism == "PLAIN":
            socket.setsockopt(zmq.PLAIN_USERNAME, str(self.security.rank).encode())
            password = self.security.password(self.security.rank, peer, channel)
            socket.setsockopt(zmq.PLAIN_PASSWORD, password)

    def authenticator(self, context: zmq.Context[Any]) -> Authenticator:
        """The authenticator of all sockets of `context`; make it before the first ``bind``."""
        has_none = self.mechanism == "NULL"
        return Authenticator(None if has_none else context, self.security.hold_s)

    def credentials(self, rank: int, channel: int) -> Credentials:
        """The proof that `rank` must show on `channel`; call it after `Security.learn`."""
        if self.mechanism == "CURVE":
            return Credentials(rank, b"CURVE", (z85.decode(self.security.keys[rank]),))
        if self.mechanism == "PLAIN":
            password = self.security.password(rank, self.security.rank, channel)
            return Credentials(rank, b"PLAIN", (str(rank).encode(), password))
        return Credentials(rank, b"NULL", ())


def _limit(socket: zmq.Socket[Any], backlog: int = _BACKLOG) -> None:
    """Bound what connections can cost a listening socket before they have proven anything."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(TIMES.handshake_s))
    socket.setsockopt(zmq.BACKLOG, backlog)


def _enforce(socket: zmq.Socket[Any], domain: str) -> None:
    socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
    # Without it a socket whose context has no authenticator accepts everybody.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _is_key(text: bytes) -> bool:
    try:
        return len(z85.decode(text)) == _KEY_BYTES
    except (KeyError, ValueError, struct.error):
        return False
