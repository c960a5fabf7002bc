"""AEGIS-128L for compiled functions, from the libsodium that pyzmq's wheels bring.

AEGIS-128L encrypts and authenticates at once, by the processor's AES instruction: F. Denis,
S. Lucas, "The AEGIS Family of Authenticated Encryption Algorithms", draft-irtf-cfrg-aegis-aead;
H. Wu, B. Preneel, "AEGIS: A Fast Authenticated Encryption Algorithm", 2013.
"""

import ctypes
from functools import cache

import llvmlite.binding
from numba import types

from ringreduce.transport.libzmq import declare, library

KEY_BYTES, TAG_BYTES = 16, 32

_ENCRYPT = "crypto_aead_aegis128l_encrypt_detached"
_DECRYPT = "crypto_aead_aegis128l_decrypt_detached"
_address, _size = types.intp, types.uint64

# (cipher, tag, 0, text, text bytes, header, header bytes, 0, nonce, key)
encrypt = declare(
    _ENCRYPT, types.intc, _address, _address, _address, _address, _size, _address, _size, _address,
    _address, _address,
)  # fmt: skip
# (text, 0, cipher, cipher bytes, tag, header, header bytes, nonce, key): 0 if all are as sealed
decrypt = declare(
    _DECRYPT, types.intc, _address, _address, _address, _size, _address, _address, _size, _address,
    _address,
)  # fmt: skip


@cache
def load() -> bool:
    """Make both functions known to compiled code; return whether this libsodium has them."""
    loaded = library()
    # Without `sodium_init` it uses no instructions of the processor, at a seventieth of the speed.
    if hasattr(loaded, _ENCRYPT) and loaded.sodium_init() >= 0:
        return True
    # The linker needs an address also for what is never called.
    never = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    for name in (_ENCRYPT, _DECRYPT):
        llvmlite.binding.add_symbol(name, never)
    return False
