"""The ring itself: one compiled function that runs any schedule over pairs of ZeroMQ sockets.

For each segment that arrives: check its header, combine it with our own (or copy it), and
send it on, all without Python and without the GIL:

      previous rank                      this rank                         next rank
      ------------->  header == expected?  combine/copy  finish?  forward  ------------->
                      checksum right?

Segment i of a chunk travels on stream i modulo the number of streams, each a pair of sockets,
and is received from there in that order: several connections, and nothing to put in order.

Sending borrows the caller's buffer (``zmq_msg_init_data``); nothing is copied on the way
out. A ring confirms by its data flow that a segment of the reduce-scatter has left before
its memory changes, since the sum that overwrites it depends on its arrival. Nothing
confirms the all-gather's. So libzmq's free callback counts the borrowed segments that it
has written out, for each socket by itself since their I/O threads may differ, and the
function returns only when all have been: afterwards the caller may do with the buffer what
it likes.

Sending never blocks: the outgoing queue is unbounded, which costs little because it holds
borrowed memory. How far a sender may run ahead is bounded at the receiver, whose queue
holds RECEIVE_QUEUE_FRAMES; behind it TCP pushes back. So no rank ever waits to send, and
the cycle in which each waits for the next cannot arise.

The function returns when it is done or when there is something to decide: nothing arrived
for a while, or what arrived is not what was due. Deadlines, signals and errors are the
caller's business (`ringreduce.transport.zeromq`); it calls again and the work goes on where
it stopped, which is what `state` is for.
"""

from __future__ import annotations

import errno
from typing import Any

import numba
import numpy as np

from ringreduce.pure.checksum import crc32c
from ringreduce.pure.kernels import call_kernel
from ringreduce.transport.libzmq import (
    memcpy,
    sched_yield,
    usleep,
    zmq_errno,
    zmq_msg_close,
    zmq_msg_data,
    zmq_msg_get,
    zmq_msg_init,
    zmq_msg_init_data,
    zmq_msg_init_size,
    zmq_msg_more,
    zmq_msg_recv,
    zmq_msg_send,
    zmq_msg_size,
)

# What the loop returns.
DONE = 0
WAITING = 1  # nothing arrived for one receive timeout, or a signal came
DRAINING = 2  # all is received; libzmq still holds borrowed segments
FOREIGN = 3  # a frame without our magic, version or job
MISMATCH = 4  # a frame of ours that is not the one due
MISSHAPEN = 5  # the header due, but a payload of another size
CONTROL = 6  # ABORT or GOODBYE: its payload is in `control`
UNSENDABLE = 7  # the next rank's connection is gone
FAILED = 8  # libzmq reported the errno in state[ERRNO]
CORRUPT = 9  # a payload whose checksum is state[COMPUTED] and not what its header says

# Where the loop stands: indices into `state`, int64.
STEP = 0
SEGMENT = 1
STARTED = 2  # segments of the first chunk sent; of an exchange, steps whose rows are sent
CHANNEL = 3  # index of the socket used last
FRAMES = 4  # frames received, ever: how progress is seen
BYTES_SENT = 5
BYTES_RECEIVED = 6
CONTROL_BYTES = 7
ERRNO = 8
COMPUTED = 9  # the checksum of the last payload that was checked
STATE_WORDS = 10

# What is kept of each pair of sockets: columns of `channels`, int64, one row for each pair.
SENDER = 0  # address of the socket to a next rank
RECEIVER = 1  # address of the socket from a previous rank
BORROWED = 2  # frames handed to the sender without a copy, ever
SOURCE = 3  # file descriptor the last frame came from; NO_SOURCE before the first
SENT = 4  # frames sent, ever
TAKEN = 5  # frames received, ever
CHANNEL_WORDS = 6
NO_SOURCE = -1

# Payloads up to this ride behind the header in the same message, by a copy: below it, the
# copy is cheaper than a second message and the wait for its release.
INLINE_BYTES_MAX = 16384

HEADER_BYTES = 64

_NOT_KNOWN = -1  # no checksum

# libzmq's constants: flags, errno values and message properties of the C API.
_DONTWAIT, _SNDMORE, _SRCFD = 1, 2, 2
_FIRST_CONTROL_KIND = 128
_EINTR, _EAGAIN = errno.EINTR, errno.EAGAIN
# How long to wait for borrowed segments before the caller gets to look at the clock.
_DRAIN_YIELDS, _DRAIN_SLEEPS, _DRAIN_SLEEP_US = 200, 1000, 50


