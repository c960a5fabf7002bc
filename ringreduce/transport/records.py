"""Memory that Python and the compiled loops share, and the codes that the loops return.

Python uses a record as a ctypes structure, a compiled function by its address and numpy dtype,
``carray(pointer(address), 1, LINK)[0]``: numba would inspect each array argument in every call,
which costs more than a small message. A link owns one `LinkRecord` and a `ChannelRecord` for each
pair of sockets; a kind of call owns a `PassRecord` or an `ExchangeRecord`, and a record per step.
Each direction of a pair of ranks has a `LinkRecord` of one channel, and a `TransferRecord`.
"""

import ctypes

import numpy as np
from numba import types
from numba.extending import intrinsic

NO_SOURCE = -1

# Codes that the loops return.
DONE = 0
WAITING = 1  # nothing arrived for one receive timeout, or a signal came
DRAINING = 2  # libzmq still holds borrowed segments, and nothing else can be done
FOREIGN = 3  # a frame without our magic, version or job
MISMATCH = 4  # a frame of ours that is not the one due
MISSHAPEN = 5  # the header due, but a payload of another size
UNSENDABLE = 6  # the next rank's connection is gone
FAILED = 7  # libzmq reported `errno`
CORRUPT = 8  # a sealed frame that does not open
KEY_ENDED = 9  # a channel's key has sealed as many frames as it may

_i64, _address = ctypes.c_int64, ctypes.c_int64
_Header = ctypes.c_uint64 * 8
_Key, _Nonce = ctypes.c_uint8 * 16, ctypes.c_uint64 * 2


class ChannelRecord(ctypes.Structure):
    """One pair of sockets: to a rank ahead, and from one behind."""

    _fields_ = (
        ("sender", _address),
        ("receiver", _address),
        ("borrowed", _i64),  # frames given to the sender without a copy, in all
        ("released", _i64),  # of these, those libzmq has freed; written by its I/O thread
        ("source", _i64),  # descriptor the last frame came from; NO_SOURCE before the first
        ("sent", _i64),  # frames, in all
        ("taken", _i64),  # frames received, in all
        # Keys of AEGIS-128L; the first word of a nonce counts the frames under its key.
        ("seal_key", _Key),
        ("seal_nonce", _Nonce),
        ("open_key", _Key),
        ("open_nonce", _Nonce),
    )


class LinkRecord(ctypes.Structure):
    """A link's parameters, and the state of its present call."""

    _fields_ = (
        ("channels", _address),
        ("channel_count", _i64),
        ("streams", _i64),  # how many channels, from the first on, lead to the next rank
        ("segment_bytes", _i64),  # payload of a full frame
        ("yields", _i64),  # of the core, while a frame is awaited, before the thread sleeps
        ("is_sealed", _i64),  # whether frames are encrypted and authenticated
        ("job", ctypes.c_uint64),
        ("epoch", _i64),
        ("release", _address),  # callback that counts up `released`
        ("free", _address),  # the same for ciphertexts, which it frees
        ("step", _i64),
        ("segment", _i64),
        ("started", _i64),  # segments of the first chunk sent; in an exchange, steps sent
        ("channel", _i64),  # the one used last
        ("frames", _i64),  # received in all; shows progress
        ("bytes_sent", _i64),
        ("bytes_received", _i64),
        ("errno", _i64),
        ("received", _Header),  # the last header that arrived
        ("scratch", _address),  # a full frame's payload, opened here before it is reduced
        ("payload", _address),  # of that frame
        ("payload_bytes", _i64),  # those behind its header in the same message
        ("message", ctypes.c_uint64 * 16),  # room for two zmq_msg_t
    )


class PassRecord(ctypes.Structure):
    """A pass around the ring: a `Schedule` on a buffer, in bytes."""

    _fields_ = (
        ("steps", _address),
        ("step_count", _i64),
        ("first_start", _i64),  # the chunk sent before anything is received; -1 for none
        ("first_end", _i64),
        ("offset", _i64),  # what frames call step 0
        ("itemsize", _i64),
        ("combine", _address),  # kernels; `finish` is 0 for none
        ("finish", _address),
        ("divisor", _address),  # of the element that `finish` divides by
        ("outgoing", _Header),  # headers; step, segment and length are filled in for each frame
        ("incoming", _Header),
    )


class ExchangeRecord(ctypes.Structure):
    """An exchange of rows."""

    _fields_ = (("steps", _address), ("step_count", _i64), ("row_bytes", _i64))


class TransferRecord(ctypes.Structure):
    """Memory that goes to one rank, or comes from it."""

    _fields_ = (
        ("header", _Header),  # segment and length are filled in for each frame
        ("memory", _address),
        ("nbytes", _i64),
    )


CHANNEL, LINK = np.dtype(ChannelRecord), np.dtype(LinkRecord)
PASS, EXCHANGE = np.dtype(PassRecord), np.dtype(ExchangeRecord)
TRANSFER = np.dtype(TransferRecord)
# Start and end of a step's chunk in bytes, and a sum of `schedule.REDUCE`, `FINISH` and `FORWARD`.
PASS_STEP = np.dtype([("start", "i8"), ("end", "i8"), ("action", "i8")])
# A step sends `count` rows `distance` ranks ahead; the headers sent and due are complete.
EXCHANGE_STEP = np.dtype(
    [("distance", "i8"), ("count", "i8"), ("outgoing", "u8", (8,)), ("incoming", "u8", (8,))]
)


@intrinsic
def pointer(typing, address):
    """Convert an address to a pointer, for `numba.carray`."""

    def build(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), build
