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
from dataclasses import dataclass, field

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
        found, failed = first_to_answer(self._rank, tried, TIMES.reach_s, check)
        for peer, host in found.items():
            if len(tried[peer]) > 1:
                offered = ", ".join(each for each, _ in tried[peer])
                text = "[%d/%d] reaches rank %d at %s (it has %s)"
                _log.info(text, self._rank, self._size, peer, host, offered)
        self._reached.update(found)
        return failed

    def ways(self, peer: int, address: str) -> list[tuple[str, int]]:
        """Where `peer`, which has announced `address`, may be: the host that was chosen, or all."""
        host, ports = split_host(address)
        hosts: Sequence[str] = [host]
        if peer in self._reached:
            hosts = [self._reached[peer]]
        elif self.are_needed:
            hosts = ways(self.networks[self._rank], self.networks[peer])
        return [(each, int(ports.partition(",")[0])) for each in hosts]

    def lead(self, peer: int, address: str) -> str:
        """`address`, which `peer` has announced, with the host that was chosen, if one was."""
        host = self._reached.get(peer)
        if host is None or not address:
            return address
        return endpoint(host, split_host(address)[1])


@dataclass
class _Runner:
    """The attempts to reach one rank: those to come, and those that run."""

    waiting: deque[tuple[str, int]]
    running: dict[socket.socket, tuple[str, int]] = field(default_factory=dict)
    next_s: float = 0.0


def first_to_answer(
    rank: int,
    ways: Mapping[int, Sequence[tuple[str, int]]],
    limit_s: float,
    check: Callable[[], object],
    lead_s: float = TIMES.lead_s,
) -> tuple[dict[int, str], list[Unreached]]:
    """Connect to every rank in `ways` at one of its addresses, and close the connections again.

    `ways` are by rank hosts and ports, the best first; each has a start of `lead_s` before the next
    one, unless it fails. All together take `limit_s` at most. Meanwhile `check` is called several
    times a second; it may raise.

    Returns by rank the host that answered first; and of each rank that was not reached, why, as
    tried by `rank`, this one.
    """
    started = time.monotonic()
    found: dict[int, str] = {}
    failed: list[Unreached] = []
    runners = {peer: _Runner(deque(addresses)) for peer, addresses in ways.items()}
    with selectors.PollSelector() as selector, contextlib.ExitStack() as opened:
        while left := [peer for peer, each in runners.items() if each.waiting or each.running]:
            now = time.monotonic()
            if now - started >= limit_s:
                break
            for peer in left:
                runner = runners[peer]
                while runner.waiting and (now >= runner.next_s or not runner.running):
                    runner.next_s = now + lead_s
                    where = runner.waiting.popleft()
                    try:
                        connecting = _started(where, opened)
                    except OSError as failure:
                        if failure.errno in (errno.EMFILE, errno.ENFILE):
                            raise
                        why = _why(failure.errno or 0)
                        failed.append(Unreached(rank, peer, _shown(where), why))
                        continue
                    runner.running[connecting] = where
                    selector.register(connecting, selectors.EVENT_WRITE, (peer, connecting))
            check()
            for key, _ in selector.select(min(TIMES.poll_s, lead_s or TIMES.poll_s)):
                peer, connecting = key.data
                runner = runners[peer]
                where = runner.running.pop(connecting)
                selector.unregister(connecting)
                error = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                connecting.close()
                if error:
                    failed.append(Unreached(rank, peer, _shown(where), _why(error)))
                    continue
                found[peer] = where[0]
                runner.waiting.clear()
                for other in runner.running:
                    selector.unregister(other)
                    other.close()
                runner.running.clear()
                break  # Others that are ready may be closed now.
    for peer, runner in runners.items():
        late = *runner.running.values(), *runner.waiting
        text = f"no answer in {limit_s:g} s"
        failed += [Unreached(rank, peer, _shown(where), text) for where in late]
    return found, [each for each in failed if each.peer not in found]


def _started(where: tuple[str, int], opened: contextlib.ExitStack) -> socket.socket:
    """A socket that has begun to connect; OSError if it cannot, as where there is no IPv6."""
    connecting = opened.enter_context(socket.socket(family(where[0]), socket.SOCK_STREAM))
    connecting.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connecting.connect(where)
    return connecting


def _why(error: int) -> str:
    return _WHY.get(error) or os.strerror(error)


def _shown(where: tuple[str, int]) -> str:
    return endpoint(*where).removeprefix("tcp://")
