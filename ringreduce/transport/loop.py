"""Compiled loops over pairs of ZeroMQ sockets: passes, exchanges, and pairs of ranks.

`run` is that of the ring, for any schedule. For each segment that arrives, without Python and
without the GIL:

      previous rank                      this rank                         next rank
      ------------->  opens? expected?  combine/copy  finish?  forward  ------------->

Segment i of a chunk travels on stream i modulo the number of streams, each a pair of sockets, and
is received in that order, so several connections need no reordering.

Sending never blocks, and borrows the caller's buffer, unless a segment is sealed that this rank
still needs (`ringreduce.transport.frames`). In a reduce-scatter, a segment's memory changes only
after it was sent, since the sum that overwrites it depends on its arrival; in an all-gather nothing
guarantees that. So a loop is done only when libzmq has written all that it borrowed.

A loop also returns when it needs a decision: nothing arrived for a while, or not what was due.
`ringreduce.transport.stalls` makes it, and has the loop called again to continue from the state in
the link's record.
"""

import numpy as np
from numba import carray

from ringreduce.pure.kernels import call_kernel
from ringreduce.pure.schedule import FINISH, FORWARD, REDUCE, segment_count
from ringreduce.transport import libzmq, records
from ringreduce.transport.frames import INLINE_BYTES_MAX, receive, release, send
from ringreduce.transport.records import CHANNEL, DONE, DRAINING, LINK, pointer
from ringreduce.vocabulary.compiled import jit

# How long to wait for borrowed segments before the caller checks its deadlines.
_DRAIN_YIELDS, _DRAIN_SLEEPS, _DRAIN_SLEEP_US = 200, 1000, 50
# Ciphertexts that a broadcast, or a pair of ranks, may have in memory: enough to keep the receiver
# busy.
_CIPHERTEXTS_MAX = 16
# The longest frame of an exchange, which may hold the rows of many ranks; receivers refuse longer
# ones unread.
EXCHANGE_BYTES_MAX = 1 << 20
_MORE = -1  # a segment has arrived, and more are due
# The largest int64, as a number: for np.iinfo numba imports scipy.linalg.
NO_LIMIT = (1 << 63) - 1

_count_segments = jit(segment_count)


