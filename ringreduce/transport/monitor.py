"""What happens to a socket's connections, as libzmq tells it.

pyzmq's ``get_monitor_socket`` would do, but for its queue of 2000 messages, a thousand events:
when it is full, libzmq's I/O thread waits for room, holding a lock that ``disable_monitor`` takes.
So a thousand strangers that connect and leave while nobody reads would stop all of the socket's
traffic, and closing it for good. Here the queue has no limit; whoever watches reads it often.
"""

from __future__ import annotations

import itertools
from typing import Any

import zmq

__all__ = ["unwatch", "watch"]

_numbers = itertools.count()


def watch(socket: zmq.Socket[Any], events: int) -> zmq.Socket[Any]:
    """A socket that receives the `events` of `socket` from now on; end it with `unwatch`."""
    name = f"inproc://monitor.{next(_numbers)}"
    socket.monitor(name, events)
    receiver: zmq.Socket[Any] = socket.context.socket(zmq.PAIR)
    receiver.setsockopt(zmq.RCVHWM, 0)
    receiver.setsockopt(zmq.LINGER, 0)
    receiver.connect(name)
    return receiver


def unwatch(socket: zmq.Socket[Any], receiver: zmq.Socket[Any]) -> None:
    """End what `watch` began."""
    socket.disable_monitor()
    receiver.close()
