"""Makes a rank's collectives.

A rank first opens its ports and, where possible, shared memory, and announces both: to the
rendezvous, or, for a group, to its parent's ranks. Then all members choose alike from what all have
announced, without another message.
"""

import contextlib
import hashlib
import logging
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringreduce.bootstrap.rendezvous import Rendezvous
from ringreduce.collectives.base import Collectives
from ringreduce.collectives.hierarchical import HierarchicalCollectives
from ringreduce.collectives.ring import Ring
from ringreduce.collectives.shared_memory import SharedMemoryCollectives
from ringreduce.commands.launch import handover
from ringreduce.commands.launch.standings import Standings, newest
from ringreduce.commands.launch.worker_records import Joins, Stands
from ringreduce.communicator import reaching
from ringreduce.communicator.opened_sockets import (
    Announced,
    OpenedSockets,
    bind_of,
    open_sockets,
    reserve_files,
)
from ringreduce.communicator.reaching import Layout
from ringreduce.effects.dumping import FlightFile
from ringreduce.pure.membership import Membership, whole
from ringreduce.pure.placement import place
from ringreduce.pure.views import Agreement, Row, Standing, View
from ringreduce.transport.control import Control
from ringreduce.transport.interfaces import await_name, own_networks
from ringreduce.transport.listening import Bind
from ringreduce.transport.routes import Routes
from ringreduce.transport.security import MATERIAL_BYTES, Security
from ringreduce.transport.shm import Neighbour
from ringreduce.transport.stalls import Waiting
from ringreduce.transport.standby import Standby
from ringreduce.transport.unix import has_ended
from ringreduce.transport.visits import Visits
from ringreduce.transport.zeromq import ZmqLink
from ringreduce.transport.zmq_pairs import ZmqPairs
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass
class Job:
    """All ranks of a job as one of them knows them since they met; shared by its sessions."""

    config: Config
    number: int  # 64 random bits in the header of every frame
    security: Security
    # hosts, domains: by rank, the name of its host, and of the memory that it can share.
    hosts: tuple[str, ...]
    domains: tuple[str, ...]
    standby: Standby  # where this rank can be met again; `standbys`: each rank, empty for nowhere
    standbys: tuple[str, ...]
    # bind, routes: where this rank listens, and at which addresses it reaches the others.
    bind: Bind
    routes: Routes
    # This rank's state in choosing the next ring's ranks; kept by attempts that fail.
    agreement: Agreement
    # How far this rank has come: in memory that outlives it, for those of its host.
    left_behind: Standings | None = None
    standing: Standing = field(default_factory=Standing)
    training: int = 0  # the number of that which its ring is formed anew for; 0: none
    # Whether the training that its ring is formed anew for has ended here; None: there was none.
    has_ended: bool | None = None
    highest_group: int = 0  # of the groups that this rank has taken part in forming
    # The ranks that share this host's memory, but this one.
    neighbours: dict[int, Neighbour] = field(default_factory=dict)
    # This rank's flight record; None until the job's session has it.
    flight: FlightFile | None = None

    @property
    def has_left_out(self) -> bool:
        """Whether ranks were left out that may be alive, and are told so when they wake."""
        return bool(self.agreement.left_out)

    @property
    def ranks_here(self) -> int:
        return self.hosts.count(self.hosts[self.config.rank])

    def stand(self, **changes: Any) -> None:
        """Leave behind how far this rank has come, before it goes on; see `Standing`."""
        self.standing = self.standing._replace(**changes)
        if self.left_behind is not None:
            self.left_behind.write(self.standing)
        # Programs that are not elastic have nothing to say.
        if self.has_ended is not None or self.standing.ring:
            handover.tell(Stands(*self.standing))

    def standing_of(self, rank: int) -> Standing:
        """What is known of how far another rank has come, whether or not it is still there."""
        neighbour, known = self.neighbours.get(rank), [Standing()]
        if neighbour is not None:
            # First whether it is gone: what it has left behind is whole then.
            process = neighbour.process
            known.append(Standing(is_gone=process is not None and has_ended(process)))
            known.append(neighbour.standing.read())
        life = self.agreement.view.life_of(rank)
        if (word := handover.word_of(rank, life)) is not None:
            known.append(word)
        return newest(*known)

    def has_place_for(self, row: Row) -> bool:
        """Whether a newcomer of that row fits into the tables of this job."""
        is_place = row.place < self.config.size and row.place != self.config.rank
        return is_place and bool(row.standby) and self.security.accepts(row.place, row.key)

    def take_in(self, rows: Iterable[Row]) -> None:
        """Know those newcomers from now on, and nothing of the processes that they follow."""
        for row in rows:
            before, after = slice(row.place), slice(row.place + 1, None)
            self.hosts = (*self.hosts[before], row.host, *self.hosts[after])
            self.domains = (*self.domains[before], row.domain, *self.domains[after])
            self.standbys = (*self.standbys[before], row.standby, *self.standbys[after])
            self.security.admit(row.place, row.key)
            networks = {**self.routes.networks, row.place: row.networks}
            self.routes = Routes(self.config.rank, self.config.size, networks)
            self.neighbours.pop(row.place, None)

    def visits(self) -> Visits:
        """Open this rank's standby port, for all ranks that there were at the beginning."""
        others = [peer for peer in range(self.security.size) if peer != self.security.rank]
        ways = {peer: self.ways(peer) for peer in others}
        return Visits(self.standby, self.security, self.number, ways)

    def ways(self, peer: int) -> list[tuple[str, int]]:
        """Where another rank's standby port may be."""
        return self.routes.ways(peer, self.standbys[peer])

    def answer(self, *, is_busy: bool = False) -> None:
        """From now on tell others that form the ring anew what holds for this rank.

        It has ended, or left them out; or, if it `is_busy`, it will come.
        """
        with self.standby.lock:
            self.standby.answering.close()
            is_wanted = is_busy or self.has_ended or self.has_left_out
            if self.standby.is_closed or self.standby.is_in_use or not is_wanted:
                return
            for_s = TIMES.told_s if self.has_ended else math.inf
            for_s = self.config.busy_timeout_s if is_busy else for_s
            visits, view = self.visits(), self.agreement.view
            self.standby.answering.callback(visits.close)
            visits.answer(view, for_s, has_ended=bool(self.has_ended), is_busy=is_busy)

    def layout(self, membership: Membership) -> Layout:
        """Which members share memory."""
        members = membership.members
        placement = place([self.hosts[m] for m in members], [self.domains[m] for m in members])
        return Layout(self.config.rank, membership, placement)