@numba.njit(nogil=True, cache=True)
def run(
    channels: Any,
    streams: Any,
    memory: Any,
    bounds: Any,
    first: Any,
    chunks: Any,
    actions: Any,
    offset: Any,
    outgoing: Any,
    incoming: Any,
    segment_bytes: Any,
    itemsize: Any,
    combine: Any,
    finish: Any,
    divisor: Any,
    checked: Any,
    release: Any,
    released: Any,
    state: Any,
    message: Any,
    received: Any,
    control: Any,
) -> Any:
    """Run one rank's schedule from where `state` stands; return one of the codes above.

    Args:
        channels: int64 of shape (number, CHANNEL_WORDS), see above.
        streams: how many of them, from the first on, lead to the next rank.
        memory: uint8, what all chunks lie in.
        bounds: int64, byte offset of each chunk and the end of the last.
        first, chunks, actions, offset: the `Schedule`; arrays are int64.
        outgoing, incoming: uint64 of shape (8,), the headers we send and expect; their step,
            segment and length words are filled in here.
        segment_bytes: payload bytes of a full frame, a multiple of `itemsize`.
        combine, finish: kernel addresses; `divisor`, uint8, is what finish takes as source.
        checked: whether frames carry the checksum of their payload.
        release: address of the callback that counts channel c's released segments in
            ``released[c]``, int64.
        state: int64 of shape (STATE_WORDS,), see above.
        message: uint8 of shape (128,), room for two zmq_msg_t.
        received: uint64 of shape (8,), the last header that arrived.
        control: uint8, where the payload of a control frame is left.
    """
    buffer = memory.ctypes.data
    first_msg = message.ctypes.data
    second_msg = first_msg + 64

    if first >= 0:
        segments = _segments(bounds, first, segment_bytes)
        while state[STARTED] < segments:
            status = _send(
                channels, state[STARTED] % streams, buffer, bounds, first, state[STARTED], offset,
                outgoing, segment_bytes, checked, np.int64(_NOT_KNOWN), release, released, state,
                first_msg,
            )  # fmt: skip
            if status != DONE:
                return status
            state[STARTED] += 1

    while state[STEP] < chunks.size:
        step = state[STEP]
        chunk = chunks[step]
        action = actions[step]
        segments = _segments(bounds, chunk, segment_bytes)
        while state[SEGMENT] < segments:
            segment = state[SEGMENT]
            stream = segment % streams
            start = bounds[chunk] + segment * segment_bytes
            nbytes = min(segment_bytes, bounds[chunk + 1] - start)
            separate = nbytes > INLINE_BYTES_MAX
            incoming[5] = np.uint64(step + offset) | (np.uint64(segment) << np.uint64(32))
            incoming[6] = np.uint64(nbytes)

            status = receive_header(
                channels, stream, first_msg, incoming, received, 0 if separate else nbytes,
                separate, checked, control, state,
            )  # fmt: skip
            if status != DONE:
                return status
            payload = zmq_msg_data(first_msg) + HEADER_BYTES
            if separate:
                # Parts of one message arrive together, so this does not wait.
                zmq_msg_init(second_msg)
                if zmq_msg_recv(second_msg, channels[stream, RECEIVER], 0) < 0:
                    zmq_msg_close(first_msg)
                    return _receive_failed(state)
                if zmq_msg_size(second_msg) != nbytes or zmq_msg_more(second_msg) != 0:
                    zmq_msg_close(first_msg)
                    zmq_msg_close(second_msg)
                    return MISSHAPEN
                payload = zmq_msg_data(second_msg)

            if checked:
                status = verify(payload, nbytes, received, state)
                if status != DONE:
                    if separate:
                        zmq_msg_close(second_msg)
                    zmq_msg_close(first_msg)
                    return status

            target = buffer + start
            if nbytes > 0:
                if action & 1:
                    call_kernel(combine, target, payload, nbytes // itemsize)
                else:
                    memcpy(target, payload, np.uint64(nbytes))
                if action & 2 and finish != 0:
                    call_kernel(finish, target, divisor.ctypes.data, nbytes // itemsize)
            if separate:
                zmq_msg_close(second_msg)
            zmq_msg_close(first_msg)
            state[FRAMES] += 1
            state[BYTES_RECEIVED] += nbytes
            # Before sending: were the send to fail, this segment must not be awaited again.
            state[SEGMENT] += 1
            if action & 4:
                known = np.int64(_NOT_KNOWN)
                if action & 3 == 0:
                    # What goes on as it came keeps its sum, which so guards our memory too.
                    known = np.int64(received[6] >> np.uint64(32))
                status = _send(
                    channels, stream, buffer, bounds, chunk, segment, step + offset + 1, outgoing,
                    segment_bytes, checked, known, release, released, state, first_msg,
                )  # fmt: skip
                if status != DONE:
                    return status
        state[STEP] += 1
        state[SEGMENT] = 0

    for _ in range(_DRAIN_YIELDS):
        if _is_released(channels, released, streams):
            return DONE
        sched_yield()
    for _ in range(_DRAIN_SLEEPS):
        if _is_released(channels, released, streams):
            return DONE
        usleep(np.uint32(_DRAIN_SLEEP_US))
    return DRAINING


@numba.njit(nogil=True, cache=True)
def post(
    channels: Any, channel: Any, frame: Any, release: Any, released: Any, state: Any, message: Any
) -> Any:
    """Queue `frame`, uint8, header included, on `channel`; return DONE or why not.

    The frame is borrowed like a segment: it has left when ``released[channel]`` has reached
    ``channels[channel, BORROWED]``, and must live until then.
    """
    msg = message.ctypes.data
    counter = released.ctypes.data + 8 * channel
    zmq_msg_init_data(msg, frame.ctypes.data, np.uint64(frame.size), release, counter)
    channels[channel, BORROWED] += 1
    return send_message(channels, channel, msg, 0, state)


@numba.njit(nogil=True, cache=True)
def send_message(channels: Any, channel: Any, msg: Any, flags: Any, state: Any) -> Any:
    """Queue the message at address `msg` on `channel`, without waiting; return DONE or why not."""
    state[CHANNEL] = channel
    if zmq_msg_send(msg, channels[channel, SENDER], _DONTWAIT | flags) < 0:
        state[ERRNO] = zmq_errno()
        zmq_msg_close(msg)
        # The queue is unbounded, so "try again" can only mean that there is no connection.
        return UNSENDABLE if state[ERRNO] == _EAGAIN else FAILED
    if flags & _SNDMORE == 0:
        channels[channel, SENT] += 1
    return DONE


@numba.njit(nogil=True, cache=True)
def receive_header(
    channels: Any,
    channel: Any,
    msg: Any,
    expected: Any,
    received: Any,
    inline_bytes: Any,
    is_more: Any,
    checked: Any,
    control: Any,
    state: Any,
) -> Any:
    """Receive the message that begins the frame due, at address `msg`; return DONE or why not.

    It is the caller's to close after DONE, and closed after anything else.

    Args:
        channels, channel: where from.
        msg: room for a zmq_msg_t.
        expected: uint64 of shape (8,), the header due.
        received: where the one that came is left.
        inline_bytes: payload bytes due behind the header.
        is_more: whether a second part is due.
        checked: whether the header holds a checksum, which the caller then is to `verify`.
        control, state: as for `run`.
    """
    state[CHANNEL] = channel
    zmq_msg_init(msg)
    if zmq_msg_recv(msg, channels[channel, RECEIVER], 0) < 0:
        return _receive_failed(state)
    channels[channel, SOURCE] = zmq_msg_get(msg, _SRCFD)
    status = _check(msg, expected, received, inline_bytes, is_more, checked, control, state)
    if status != DONE:
        zmq_msg_close(msg)
        return status
    channels[channel, TAKEN] += 1
    return DONE


@numba.njit(nogil=True, cache=True)
def verify(payload: Any, nbytes: Any, received: Any, state: Any) -> Any:
    """DONE if `nbytes` at address `payload` have the checksum in `received`, else CORRUPT."""
    checksum = crc32c(payload, nbytes)
    state[COMPUTED] = np.int64(checksum)
    return DONE if checksum == received[6] >> np.uint64(32) else CORRUPT


@numba.njit(nogil=True, cache=True)
def _segments(bounds: Any, chunk: Any, segment_bytes: Any) -> Any:
    """`schedule.segment_count` of a chunk, for compiled callers."""
    return max(1, -(-(bounds[chunk + 1] - bounds[chunk]) // segment_bytes))


@numba.njit(nogil=True, cache=True)
def _is_released(channels: Any, released: Any, streams: Any) -> Any:
    """Whether libzmq has written out everything that the streams have borrowed."""
    for stream in range(streams):  # noqa: SIM110  numba compiles no generators with all()
        if released[stream] < channels[stream, BORROWED]:
            return False
    return True


@numba.njit(nogil=True, cache=True)
def _send(
    channels: Any,
    channel: Any,
    buffer: Any,
    bounds: Any,
    chunk: Any,
    segment: Any,
    step: Any,
    outgoing: Any,
    segment_bytes: Any,
    checked: Any,
    known: Any,
    release: Any,
    released: Any,
    state: Any,
    msg: Any,
) -> Any:
    """Queue one segment on `channel`; large ones are borrowed, not copied.

    `known` is its checksum, if it need not be computed.
    """
    start = bounds[chunk] + segment * segment_bytes
    nbytes = min(segment_bytes, bounds[chunk + 1] - start)
    outgoing[5] = np.uint64(step) | (np.uint64(segment) << np.uint64(32))
    outgoing[6] = np.uint64(nbytes)
    if checked:
        checksum = crc32c(buffer + start, nbytes) if known == _NOT_KNOWN else np.uint64(known)
        outgoing[6] |= checksum << np.uint64(32)
    separate = nbytes > INLINE_BYTES_MAX
    inline_bytes = 0 if separate else nbytes

    zmq_msg_init_size(msg, np.uint64(HEADER_BYTES + inline_bytes))
    data = zmq_msg_data(msg)
    memcpy(data, outgoing.ctypes.data, np.uint64(HEADER_BYTES))
    if inline_bytes > 0:
        memcpy(data + HEADER_BYTES, buffer + start, np.uint64(inline_bytes))
    status = send_message(channels, channel, msg, _SNDMORE if separate else 0, state)
    if status != DONE:
        return status
    if separate:
        counter = released.ctypes.data + 8 * channel
        zmq_msg_init_data(msg, buffer + start, np.uint64(nbytes), release, counter)
        channels[channel, BORROWED] += 1
        status = send_message(channels, channel, msg, 0, state)
        if status != DONE:
            return status
    state[BYTES_SENT] += nbytes
    return DONE


@numba.njit(nogil=True, cache=True)
def _check(
    msg: Any,
    expected: Any,
    received: Any,
    inline_bytes: Any,
    is_more: Any,
    checked: Any,
    control: Any,
    state: Any,
) -> Any:
    """Compare the header in `msg` with the one due; copy it to `received`."""
    size = np.int64(zmq_msg_size(msg))
    if size < HEADER_BYTES:
        received[:] = 0
        return FOREIGN
    data = zmq_msg_data(msg)
    memcpy(received.ctypes.data, data, np.uint64(HEADER_BYTES))
    low_40_bits = np.uint64(0xFFFFFFFFFF)
    if (received[0] ^ expected[0]) & low_40_bits != 0 or received[1] != expected[1]:
        return FOREIGN
    if (received[0] >> np.uint64(40)) & np.uint64(0xFF) >= _FIRST_CONTROL_KIND:
        state[CONTROL_BYTES] = min(size - HEADER_BYTES, control.size)
        memcpy(control.ctypes.data, data + HEADER_BYTES, np.uint64(state[CONTROL_BYTES]))
        return CONTROL
    for word in range(8):
        difference = received[word] ^ expected[word]
        if checked and word == 6:
            difference &= np.uint64(0xFFFFFFFF)
        if difference != 0:
            return MISMATCH
    if size != HEADER_BYTES + inline_bytes or (zmq_msg_more(msg) != 0) != is_more:
        return MISSHAPEN
    return DONE


@numba.njit(nogil=True, cache=True)
def _receive_failed(state: Any) -> Any:
    state[ERRNO] = zmq_errno()
    return WAITING if state[ERRNO] == _EAGAIN or state[ERRNO] == _EINTR else FAILED
