"""Events of a socket's connections, from libzmq.

pyzmq's ``get_monitor_socket`` has a queue of 2000 messages, a thousand events. When it is full,
libzmq's I/O thread waits, holding a lock that ``disable_monitor`` needs: strangers that connect and
leave while nobody reads would stop the socket's traffic and block its closing. Here the queue is
unbounded, so the owner must read it often.
"""

from __future__ import annotations

import itertools
from typing import Any

import zmq

_numbers = itertools.count()


def watch(socket: zmq.Socket[Any], events: int) -> zmq.Socket[Any]:
    """Return a socket that receives the `events` of `socket` from now on; end with `unwatch`."""
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
