r"""Hosts for a bench: network namespaces whose links to a common switch have a limited rate.

Without latency:

    rr<pid>h0: eth0 10.77.0.1 --- p0 \
    rr<pid>h1: eth0 10.77.0.2 --- p1  +- bridge br0, in the namespace rr<pid>s
    ...                               /
    each --- a veth pair, with tbf on both ends: the same rate in both directions

With latency `bench.router` takes the switch's place, since few kernels have a queue that delays.

The bridge is in a namespace too. So the machine's own network does not change, its firewall
does not see our frames, and deleting the namespaces removes everything.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from bench.systems import Host

# tbf passes this much at full speed: a millisecond's worth, to cover the timer's resolution at
# 1000 Hz, and at least two of the 64 KiB frames that TCP sends over a veth.
BURST_S, BURST_BYTES_MIN = 1e-3, 128 << 10
# Queue in front of a link before frames are dropped, as in a switch with some buffer.
QUEUE_MS = 20
COMMAND_TIMEOUT_S = 20
STREAM_S, STREAM_START_TIMEOUT_S = 3, 5
HOSTS_MAX = 200
_NETWORK = ipaddress.ip_network("10.77.0.0/24")
_BITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class UnavailableError(Exception):
    """This machine or this user cannot make the namespaces; the text says why."""


def require(*tools: str) -> None:
    """Raise `UnavailableError` unless this user can make hosts and has these programs too."""
    for tool in ("ip", "tc", *tools):
        if shutil.which(tool) is None:
            package = "iperf3" if tool == "iperf3" else "iproute2"
            raise UnavailableError(
                f"shaped links need the program {tool}, which is not installed (package {package})"
            )
    if os.geteuid() != 0:
        raise UnavailableError("shaped links need root, to make network namespaces")


def bits_per_second(rate: str) -> int:
    """The value of a rate as tc writes it: 1gbit, 500mbit.

    Raises:
        ValueError: it is not of that form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{rate!r} is no rate; 1gbit and 500mbit are")
    return int(float(match[1]) * _BITS[match[2]])


@contextlib.contextmanager
def shaped(count: int, rate: str, latency_ms: float = 0) -> Iterator[list[Host]]:
    """`count` hosts connected by links of that rate; always removed afterwards.

    Args:
        latency_ms: how much later a packet arrives at another host.

    Raises:
        UnavailableError: `ip` or `tc` refuses, or there are no tun devices for latency.
    """
    burst = max(BURST_BYTES_MIN, int(bits_per_second(rate) / 8 * BURST_S))
    tbf = f"root tbf rate {rate} burst {burst} latency {QUEUE_MS}ms"
    name = f"rr{os.getpid()}"
    switch = f"{name}s"
    hosts = [
        Host(str(_NETWORK[i + 1]), "eth0", ("ip", "netns", "exec", f"{name}h{i}"), f"{name}h{i}")
        for i in range(count)
    ]
    with contextlib.ExitStack() as stack:
        for namespace in (switch, *(host.name for host in hosts)):
            # Before adding it, so that no signal leaves it behind; a missing one does no harm.
            stack.callback(_remove, namespace)
            _run(f"ip netns add {namespace}")
        if latency_ms > 0:
            stack.enter_context(_routed(hosts, rate, latency_ms))
        else:
            _bridge(hosts, switch, tbf)
        for host in hosts:
            _run(f"ip -n {host.name} address add {host.address}/{_NETWORK.prefixlen} dev eth0")
            _run(f"ip -n {host.name} link set lo up")
            _run(f"ip -n {host.name} link set {host.interface} up")
            _run(f"tc -n {host.name} qdisc add dev {host.interface} {tbf}")
        yield hosts


def at_switch(hosts: Sequence[Host]) -> tuple[str, ...]:
    """The prefix of a command where port p0 leads to the first of `hosts`; without latency."""
    return ("ip", "netns", "exec", f"{hosts[0].name.removesuffix('h0')}s")


def _bridge(hosts: Sequence[Host], switch: str, tbf: str) -> None:
    """Connect the hosts by a switch whose ports are shaped."""
    _run(f"ip -n {switch} link add br0 type bridge")
    _run(f"ip -n {switch} link set br0 up")
    for i, host in enumerate(hosts):
        _run(f"ip -n {switch} link add p{i} type veth peer name {host.interface} netns {host.name}")
        _run(f"ip -n {switch} link set p{i} master br0 up")
        _run(f"tc -n {switch} qdisc add dev p{i} {tbf}")


@contextlib.contextmanager
def _routed(hosts: Sequence[Host], rate: str, latency_ms: float) -> Iterator[None]:
    """Connect the hosts by a router that delays packets."""
    command = [sys.executable, "-m", "bench.router", "--delay-ms", str(latency_ms)]
    command += ["--rate", str(bits_per_second(rate))]
    command += [word for host in hosts for word in (host.name, host.address)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as router:
        assert router.stdin is not None
        assert router.stdout is not None
        try:
            if not router.stdout.readline():
                raise UnavailableError("links with latency need tun devices (/dev/net/tun)")
            yield
        finally:
            router.stdin.close()  # It ends.


def open_windows(hosts: Sequence[Host]) -> None:
    """Let TCP send 140 KB at once on a connection that is new or was idle, not 14 KB.

    Otherwise a message of 16 KiB waits for an acknowledgement, which distance makes late.
    """
    for host in hosts:
        _run(
            f"ip -n {host.name} route change {_NETWORK} dev {host.interface} proto kernel "
            f"scope link src {host.address} initcwnd 100 initrwnd 100"
        )


def stream_bits_per_second(source: Host, target: Host) -> float:
    """Payload rate of one TCP stream between two hosts, as iperf3's receiver measures it.

    Raises:
        UnavailableError: iperf3 failed.
    """
    listen = ["iperf3", "--server", "--one-off", "--bind", target.address]
    send = ["iperf3", "--client", target.address, "--time", str(STREAM_S), "--omit", "1", "--json"]
    server = subprocess.Popen([*target.prefix, *listen], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + STREAM_START_TIMEOUT_S
    try:
        while True:
            result = subprocess.run(
                [*source.prefix, *send],
                capture_output=True,
                text=True,
                timeout=STREAM_S + COMMAND_TIMEOUT_S,
                check=False,
            )
            measured = json.loads(result.stdout or "{}")
            # Until the server listens iperf3 reports an error, with exit code 0.
            if "error" not in measured or time.monotonic() >= deadline:
                break
            time.sleep(0.1)
    except subprocess.TimeoutExpired:
        raise UnavailableError("iperf3 between two namespaces did not end") from None
    finally:
        server.kill()
        server.wait()
    try:
        return float(measured["end"]["sum_received"]["bits_per_second"])
    except KeyError:
        why = measured.get("error") or result.stderr.strip() or "it printed no result"
        raise UnavailableError(f"iperf3 between two namespaces failed: {why}") from None


def _run(command: str) -> None:
    result = subprocess.run(
        command.split(), capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    if result.returncode:
        raise UnavailableError(f"`{command}` failed: {result.stderr.strip()}")


def _remove(namespace: str) -> None:
    """Delete a namespace if it exists; a second Ctrl-C is delayed until that is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        subprocess.run(
            ["ip", "netns", "delete", namespace],
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
