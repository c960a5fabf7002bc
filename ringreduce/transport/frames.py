"""Frames over ZeroMQ, compiled: send one, receive the one that is due.

    plain    header | payload           in one message, or two where the payload is lent
    sealed   header | tag | ciphertext  the same

Sealed frames are encrypted and authenticated by AEGIS-128L (`ringreduce.transport.sodium`). The
header stays readable, and is authenticated too: it is the associated data. The nonce is the number
of frames sealed before on this channel; both ends count, so a frame that is lost, repeated, moved
or changed on the way does not open. A frame is opened before its header is compared, into the
message's own memory or that of a payload of just the length due; nothing is believed of it before.

Large payloads are lent to libzmq (``zmq_msg_init_data``): plain ones, and those that nobody needs
any more, which are encrypted where they are. Other ciphertexts are allocated. Either way libzmq's
free callback counts in the channel's `released` when it has written one.
"""

import errno

import numpy as np

from ringreduce.pure.wire import HEADER_BYTES, MAGIC, WIRE_VERSION
from ringreduce.transport import libzmq, records, sodium
from ringreduce.transport.records import DONE, ChannelRecord
from ringreduce.transport.sodium import TAG_BYTES
from ringreduce.vocabulary.compiled import jit
from ringreduce.vocabulary.cores import are_crowded

# Up to this size a payload is copied behind the header in the same message: that is cheaper than a
# second message and the wait for its release.
INLINE_BYTES_MAX = 16384
# Before a thread that awaits a frame sleeps: about 100 us. More makes large messages slower, and so
# does any with fewer cores than ranks (docs/performance.md).
_YIELDS = 100
# Frames that one key seals: at a million a second, nine years' worth.
FRAMES_PER_KEY_MAX = 1 << 48

SEALED_OVERHEAD_BYTES = HEADER_BYTES + TAG_BYTES
# Parts of a message that are read before its sender counts as broken.
_PARTS_MAX = 16

_CHANNEL_BYTES = records.CHANNEL.itemsize
_RELEASED_AT = ChannelRecord.released.offset
_SEAL_KEY_AT, _SEAL_NONCE_AT = ChannelRecord.seal_key.offset, ChannelRecord.seal_nonce.offset
_OPEN_KEY_AT, _OPEN_NONCE_AT = ChannelRecord.open_key.offset, ChannelRecord.open_nonce.offset

# libzmq's constants: flags, errno values and message properties of the C API.
DONTWAIT, _SNDMORE, _SRCFD = 1, 2, 2
_EINTR, _EAGAIN, _ENOMEM = errno.EINTR, errno.EAGAIN, errno.ENOMEM

# Magic and version in word 0, the epoch in word 2.
_GREETING = np.uint64(MAGIC | WIRE_VERSION << 32)
_GREETING_BITS, _EPOCH_BITS = np.uint64(0xFFFFFFFFFF), np.uint64(0xFFFF)
# A frame of another epoch.
_STALE = -1
_MESSAGE_BYTES = 64


def load() -> None:
    """Make what the loops call known to compiled code, and libzmq quicker with large messages."""
    libzmq.load()
    sodium.load()  # The linker needs it, whether frames are sealed or not.
    libzmq.keep_large_blocks()


def yields(ranks: int) -> int:
    """How often to yield the core while a frame is awaited, with `ranks` on this host."""
    return 0 if are_crowded(ranks) else _YIELDS