class Formed(NamedTuple):
    """The connected parts that `form` has made."""

    job: Job
    collectives: Collectives
    control: Control
    transport: str  # ``shm``, ``zmq`` or ``shm+zmq``
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each host, in the order of the ring
    local_rank: int  # as configured, else counted on this host; `local_size` too
    local_size: int
    rendezvous: Rendezvous | None
    link: ZmqLink | None

    def finish(self) -> None:
        """Refuse further connections; call it after the first barrier, when all are connected."""
        if self.rendezvous is not None:
            self.rendezvous.close()
        if self.link is not None:
            self.link.lock()


def form(config: Config, waiting: Waiting) -> Formed:
    """Meet all ranks and connect to this one's peers; raises as `Communicator` does."""
    handover.tell(Joins(config.size))
    reserve_files(config, config.size)  # First: a secret and a name take files, too.
    await_name(config)
    membership, security = whole(config.size), Security.of(config)
    networks = own_networks(config)
    bind = bind_of(config, networks)
    with contextlib.ExitStack() as undo:  # What closes them after an error.
        opened = open_sockets(config, membership, security, bind, waiting, undo)
        standby = Standby(bind, rank=config.rank, size=config.size)
        undo.callback(standby.close)
        rendezvous = Rendezvous(
            config,
            *opened.announced,
            standby=standby.address,
            networks=networks,
            security=security,
            idle=opened.read_events,
        )
        undo.callback(rendezvous.close)
        table = rendezvous.meet()
        members = table.members
        security.learn([member.key for member in members], table.material, table.job)
        networks_of = {rank: member.networks for rank, member in enumerate(members)}
        job = Job(
            config,
            table.job,
            security,
            hosts=tuple(member.host for member in members),
            domains=tuple(member.memory.rpartition("/")[0] for member in members),
            standby=standby,
            standbys=tuple(member.standby for member in members),
            bind=bind,
            routes=Routes(config.rank, config.size, networks_of),
            # If its first ring does not form, the job ends.
            agreement=Agreement(
                config.rank, View(membership.epoch, membership.members), has_passed=True
            ),
            left_behind=Standings.create(1) if opened.shared is not None else None,
        )
        layout = job.layout(membership)
        placement = layout.placement
        if config.transport == "shm" and placement.transport != "shm":
            groups = ", ".join(str(host) for host in placement.hosts)
            raise ConfigError(
                f"cannot use shared memory alone: the ranks that share it are {groups}",
                **config.who,
                remedy="Use RINGREDUCE_TRANSPORT=auto, which joins hosts over sockets.",
            )
        announced = [Announced(member.address, member.control, member.memory) for member in members]
        formed = connect(job, layout, opened, announced, rendezvous)
        undo.pop_all()
    _log.info(
        "[%d/%d] ring formed over %s%s: %s",
        *(config.rank, config.size, placement.transport),
        f", encryption: {security.encryption}" if placement.transport != "shm" else "",
        " | ".join(map(str, placement.hosts)),
    )
    return formed


