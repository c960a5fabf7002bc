"""An exchange of rows in a few long strides, compiled: the short way for small messages.

In each step a rank sends all rows it holds so far to the rank `distance` places after it and
gets as many from the rank as far before it (`ringreduce.pure.schedule.exchange`):

      rank - distance                    this rank                     rank + distance
      --------------->  header == expected?  copy behind our rows   row 0 ... --------->

Rows ride behind the header in the same message, by a copy: they are few and small, a second
message costs more than copying them, and nothing has to be waited for at the end. As in the
ring, sending never blocks and the function returns when there is something to decide.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from ringreduce.pure.checksum import crc32c
from ringreduce.transport.libzmq import memcpy, zmq_msg_close, zmq_msg_data, zmq_msg_init_size
from ringreduce.transport.loop import (
    BYTES_RECEIVED,
    BYTES_SENT,
    DONE,
    FRAMES,
    HEADER_BYTES,
    STARTED,
    STEP,
    receive_header,
    send_message,
    verify,
)

# One frame may hold the rows of many ranks, but not more bytes than this: a receiver refuses
# longer ones unread.
EXCHANGE_BYTES_MAX = 1 << 20


@numba.njit(nogil=True, cache=True)
def run(
    channels: Any,
    streams: Any,
    rows: Any,
    distances: Any,
    counts: Any,
    outgoing: Any,
    incoming: Any,
    checked: Any,
    state: Any,
    message: Any,
    received: Any,
    control: Any,
) -> Any:
    """Run the exchange from where `state` stands; return one of the codes of `loop`.

    Args:
        channels, streams: as for `loop.run`; the channels after the streams lead over the
            distances after the first, in their order.
        rows: uint8 of shape (size, row bytes), contiguous, row 0 filled.
        distances, counts: int64, the `Exchange`.
        outgoing, incoming: uint64 of shape (steps, 8), the headers we send and expect.
        checked: whether frames carry the checksum of their payload; it is filled in here.
        state, message, received, control: as for `loop.run`.
    """
    memory = rows.ctypes.data
    row_bytes = rows.shape[1]
    msg = message.ctypes.data
    while state[STEP] < distances.size:
        step = state[STEP]
        channel = 0 if step == 0 else streams - 1 + step
        nbytes = counts[step] * row_bytes
        if state[STARTED] == step:
            zmq_msg_init_size(msg, np.uint64(HEADER_BYTES + nbytes))
            data = zmq_msg_data(msg)
            if checked:
                checksum = crc32c(memory, nbytes)
                outgoing[step, 6] = np.uint64(nbytes) | (checksum << np.uint64(32))
            memcpy(data, outgoing.ctypes.data + HEADER_BYTES * step, np.uint64(HEADER_BYTES))
            memcpy(data + HEADER_BYTES, memory, np.uint64(nbytes))
            status = send_message(channels, channel, msg, 0, state)
            if status != DONE:
                return status
            state[STARTED] += 1
            state[BYTES_SENT] += nbytes
        status = receive_header(
            channels, channel, msg, incoming[step], received, nbytes, False, checked, control, state
        )
        if status != DONE:
            return status
        if checked:
            status = verify(zmq_msg_data(msg) + HEADER_BYTES, nbytes, received, state)
            if status != DONE:
                zmq_msg_close(msg)
                return status
        target = memory + distances[step] * row_bytes
        memcpy(target, zmq_msg_data(msg) + HEADER_BYTES, np.uint64(nbytes))
        zmq_msg_close(msg)
        state[FRAMES] += 1
        state[BYTES_RECEIVED] += nbytes
        state[STEP] += 1
    return DONE
