"""The addresses at which ranks of other hosts may reach this one."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence

from ringreduce.pure.networks import OFFERED_MAX, Local, described, offered
from ringreduce.transport.address import is_loopback, resolve, unreachable
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.endpoints import patterns
from ringreduce.vocabulary.errors import ConfigError, RendezvousError

_log = logging.getLogger(__name__)


def own_networks(config: Config) -> tuple[str, ...]:
    """This rank's addresses for the others, with prefixes; first the one towards the rendezvous.

    Where the ranks meet on loopback that is the only one, so that a job on one host listens on
    nothing else.

    Raises:
        RendezvousError: the rendezvous host's name does not resolve or cannot be reached; on rank
            0, it is not an address of this host.
        ConfigError: ``iface`` leaves no address, or one of its patterns matches none.
    """
    family, target = resolve(config)
    host = _own_end(config, family, target)
    if is_loopback(host):
        return (f"{host}/{128 if ':' in host else 8}",)
    found = local_addresses()
    if config.rank == 0:
        _check_own(config, host, found)
    try:
        chosen = offered(found, patterns(config.iface))
    except ValueError as error:
        raise ConfigError(
            f"cannot use RINGREDUCE_IFACE={config.iface}: {error}; there are {described(found)}",
            **config.who,
            remedy="Names and CIDR blocks are listed with commas between them; ^ before one "
            "excludes it.",
        ) from error
    here = [each for each in chosen if str(each.at.ip) == host]
    if not here and not config.iface:
        # A bridge leads to the rendezvous, as from a container of the host.
        here = [each for each in found if each.is_usable and str(each.at.ip) == host]
    ordered = here + [each for each in chosen if each not in here]
    networks = tuple(each.network for each in ordered if _is_bindable(str(each.at.ip)))
    if not networks:
        raise ConfigError(
            f"has no address for ranks of other hosts; there are {described(found)}",
            **config.who,
            remedy="Choose some by RINGREDUCE_IFACE.",
        )
    if config.rank == 0 or len(networks) > 1:
        _log.info("[%d/%d] listens on %s", config.rank, config.size, ", ".join(networks))
    return networks[:OFFERED_MAX]


def hosts_of(networks: Sequence[str]) -> tuple[str, ...]:
    """The addresses without their prefixes."""
    return tuple(network.rpartition("/")[0] for network in networks)


def local_addresses() -> list[Local]:
    """All addresses of interfaces that are up."""
    import psutil  # Takes a while to load, and jobs on one host do not need it.

    down = {name for name, facts in psutil.net_if_stats().items() if not facts.isup}
    return [
        Local(name, f"{each.address.partition('%')[0]}/{_prefix(each.address, each.netmask)}")
        for name, addresses in psutil.net_if_addrs().items()
        if name not in down
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _prefix(address: str, mask: str | None) -> int:
    """The length of a network's prefix; that of a single address if the mask is unknown."""
    bits = 128 if ":" in address else 32
    return bits if mask is None else int(ipaddress.ip_address(mask)).bit_count()


def _own_end(config: Config, family: int, target: tuple[str, int]) -> str:
    """On rank 0 the rendezvous host; elsewhere the address that leads there."""
    if config.rank == 0:
        return target[0]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # Chooses a route and sends nothing.
            return str(probe.getsockname()[0])
    except OSError as error:
        raise unreachable(config, error) from error


def _check_own(config: Config, host: str, found: Sequence[Local]) -> None:
    """Raise RendezvousError on rank 0 unless the rendezvous host is its own."""
    if not _is_bindable(host):
        raise RendezvousError(
            f"cannot listen on {config.rendezvous} for the other ranks: {host} is not an address "
            f"of this host, which has {described(found)}",
            **config.who,
            remedy="Set RINGREDUCE_RENDEZVOUS on all ranks to one of rank 0's own addresses, or "
            "run rank 0 on that host.",
        )


def _is_bindable(host: str) -> bool:
    """Whether sockets may listen there; an IPv6 address may still be tentative."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
