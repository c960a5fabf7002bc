"""The ring: one compiled function that runs any schedule over pairs of ZeroMQ sockets.

For each segment that arrives, without Python and without the GIL:

      previous rank                      this rank                         next rank
      ------------->  header == expected?  combine/copy  finish?  forward  ------------->
                      checksum right?

Segment i of a chunk travels on stream i modulo the number of streams, each a pair of sockets, and
is received in that order, so several connections need no reordering.

Sending borrows the caller's buffer (``zmq_msg_init_data``). In a reduce-scatter, a segment's memory
changes only after it was sent, since the sum that overwrites it depends on its arrival; in an
all-gather nothing guarantees that. So libzmq's free callback counts the borrowed segments that were
written, for each socket separately since their I/O threads may differ, and the function returns
only when all were: then the buffer is the caller's again.

Sending never blocks, so ranks cannot deadlock in a cycle of sends: the outgoing queue is unbounded,
and costs little since its memory is borrowed. The receiver bounds how far a sender runs ahead: its
queue holds RECEIVE_QUEUE_FRAMES, and behind that TCP holds the sender back.

The function returns when it is done or needs a decision: nothing arrived for a while, or not what
was due. `ringreduce.transport.zeromq` handles deadlines, signals and errors, and calls it again to
continue from the state in the link's record.
"""

from __future__ import annotations

import errno
from typing import Any

import numba
import numpy as np
from numba import carray

from ringreduce.pure.checksum import crc32c
from ringreduce.pure.kernels import call_kernel
from ringreduce.pure.notification import ABORT_BYTES_MAX
from ringreduce.pure.schedule import FINISH, FORWARD, REDUCE, segment_count
from ringreduce.pure.wire import HEADER_BYTES, Kind
from ringreduce.transport import libzmq
from ringreduce.transport.records import (
    CHANNEL,
    CONTROL,
    CORRUPT,
    DONE,
    DRAINING,
    FAILED,
    FOREIGN,
    LINK,
    MISMATCH,
    MISSHAPEN,
    PASS,
    PASS_STEP,
    UNSENDABLE,
    WAITING,
    ChannelRecord,
    pointer,
)

# Up to this size a payload is copied behind the header in the same message: that is cheaper than a
# second message and the wait for its release.
INLINE_BYTES_MAX = 16384

_NOT_KNOWN = -1  # no checksum
_CHANNEL_BYTES = CHANNEL.itemsize
_RELEASED_AT = ChannelRecord.released.offset

# libzmq's constants: flags, errno values and message properties of the C API.
_DONTWAIT, _SNDMORE, _SRCFD = 1, 2, 2
_FIRST_CONTROL_KIND = int(Kind.ABORT)
_EINTR, _EAGAIN = errno.EINTR, errno.EAGAIN
# How long to wait for borrowed segments before the caller checks its deadlines.
_DRAIN_YIELDS, _DRAIN_SLEEPS, _DRAIN_SLEEP_US = 200, 1000, 50

_segment_count = numba.njit(nogil=True, cache=True)(segment_count)


