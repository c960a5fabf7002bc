"""Addresses, ports and networks as users write them in settings."""

import fnmatch
import ipaddress
from typing import NamedTuple

from ringreduce.vocabulary.errors import ConfigError

_PORT_MAX = 65535


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[ipv6]:port``, port 1 to 65535; else ConfigError."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or len(host) > 255 or _port(port) is None:
        raise ConfigError(
            f"rendezvous is {address[:80]!r}, from the argument rendezvous or the variable "
            "RINGREDUCE_RENDEZVOUS; accepted: host:port with a port of 1 to 65535, "
            "such as 127.0.0.1:4000"
        )
    return host, int(port)


def address(host: str, port: int | str) -> str:
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether the numeric address `host` can be reached from its own host alone."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_local(host: str) -> bool:
    """Whether `host` is a loopback address, or the name of one."""
    return host == "localhost" or is_loopback(host)


def port_range(text: str) -> range | None:
    """The ports of ``first-last``, both included, or of a single one; None if it is no such."""
    first, _, last = text.partition("-")
    low, high = _port(first), _port(last if "-" in text else first)
    if low is None or high is None or low > high:
        return None
    return range(low, high + 1)


def _port(text: str) -> int | None:
    digits = text.isascii() and text.isdecimal() and len(text) <= 5
    return int(text) if digits and 1 <= int(text) <= _PORT_MAX else None


class Pattern(NamedTuple):
    """Interfaces by name (``eth0``, ``ib*``) or addresses by CIDR block; ``^`` excludes them."""

    text: str

    @property
    def excludes(self) -> bool:
        return self.text.startswith("^")

    @property
    def block(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
        """The block of addresses; None for a name. Raises ValueError for a block that is none."""
        text = self.text.removeprefix("^")
        return ipaddress.ip_network(text, strict=False) if "/" in text or ":" in text else None

    def matches(self, name: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        block = self.block
        if block is None:
            return fnmatch.fnmatchcase(name, self.text.removeprefix("^"))
        return address in block


def patterns(text: str) -> tuple[Pattern, ...]:
    """The patterns between the commas of `text`; ValueError: one is empty or a wrong block."""
    parsed = tuple(Pattern(part.strip()) for part in text.split(",")) if text else ()
    for pattern in parsed:
        if not pattern.text.removeprefix("^"):
            raise ValueError("a pattern is empty")
        _ = pattern.block
    return parsed


def are_patterns(text: str) -> bool:
    """Whether `patterns` can read it."""
    try:
        patterns(text)
    except ValueError:
        return False
    return True
