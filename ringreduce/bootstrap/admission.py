"""Rank 0's list of the ranks that have joined, and which may. No sockets.

A hello of another job, or for a rank that has joined, is refused, and the job goes on waiting. A
rank of this job with another version or other settings ends the rendezvous on every rank.
"""

from __future__ import annotations

import hmac
import logging
import secrets

from ringreduce.bootstrap.messages import Hello, Refusal, Table, shown
from ringreduce.transport.security import MATERIAL_BYTES
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import MismatchError, RendezvousError

_log = logging.getLogger(__name__)

# Refusals named in logs and errors; anybody may connect, so few are enough.
_REFUSALS_KEPT = 8
# Refusals answered with the reason, for ranks of other jobs; further hellos get no answer.
_REFUSALS_ANSWERED = 256


class Members:
    """The ranks that have joined; their hellos must agree with rank 0's `own`."""

    def __init__(self, config: Config, own: Hello) -> None:
        self._config, self._own = config, own
        self._hellos = {0: own}
        self._refused: list[str] = []
        # The socket's names of those ranks, to answer them.
        self.identities: list[bytes] = []

    @property
    def complete(self) -> bool:
        """Whether all ranks have joined."""
        return len(self._hellos) == self._config.size

    def admit(self, identity: bytes, hello: Hello) -> Refusal | None:
        """Add a rank and return None, or refuse it and return the answer, if it gets one.

        Raises:
            MismatchError: a rank of this job has another version, size or other settings.
        """
        config, own = self._config, self._own
        who = f"rank {hello.rank} ({shown(hello.host)})"
        theirs, ours = (text.encode(errors="replace") for text in (hello.job_id, own.job_id))
        if not hmac.compare_digest(theirs, ours):
            why = f"{who} belongs to another job"
        elif not 0 <= hello.rank < max(hello.size, config.size):
            why = f"{who} has no place in a ring of {config.size}"
        elif hello.rank in self._hellos and hello.size == own.size:
            why = f"rank {hello.rank} came twice, the second time from {shown(hello.host)}"
        else:
            self._compare(hello)
            self._hellos[hello.rank] = hello
            self.identities.append(identity)
            return None
        self.note(why)
        if len(self._refused) > _REFUSALS_ANSWERED:
            return None
        return Refusal(text=f"was turned away by rank 0: {why}", mismatch=False, peer=0)

    def note(self, why: str) -> None:
        """Record a refusal, and log the first few."""
        if len(self._refused) <= _REFUSALS_ANSWERED:
            self._refused.append(why)
        if len(self._refused) <= _REFUSALS_KEPT:
            _log.warning("rendezvous turned away: %s", why)

    def _compare(self, hello: Hello) -> None:
        for what, other, this in (
            ("ringreduce", hello.version, self._own.version),
            ("wire version", hello.wire_version, self._own.wire_version),
            ("size", hello.size, self._own.size),
            ("settings", hello.settings, self._own.settings),
            ("encryption", hello.encryption, self._own.encryption),
        ):
            if other != this:
                raise MismatchError(
                    f"found that rank {hello.rank} has {what} {shown(other)}, rank 0 has {this}",
                    rank=0,
                    size=self._config.size,
                    peer=hello.rank,
                    remedy="Start all ranks with the same ringreduce and the same RINGREDUCE_* "
                    "settings.",
                )

    def incomplete(self, failed_handshakes: int) -> RendezvousError:
        """The error when not all ranks have joined in time."""
        config, missing = self._config, set(range(self._config.size)) - set(self._hellos)
        named = ", ".join(map(str, sorted(missing)[:16])) + (", ..." if len(missing) > 16 else "")
        text = (
            f"waited {config.join_timeout_s:g} s at {config.rendezvous} and "
            f"{'rank' if len(missing) == 1 else 'ranks'} {named} did not come"
        )
        refusals = self._refused[:_REFUSALS_KEPT]
        if failed_handshakes:
            refusals.append(f"{failed_handshakes} connections that could not show the job's secret")
        if refusals:
            text += f" (turned away: {'; '.join(refusals)})"
        return RendezvousError(
            text,
            rank=0,
            size=config.size,
            peer=min(missing),
            remedy="Read the log of the missing ranks; raise RINGREDUCE_JOIN_TIMEOUT_S if they "
            "start slowly.",
        )

    def table(self) -> Table:
        """The table for all ranks, once all have joined."""
        hellos = [self._hellos[rank] for rank in range(self._config.size)]
        own = self._own
        others = [
            f"rank {hello.rank} Python {hello.python[:32]}, numpy {hello.numpy[:32]}"
            for hello in hellos
            if (hello.python, hello.numpy) != (own.python, own.numpy)
        ]
        if others:  # Other versions can change results.
            _log.warning(
                "[0/%d] ranks run different versions, so results may differ: rank 0 Python %s, "
                "numpy %s; %s",
                *(len(hellos), own.python, own.numpy, "; ".join(others[:_REFUSALS_KEPT])),
            )
        return Table(
            job=secrets.randbits(64),
            addresses=tuple(hello.address for hello in hellos),
            controls=tuple(hello.control for hello in hellos),
            hosts=tuple(hello.host for hello in hellos),
            memory=tuple(hello.memory for hello in hellos),
            keys=tuple(hello.key for hello in hellos),
            material=secrets.token_bytes(MATERIAL_BYTES) if own.key else b"",
        )
