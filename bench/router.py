"""A router between network namespaces that holds each packet back for a time, as distance does.

``python -m bench.router --delay-ms 20 --rate 1000000000 NAMESPACE ADDRESS NAMESPACE ADDRESS ...``

Each namespace gets a network device (tun) whose packets come here. A packet leaves towards its
destination at the end of the delay, and no earlier than the rate of that link allows; one that
would wait longer for the rate than a switch's queue holds is dropped. TCP passes large packets
undivided (offload), so that few come by. Prints a line once all devices are there; ends when its
standard input does.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import os
import selectors
import socket
import struct
import sys
import time

INTERFACE = "eth0"
# Of a link's queue, before packets are dropped.
QUEUE_S = 0.02

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
# IFF_TUN, IFF_NO_PI, IFF_VNET_HDR; TUN_F_CSUM, TUN_F_TSO4.
_FLAGS, _OFFLOAD = 0x0001 | 0x1000 | 0x4000, 0x01 | 0x02
# virtio_net_hdr, and an IPv4 packet as large as it can be.
_HEADER_BYTES, _PACKET_BYTES_MAX = 10, 65535


class Port:
    """One namespace's device, and the link that leads to it."""

    def __init__(self, namespace: str, address: str) -> None:
        self.address = socket.inet_aton(address)
        self.free_s = 0.0  # when the link has sent all that was accepted
        self.descriptor = _device(namespace)


def _device(namespace: str) -> int:
    """A new device in a namespace; this process goes there, and back."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _FLAGS))
        fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _OFFLOAD)
        return descriptor
    finally:
        libc.setns(home, _CLONE_NEWNET)
        os.close(there)
        os.close(home)


class Router:
    """Passes packets on between ports until standard input ends.

    Args:
        delay_s: of every packet, one way.
        rate: of each link towards a port, in bits a second.
    """

    def __init__(self, ports: list[Port], delay_s: float, rate: float) -> None:
        self._delay_s, self._seconds_per_byte = delay_s, 8 / rate
        self._by_address = {port.address: port for port in ports}
        # When due, a running number, descriptor, packet.
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        # Others round a wait up to a millisecond.
        self._selector = selectors.SelectSelector()
        for port in ports:
            self._selector.register(port.descriptor, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)

    def run(self) -> None:
        """Until standard input ends."""
        while True:
            timeout = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            for key, _ in self._selector.select(timeout):
                if key.fd == 0:
                    return
                self._read(key.fd)
            now = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now:
                _, _, descriptor, packet = heapq.heappop(self._waiting)
                # A device that is down loses the packet, as a link does.
                with contextlib.suppress(OSError):
                    os.write(descriptor, packet)

    def _read(self, descriptor: int) -> None:
        while True:
            try:
                packet = os.read(descriptor, _HEADER_BYTES + _PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            target = packet[_HEADER_BYTES + 16 : _HEADER_BYTES + 20]
            if (port := self._by_address.get(target)) is None:
                continue  # Broadcasts, and IPv6.
            now = time.monotonic()
            port.free_s = max(port.free_s, now) + len(packet) * self._seconds_per_byte
            if port.free_s - now > QUEUE_S:
                port.free_s -= len(packet) * self._seconds_per_byte
                continue
            self._number += 1
            due = port.free_s + self._delay_s
            heapq.heappush(self._waiting, (due, self._number, port.descriptor, packet))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay-ms", type=float, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("ports", nargs="+")
    arguments = parser.parse_args()
    pairs = zip(arguments.ports[::2], arguments.ports[1::2], strict=True)
    ports = [Port(namespace, address) for namespace, address in pairs]
    with contextlib.suppress(OSError):
        # It stands for hardware, which waits for no core.
        os.nice(-20)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    Router(ports, arguments.delay_ms / 1e3, arguments.rate).run()


if __name__ == "__main__":
    main()
