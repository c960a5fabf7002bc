"""At which of its addresses each rank is reached: chosen once for each peer, by a race.

Any thread may ask; two that ask for the same peer at once may both run the race, of TCP
connections. One is closed as soon as it is there, without a byte: a port that listens sees a
visitor that leaves. No thread is started.
"""

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ringreduce.pure.networks import Unreached, ways
from ringreduce.transport.address import endpoint, family, split_host
from ringreduce.transport.interfaces import hosts_of
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.endpoints import is_loopback

_log = logging.getLogger(__name__)


_WHY = {
    errno.ECONNREFUSED: "refused",
    errno.ENETUNREACH: "no route",
    errno.EHOSTUNREACH: "no route",
    errno.EADDRNOTAVAIL: "no route",
}


class Routes:
    """This rank's choices; `networks` are by rank what each offers, with prefixes."""

    def __init__(self, rank: int, size: int, networks: Mapping[int, Sequence[str]]) -> None:
        self._rank, self._size, self.networks = rank, size, networks
        self._reached: dict[int, str] = {}  # by rank, the host that has answered
        # On loopback there is nothing to choose, and nothing in between.
        self.are_needed = any(
            len(offered) > 1 or not all(map(is_loopback, hosts_of(offered)))
            for offered in networks.values()
        )

    def find(self, addresses: Mapping[int, str], check: Callable[[], object]) -> list[Unreached]:
        """Choose for all ranks in `addresses`, where they listen; return what cannot be reached.

        A port of the address must be open now. While this waits it calls `check`.
        """
        if not self.are_needed:
            return []
        tried = {
            peer: self.ways(peer, address)
            for peer, address in addresses.items()
            if peer not in self._reached and peer != self._rank
        }
        reached, failed = first_to_answer(self._rank, tried, TIMES.reach_s, check)
        for peer, host in reached.items():
            if len(tried[peer]) > 1:
                offered = ", ".join(address for address, _ in tried[peer])
                text = "[%d/%d] reaches rank %d at %s (it has %s)"
                _log.info(text, self._rank, self._size, peer, host, offered)
        self._reached.update(reached)
        return failed

    def ways(self, peer: int, address: str) -> list[tuple[str, int]]:
        """Where `peer`, which has announced `address`, may be: the host that was chosen, or all."""
        host, ports = split_host(address)
        hosts: Sequence[str] = [host]
        if peer in self._reached:
            hosts = [self._reached[peer]]
        elif self.are_needed:
            hosts = ways(self.networks[self._rank], self.networks[peer])
        return [(host, int(ports.partition(",")[0])) for host in hosts]

    def lead(self, peer: int, address: str) -> str:
        """`address`, which `peer` has announced, with the host that was chosen, if one was."""
        host = self._reached.get(peer)
        if host is None or not address:
            return address
        return endpoint(host, split_host(address)[1])


def first_to_answer(
    rank: int,
    ways: Mapping[int, Sequence[tuple[str, int]]],
    limit_s: float,
    check: Callable[[], object],
    lead_s: float = TIMES.lead_s,
) -> tuple[dict[int, str], list[Unreached]]:
    """Connect to every rank in `ways` at one of its addresses, and close the connections again.

    `ways` are by rank hosts and ports, the best first; each has a start of `lead_s` before the next
    one, unless it fails. All together take `limit_s`, and a moment, at most. Meanwhile `check` is
    called several times a second; it may raise.

    Returns by rank the host that answered first; and of each rank that was not reached, why, as
    tried by `rank`, this one.
    """
    started = time.monotonic()
    reached: dict[int, str] = {}
    failed: list[Unreached] = []
    waiting = {peer: deque(addresses) for peer, addresses in ways.items()}
    next_s = dict.fromkeys(ways, 0.0)  # when the next address is tried, if one is tried already
    running: dict[socket.socket, tuple[int, tuple[str, int]]] = {}

    def fail(peer: int, where: tuple[str, int], why: str) -> None:
        failed.append(Unreached(rank, peer, endpoint(*where).removeprefix("tcp://"), why))

    with selectors.PollSelector() as selector, contextlib.ExitStack() as opened:

        def end(connecting: socket.socket) -> tuple[int, tuple[str, int]]:
            selector.unregister(connecting)
            connecting.close()
            return running.pop(connecting)

        while running or any(waiting.values()):
            now = time.monotonic()
            tried = {peer for peer, _ in running.values()}
            for peer, addresses in waiting.items():
                while addresses and (now >= next_s[peer] or peer not in tried):
                    next_s[peer] = now + lead_s
                    where = addresses.popleft()
                    try:
                        connecting = _started(where, opened)
                    except OSError as failure:
                        if failure.errno in (errno.EMFILE, errno.ENFILE):
                            raise
                        fail(peer, where, _why(failure.errno or 0))
                        continue
                    running[connecting] = peer, where
                    tried.add(peer)
                    selector.register(connecting, selectors.EVENT_WRITE, connecting)
            check()
            ready = selector.select(min(TIMES.poll_s, lead_s or TIMES.poll_s))
            # What has answered counts, though this thread may have had no time to look before.
            if not ready and now - started >= limit_s:
                break
            for key, _ in ready:
                connecting = key.data
                if connecting not in running:
                    continue  # Its rank has just answered at another address.
                error = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                peer, where = end(connecting)
                if error:
                    fail(peer, where, _why(error))
                    continue
                reached[peer] = where[0]
                waiting[peer].clear()
                for other in [attempt for attempt, (whose, _) in running.items() if whose == peer]:
                    end(other)
    late = [(peer, where) for peer, addresses in waiting.items() for where in addresses]
    for peer, where in (*running.values(), *late):
        fail(peer, where, f"no answer in {limit_s:g} s")
    return reached, [way for way in failed if way.peer not in reached]


def _started(where: tuple[str, int], opened: contextlib.ExitStack) -> socket.socket:
    """A socket that has begun to connect; OSError if it cannot, as where there is no IPv6."""
    connecting = opened.enter_context(socket.socket(family(where[0]), socket.SOCK_STREAM))
    connecting.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connecting.connect(where)
    return connecting


def _why(error: int) -> str:
    return _WHY.get(error) or os.strerror(error)
