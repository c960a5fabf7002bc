"""The proxy does what it says, seen from both ends of a connection.

Delays, rates, resets, dropped bytes and patterns of ways are seen in test_half_open: there a fault
that does nothing fails the test.
"""

import contextlib
import fcntl
import os
import socket
import sys
import termios
import threading
from collections.abc import Iterator

import pytest

from tests.processes import wait_until
from tests.proxy import Proxy


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with Proxy() as started:
        yield started


@contextlib.contextmanager
def connected(proxy: Proxy, name: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection through a new way: the visitor's and the target's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        port = proxy.open(f"127.0.0.1:{listener.getsockname()[1]}", name)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as visitor:
            target, _ = listener.accept()
            with target:
                target.settimeout(10)
                wait_until(lambda: proxy.status()[name]["connections"], "the way to stand")
                yield visitor, target


def assert_passed(source: socket.socket, end: socket.socket, sent: bytes) -> None:
    """What one end sends comes out of the other."""
    received = bytearray()
    sender = threading.Thread(target=source.sendall, args=(sent,))
    sender.start()
    while len(received) < len(sent):
        part = end.recv(len(sent) - len(received))
        assert part, f"ended after {len(received)} of {len(sent)} bytes"
        received += part
    sender.join()
    assert received == sent


def assert_silent(end: socket.socket, seconds: float = 0.3) -> None:
    end.settimeout(seconds)
    with pytest.raises(TimeoutError):
        end.recv(1)
    end.settimeout(10)


def test_bytes_pass_unchanged_both_ways_to_the_end_of_each(proxy):
    sent = os.urandom(8 << 20)
    with connected(proxy, "plain") as (visitor, target):
        assert_passed(visitor, target, sent)
        assert_passed(target, visitor, sent)
        assert proxy.status()["plain"] == {"connections": 1, "forward": 8 << 20, "back": 8 << 20}
        visitor.sendall(b"last")
        visitor.shutdown(socket.SHUT_WR)
        assert target.recv(4) == b"last"
        assert target.recv(1) == b""
        assert_passed(target, visitor, b"answer")  # That direction is still open.
        target.close()
        assert visitor.recv(1) == b""
        wait_until(lambda: proxy.status()["plain"]["connections"] == 0, "the connection to end")


def test_half_open_hides_everything_and_can_end(proxy):
    with connected(proxy, "half") as (visitor, target):
        proxy.set("half", half_open=True)
        visitor.sendall(b"held")
        target.sendall(b"held too")
        assert_silent(target)
        assert_silent(visitor)
        assert proxy.status()["half"]["forward"] == 0
        proxy.clear("half")
        assert (target.recv(4), visitor.recv(8)) == (b"held", b"held too")


@pytest.mark.parametrize("is_reset", [False, True])
def test_half_open_hides_that_the_other_side_has_gone(proxy, is_reset):
    name = f"gone {is_reset}"
    with connected(proxy, name) as (visitor, target):
        proxy.set(name, half_open=True)
        if is_reset:
            target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        target.close()
        assert_silent(visitor)
        visitor.sendall(b"into the void")
        assert_silent(visitor)
        proxy.clear(name)
        with contextlib.suppress(ConnectionResetError):
            assert visitor.recv(1) == b""


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_cut_loses_confirmations_too(proxy):
    with connected(proxy, "cut") as (visitor, target):
        assert_passed(visitor, target, b"before")
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 500)
        assert proxy.cut("cut") == 1
        visitor.sendall(b"held")
        assert_silent(target)
        # Bytes that the other side's system has not confirmed (SIOCOUTQ).
        unconfirmed = fcntl.ioctl(visitor, termios.TIOCOUTQ, bytes(4))
        assert int.from_bytes(unconfirmed, sys.byteorder) == 4
        with pytest.raises(TimeoutError, match="timed out"):
            visitor.recv(1)
