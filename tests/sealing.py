"""Sealed frames by another way: libsodium called from Python, keys made from the documentation."""

import ctypes
import hashlib
import struct

from ringreduce.transport import libzmq

TAG_BYTES = 32
HEADER_BYTES = 64

_library = libzmq.library()
_library.sodium_init()


def encrypt(key: bytes, nonce: bytes, text: bytes, associated: bytes) -> tuple[bytes, bytes]:
    """Ciphertext and tag."""
    cipher, tag = ctypes.create_string_buffer(len(text)), ctypes.create_string_buffer(TAG_BYTES)
    arguments = [text, ctypes.c_ulonglong(len(text)), associated]
    _library.crypto_aead_aegis128l_encrypt_detached(
        *(cipher, tag, None, *arguments, ctypes.c_ulonglong(len(associated)), None, nonce, key)
    )
    return cipher.raw, tag.raw


def frame_key(
    *,
    secret: str,
    job_id: str,
    material: bytes,
    job: int,
    keys: tuple[bytes, bytes],
    route: tuple[int, int, int],
    group: int = 0,
    epoch: int = 0,
) -> bytes:
    """As docs/security.md gives it; `keys` and `route` are those of sender and receiver."""

    def blake(data: bytes, **options: object) -> bytes:
        return hashlib.blake2b(data, **options).digest()  # type: ignore[arg-type]

    job_key = blake(job_id.encode(), key=blake(secret.encode()), person=b"ringreduce job")
    session = blake(struct.pack("<Q", job) + job_key, key=material, person=b"rr session")
    message = struct.pack("<HHIII", group, epoch, *route) + keys[0] + keys[1]
    return blake(message, key=session, person=b"rr frames", digest_size=16)


class Sealer:
    """Seals frames as the sender on one channel does."""

    def __init__(self, key: bytes) -> None:
        self._key, self.count = key, 0

    def seal(self, header: bytes, payload: bytes) -> bytes:
        """The next frame."""
        nonce = struct.pack("<QQ", self.count, 0)
        self.count += 1
        cipher, tag = encrypt(self._key, nonce, payload, header)
        return header + tag + cipher
