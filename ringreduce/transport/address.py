"""Addresses of ranks: resolve names, write them as libzmq does, recognise loopback."""

import ipaddress
import socket

from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.endpoints import address, host_and_port, is_loopback
from ringreduce.vocabulary.errors import RendezvousError

_LOCAL_NAMES = ("localhost", "ip6-localhost", "ip6-loopback")


def resolve(config: Config) -> tuple[tuple[str, ...], int]:
    """Numeric addresses of the rendezvous, and its port; libzmq binds no host names.

    A name may have several, which hosts may order differently; then none is a loopback address.
    Raises RendezvousError if it does not resolve.
    """
    host, port = host_and_port(config.rendezvous)
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise unreachable(config, error) from error
    hosts = tuple(dict.fromkeys(str(target[0]) for *_, target in answers))
    others = tuple(numeric for numeric in hosts if not is_loopback(numeric))
    # Of loopback addresses all ranks take the first one; they are on one host.
    return others or hosts[:1], port


def is_literal(host: str) -> bool:
    """Whether `host` is a numeric address or means this host to everybody."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.rstrip(".").endswith(".localhost") or host.partition(".")[0] in _LOCAL_NAMES
    return True


def unreachable(config: Config, error: Exception) -> RendezvousError:
    """The error when the rendezvous has no address that this rank can use."""
    why = (error.strerror if isinstance(error, OSError) else None) or error
    text = f"cannot reach the rendezvous {config.rendezvous}: {why}"
    return RendezvousError(text, **config.who, remedy="Check RINGREDUCE_RENDEZVOUS.")


def endpoint(host: str, port: int | str) -> str:
    """``tcp://host:port``, with an IPv6 address in brackets."""
    return f"tcp://{address(host, port)}"


def split_host(address: str) -> tuple[str, str]:
    """Host and port, or ports, of ``tcp://host:port``."""
    host, _, ports = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), ports


def family(host: str) -> int:
    """The address family of the numeric address `host`."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listens_on_loopback(address: str) -> bool:
    """Whether an announced address is a loopback address."""
    return is_loopback(split_host(address)[0])
