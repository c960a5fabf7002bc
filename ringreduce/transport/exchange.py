"""An exchange of rows, compiled: few steps over growing distances, for small messages.

In each step a rank sends all rows it has so far to the rank `distance` positions ahead and receives
as many from the rank as far behind (`ringreduce.pure.schedule.exchange`):

      rank - distance                    this rank                     rank + distance
      --------------->  opens? expected?  copy behind our rows     row 0 ... --------->

Rows are copied behind the header into the same message: they are small, a second message would cost
more than the copy, and no borrowed memory has to be awaited. As in the ring, sending never blocks
and the function returns when it needs a decision.
"""

import numpy as np
from numba import carray

from ringreduce.transport import libzmq
from ringreduce.transport.frames import receive, release, send
from ringreduce.transport.records import CHANNEL, DONE, EXCHANGE, EXCHANGE_STEP, LINK, pointer
from ringreduce.vocabulary.compiled import jit

# The longest frame of an exchange, which may hold the rows of many ranks; receivers refuse longer
# ones unread.
EXCHANGE_BYTES_MAX = 1 << 20


@jit
def run(link_address, call_address, rows):
    """Run the exchange from where the link stands; return a status code.

    Takes the addresses of the `LinkRecord`, whose channels after the streams lead over the
    distances after the first, in their order; of the `ExchangeRecord`; and
    of the rows, uint8 of shape (size, row bytes), contiguous, row 0 filled.
    """
    link = carray(pointer(link_address), 1, LINK)[0]
    channels = carray(pointer(link.channels), link.channel_count, CHANNEL)
    call = carray(pointer(call_address), 1, EXCHANGE)[0]
    steps = carray(pointer(call.steps), call.step_count, EXCHANGE_STEP)
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
            link.bytes_sent += nbytes
        into = rows + step.distance * call.row_bytes
        status = receive(link, channels, number, step.incoming, nbytes, into)
        if status != DONE:
            return status
        if link.payload != into:
            libzmq.memcpy(into, link.payload, np.uint64(nbytes))
        release(link)
        link.frames += 1
        link.bytes_received += nbytes
        link.step += 1
    return DONE
