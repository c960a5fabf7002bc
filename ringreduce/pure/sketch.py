"""Arrays of any size as a few numbers from which differences of arrays can be read. Pure.

Each element is added to one of these numbers, with a sign by chance that is always the same. The
norm of a sketch is about that of the array, and since a sketch is linear the norm of a difference
of sketches is about that of the difference. A small array has its own elements as sketch. See:
Charikar, Chen and Farach-Colton, "Finding frequent items in data streams", ICALP 2002.
"""

import zlib

import numpy as np

LENGTH = 64  # The norm of a difference is right to a tenth, which is enough: limits are coarser.


def sketch(array: np.ndarray, name: str) -> np.ndarray:
    """`LENGTH` numbers, float64, for `array`; `name` chooses the signs. Not finite if that is not.

    Takes three times the memory of `array` for the moment.
    """
    flat = array.reshape(-1)
    if flat.size > LENGTH:
        chance = np.random.default_rng(zlib.crc32(name.encode()))
        bits = np.frombuffer(chance.bytes(-(-flat.size // 8)), np.uint8)
        flat = np.where(np.unpackbits(bits, count=flat.size), flat, -flat)
    padded = np.zeros(-(-max(flat.size, 1) // LENGTH) * LENGTH, flat.dtype)
    padded[: flat.size] = flat
    with np.errstate(invalid="ignore"):  # Of infinities with both signs.
        total: np.ndarray = padded.reshape(-1, LENGTH).sum(0, np.float64)
    return total
