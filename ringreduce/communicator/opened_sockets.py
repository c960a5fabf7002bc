"""Opens a rank's sockets before it meets others, and memory to share where that is possible."""

import contextlib
import logging
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ringreduce.effects.native import library
from ringreduce.pure.membership import Membership
from ringreduce.pure.schedule import channel_distances
from ringreduce.transport import descriptors
from ringreduce.transport.control import CONTROL_CHANNELS, Control
from ringreduce.transport.interfaces import hosts_of
from ringreduce.transport.listening import Bind
from ringreduce.transport.security import Security
from ringreduce.transport.shm import ShmLink
from ringreduce.transport.stalls import Waiting
from ringreduce.transport.zeromq import ZmqLink
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.endpoints import port_range
from ringreduce.vocabulary.errors import ConfigError, NativeError, RendezvousError

_log = logging.getLogger(__name__)


class Announced(NamedTuple):
    """Where a member can be reached: its data sockets, its control channel, its memory."""

    address: str
    control: str
    memory: str


class OpenedSockets(NamedTuple):
    """A rank's open sockets; `link` and `shared` are None where not needed or impossible."""

    waiting: Waiting
    shared: ShmLink | None
    link: ZmqLink | None
    control: Control
    security: Security

    @property
    def announced(self) -> Announced:
        """The names by which other members reach this one."""
        address = "" if self.link is None else self.link.address
        return Announced(address, self.control.address, self.shared.name if self.shared else "")

    def read_events(self) -> None:
        if self.link is not None:
            self.link.sockets.read_events()
        self.control.sockets.read_events()


def bind_of(config: Config, networks: Sequence[str]) -> Bind:
    """Where a rank with these addresses listens; ConfigError if ``ports`` are too few."""
    data = 0 if config.transport == "shm" else len(channel_distances(config.size, config.streams))
    # Control channels to its neighbours, and the standby port.
    needed = data + min(CONTROL_CHANNELS, config.size - 1) + 1
    ports = port_range(config.ports) if config.ports else None
    if ports is not None and len(ports) < needed:
        raise ConfigError(
            f"needs {needed} ports, and RINGREDUCE_PORTS={config.ports} has {len(ports)}",
            **config.who,
            remedy="Widen the range: all ranks of a host share it.",
        )
    return Bind(hosts_of(networks), ports, needed)


def reserve_files(config: Config, size: int, addresses: int = 1) -> None:
    """Ensure that a rank of `size` that listens at `addresses` can open its files; ConfigError."""
    channels = len(channel_distances(size, config.streams)) + CONTROL_CHANNELS
    count = descriptors.needed(size, channels, config.streams, addresses)
    descriptors.reserve(count, **config.who)


def open_sockets(
    config: Config,
    membership: Membership,
    security: Security,
    bind: Bind,
    waiting: Waiting,
    undo: contextlib.ExitStack,
    transport: str = "shm+zmq",
) -> OpenedSockets:
    """Open memory and sockets, as far as `transport` needs them, once there is room for them."""
    reserve_files(config, membership.size, len(bind.hosts))
    shared = _shared_memory(config, waiting) if "shm" in transport else None
    if shared is not None:
        undo.callback(shared.close)
    link: ZmqLink | None = None
    if "zmq" in transport:
        link = ZmqLink(
            bind=bind,
            segment_bytes=config.segment_bytes,
            waiting=waiting,
            streams=config.streams,
            security=security,
            members_max=membership.size,
        )
        undo.callback(link.close)
    control = Control(
        bind=bind, link_timeout_s=config.link_timeout_s, security=security, membership=membership
    )
    undo.callback(control.close)
    return OpenedSockets(waiting, shared, link, control, security)


def _shared_memory(config: Config, waiting: Waiting) -> ShmLink | None:
    """Memory to share; None where it is not wanted or not possible.

    Where `transport` is ``shm`` that is a NativeError or RendezvousError. Raises NativeError, too,
    if the native library is broken.
    """
    if config.transport == "zmq":
        return None
    library()  # A library that cannot be used is an error; one that is missing is not.
    try:
        if sys.platform != "linux":
            raise NativeError("shared memory needs Linux (memfd, futex)")
        return ShmLink(waiting=waiting)
    except NativeError:
        if config.transport == "shm":
            raise
    except OSError as error:
        if config.transport == "shm":
            raise RendezvousError(
                f"cannot get memory to share with the other ranks: {error.strerror}",
                **config.who,
                remedy="Free some memory, or use RINGREDUCE_TRANSPORT=zmq.",
            ) from error
        text = "[%d/%d] has no memory to share (%s); it is reached over sockets instead"
        _log.warning(text, config.rank, config.size, error.strerror)
    return None
