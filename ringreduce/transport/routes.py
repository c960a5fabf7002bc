"""At which of its addresses each rank is reached: chosen once for each peer, by a race.

Any thread may ask; two that ask for the same peer at once may both run the race.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from ringreduce.pure.networks import Unreached, ways
from ringreduce.transport.address import endpoint, split_host
from ringreduce.transport.happy_eyeballs import Reached, first_to_answer
from ringreduce.transport.interfaces import hosts_of
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.endpoints import is_loopback

_log = logging.getLogger(__name__)


class Routes:
    """This rank's choices; `networks` are by rank what each offers, with prefixes."""

    def __init__(self, rank: int, size: int, networks: Mapping[int, Sequence[str]]) -> None:
        self._rank, self._size, self.networks = rank, size, networks
        self._reached: dict[int, Reached] = {}
        # On loopback there is nothing to choose, and nothing in between.
        self.are_needed = any(
            len(offered) > 1 or not all(map(is_loopback, hosts_of(offered)))
            for offered in networks.values()
        )

    def find(
        self,
        addresses: Mapping[int, str],
        check: Callable[[], object],
        limit_s: float = TIMES.reach_s,
        lead_s: float = TIMES.lead_s,
    ) -> list[Unreached]:
        """Choose for all ranks in `addresses`, where they listen; return what cannot be reached.

        A port of the address must be open now. While this waits it calls `check`; `limit_s` and
        `lead_s` are those of the race.
        """
        if not self.are_needed:
            return []
        tried = {
            peer: [
                (host, int(split_host(address)[1].partition(",")[0]))
                for host in ways(self.networks[self._rank], self.networks[peer])
            ]
            for peer, address in addresses.items()
            if peer not in self._reached and peer != self._rank
        }
        found, failed = first_to_answer(self._rank, tried, limit_s, check, lead_s)
        for peer, (host, _) in found.items():
            level = logging.INFO if len(tried[peer]) > 1 else logging.DEBUG
            offered = ", ".join(each for each, _ in tried[peer])
            _log.log(
                level,
                "[%d/%d] reaches rank %d at %s (it has %s)",
                *(self._rank, self._size, peer, host, offered),
            )
        self._reached.update(found)
        return failed

    def lead(self, peer: int, address: str) -> str:
        """`address`, which `peer` has announced, with the host that was chosen, if one was."""
        reached = self._reached.get(peer)
        if reached is None or not address:
            return address
        return endpoint(reached.host, split_host(address)[1])

    def round_trip_s(self, peer: int) -> float:
        """How long an answer of `peer` took when it was chosen; 0 if that is not known."""
        reached = self._reached.get(peer)
        return 0.0 if reached is None else reached.round_trip_s or 0.0
