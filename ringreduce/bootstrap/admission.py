"""The first rank's list of those that have joined, and which may. No sockets.

A hello of another job, or for a rank that has joined, is refused, and the job goes on waiting. A
rank of this job with another version or other settings ends the rendezvous on every rank.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from typing import Any

import msgspec

from ringreduce.bootstrap.hello import Hello, Member, Refusal, Table, shown
from ringreduce.transport.security import MATERIAL_BYTES
from ringreduce.vocabulary.config import SETTINGS, Config, variable_of
from ringreduce.vocabulary.errors import MismatchError, RendezvousError
from ringreduce.vocabulary.words import named

_log = logging.getLogger(__name__)

_REFUSALS_KEPT = 8  # refusals named in logs and errors; anybody may connect, so few are enough
# Refusals answered with the reason, for ranks of other jobs; further hellos get no answer.
_REFUSALS_ANSWERED = 256


class Members:
    """The ranks that have joined; their hellos must agree with `own`, of the rank that counts."""

    def __init__(self, config: Config, own: Hello) -> None:
        self._config, self._own = config, own
        self._hellos = {own.rank: own}
        self._refused: list[str] = []
        # The ranks by the socket's names for them, to answer them.
        self.identities: dict[bytes, int] = {}

    def admit(self, identity: bytes, hello: Hello) -> Refusal | None:
        """Add a rank and return None, or refuse it and return the answer, if it gets one.

        Raises MismatchError for a rank of this job with another version, size or other settings.
        """
        own = self._own
        who = f"rank {hello.rank} ({shown(hello.host)})"
        their_job, our_job = (text.encode(errors="replace") for text in (hello.job_id, own.job_id))
        if not hmac.compare_digest(their_job, our_job):
            why = f"{who} belongs to another job"
        elif not 0 <= hello.rank < max(own.size, hello.size):
            why = f"{who} has no place in a ring of {own.size}"
        elif hello.rank in self._hellos and hello.size == own.size:
            why = f"rank {hello.rank} came twice, the second time from {shown(hello.host)}"
        else:
            self._compare(hello)
            self._hellos[hello.rank] = hello
            self.identities[identity] = hello.rank
            return None
        self.note(why)
        if len(self._refused) > _REFUSALS_ANSWERED:
            return None
        text = f"was turned away by rank {own.rank}: {why}"
        return Refusal(text, mismatch=False, peer=own.rank)

    def note(self, why: str) -> None:
        """Record a refusal, and log the first few."""
        if len(self._refused) <= _REFUSALS_ANSWERED:
            self._refused.append(why)
        if len(self._refused) <= _REFUSALS_KEPT:
            _log.warning("rendezvous turned away: %s", why)

    def _compare(self, hello: Hello) -> None:
        own = self._own
        for what, other, this in (
            ("ringreduce", hello.version, own.version),
            ("wire version", hello.wire_version, own.wire_version),
            ("size", hello.size, own.size),
            *_differing(hello.settings, own.settings),
            ("encryption", hello.encryption, own.encryption),
        ):
            if other != this:
                raise MismatchError(
                    f"found that rank {hello.rank} has {what} {shown(other)}, rank {own.rank} has "
                    f"{shown(this)}",
                    **self._config.who,
                    peer=hello.rank,
                    remedy="Start all ranks with the same ringreduce and the same RINGREDUCE_* "
                    "settings.",
                )

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in range(self._own.size) if rank not in self._hellos]

    def incomplete(self, failed_handshakes: int) -> RendezvousError:
        """The error when not all ranks have joined in time."""
        config = self._config
        text = f"waited {config.join_timeout_s:g} s at {config.rendezvous} and "
        text += f"{named('rank', self.missing)} did not come"
        refusals = self._refused[:_REFUSALS_KEPT]
        if failed_handshakes:
            refusals.append(f"{failed_handshakes} connections that could not show the job's secret")
        if refusals:
            text += f" (turned away: {'; '.join(refusals)})"
        return RendezvousError(
            text,
            **config.who,
            peer=min(self.missing),
            remedy="Read the log of the missing ranks; raise RINGREDUCE_JOIN_TIMEOUT_S if they "
            "start slowly.",
        )

    def table(self) -> Table:
        """The table for all ranks, once all have joined."""
        own = self._own
        hellos = [self._hellos[rank] for rank in range(own.size)]
        others = [
            f"rank {hello.rank} Python {hello.python[:32]}, numpy {hello.numpy[:32]}"
            for hello in hellos
            if (hello.python, hello.numpy) != (own.python, own.numpy)
        ]
        if others:  # Other versions can change results.
            _log.warning(
                "[%d/%d] ranks run different versions, so results may differ: this one Python %s, "
                "numpy %s; %s",
                *(own.rank, own.size, own.python, own.numpy, "; ".join(others[:_REFUSALS_KEPT])),
            )
        members = tuple(msgspec.convert(hello, Member, from_attributes=True) for hello in hellos)
        material = secrets.token_bytes(MATERIAL_BYTES) if own.key else b""
        return Table(secrets.randbits(64), members, material)


def _differing(theirs: dict[str, int], ours: dict[str, int]) -> list[tuple[str, Any, Any]]:
    """Each setting, by its variable: what it is there and here."""
    if theirs.keys() != ours.keys():
        return [("settings", theirs, ours)]
    return [
        (variable_of(name), _value(name, theirs[name]), _value(name, ours[name])) for name in ours
    ]


def _value(name: str, number: int) -> int | str:
    """A setting's value as users write it; of names the index is sent."""
    names = SETTINGS[name].values
    return names[number] if 0 <= number < len(names) else number