@jit
def run(link_address, call_address, buffer):
    """Run one rank's schedule from where the link stands; return a status code.

    Takes the addresses of the `LinkRecord`, the `PassRecord` and the memory with all chunks.
    """
    link = carray(pointer(link_address), 1, LINK)[0]
    channels = carray(pointer(link.channels), link.channel_count, CHANNEL)
    call = carray(pointer(call_address), 1, records.PASS)[0]
    steps = carray(pointer(call.steps), call.step_count, records.PASS_STEP)
    # A broadcast is a chain with an end, so a rank may wait for the next one; in a ring, where all
    # ranks would wait, as many ciphertexts as there are take memory.
    is_chain = call.step_count == 0 or call.first_start < 0
    ahead_max = _CIPHERTEXTS_MAX if link.is_sealed != 0 and is_chain else NO_LIMIT

    if call.first_start >= 0:
        is_reducing = call.step_count > 0 and steps[0].action & REDUCE != 0
        segments = _count_segments(call.first_end - call.first_start, link.segment_bytes)
        while link.started < segments:
            if not is_released(channels, link.streams, ahead_max):
                return DRAINING
            status = _send(
                link, channels, call.outgoing, buffer, call.first_start, call.first_end,
                link.started, call.offset, is_reducing,
            )  # fmt: skip
            if status != DONE:
                return status
            link.started += 1

    while link.step < call.step_count:
        step = steps[link.step]
        number = link.step + call.offset
        segments = _count_segments(step.end - step.start, link.segment_bytes)
        while link.segment < segments:
            if step.action & FORWARD and not is_released(channels, link.streams, ahead_max):
                return DRAINING
            segment = link.segment
            stream = segment % link.streams
            start = step.start + segment * link.segment_bytes
            nbytes = min(link.segment_bytes, step.end - start)
            # What is only copied is opened where it belongs.
            is_reduced = step.action & REDUCE != 0
            target = buffer + start
            into = link.scratch if is_reduced else target
            call.incoming[5] = np.uint64(number) | (np.uint64(segment) << np.uint64(32))
            call.incoming[6] = np.uint64(nbytes)

            status = receive(link, channels, stream, call.incoming, nbytes, into)
            if status != DONE:
                return status
            if nbytes > 0:
                if is_reduced:
                    call_kernel(call.combine, target, link.payload, nbytes // call.itemsize)
                elif link.payload != target:
                    libzmq.memcpy(target, link.payload, np.uint64(nbytes))
                if step.action & FINISH and call.finish != 0:
                    call_kernel(call.finish, target, call.divisor, nbytes // call.itemsize)
            release(link)
            # Before sending: if the send fails, this segment must not be expected again.
            link.segment += 1
            if step.action & FORWARD:
                # A partial sum is completed elsewhere.
                is_spent = is_reduced and step.action & FINISH == 0
                status = _send(
                    link, channels, call.outgoing, buffer, step.start, step.end, segment,
                    number + 1, is_spent,
                )  # fmt: skip
                if status != DONE:
                    return status
        link.step += 1
        link.segment = 0

    return DONE if is_released(channels, link.streams, 0) else DRAINING


@jit
def is_released(channels, streams, but):
    """Whether libzmq, in a while, has written the streams' borrowed memory but so many segments."""
    for attempt in range(_DRAIN_YIELDS + _DRAIN_SLEEPS):
        held = np.int64(0)
        for stream in range(streams):
            held += channels[stream].borrowed - channels[stream].released
        if held <= but:
            return True
        if attempt < _DRAIN_YIELDS:
            libzmq.sched_yield()
        else:
            libzmq.usleep(np.uint32(_DRAIN_SLEEP_US))
    return False


@jit
def _send(link, channels, header, buffer, chunk_start, chunk_end, segment, step, is_spent):
    """Queue one segment of a chunk; if `is_spent`, this rank does not need it any more."""
    start = chunk_start + segment * link.segment_bytes
    nbytes = min(link.segment_bytes, chunk_end - start)
    header[5] = np.uint64(step) | (np.uint64(segment) << np.uint64(32))
    header[6] = np.uint64(nbytes)
    return send(
        link, channels, segment % link.streams, header.ctypes.data, buffer + start, nbytes,
        nbytes > INLINE_BYTES_MAX, is_spent,
    )  # fmt: skip


@jit
def exchange(link_address, call_address, rows):
    """Run an exchange of rows from where the link stands; return a status code.

    For small messages: in few steps over growing distances (`ringreduce.pure.schedule.exchange`) a
    rank sends all rows it has so far ahead, and receives as many from as far behind:

          rank - distance                    this rank                     rank + distance
          --------------->  opens? expected?  copy behind our rows     row 0 ... --------->

    Takes the addresses of the `LinkRecord`, whose channels after the streams lead over the
    distances after the first, in their order; of the `ExchangeRecord`; and of the rows, uint8 of
    shape (size, row bytes), contiguous, row 0 filled.
    """
    link = carray(pointer(link_address), 1, LINK)[0]
    channels = carray(pointer(link.channels), link.channel_count, CHANNEL)
    call = carray(pointer(call_address), 1, records.EXCHANGE)[0]
    steps = carray(pointer(call.steps), call.step_count, records.EXCHANGE_STEP)
    while link.step < call.step_count:
        step = steps[link.step]
        number = 0 if link.step == 0 else link.streams - 1 + link.step
        nbytes = step.count * call.row_bytes
        if link.started == link.step:
            header = step.outgoing.ctypes.data
            status = send(link, channels, number, header, rows, nbytes, False, False)
            if status != DONE:
                return status
            link.started += 1
        into = rows + step.distance * call.row_bytes
        status = receive(link, channels, number, step.incoming, nbytes, into)
        if status != DONE:
            return status
        if link.payload != into:
            libzmq.memcpy(into, link.payload, np.uint64(nbytes))
        release(link)
        link.step += 1
    return DONE


@jit
def transfer(sending, source, receiving, target, held_max):
    """Send and receive from where two links of pairs stand; return a status code.

          this rank  -- segment 0, 1, ... -->  one rank
          this rank  <-- segment 0, 1, ... --  another one, or the same

    All that may be sent is queued before anything is waited for. Of sealed segments only some have
    their ciphertexts in memory at a time: more are sealed when libzmq has written some, also while
    segments arrive.

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
        if not is_released(channels, 1, held_max if posted == DONE else _CIPHERTEXTS_MAX - 1):
            return DRAINING
        if posted == DONE:
            return DONE


@jit
def _post(link_address, transfer_address):
    """Queue what may be queued; return DONE, DRAINING if that is not all, or a failure."""
    link = carray(pointer(link_address), 1, LINK)[0]
    channels = carray(pointer(link.channels), link.channel_count, CHANNEL)
    transfer = carray(pointer(transfer_address), 1, records.TRANSFER)[0]
    channel = channels[0]
    segments = _count_segments(transfer.nbytes, link.segment_bytes)
    while link.started < segments:
        if link.is_sealed != 0 and channel.borrowed - channel.released >= _CIPHERTEXTS_MAX:
            return DRAINING
        status = _send(
            link, channels, transfer.header, transfer.memory, 0, transfer.nbytes, link.started, 0,
            False,
        )  # fmt: skip
        if status != DONE:
            return status
        link.started += 1
    return DONE


@jit
def _take(link_address, transfer_address):
    """Receive the next segment; return _MORE, DONE if it was the last, or a failure."""
    link = carray(pointer(link_address), 1, LINK)[0]
    channels = carray(pointer(link.channels), link.channel_count, CHANNEL)
    transfer = carray(pointer(transfer_address), 1, records.TRANSFER)[0]
    segments = _count_segments(transfer.nbytes, link.segment_bytes)
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
    link.segment += 1
    return DONE if link.segment == segments else _MORE
