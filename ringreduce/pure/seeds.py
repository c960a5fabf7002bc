"""Seeds that follow from numbers, and tell nothing of them."""

import hashlib


def folded(*numbers: int) -> int:
    """A seed made of `numbers`, from 0 to 2^31 - 1."""
    text = " ".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1