@jit
def send(link, channels, number, header, payload, nbytes, lends, is_spent):
    """Queue a frame without waiting, from the addresses of header and payload.

    Returns DONE or a failure. With `lends` the channel's `released` counts when libzmq has written
    it, and a plain payload is borrowed until then; so is one that nobody needs any more
    (`is_spent`), which is encrypted where it is.
    """
    channel = channels[number]
    is_sealed = link.is_sealed != 0
    if is_sealed and channel.seal_nonce[0] >= np.uint64(FRAMES_PER_KEY_MAX):
        return records.KEY_ENDED
    begin = SEALED_OVERHEAD_BYTES if is_sealed else HEADER_BYTES
    is_apart = lends and (is_spent or not is_sealed)  # The payload is a message of its own.
    msg = link.message.ctypes.data
    size = np.uint64(begin if is_apart else begin + nbytes)
    if lends and not is_apart:
        data = libzmq.malloc(size)
        if data == 0:
            link.errno = _ENOMEM
            return records.FAILED
        libzmq.msg_init_data(msg, data, size, link.free, _counter(channels, number))
        channel.borrowed += 1
    else:
        libzmq.msg_init_size(msg, size)
        data = libzmq.msg_data(msg)
    libzmq.memcpy(data, header, np.uint64(HEADER_BYTES))
    if is_sealed:
        record = channels.ctypes.data + number * _CHANNEL_BYTES
        cipher = payload if is_apart else data + SEALED_OVERHEAD_BYTES
        sodium.encrypt(
            cipher, data + HEADER_BYTES, 0, payload, np.uint64(nbytes), data,
            np.uint64(HEADER_BYTES), 0, record + _SEAL_NONCE_AT, record + _SEAL_KEY_AT,
        )  # fmt: skip
        # Before it is sent: whatever becomes of it, this nonce has been used.
        channel.seal_nonce[0] += np.uint64(1)
    elif nbytes > 0 and not is_apart:
        libzmq.memcpy(data + HEADER_BYTES, payload, np.uint64(nbytes))
    status = _send_message(link, channels, number, msg, _SNDMORE if is_apart else 0)
    if status == DONE and is_apart:
        # Without a copy.
        counter = _counter(channels, number)
        libzmq.msg_init_data(msg, payload, np.uint64(nbytes), link.release, counter)
        channel.borrowed += 1
        status = _send_message(link, channels, number, msg, 0)
    if status == DONE:
        channel.sent += 1
        link.bytes_sent += nbytes
    return status


@jit
def _send_message(link, channels, number, msg, flags):
    link.channel = number
    while libzmq.msg_send(msg, channels[number].sender, DONTWAIT | flags) < 0:
        link.errno = libzmq.errno()
        if link.errno != _EINTR:
            libzmq.msg_close(msg)
            # The queue is unbounded, so EAGAIN can only mean that there is no connection.
            return records.UNSENDABLE if link.errno == _EAGAIN else records.FAILED
    return DONE


@jit
def _counter(channels, number):
    """Address of the channel's `released`."""
    return channels.ctypes.data + number * _CHANNEL_BYTES + _RELEASED_AT


@jit
def receive(link, channels, number, expected, nbytes, into):
    """Receive the frame due; return DONE or a failure.

    Due are the header `expected`, uint64 of shape (8,), and `nbytes` of payload. After DONE the
    payload is at ``link.payload`` until the caller calls `release`: at address `into`, if that is
    not 0 and frames are sealed. After a failure nothing is to be released; ``link.received`` has
    the header that came.
    """
    link.channel = number
    channel = channels[number]
    first = link.message.ctypes.data
    libzmq.msg_init(first)
    if not _receive_soon(first, channel, link.yields):
        link.errno = libzmq.errno()
        return records.WAITING if link.errno == _EAGAIN or link.errno == _EINTR else records.FAILED
    source = libzmq.msg_get(first, _SRCFD)
    if link.is_sealed != 0:
        status = _open(link, channels, number, first, expected, nbytes, into)
    else:
        status = _read(link, channel, first)
    if status != records.CORRUPT and status != records.FOREIGN:
        channel.source = source
    if status == DONE:
        if not _is_equal(link.received, expected):
            status = records.MISMATCH
        elif link.payload_bytes != nbytes:
            status = records.MISSHAPEN
    if status != DONE:
        release(link)
        # A frame of another epoch counts as not come.
        return records.WAITING if status == _STALE else status
    channel.taken += 1
    link.frames += 1
    link.bytes_received += nbytes
    return DONE


