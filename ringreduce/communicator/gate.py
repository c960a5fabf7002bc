"""The first rank's door for newcomers, as the ring is now; opened anew with each ring.

What a newcomer is told is fixed when the door opens, so that it is of one ring. When the ring forms
anew the door closes once that is done, and newcomers that were not taken in knock at the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringreduce.commands.launch import handover
from ringreduce.commands.launch.worker_records import Grows
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.journal import Journal, journal_of
from ringreduce.pure.arrivals import Knock, Ready, Refusal, Welcome
from ringreduce.pure.views import Row
from ringreduce.transport.door import Door
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.worker_environment import door_name


class Gate:
    """Lets newcomers into the job of `ring`, whose calls before training are in its `journal`.

    `facts` are this program's, which must be theirs too.
    """

    def __init__(self, ring: Communicator, journal: Journal, facts: Mapping[str, str]) -> None:
        self._ring, self._journal, self._facts = ring, journal, dict(facts)
        self._door: Door | None = None
        self._reason = ""

    def stand(self) -> None:
        """Open the door for the ring as it is now, if this rank is its first; else have none."""
        before, self._door = self._door, None
        session = self._ring._session
        job = session.job
        if self._ring.rank == 0 and job is not None and not self._reason:
            try:
                journal = self._journal.encoded()
            except ConfigError as error:
                self._reason = error.message
        if before is not None:
            before.close()
        if self._ring.rank or job is None or self._reason:
            return
        networks = job.routes.networks
        welcome = Welcome(
            number=job.number,
            size=job.config.size,
            hosts=job.hosts,
            domains=job.domains,
            standbys=job.standbys,
            keys=tuple(key.decode() for key in job.security.keys) or ("",) * job.config.size,
            networks=tuple(tuple(networks.get(rank, ())) for rank in range(job.config.size)),
            view=job.agreement.view,
            training=job.training,
            has_ended=job.has_ended,
            transport=session.transport,
            facts=self._facts,
            journal=journal,
        )

        def answer(knock: Knock) -> Welcome | Refusal:
            view = welcome.view
            if knock.place in view.members:
                text = f"rank {knock.place} is in the ring, as process {view.life_of(knock.place)}"
                return Refusal(f"{text} of its place")
            if knock.life <= view.life_of(knock.place):
                return Refusal(f"a later process than {knock.life} has been rank {knock.place}")
            return welcome

        self._door = Door(door_name(), job.security, job.config, answer, self._why_not)

    def _why_not(self, ready: Ready) -> Refusal | None:
        unlike = differing(self._facts, ready.facts)
        return Refusal(unlike) if unlike else None

    def ready(self) -> tuple[Row, ...]:
        """The newcomers that could be taken in now; none where this rank is not the first."""
        return () if self._door is None else self._door.ready()

    def end(self, text: str) -> None:
        """Let nobody in any more; newcomers are told that the job has ended, with `text`."""
        self._reason = text
        if self._door is not None:
            self._door.end(text)
        self.close()

    def close(self) -> None:
        """Have no door any more; newcomers knock where the next first rank has one."""
        if self._door is not None:
            self._door.close()
            self._door = None


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """What a newcomer with the facts `theirs` has other than the job, in words; empty: nothing."""
    for name in sorted({*ours} & {*theirs}):
        if ours[name] != theirs[name] and name.endswith(".py"):
            return f"{name} was changed since the job began"
        if ours[name] != theirs[name]:
            return f"{name} is {theirs[name]!s:.200} here, and {ours[name]!s:.200} in the job"
    return ""


def only_shrinks(ring: Communicator, reason: str) -> None:
    """From now on no rank can come back to the job, because of `reason`; the launcher is told."""
    journal = journal_of(ring)
    if journal is None or journal.has_served:
        return
    journal.has_served = True
    journal.end_growing(reason)
    if ring.rank == 0:
        handover.tell(Grows(journal.ends_growing or reason))
