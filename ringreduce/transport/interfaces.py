"""The addresses at which ranks of other hosts may reach this one."""

import errno
import ipaddress
import logging
import socket
import time
from collections.abc import Sequence

from ringreduce.pure.networks import OFFERED_MAX, Local, described, offered
from ringreduce.transport.address import family, is_literal, resolve, unreachable
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.endpoints import host_and_port, is_loopback, patterns
from ringreduce.vocabulary.errors import ConfigError, RendezvousError

_log = logging.getLogger(__name__)


def await_name(config: Config) -> None:
    """Wait until the rendezvous host's name resolves, and on rank 0 leads to this host.

    A cluster's name server learns the name of a new pod seconds after the pod has started, and may
    give the address of the one before it until then. Returns after ``join_timeout_s`` at the
    latest; what uses the name then raises the error.
    """
    deadline = time.monotonic() + config.join_timeout_s
    is_logged = False
    while (why := _not_yet(config)) and time.monotonic() < deadline:
        if not is_logged:
            is_logged = True
            text = "[%d/%d] waits for the rendezvous %s, up to %g s: %s"
            place = config.rendezvous, config.join_timeout_s
            _log.warning(text, config.rank, config.size, *place, why)
        time.sleep(TIMES.name_s)


def _not_yet(config: Config) -> str:
    """Why the rendezvous cannot be used now and perhaps later; empty if it can, or never can."""
    if config.size == 1 or is_literal(host_and_port(config.rendezvous)[0]):
        return ""
    try:
        hosts, _ = resolve(config)
    except RendezvousError as error:
        may_change = isinstance(error.__cause__, socket.gaierror)
        return f"the name does not resolve ({error.__cause__})" if may_change else ""
    if config.rank == 0 and not any(map(_is_bindable, hosts)):
        return f"{', '.join(hosts)} is not an address of this host"
    return ""


def own_networks(config: Config) -> tuple[str, ...]:
    """This rank's addresses for the others, with prefixes; first the one towards the rendezvous.

    Where the ranks meet on loopback that is the only one, so that a job on one host listens on
    nothing else. Raises RendezvousError if the rendezvous host's name does not resolve, cannot be
    reached, or on rank 0 is not an address of this host; ConfigError if ``iface`` leaves no
    address, or one of its patterns matches none.
    """
    host = _own_end(config)
    if is_loopback(host):
        _check_name(config, host)
        return (f"{host}/{128 if ':' in host else 8}",)
    local = local_addresses()
    try:
        chosen = offered(local, patterns(config.iface))
    except ValueError as error:
        raise ConfigError(
            f"cannot use RINGREDUCE_IFACE={config.iface}: {error}; there are {described(local)}",
            **config.who,
            remedy="Names and CIDR blocks are listed with commas between them; ^ before one "
            "excludes it.",
        ) from error
    here = [address for address in chosen if str(address.at.ip) == host]
    if not here and not config.iface:
        # A bridge leads to the rendezvous, as from a container of the host.
        here = [address for address in local if address.is_usable and str(address.at.ip) == host]
    ordered = here + [address for address in chosen if address not in here]
    networks = tuple(address.network for address in ordered if _is_bindable(str(address.at.ip)))
    if not networks:
        text = f"has no address for ranks of other hosts; there are {described(local)}"
        raise ConfigError(text, **config.who, remedy="Choose some by RINGREDUCE_IFACE.")
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
        Local(name, f"{entry.address.partition('%')[0]}/{_prefix(entry.address, entry.netmask)}")
        for name, addresses in psutil.net_if_addrs().items()
        if name not in down
        for entry in addresses
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _prefix(address: str, mask: str | None) -> int:
    """The length of a network's prefix; that of a single address if the mask is unknown."""
    bits = 128 if ":" in address else 32
    return bits if mask is None else int(ipaddress.ip_address(mask)).bit_count()


def meeting_hosts(config: Config) -> tuple[str, ...]:
    """This host's addresses among the rendezvous host's; RendezvousError if there is none."""
    hosts, _ = resolve(config)
    bindable = tuple(host for host in hosts if _is_bindable(host))
    if not bindable:
        raise RendezvousError(
            f"cannot listen on {config.rendezvous} for the other ranks: {', '.join(hosts)} is not "
            f"an address of this host, which has {described(local_addresses())}",
            **config.who,
            remedy="Set RINGREDUCE_RENDEZVOUS on all ranks to one of rank 0's own addresses, or "
            "run rank 0 on that host.",
        )
    return bindable


def _own_end(config: Config) -> str:
    """On rank 0 the rendezvous host; elsewhere the address that leads there."""
    if config.rank == 0:
        return meeting_hosts(config)[0]
    hosts, port = resolve(config)
    failure: OSError | None = None
    for host in hosts:
        try:
            with socket.socket(family(host), socket.SOCK_DGRAM) as probe:
                probe.connect((host, port))  # Chooses a route and sends nothing.
                return str(probe.getsockname()[0])
        except OSError as error:
            failure = error
    assert failure is not None
    raise unreachable(config, failure) from failure


def _check_name(config: Config, host: str) -> None:
    """Refuse a name that means this host alone in a job of several, and warn if that may be so.

    As Debian has it, whose hosts know themselves as 127.0.1.1.
    """
    name, _ = host_and_port(config.rendezvous)
    if is_literal(name) or config.local_size == config.size:
        return
    what = f"{name} in RINGREDUCE_RENDEZVOUS is {host} here, which other hosts cannot reach"
    here = f" ({described(local_addresses())})" if config.rank == 0 else ""
    remedy = f"Set it on all ranks to an address of rank 0's host{here}, or correct /etc/hosts."
    if config.local_size is not None:
        raise ConfigError(f"cannot meet ranks of other hosts: {what}", **config.who, remedy=remedy)
    if config.rank == 0:
        text = "[%d/%d] %s; if this job has several: %s"
        _log.warning(text, config.rank, config.size, what, remedy)


def _is_bindable(host: str) -> bool:
    """Whether sockets may listen there; an IPv6 address may still be tentative."""
    kind, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError as error:
        # Without descriptors it is not known; the socket that is to listen there fails then.
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return True