@jit
def release(link):
    """Free the messages of the frame that `receive` has returned."""
    first = link.message.ctypes.data
    libzmq.msg_close(first)
    libzmq.msg_close(first + _MESSAGE_BYTES)


@jit
def _receive_soon(msg, channel, yields):
    """Receive a message; wait first by yielding the core so many times, then asleep, for a while.

    To wake a thread costs more than most messages take to come.
    """
    for _ in range(yields):
        if libzmq.msg_recv(msg, channel.receiver, DONTWAIT) >= 0:
            return True
        libzmq.sched_yield()
    return libzmq.msg_recv(msg, channel.receiver, 0) >= 0


@jit
def _receive_now(msg, channel):
    """Receive a message without waiting; signals do not end this."""
    while libzmq.msg_recv(msg, channel.receiver, DONTWAIT) < 0:
        if libzmq.errno() != _EINTR:
            return False
    return True


@jit
def _parts(link, channel, msg, head_bytes):
    """Find a message's payload, behind `head_bytes` or in a second part; return whether it fits.

    A message of another shape is read to its end, with a limit.
    """
    second = msg + _MESSAGE_BYTES
    libzmq.msg_init(second)
    size = np.int64(libzmq.msg_size(msg)) - head_bytes
    link.payload, link.payload_bytes = libzmq.msg_data(msg) + head_bytes, size
    if libzmq.msg_more(msg) == 0:
        return size >= 0
    # Parts of one message arrive together, so this does not wait.
    for part in range(_PARTS_MAX):
        libzmq.msg_close(second)
        libzmq.msg_init(second)
        if not _receive_now(second, channel):
            return False
        if libzmq.msg_more(second) == 0:
            link.payload = libzmq.msg_data(second)
            link.payload_bytes = np.int64(libzmq.msg_size(second))
            return part == 0 and size == 0
    return False


@jit
def _read(link, channel, msg):
    """Copy a plain frame's header to the link's record, and look whose frame it is."""
    is_whole = _parts(link, channel, msg, HEADER_BYTES)
    if libzmq.msg_size(msg) < HEADER_BYTES:
        link.received[:] = 0
        return records.FOREIGN
    libzmq.memcpy(link.received.ctypes.data, libzmq.msg_data(msg), np.uint64(HEADER_BYTES))
    status = _look(link)
    return records.MISSHAPEN if status == DONE and not is_whole else status


@jit
def _open(link, channels, number, msg, expected, nbytes, into):
    """Do as `_read` with a sealed frame; open it `into` there if it is the one due."""
    received, nonce = link.received, channels[number].open_nonce
    if not _parts(link, channels[number], msg, SEALED_OVERHEAD_BYTES):
        received[:] = 0
        nonce[0] += np.uint64(1)
        return records.CORRUPT
    data = libzmq.msg_data(msg)
    libzmq.memcpy(received.ctypes.data, data, np.uint64(HEADER_BYTES))
    cipher, size = link.payload, link.payload_bytes
    if into != 0 and size == nbytes and _is_equal(received, expected):
        link.payload = into
    record = channels.ctypes.data + number * _CHANNEL_BYTES
    failed = sodium.decrypt(
        link.payload, 0, cipher, np.uint64(size), data + HEADER_BYTES, data,
        np.uint64(HEADER_BYTES), record + _OPEN_NONCE_AT, record + _OPEN_KEY_AT,
    )  # fmt: skip
    nonce[0] += np.uint64(1)
    return records.CORRUPT if failed != 0 else _look(link)


@jit
def _look(link):
    """Whose frame the one in the link's record is."""
    received = link.received
    if received[0] & _GREETING_BITS != _GREETING or received[1] != link.job:
        return records.FOREIGN
    if received[2] & _EPOCH_BITS != np.uint64(link.epoch):
        return _STALE
    return DONE


@jit
def _is_equal(received, expected):
    for word in range(8):  # noqa: SIM110  numba compiles no generators with all()
        if received[word] != expected[word]:
            return False
    return True
