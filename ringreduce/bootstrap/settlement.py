"""How ranks that have the table find out whether all of them reach those that they send to.

Each rank has tried to connect (`transport/happy_eyeballs.py`), and reports to the first rank what
it could not reach. That one answers when all have reported. If a rank cannot reach another, all
raise the same table; otherwise they connect.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
import zmq

from ringreduce.bootstrap.hello import (
    Agreed,
    Failed,
    Reached,
    Refusal,
    read_agreement,
    read_reached,
    shown,
)
from ringreduce.pure.networks import Unreached, unreached_table
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.errors import RendezvousError
from ringreduce.vocabulary.times import milliseconds

OPEN_NETWORK = (
    "Let these hosts connect to each other at these ports (RINGREDUCE_PORTS gives them a range for "
    "firewalls), or choose another network by RINGREDUCE_IFACE on all hosts."
)


class Settlement:
    """One rank's side: call `advance` until it returns True.

    Args:
        socket: that of the rendezvous.
        first: the rank that collects the reports.
        identities: on that rank, the others by the socket's names for them; else None.
        unreached: what this rank could not reach.
        hosts: names of the ranks' hosts, for the error.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        config: Config,
        first: int,
        identities: Mapping[bytes, int] | None,
        unreached: Sequence[Unreached],
        hosts: Mapping[int, str],
    ) -> None:
        self._socket, self._config, self._first = socket, config, first
        self._identities, self._hosts = identities, hosts
        self._reports: dict[int, Sequence[Unreached]] = {config.rank: unreached}
        # A rank reports once it has tried for `TIMES.reach_s`.
        self._deadline = time.monotonic() + TIMES.reach_s + config.timeout_s
        if identities is None:
            self._deadline += TIMES.answer_s
            failed = tuple(Failed(each.peer, each.address, each.why) for each in unreached)
            socket.send(msgspec.msgpack.encode(Reached(failed)))

    def advance(self) -> bool:
        """Wait up to ``TIMES.poll_s``; return whether all ranks reach those that they send to.

        Raises:
            RendezvousError: on all ranks, with a table, if one cannot reach another; or a rank did
                not report, or the first did not answer.
        """
        if self._identities is None:
            return self._await_answer()
        return self._collect(self._identities)

    def _collect(self, identities: Mapping[bytes, int]) -> bool:
        """The first rank's side."""
        if time.monotonic() < self._deadline:
            self._receive_report(identities)
            if len(self._reports) <= len(identities):
                return False
        missing = sorted(set(identities.values()) - set(self._reports))
        failed = [each for rank in sorted(self._reports) for each in self._reports[rank]]
        error: RendezvousError | None = None
        if failed:
            named = {rank: shown(host) for rank, host in self._hosts.items()}
            error = self._error(
                "cannot form the ring, since ranks cannot reach each other:\n"
                f"{unreached_table(failed, named)}\n",
                failed[0].peer,
            )
        elif missing:
            error = self._error(
                f"waited in vain for rank {missing[0]}, which had joined, to connect to its peers",
                missing[0],
            )
        answer = Agreed() if error is None else Refusal(error.message, False, error.peer)
        for identity in identities:
            self._socket.send_multipart([identity, msgspec.msgpack.encode(answer)])
        if error is not None:
            raise error
        return True

    def _receive_report(self, identities: Mapping[bytes, int]) -> None:
        if self._socket.poll(milliseconds(TIMES.poll_s)):
            identity, *_, data = self._socket.recv_multipart()
            rank, report = identities.get(identity), read_reached(data)
            # Another rank's late hello is no report.
            if rank is not None and report is not None:
                self._reports[rank] = [
                    Unreached(rank, each.peer, shown(each.address), shown(each.why))
                    for each in report.failed
                ]

    def _await_answer(self) -> bool:
        """The other ranks' side."""
        if self._socket.poll(milliseconds(TIMES.poll_s)):
            answer = read_agreement(self._socket.recv())
            if isinstance(answer, Refusal):
                raise self._error(answer.text, answer.peer)
            if isinstance(answer, Agreed):
                return True
        if time.monotonic() >= self._deadline:
            raise self._error(
                f"got no answer from rank {self._first}, which had joined", self._first
            )
        return False

    def _error(self, text: str, peer: int | None) -> RendezvousError:
        has_table = "\n" in text
        return RendezvousError(
            text,
            **self._config.who,
            peer=peer,
            remedy=OPEN_NETWORK if has_table else f"Read rank {peer}'s log first.",
        )