def form_group(
    job: Job,
    membership: Membership,
    parent: reaching.Exchanger,
    check: Callable[[], None],
    waiting: Waiting,
) -> Formed:
    """Form the ring of a group of two or more, or one anew, of which this rank is a member.

    The ranks of `parent` take the place of the rendezvous. Those that are in no such group call
    `take_no_part` at the same time. `check` raises the error that has broken the parent.

    Raises as `Communicator`; RendezvousError, on all ranks of the parent, if a rank could not open
    what it needs, or reach another.
    """
    config, layout = job.config, job.layout(membership)
    security = job.security.for_group(membership)
    with contextlib.ExitStack() as undo:
        with parent.guarded():
            transport = layout.placement.transport
            opened = open_sockets(config, membership, security, job.bind, waiting, undo, transport)
        passed = parent.exchange((*opened.announced, secrets.token_bytes(MATERIAL_BYTES)))
        by_member = [passed[rank] for rank in membership.members]
        # Fresh if only one member draws good random numbers.
        drawn = b"".join(material for *_, material in by_member)
        security.start_session(hashlib.blake2b(drawn, digest_size=MATERIAL_BYTES).digest())
        announced = [Announced(*address) for *address, _ in by_member]
        formed = connect(job, layout, opened, announced, parent, check)
        # The parent's watchers see at once who dies, those of the group once they are connected.
        parent.exchange(None)
        undo.pop_all()
    return formed


def take_no_part(job: Job, parent: reaching.Exchanger) -> None:
    """Let other ranks form groups; see `form_group`."""
    parent.exchange(None)
    if job.routes.are_needed:
        reaching.refuse_unreached(job, parent.exchange(()))
    parent.exchange(None)


def connect(
    job: Job,
    layout: Layout,
    opened: OpenedSockets,
    announced: Sequence[Announced],
    others: reaching.Exchanger,
    check: Callable[[], None] = lambda: None,
) -> Formed:
    """Connect to the members; close what they do not need. While it waits it calls `check`.

    The same for a job, for one whose ring is formed anew, and for a group. `announced` is where
    each member listens, in their order; by `others` they exchange which of them they can reach.

    Raises RendezvousError, on all, if a member cannot reach one that it sends to.
    """
    config, membership = job.config, layout.membership
    where = dict(zip(membership.members, announced, strict=True))
    if job.routes.are_needed:
        where = reaching.find_ways(job, layout, where, others, check)
    with others.guarded():
        opened.control.connect({rank: ways.control for rank, ways in where.items()})
        pairs = ZmqPairs(
            bind=job.bind,
            segment_bytes=config.segment_bytes,
            waiting=opened.waiting,
            security=opened.security,
            membership=membership,
            job=job.number,
            routes=job.routes,
            ranks_here=job.ranks_here,
        )
        collectives = _collectives(job, layout, opened, where, pairs, check)
        collectives.pairs = pairs
    here = [rank for rank in membership.members if job.hosts[rank] == job.hosts[config.rank]]
    is_whole = membership == whole(config.size)
    local_rank, count = (config.local_rank, config.local_size) if is_whole else (None, None)
    return Formed(
        job=job,
        collectives=collectives,
        control=opened.control,
        transport=layout.placement.transport,
        hosts=layout.placement.hosts,
        local_rank=here.index(config.rank) if local_rank is None else local_rank,
        local_size=len(here) if count is None else count,
        rendezvous=others if isinstance(others, Rendezvous) else None,
        link=opened.link,
    )


def _collectives(
    job: Job,
    layout: Layout,
    opened: OpenedSockets,
    announced: Mapping[int, Announced],
    pairs: ZmqPairs,
    check: Callable[[], None],
) -> Collectives:
    """The collectives of the members as they are placed."""
    rank, link, shared = layout.rank, opened.link, opened.shared
    membership, placement, together = layout.membership, layout.placement, layout.together
    whose: dict[str, Any] = {"membership": membership, "job": job.number}
    host = SharedMemoryCollectives(None)
    if len(together) > 1:
        assert shared is not None
        names = {member: announced[member].memory for member in together}
        assert job.left_behind is not None
        here = shared.connect(
            names,
            rank=rank,
            size=job.config.size,
            job=job.number,
            standing=job.left_behind.descriptor,
            check=check,
        )
        job.neighbours.update(here)
        place, count = together.index(rank), len(together)
        host = SharedMemoryCollectives(shared, rank=place, size=count, **whose)
    elif shared is not None:
        shared.close()
    ring: Ring | None = None
    if (lane := layout.lane) is not None:
        assert link is not None
        link.connect(
            job=job.number,
            addresses={member: announced[member].address for member in lane.members},
            membership=lane,
            ranks_here=job.ranks_here,
        )
        places = tuple(map(membership.group_rank, lane.members))
        place = lane.group_rank(rank)
        ring = Ring(link, rank=place, size=lane.size, pairs=pairs, places=places, **whose)
    elif link is not None:
        link.close()
    if placement.transport == "shm":
        return host
    if placement.transport == "zmq":
        assert ring is not None
        return ring
    return HierarchicalCollectives(host, ring, placement, membership.group_rank(rank), **whose)
