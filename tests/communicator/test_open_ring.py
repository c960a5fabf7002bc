"""Strangers at a ring without a secret, whose ports stay open: they hurt nothing, or are named."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import zmq

from ringreduce.pure import wire
from tests.processes import wait_until
from tests.rings import Ring

# Rounds of a sum until the test lets rank 0 stop them; every result is checked.
# Its ports stay open, as they do where the kernel cannot shut them, and there is no secret.
ROUNDS = """
from queue import Queue
from ringreduce.transport import listening
listening.shut = lambda listener: False
over = Queue()
def watch():
    for line in sys.stdin:
        over.put(line)
threading.Thread(target=watch, daemon=True).start()
def rounds(ring):
    number = 0
    while True:
        data = np.full(50_000, ring.rank + 1.0)
        ring.all_reduce(data)
        assert (data == sum(range(1, SIZE + 1))).all()
        last = ring.all_reduce(np.array([int(not over.empty())]), "max")
        number += 1
        if number % 20 == 0:
            say("rounds", ring=rings)
        if last[0]:
            return
for rings in range(len(CONFIGS)):
    ring = join(rings)
    say("ready", address=ring._session.collectives._link.address)
    attempt("result", lambda: rounds(ring))
    attempt("again", ring.barrier)
    ring.close()
"""


@pytest.fixture(scope="module")
def strangers_allowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """A ring that runs on while strangers try things on it; it must end well."""
    with Ring(tmp_path_factory.mktemp("strangers"), 2, ROUNDS) as ring:
        ring.wait("rounds")
        yield ring
        ring.end_well()


def connection(ring: Ring, rank: int = 1) -> socket.socket:
    return socket.create_connection(("127.0.0.1", ring.port(rank)), timeout=10)


def test_strangers_that_only_connect_do_no_harm(strangers_allowed: Ring) -> None:
    for _ in range(20):
        connection(strangers_allowed).close()
    strangers_allowed.assert_unhurt()


def test_a_stranger_that_stays_and_says_nothing_does_no_harm(strangers_allowed: Ring) -> None:
    with connection(strangers_allowed):
        strangers_allowed.assert_unhurt()


@pytest.mark.parametrize(
    "data",
    [
        bytes(range(256)) * 64,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        # The greeting of ZMTP 3.1 with the mechanism NULL, and then no such thing.
        b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48) + b"\xff" * 500,
    ],
    ids=["bytes", "http", "broken ZMTP"],
)
def test_a_stranger_that_does_not_speak_zmtp_does_no_harm(
    strangers_allowed: Ring, data: bytes
) -> None:
    with connection(strangers_allowed) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(data)
            # Until the other side has had enough of it.
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
        strangers_allowed.assert_unhurt()


@contextlib.contextmanager
def zmq_stranger(ring: Ring, kind: int, rank: int = 1) -> Iterator[zmq.Socket[bytes]]:
    """A real ZeroMQ socket that has connected to a rank's data port."""
    with zmq.Context() as context, context.socket(kind) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.SNDTIMEO, 5000)
        stranger.connect(f"tcp://127.0.0.1:{ring.port(rank)}")
        yield stranger


def test_a_socket_of_another_kind_does_no_harm(strangers_allowed: Ring) -> None:
    with zmq_stranger(strangers_allowed, zmq.SUB):
        strangers_allowed.assert_unhurt()


def test_an_oversized_frame_is_not_even_read(strangers_allowed: Ring) -> None:
    with zmq_stranger(strangers_allowed, zmq.PUSH) as stranger:
        with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            stranger.send(bytes(64 << 20))
            closed = monitor.poll(10_000)
            stranger.disable_monitor()
        assert closed
    strangers_allowed.assert_unhurt()


def foreign_header(**fields: int) -> bytes:
    header = wire.Header(kind=wire.Kind.ALL_REDUCE, job=12345, rank=0, sequence=1)
    return wire.encode(wire.Header(**{**asdict(header), **fields})).tobytes()


# What a stranger sends in one message, and what the ranks then say of it.
FOREIGN = {
    "short": ([b"short"], "bytes that are no frame"),
    "empty": ([b""], "bytes that are no frame"),
    "random": ([os.urandom(64)], "bytes that are no frame"),
    "other job": ([foreign_header()], "a frame of another job"),
    "three parts": ([foreign_header(), bytes(100_000), b"more"], "a frame of another job"),
    "version": ([foreign_header(version=9)], f"a frame of wire version 9, not {wire.WIRE_VERSION}"),
}


@pytest.fixture(scope="module")
def foreign_frames(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[int, list[Any], list[Any]]]:
    """The port, what both ranks raised and what they raised again; a ring for each message."""
    found = {}
    with Ring(tmp_path_factory.mktemp("foreign"), 2, ROUNDS, rings=len(FOREIGN)) as ring:
        for number, (name, (frames, _)) in enumerate(FOREIGN.items()):
            wait_until(
                lambda number=number: all(
                    any(fact["ring"] == number for fact in ring.said(rank, "rounds"))
                    for rank in (0, 1)
                ),
                f"rounds of ring {number}",
            )
            port = ring.port(1)
            with zmq_stranger(ring, zmq.PUSH) as stranger:
                stranger.send_multipart(frames)
                results = ring.wait("result", times=number + 1)
            found[name] = port, results, ring.wait("again", times=number + 1)
        ring.release()
    return found


@pytest.mark.parametrize("name", FOREIGN)
def test_frames_of_a_stranger_are_a_protocol_error_on_every_rank(
    name: str, foreign_frames: dict[str, tuple[int, list[Any], list[Any]]]
) -> None:
    port, results, again = foreign_frames[name]
    for fact in [*results, *again]:
        assert fact["kind"] == "ProtocolError", fact
        assert f"received {FOREIGN[name][1]} on tcp://127.0.0.1:{port}" in fact["text"]
    assert all(fact["seconds"] < 0.5 for fact in again), again
