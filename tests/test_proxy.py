"""The proxy does what it says: each fault, seen from both ends of a connection."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes import wait_gone, wait_until
from tests.proxy import Proxy, ask


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
                yield visitor, target


def receive(end: socket.socket, nbytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < nbytes:
        part = end.recv(nbytes - len(parts))
        assert part, f"ended after {len(parts)} of {nbytes} bytes"
        parts += part
    return bytes(parts)


def assert_silent(end: socket.socket, seconds: float = 0.3) -> None:
    end.settimeout(seconds)
    with pytest.raises(TimeoutError):
        end.recv(1)
    end.settimeout(10)


def test_bytes_pass_unchanged_both_ways(proxy: Proxy) -> None:
    sent = os.urandom(8 << 20)
    with connected(proxy, "plain") as (visitor, target):
        for source, end in ((visitor, target), (target, visitor)):
            sender = threading.Thread(target=source.sendall, args=(sent,))
            sender.start()
            assert receive(end, len(sent)) == sent
            sender.join()
        status = proxy.status()["plain"]
        assert status == {"connections": 1, "forward": 8 << 20, "back": 8 << 20, "flipped": 0}


def test_the_end_of_one_side_reaches_the_other_after_its_last_byte(proxy: Proxy) -> None:
    with connected(proxy, "end") as (visitor, target):
        visitor.sendall(b"last")
        visitor.shutdown(socket.SHUT_WR)
        assert receive(target, 4) == b"last"
        assert target.recv(1) == b""
        target.sendall(b"answer")  # That direction is still open.
        assert receive(visitor, 6) == b"answer"
        target.close()
        assert visitor.recv(1) == b""
        wait_until(lambda: proxy.status()["end"]["connections"] == 0, "the connection to end")


def test_a_target_that_is_not_there_resets_the_connection(proxy: Proxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    way = proxy.open(f"127.0.0.1:{port}", "nobody")
    # It may come before the visitor has taken note that it is connected.
    with (
        pytest.raises(ConnectionResetError),
        socket.create_connection(("127.0.0.1", way), timeout=10) as visitor,
    ):
        visitor.recv(1)


def test_delay_holds_every_byte_back_and_keeps_order_and_rate(proxy: Proxy) -> None:
    sent = os.urandom(4 << 20)
    with connected(proxy, "delay") as (visitor, target):
        assert proxy.set("delay", ("forward",), delay_s=0.2) == 1
        started = time.monotonic()
        sender = threading.Thread(target=visitor.sendall, args=(sent,))
        sender.start()
        first = receive(target, 1)
        seconds = time.monotonic() - started
        assert first + receive(target, len(sent) - 1) == sent
        sender.join()
        assert 0.2 <= seconds < 0.2 + 1.0
        # One delay for all of it, not one for each piece.
        assert time.monotonic() - started < 2.0
        target.sendall(b"x")
        started = time.monotonic()
        receive(visitor, 1)
        assert time.monotonic() - started < 0.2


def test_throttle_lets_so_much_pass_per_second(proxy: Proxy) -> None:
    with connected(proxy, "throttle") as (visitor, target):
        proxy.set("throttle", ("forward",), bytes_per_s=1_000_000)
        sent = os.urandom(500_000)
        started = time.monotonic()
        sender = threading.Thread(target=visitor.sendall, args=(sent,))
        sender.start()
        assert receive(target, len(sent)) == sent
        sender.join()
        assert 0.45 <= time.monotonic() - started < 1.5


def test_what_passed_before_a_throttle_is_no_debt(proxy: Proxy) -> None:
    with connected(proxy, "debt") as (visitor, target):
        sent = bytes(8 << 20)
        sender = threading.Thread(target=visitor.sendall, args=(sent,))
        sender.start()
        assert receive(target, len(sent)) == sent
        sender.join()
        proxy.set("debt", ("forward",), bytes_per_s=1_000_000)
        target.settimeout(2.0)
        visitor.sendall(b"after")
        assert receive(target, 5) == b"after"


def test_a_throttled_way_pushes_back_and_does_not_hoard(proxy: Proxy) -> None:
    with connected(proxy, "hoard") as (visitor, target):
        proxy.set("hoard", bytes_per_s=1000)
        visitor.settimeout(0.5)
        with pytest.raises(TimeoutError):
            visitor.sendall(bytes(64 << 20))
        # At most its queue, one read beyond that.
        assert proxy.status()["hoard"]["forward"] <= 1 << 20
        assert target.recv(1) == b"\0"


def test_dropped_bytes_are_taken_and_go_nowhere(proxy: Proxy) -> None:
    with connected(proxy, "drop") as (visitor, target):
        proxy.set("drop", ("forward",), drop=True)
        visitor.sendall(bytes(1 << 20))
        wait_until(lambda: proxy.status()["drop"]["forward"] == 1 << 20, "the bytes to be taken")
        assert_silent(target)
        proxy.clear("drop")
        visitor.sendall(b"after")
        assert receive(target, 5) == b"after"


def test_half_open_hides_everything_and_can_end(proxy: Proxy) -> None:
    with connected(proxy, "half") as (visitor, target):
        proxy.set("half", half_open=True)
        visitor.sendall(b"held")
        target.sendall(b"held too")
        assert_silent(target)
        assert_silent(visitor)
        assert proxy.status()["half"]["forward"] == 0
        proxy.clear("half")
        assert receive(target, 4) == b"held"
        assert receive(visitor, 8) == b"held too"


def test_half_open_hides_that_the_other_side_has_gone(proxy: Proxy) -> None:
    with connected(proxy, "gone") as (visitor, target):
        proxy.set("gone", half_open=True)
        target.close()
        assert_silent(visitor)
        visitor.sendall(b"into the void")
        assert_silent(visitor)


def test_half_open_takes_connections_and_says_nothing(proxy: Proxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        port = proxy.open(f"127.0.0.1:{listener.getsockname()[1]}", "new")
        proxy.set("new", half_open=True)
        with socket.create_connection(("127.0.0.1", port), timeout=10) as visitor:
            visitor.sendall(b"x")
            target, _ = listener.accept()
            with target:
                assert_silent(target)


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_cut_loses_confirmations_too_and_can_be_mended(proxy: Proxy) -> None:
    with connected(proxy, "cut") as (visitor, target):
        visitor.sendall(b"before")
        assert receive(target, 6) == b"before"
        assert proxy.cut("cut") == 1
        visitor.sendall(b"held")
        assert_silent(target)
        assert unconfirmed(visitor) == 4
        assert proxy.mend("cut") == 1
        assert receive(target, 4) == b"held"
        proxy.set("cut", half_open=True)
        visitor.sendall(b"more")
        wait_until(lambda: unconfirmed(visitor) == 0, "the proxy's system to confirm")
        assert_silent(target)


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_a_cut_connection_ends_at_the_time_limit_of_tcp(proxy: Proxy) -> None:
    with connected(proxy, "unconfirmed") as (visitor, _):
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 500)
        proxy.cut("unconfirmed")
        visitor.sendall(b"x")
        with pytest.raises(TimeoutError, match="timed out"):
            visitor.recv(1)


def unconfirmed(end: socket.socket) -> int:
    """Bytes sent that the other side's system has not confirmed (SIOCOUTQ)."""
    answer = fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def test_reset_is_a_reset_on_both_sides(proxy: Proxy) -> None:
    with connected(proxy, "reset") as (visitor, target):
        assert proxy.reset("reset") == 1
        for end in (visitor, target):
            with pytest.raises(ConnectionResetError):
                end.recv(1)


