"""Makes a rank's collectives.

A rank first opens its port and, where possible, shared memory, so that the rendezvous's table
holds both. Then all ranks choose alike from that table, without another message.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import dataclass

from ringreduce.bootstrap.messages import Table
from ringreduce.bootstrap.rendezvous import Meeting, bind_address
from ringreduce.collectives.base import Collectives
from ringreduce.collectives.hierarchical import HierarchicalCollectives
from ringreduce.collectives.ring import Ring
from ringreduce.collectives.shared_memory import SharedMemoryCollectives
from ringreduce.pure.messages import message_bytes_max
from ringreduce.pure.patience import Patience
from ringreduce.pure.placement import Placement, place
from ringreduce.transport import descriptors
from ringreduce.transport.connections import distances
from ringreduce.transport.control import CONTROL_CHANNELS, Control
from ringreduce.transport.security import Security
from ringreduce.transport.shm import HostLink
from ringreduce.transport.zeromq import ZmqLink
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import ConfigError, NativeError, RendezvousError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Formed:
    """What `form` has made, connected.

    Attributes:
        patience: how long calls may wait; the watcher keeps it up to date.
        transport: ``shm``, ``zmq`` or ``shm+zmq``.
        shares_memory: whether this rank shares memory with another.
        local_rank, local_size: as configured, else counted on this host.
    """

    collectives: Collectives
    control: Control
    patience: Patience
    transport: str
    shares_memory: bool
    local_rank: int
    local_size: int
    meeting: Meeting
    link: ZmqLink

    def finish(self) -> None:
        """Refuse further connections; call it after the first barrier, when all are connected."""
        self.meeting.close()
        self.link.lock()


def form(config: Config) -> Formed:
    """Meet all ranks and connect to this one's peers; raises as `Communicator` does."""
    security = Security.of(config)
    channels = len(distances(config.size, config.streams)) + CONTROL_CHANNELS
    count = descriptors.needed(config.size, channels, config.streams)
    descriptors.reserve(count, rank=config.rank, size=config.size)
    with (
        descriptors.shortage_explained(rank=config.rank, size=config.size),
        contextlib.ExitStack() as undo,
    ):
        patience = Patience(config.timeout_s, config.busy_timeout_s)
        shared = _shared_memory(config, patience)
        if shared is not None:
            undo.callback(shared.close)
        bind = bind_address(config)
        link = ZmqLink(
            bind=bind,
            segment_bytes=config.segment_bytes,
            patience=patience,
            streams=config.streams,
            security=security,
        )
        undo.callback(link.close)
        control = Control(
            bind=bind,
            message_bytes_max=message_bytes_max(config.size),
            link_timeout_s=config.link_timeout_s,
            security=security,
        )
        undo.callback(control.close)

        memory = shared.name if shared else ""
        meeting = Meeting(config, link.address, control.address, memory, security)
        undo.callback(meeting.close)
        while (table := meeting.advance()) is None:
            link.read_events()
            control.read_events()
        security.learn(table.keys, table.material, table.job)
        domains = tuple(name.rpartition("/")[0] for name in table.memory)
        placement = place(table.hosts, domains)
        if config.transport == "shm" and placement.transport != "shm":
            groups = ", ".join(str(host) for host in placement.hosts)
            raise ConfigError(
                f"cannot use shared memory alone: the ranks that share it are {groups}",
                rank=config.rank,
                size=config.size,
                remedy="Use RINGREDUCE_TRANSPORT=auto, which joins hosts over sockets.",
            )
        control.connect(table.controls)
        collectives = _connect(config, table, placement, link, shared)
        undo.pop_all()

    has_sockets = placement.transport != "shm"
    encryption = f", encryption: {security.encryption}" if has_sockets else ""
    here = [r for r in range(config.size) if table.hosts[r] == table.hosts[config.rank]]
    _log.info(
        "[%d/%d] ring formed over %s%s: %s",
        *(config.rank, config.size, placement.transport, encryption),
        " | ".join(map(str, placement.hosts)),
    )
    return Formed(
        collectives=collectives,
        control=control,
        patience=patience,
        transport=placement.transport,
        shares_memory=len(placement.hosts[placement.host_of(config.rank)]) > 1,
        local_rank=here.index(config.rank) if config.local_rank is None else config.local_rank,
        local_size=len(here) if config.local_size is None else config.local_size,
        meeting=meeting,
        link=link,
    )


def _shared_memory(config: Config, patience: Patience) -> HostLink | None:
    """Memory to share; None where it is not wanted or not possible.

    Raises:
        NativeError, RendezvousError: `transport` is ``shm``, and it is not possible.
    """
    if config.transport == "zmq":
        return None
    try:
        if sys.platform != "linux":
            raise NativeError("shared memory needs Linux (memfd, futex)")
        return HostLink(patience=patience)
    except NativeError:
        if config.transport == "shm":
            raise
    except OSError as error:
        if config.transport == "shm":
            raise RendezvousError(
                f"cannot get memory to share with the other ranks: {error.strerror}",
                rank=config.rank,
                size=config.size,
                remedy="Free some memory, or use RINGREDUCE_TRANSPORT=zmq.",
            ) from error
        _log.warning(
            "[%d/%d] has no memory to share (%s); it is reached over sockets instead",
            *(config.rank, config.size, error.strerror),
        )
    return None


def _connect(
    config: Config, table: Table, placement: Placement, link: ZmqLink, shared: HostLink | None
) -> Collectives:
    """The chosen collectives, connected; closes what they do not need."""
    rank, size = config.rank, config.size
    members = placement.hosts[placement.host_of(rank)]
    host = SharedMemoryCollectives(None, rank=0, size=1)
    if len(members) > 1:
        assert shared is not None
        names = [table.memory[member] for member in members]
        shared.connect(names, members, rank=rank, size=size, job=table.job)
        host = SharedMemoryCollectives(
            shared, rank=members.index(rank), size=len(members), job=table.job
        )
    elif shared is not None:
        shared.close()
    if placement.transport == "shm":
        link.close()
        return host
    ring: Ring | None = None
    lane = members.index(rank)
    if lane < placement.lanes:
        ring = _ring(config, table, placement.lane(lane), link)
    else:
        link.close()
    if placement.transport == "zmq":
        assert ring is not None
        return ring
    return HierarchicalCollectives(host, ring, placement, rank)


def _ring(config: Config, table: Table, members: tuple[int, ...], link: ZmqLink) -> Ring:
    """The ring of `members`, which include this rank."""
    link.connect(job=table.job, addresses=table.addresses, members=members)
    place, size = members.index(config.rank), len(members)
    return Ring(link, rank=place, size=size, job=table.job, mean_over=config.size)
