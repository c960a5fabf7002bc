"""Find out at which of its addresses a rank can be reached: a race of TCP connections.

A connection is closed as soon as it is there, without a byte: a port that listens sees a visitor
that leaves. No thread is started.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringreduce.pure.networks import Unreached
from ringreduce.transport.address import endpoint, family
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.times import milliseconds

_WHY = {
    errno.ECONNREFUSED: "refused",
    errno.ENETUNREACH: "no route",
    errno.EHOSTUNREACH: "no route",
    errno.EADDRNOTAVAIL: "no route",
}

# Of Linux's struct tcp_info: tcpi_rtt, in microseconds, behind 8 bytes and 15 numbers of 4.
_RTT = struct.Struct("=68xI")


class Reached(NamedTuple):
    """A rank's host that has answered, and how long its answer took; None if that is not known."""

    host: str
    round_trip_s: float | None


@dataclass
class _Runner:
    """The attempts to reach one rank: those to come, those that run, by descriptor."""

    waiting: deque[tuple[str, int]]
    running: dict[int, tuple[socket.socket, tuple[str, int]]] = field(default_factory=dict)
    next_s: float = 0.0


def first_to_answer(
    rank: int,
    ways: Mapping[int, Sequence[tuple[str, int]]],
    limit_s: float,
    check: Callable[[], object],
    lead_s: float = TIMES.lead_s,
) -> tuple[dict[int, Reached], list[Unreached]]:
    """Connect to every rank in `ways` at one of its addresses, and close the connections again.

    Args:
        rank: this one, for the result.
        ways: by rank, hosts and ports, the best first; each has a start of `lead_s` before the
            next one, unless it fails.
        limit_s: how long to try all together.
        check: called several times a second; it may raise.

    Returns:
        By rank, the host that answered first; and of each rank that was not reached, why.
    """
    started = time.monotonic()
    found: dict[int, Reached] = {}
    failed: list[Unreached] = []
    runners = {peer: _Runner(deque(addresses)) for peer, addresses in ways.items()}
    poll = select.poll()
    with contextlib.ExitStack() as opened:
        while left := [peer for peer, each in runners.items() if each.waiting or each.running]:
            now = time.monotonic()
            if now - started >= limit_s:
                break
            for peer in left:
                runner = runners[peer]
                while runner.waiting and (now >= runner.next_s or not runner.running):
                    runner.next_s = now + lead_s
                    where = runner.waiting.popleft()
                    if (why := _start(runner, where, poll, opened)) is not None:
                        failed.append(Unreached(rank, peer, _shown(where), why))
            check()
            for descriptor, _ in poll.poll(milliseconds(min(TIMES.poll_s, lead_s or TIMES.poll_s))):
                peer, runner = next(
                    (peer, each) for peer, each in runners.items() if descriptor in each.running
                )
                connecting, where = runner.running.pop(descriptor)
                poll.unregister(descriptor)
                error = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                round_trip_s = None if error else _round_trip_s(connecting)
                connecting.close()
                if error:
                    failed.append(Unreached(rank, peer, _shown(where), _why(error)))
                    continue
                found[peer] = Reached(where[0], round_trip_s)
                runner.waiting.clear()
                for other, _ in runner.running.values():
                    poll.unregister(other.fileno())
                    other.close()
                runner.running.clear()
                break  # Others that are ready may be closed now.
    for peer, runner in runners.items():
        late = [where for _, where in runner.running.values()] + list(runner.waiting)
        why = f"no answer in {limit_s:g} s"
        failed += [Unreached(rank, peer, _shown(where), why) for where in late]
    return found, [each for each in failed if each.peer not in found]


def _start(
    runner: _Runner, where: tuple[str, int], poll: select.poll, opened: contextlib.ExitStack
) -> str | None:
    """Begin to connect; why that is impossible, if so."""
    try:
        connecting = opened.enter_context(socket.socket(family(where[0]), socket.SOCK_STREAM))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return _why(error.errno or 0)  # No IPv6 here.
    connecting.setblocking(False)
    error_number = connecting.connect_ex(where)
    if error_number not in (0, errno.EINPROGRESS):
        return _why(error_number)
    runner.running[connecting.fileno()] = connecting, where
    poll.register(connecting.fileno(), select.POLLOUT)
    return None


def _round_trip_s(connected: socket.socket) -> float | None:
    """What the kernel has measured while it connected, however late this process looks."""
    if not sys.platform.startswith("linux"):
        return None
    known = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT.size)
    return float(_RTT.unpack(known)[0]) * 1e-6


def _why(error: int) -> str:
    return _WHY.get(error) or os.strerror(error)


def _shown(where: tuple[str, int]) -> str:
    return endpoint(*where).removeprefix("tcp://")