def test_a_reset_by_one_side_reaches_the_other(proxy: Proxy) -> None:
    with connected(proxy, "passed") as (visitor, target):
        target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        target.close()
        with pytest.raises(ConnectionResetError):
            visitor.recv(1)


@pytest.mark.parametrize("after", [0, 1, 999, 299_999])
def test_flip_changes_one_byte_after_so_many(proxy: Proxy, after: int) -> None:
    sent = bytes(300_000)
    name = f"flip {after}"
    with connected(proxy, name) as (visitor, target):
        proxy.set(name, ("forward",), flip_after=after)
        visitor.sendall(sent)
        got = receive(target, len(sent))
        assert [i for i, byte in enumerate(got) if byte] == [after]
        assert proxy.status()[name]["flipped"] == 1


def test_patterns_choose_ways_and_directions(proxy: Proxy) -> None:
    with connected(proxy, "1>0/a") as (visitor, target), connected(proxy, "1>2/a") as others:
        assert proxy.set("1>0*", ("back",), drop=True) == 1
        assert proxy.set("?>?/a", ("forward",), delay_s=0.01) == 2
        target.sendall(b"lost")
        for source, end in ((visitor, target), others, others[::-1]):
            source.sendall(b"kept")
            assert receive(end, 4) == b"kept"
        assert_silent(visitor)


@pytest.mark.parametrize(
    "order", [{"do": "dance"}, {"do": "set", "ways": "*"}, {"do": "open", "target": "nowhere"}]
)
def test_a_wrong_order_is_refused_and_the_proxy_goes_on(
    proxy: Proxy, order: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match="Error"):
        ask(proxy.port, **order)
    with pytest.raises(ValueError, match="unknown"):
        proxy.set("*", delay=0.1)
    with connected(proxy, "still") as (visitor, target):
        visitor.sendall(b"x")
        assert receive(target, 1) == b"x"


def test_it_does_not_spin_while_nothing_happens(proxy: Proxy) -> None:
    process = psutil.Process(proxy.pid)
    with connected(proxy, "idle") as (visitor, target):
        proxy.set("idle", delay_s=10.0)
        visitor.sendall(b"held for ten seconds")
        assert_silent(target, 0.1)
        before = process.cpu_times()
        assert_silent(target, 1.0)
        after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.3


def test_it_ends_with_whoever_started_it(tmp_path: Path) -> None:
    with Proxy() as own:
        pid = own.pid
    wait_gone([pid])
