"""Memory to one rank, and from one, compiled: the loop of pairs of ranks.

      this rank  -- segment 0, 1, ... -->  one rank
      this rank  <-- segment 0, 1, ... --  another one, or the same

All that may be sent is queued before anything is waited for. As in the ring
(`ringreduce.transport.loop`), plain segments are borrowed, sending never waits, and the function
returns when it is done or needs a decision. Of sealed segments only some have their ciphertexts in
memory at a time: more are sealed when libzmq has written some, also while segments arrive.
"""

import numpy as np
from numba import carray

from ringreduce.transport import libzmq
from ringreduce.transport.frames import INLINE_BYTES_MAX, receive, release, send
from ringreduce.transport.loop import CIPHERTEXTS_MAX, count_segments, is_released
from ringreduce.transport.records import CHANNEL, DONE, DRAINING, LINK, TRANSFER, pointer
from ringreduce.vocabulary.compiled import jit

HOLD_ALL = (1 << 63) - 1  # all borrowed segments may still be unwritten when the function returns

_MORE = -1  # a segment has arrived, and more are due


@jit
def run(sending, source, receiving, target, held_max):
    """Send and receive from where the two links stand; return a status code.

    Takes the addresses of a `LinkRecord` and a `TransferRecord` for each direction; a link of 0:
    there is nothing to do in that direction. It is done when all has arrived and libzmq has written
    all segments but `held_max`.
    """
    while True:
        posted = DONE if sending == 0 else _post(sending, source)
        if posted != DONE and posted != DRAINING:
            return posted
        taken = DONE if receiving == 0 else _take(receiving, target)
        if taken == _MORE:
            continue
        if taken != DONE or sending == 0:
            return taken
        link = carray(pointer(sending), 1, LINK)[0]
        channels = carray(pointer(link.channels), link.channel_count, CHANNEL)
        if not is_released(channels, 1, held_max if posted == DONE else CIPHERTEXTS_MAX - 1):
            return DRAINING
        if posted == DONE:
            return DONE


@jit
def _post(link_address, transfer_address):
    """Queue what may be queued; return DONE, DRAINING if that is not all, or a failure."""
    link = carray(pointer(link_address), 1, LINK)[0]
    channels = carray(pointer(link.channels), link.channel_count, CHANNEL)
    transfer = carray(pointer(transfer_address), 1, TRANSFER)[0]
    channel = channels[0]
    segments = count_segments(transfer.nbytes, link.segment_bytes)
    while link.started < segments:
        if link.is_sealed != 0 and channel.borrowed - channel.released >= CIPHERTEXTS_MAX:
            return DRAINING
        start = link.started * link.segment_bytes
        nbytes = min(link.segment_bytes, transfer.nbytes - start)
        transfer.header[5] = np.uint64(link.started) << np.uint64(32)
        transfer.header[6] = np.uint64(nbytes)
        status = send(
            link, channels, 0, transfer.header.ctypes.data, transfer.memory + start, nbytes,
            nbytes > INLINE_BYTES_MAX, False,
        )  # fmt: skip
        if status != DONE:
            return status
        link.bytes_sent += nbytes
        link.started += 1
    return DONE


@jit
def _take(link_address, transfer_address):
    """Receive the next segment; return _MORE, DONE if it was the last, or a failure."""
    link = carray(pointer(link_address), 1, LINK)[0]
    channels = carray(pointer(link.channels), link.channel_count, CHANNEL)
    transfer = carray(pointer(transfer_address), 1, TRANSFER)[0]
    segments = count_segments(transfer.nbytes, link.segment_bytes)
    if link.segment == segments:
        return DONE
    start = link.segment * link.segment_bytes
    nbytes = min(link.segment_bytes, transfer.nbytes - start)
    into = transfer.memory + start
    transfer.header[5] = np.uint64(link.segment) << np.uint64(32)
    transfer.header[6] = np.uint64(nbytes)
    status = receive(link, channels, 0, transfer.header, nbytes, into)
    if status != DONE:
        return status
    if nbytes > 0 and link.payload != into:
        libzmq.memcpy(into, link.payload, np.uint64(nbytes))
    release(link)
    link.frames += 1
    link.bytes_received += nbytes
    link.segment += 1
    return DONE if link.segment == segments else _MORE