@numba.njit(nogil=True, cache=True)
def run(link_address: Any, call_address: Any, buffer: Any) -> Any:
    """Run one rank's schedule from where the link stands; return a status code.

    Takes the addresses of the `LinkRecord`, the `PassRecord` and the memory with all chunks.
    """
    link = carray(pointer(link_address), 1, LINK)[0]
    channels = carray(pointer(link.channels), link.channel_count, CHANNEL)
    call = carray(pointer(call_address), 1, PASS)[0]
    steps = carray(pointer(call.steps), call.step_count, PASS_STEP)
    first_msg = link.message.ctypes.data
    second_msg = first_msg + 64

    if call.first_start >= 0:
        segments = _segment_count(call.first_end - call.first_start, link.segment_bytes)
        while link.started < segments:
            status = _send(
                link, channels, call, buffer, call.first_start, call.first_end, link.started,
                call.offset, np.int64(_NOT_KNOWN),
            )  # fmt: skip
            if status != DONE:
                return status
            link.started += 1

    while link.step < call.step_count:
        step = steps[link.step]
        number = link.step + call.offset
        segments = _segment_count(step.end - step.start, link.segment_bytes)
        while link.segment < segments:
            segment = link.segment
            stream = segment % link.streams
            start = step.start + segment * link.segment_bytes
            nbytes = min(link.segment_bytes, step.end - start)
            separate = nbytes > INLINE_BYTES_MAX
            call.incoming[5] = np.uint64(number) | (np.uint64(segment) << np.uint64(32))
            call.incoming[6] = np.uint64(nbytes)

            inline_bytes = 0 if separate else nbytes
            status = receive_header(
                link, channels[stream], stream, first_msg, call.incoming, inline_bytes, separate
            )
            if status != DONE:
                return status
            payload = libzmq.msg_data(first_msg) + HEADER_BYTES
            if separate:
                # Parts of one message arrive together, so this does not wait.
                libzmq.msg_init(second_msg)
                if libzmq.msg_recv(second_msg, channels[stream].receiver, 0) < 0:
                    libzmq.msg_close(first_msg)
                    return _receive_failed(link)
                if libzmq.msg_size(second_msg) != nbytes or libzmq.msg_more(second_msg) != 0:
                    libzmq.msg_close(first_msg)
                    libzmq.msg_close(second_msg)
                    return MISSHAPEN
                payload = libzmq.msg_data(second_msg)

            status = verify(link, payload, nbytes)
            if status != DONE:
                if separate:
                    libzmq.msg_close(second_msg)
                libzmq.msg_close(first_msg)
                return status

            target = buffer + start
            if nbytes > 0:
                if step.action & REDUCE:
                    call_kernel(call.combine, target, payload, nbytes // call.itemsize)
                else:
                    libzmq.memcpy(target, payload, np.uint64(nbytes))
                if step.action & FINISH and call.finish != 0:
                    call_kernel(call.finish, target, call.divisor, nbytes // call.itemsize)
            if separate:
                libzmq.msg_close(second_msg)
            libzmq.msg_close(first_msg)
            link.frames += 1
            link.bytes_received += nbytes
            # Before sending: if the send fails, this segment must not be expected again.
            link.segment += 1
            if step.action & FORWARD:
                known = np.int64(_NOT_KNOWN)
                if step.action & (REDUCE | FINISH) == 0:
                    # Forwarded as received: keep the sender's checksum, which also covers errors
                    # in this rank's memory.
                    known = np.int64(link.received[6] >> np.uint64(32))
                status = _send(
                    link, channels, call, buffer, step.start, step.end, segment, number + 1, known
                )
                if status != DONE:
                    return status
        link.step += 1
        link.segment = 0

    for _ in range(_DRAIN_YIELDS):
        if _is_released(channels, link.streams):
            return DONE
        libzmq.sched_yield()
    for _ in range(_DRAIN_SLEEPS):
        if _is_released(channels, link.streams):
            return DONE
        libzmq.usleep(np.uint32(_DRAIN_SLEEP_US))
    return DRAINING


@numba.njit(nogil=True, cache=True)
def post(link_address: Any, channel: Any, frame: Any, nbytes: Any) -> Any:
    """Queue a frame of `nbytes`, header included, at address `frame`; return DONE or a failure.

    It is borrowed and must live until the channel's `released` has reached its `borrowed`.
    """
    link = carray(pointer(link_address), 1, LINK)[0]
    channels = carray(pointer(link.channels), link.channel_count, CHANNEL)
    return _lend(link, channels, channel, frame, nbytes)


@numba.njit(nogil=True, cache=True)
def send_message(link: Any, channel: Any, number: Any, msg: Any, flags: Any) -> Any:
    """Queue the message at address `msg` on `channel` without waiting; return DONE or a failure."""
    link.channel = number
    if libzmq.msg_send(msg, channel.sender, _DONTWAIT | flags) < 0:
        link.errno = libzmq.errno()
        libzmq.msg_close(msg)
        # The queue is unbounded, so EAGAIN can only mean that there is no connection.
        return UNSENDABLE if link.errno == _EAGAIN else FAILED
    if flags & _SNDMORE == 0:
        channel.sent += 1
    return DONE


@numba.njit(nogil=True, cache=True)
def receive_header(
    link: Any, channel: Any, number: Any, msg: Any, expected: Any, inline_bytes: Any, is_more: Any
) -> Any:
    """Receive the first part of the frame due, at address `msg`; return DONE or a failure.

    After DONE the caller must close the message; else it is closed already. `link` gets a copy of
    the header. Due are the header `expected`, uint64 of shape (8,), with `inline_bytes` of payload
    behind it, and a second part if `is_more`.
    """
    link.channel = number
    libzmq.msg_init(msg)
    if libzmq.msg_recv(msg, channel.receiver, 0) < 0:
        return _receive_failed(link)
    channel.source = libzmq.msg_get(msg, _SRCFD)
    status = _check(link, msg, expected, inline_bytes, is_more)
    if status != DONE:
        libzmq.msg_close(msg)
        return status
    channel.taken += 1
    return DONE


@numba.njit(nogil=True, cache=True)
def verify(link: Any, payload: Any, nbytes: Any) -> Any:
    """CORRUPT unless `nbytes` at address `payload` have the checksum in the last header."""
    if link.checked == 0:
        return DONE
    checksum = crc32c(payload, nbytes)
    link.computed = np.int64(checksum)
    return DONE if checksum == link.received[6] >> np.uint64(32) else CORRUPT


@numba.njit(nogil=True, cache=True)
def _is_released(channels: Any, streams: Any) -> Any:
    """Whether libzmq has written all borrowed memory of the streams."""
    for stream in range(streams):  # noqa: SIM110  numba compiles no generators with all()
        if channels[stream].released < channels[stream].borrowed:
            return False
    return True


@numba.njit(nogil=True, cache=True)
def _send(
    link: Any,
    channels: Any,
    call: Any,
    buffer: Any,
    chunk_start: Any,
    chunk_end: Any,
    segment: Any,
    step: Any,
    known: Any,
) -> Any:
    """Queue one segment of a chunk, borrowed if large; `known` is its checksum, or _NOT_KNOWN."""
    number = segment % link.streams
    start = chunk_start + segment * link.segment_bytes
    nbytes = min(link.segment_bytes, chunk_end - start)
    call.outgoing[5] = np.uint64(step) | (np.uint64(segment) << np.uint64(32))
    call.outgoing[6] = np.uint64(nbytes)
    if link.checked != 0:
        checksum = crc32c(buffer + start, nbytes) if known == _NOT_KNOWN else np.uint64(known)
        call.outgoing[6] |= checksum << np.uint64(32)
    separate = nbytes > INLINE_BYTES_MAX
    inline_bytes = 0 if separate else nbytes

    msg = link.message.ctypes.data
    libzmq.msg_init_size(msg, np.uint64(HEADER_BYTES + inline_bytes))
    data = libzmq.msg_data(msg)
    libzmq.memcpy(data, call.outgoing.ctypes.data, np.uint64(HEADER_BYTES))
    if inline_bytes > 0:
        libzmq.memcpy(data + HEADER_BYTES, buffer + start, np.uint64(inline_bytes))
    flags = _SNDMORE if separate else 0
    status = send_message(link, channels[number], number, msg, flags)
    if status == DONE and separate:
        status = _lend(link, channels, number, buffer + start, nbytes)
    if status == DONE:
        link.bytes_sent += nbytes
    return status


@numba.njit(nogil=True, cache=True)
def _lend(link: Any, channels: Any, number: Any, memory: Any, nbytes: Any) -> Any:
    """Queue `nbytes` at address `memory` without a copy; return DONE or a failure."""
    msg = link.message.ctypes.data
    counter = channels.ctypes.data + number * _CHANNEL_BYTES + _RELEASED_AT
    libzmq.msg_init_data(msg, memory, np.uint64(nbytes), link.release, counter)
    channels[number].borrowed += 1
    return send_message(link, channels[number], number, msg, 0)


@numba.njit(nogil=True, cache=True)
def _check(link: Any, msg: Any, expected: Any, inline_bytes: Any, is_more: Any) -> Any:
    """Compare the header in `msg` with the one due; copy it to the link's record."""
    received = link.received
    size = np.int64(libzmq.msg_size(msg))
    if size < HEADER_BYTES:
        received[:] = 0
        return FOREIGN
    data = libzmq.msg_data(msg)
    libzmq.memcpy(received.ctypes.data, data, np.uint64(HEADER_BYTES))
    low_40_bits = np.uint64(0xFFFFFFFFFF)
    if (received[0] ^ expected[0]) & low_40_bits != 0 or received[1] != expected[1]:
        return FOREIGN
    if (received[0] >> np.uint64(40)) & np.uint64(0xFF) >= _FIRST_CONTROL_KIND:
        link.control_bytes = min(size - HEADER_BYTES, ABORT_BYTES_MAX)
        libzmq.memcpy(link.control.ctypes.data, data + HEADER_BYTES, np.uint64(link.control_bytes))
        return CONTROL
    for word in range(8):
        difference = received[word] ^ expected[word]
        if link.checked != 0 and word == 6:
            difference &= np.uint64(0xFFFFFFFF)
        if difference != 0:
            return MISMATCH
    if size != HEADER_BYTES + inline_bytes or (libzmq.msg_more(msg) != 0) != is_more:
        return MISSHAPEN
    return DONE


@numba.njit(nogil=True, cache=True)
def _receive_failed(link: Any) -> Any:
    link.errno = libzmq.errno()
    return WAITING if link.errno == _EAGAIN or link.errno == _EINTR else FAILED
