"""What strangers and erring ranks send: named attempts, and mutations of right messages.

Everything random comes from a `random.Random` that the test has seeded and printed.
"""

import contextlib
import functools
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import psutil
import zmq

from ringreduce.pure import wire
from tests.proxy import LONG, command, greeting, ready, wrap

__all__ = ["STRANGERS", "blast", "bounded_memory", "mutate_bytes", "mutate_frame"]

# Numbers at which lengths, ranks and offsets turn over.
EDGES = (0, 1, 2, 255, 1 << 15, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, 1 << 63)
_MAX = (1 << 64) - 1
# A stranger gives up on a port that says nothing after this long.
_PATIENCE_S = 5.0
# What a process may grow by while strangers are at it: buffers of TCP and of libzmq for those
# who are in the middle of a handshake, and Python's own ups and downs.
_GROWTH_BYTES = 96 << 20


@contextlib.contextmanager
def bounded_memory(*pids: int) -> Iterator[None]:
    before = {pid: psutil.Process(pid).memory_info().rss for pid in pids}
    yield
    for pid in pids:
        grown = psutil.Process(pid).memory_info().rss - before[pid]
        assert grown < _GROWTH_BYTES, f"process {pid} grew by {grown >> 20} MiB"


def mutate_frame(
    chance: random.Random, header: np.ndarray, payload: Sequence[bytes]
) -> tuple[str, list[bytes]]:
    """A frame that is not the one of `header` and `payload`, and what was done to it.

    Args:
        header: uint64 of shape (8,), the header due.
        payload: nothing for a frame without, one part behind the header's for a large one.
    """
    words, parts = header.copy(), [header.tobytes(), *payload]
    kinds = ("word", "edge", "bit", "near", "short", "long", "missing", "extra", "swap", "random")
    kind, word, part = chance.choice(kinds), chance.randrange(8), chance.randrange(len(parts))
    value = int(words[word])
    if kind == "word":
        words[word] = (value + chance.randrange(1, 1 << 64)) & _MAX
    elif kind == "edge":
        edge = chance.choice(EDGES)
        edge = chance.choice((edge, (edge & 0xFFFFFFFF) << 32))
        words[word] = edge if edge != value else edge ^ 1
    elif kind == "bit":
        words[word] ^= np.uint64(1 << chance.randrange(64))
    elif kind == "near":
        words[word] = (value + chance.choice((-1, 1)) * chance.choice((1, 1 << 32))) & _MAX
    elif kind == "short":
        parts[part] = parts[part][: chance.randrange(len(parts[part]))]
    elif kind == "long":
        parts[part] += chance.randbytes(chance.choice((1, 2, 63, 64, 4000)))
    elif kind == "missing":
        parts = parts[:-1] if len(parts) > 1 else [b""]
    elif kind == "extra":
        parts += [chance.randbytes(chance.randrange(200)) for _ in range(chance.randrange(1, 5))]
    elif kind == "swap":
        parts = [*parts[1:], parts[0]] if len(parts) > 1 else [parts[0][::-1]]
    else:
        sizes = (0, 1, 63, 64, 65, 1000)
        parts = [chance.randbytes(chance.choice(sizes)) for _ in range(chance.randrange(1, 4))]
    if kind in kinds[:4]:
        parts[0] = words.tobytes()
    return kind, parts


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    """`data` with a few changes of the kinds that break readers of length-prefixed formats."""
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(5)
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << chance.randrange(8)
        elif kind == 1 and changed:
            # The leading bytes of MessagePack's long strings, arrays, maps and numbers.
            changed[at % len(changed)] = chance.choice(
                b"\xc1\xc6\xcb\xcf\xd3\xd9\xdb\xdd\xdf\xff\x80\x90"
            )
        elif kind == 2:
            changed[at:at] = chance.randbytes(chance.randrange(1, 20))
        elif kind == 3:
            del changed[at : at + chance.randrange(1, 20)]
        else:
            changed[at:at] = changed[: chance.randrange(len(changed) + 1)]
    return bytes(changed)


# --- Strangers that speak TCP ---------------------------------------------------------------


def _knock(port: int, act: Callable[..., object] = lambda *_: None, number: int = 1) -> None:
    """Connect so many times, do something with the sockets; the port may refuse and end them."""
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        address = "127.0.0.1", port
        strangers = [
            opened.enter_context(socket.create_connection(address, _PATIENCE_S))
            for _ in range(number)
        ]
        act(*strangers)


def blast(port: int, *pieces: bytes) -> bytes:
    """Connect, send `pieces`, and read until the other side has had enough."""
    received = []

    def act(stranger: socket.socket) -> None:
        for piece in pieces:
            stranger.sendall(piece)
        stranger.shutdown(socket.SHUT_WR)
        while data := stranger.recv(1 << 16):
            received.append(data)

    _knock(port, act)
    return b"".join(received)


def _speaking(
    kind: int, prepare: Callable[[zmq.Socket[bytes]], object] = lambda socket: None
) -> Callable[[int], object]:
    """Connect with a real ZeroMQ socket, send what it can, and see the connection fail or hold."""

    def speak(port: int) -> None:
        with zmq.Context() as context, context.socket(kind) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.setsockopt(zmq.SNDTIMEO, 100)
            stranger.setsockopt(zmq.RECONNECT_IVL, 10)
            prepare(stranger)
            handshakes = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            handshakes |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            events = stranger.get_monitor_socket(int(handshakes | zmq.EVENT_DISCONNECTED))
            stranger.connect(f"tcp://127.0.0.1:{port}")
            with contextlib.suppress(zmq.ZMQError):
                stranger.send_multipart([b"hello", bytes(100)])
            events.poll(int(_PATIENCE_S * 1000))
            stranger.disable_monitor()
            events.close(linger=0)

    return speak


def _plain(user: bytes, password: bytes) -> Callable[[zmq.Socket[bytes]], object]:
    def prepare(stranger: zmq.Socket[bytes]) -> None:
        stranger.setsockopt(zmq.PLAIN_USERNAME, user)
        stranger.setsockopt(zmq.PLAIN_PASSWORD, password)

    return prepare


def _curve(stranger: zmq.Socket[bytes]) -> None:
    server, _ = zmq.curve_keypair()
    public, private = zmq.curve_keypair()
    stranger.setsockopt(zmq.CURVE_SERVERKEY, server)
    stranger.setsockopt(zmq.CURVE_PUBLICKEY, public)
    stranger.setsockopt(zmq.CURVE_SECRETKEY, private)


def _slowly(stranger: socket.socket) -> None:
    """A byte at a time; the port must not mind how long that takes, so a second shows it."""
    over = time.monotonic() + 0.5
    for byte in greeting() + ready():
        stranger.sendall(bytes([byte]))
        with contextlib.suppress(TimeoutError):
            stranger.settimeout(0.02)
            stranger.recv(100)
        if time.monotonic() > over:
            break


def _storm(port: int) -> None:
    for _ in range(300):
        _knock(port)


def _reset(port: int) -> None:
    """Leave with a reset instead of an end."""

    def leave(stranger: socket.socket, data: bytes) -> None:
        stranger.sendall(data)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    for data in (b"", greeting(), greeting() + ready()):
        _knock(port, functools.partial(leave, data=data))


def _urgent(stranger: socket.socket) -> None:
    stranger.send(b"!", socket.MSG_OOB)
    stranger.sendall(greeting())


def _blasting(*pieces: bytes) -> Callable[[int], object]:
    return lambda port: blast(port, *pieces)


_TLS_HELLO = (
    bytes.fromhex("160301002f0100002b0303") + bytes(32) + bytes.fromhex("000004c02f009c0100")
)

# What a stranger does to a port, by name.
STRANGERS: dict[str, Callable[[int], object]] = {
    "nothing": _blasting(),
    "random bytes": _blasting(random.Random(1).randbytes(5000)),
    "zeros": _blasting(bytes(100_000)),
    "HTTP": _blasting(b"GET / HTTP/1.1\r\nHost: ring\r\n\r\n"),
    "TLS": _blasting(_TLS_HELLO),
    "SSH": _blasting(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "Redis": _blasting(b"*1\r\n$4\r\nPING\r\n"),
    "ZMTP 1": _blasting(b"\x01\x00" + b"\x06\x00hello"),
    "ZMTP 1 long": _blasting(b"\x01\x00\xff" + b"\x7f" * 8 + b"hello"),
    "ZMTP 2": _blasting(b"\xff" + bytes(8) + b"\x7f\x01\x08\x00\x00" + b"\x00\x05hello"),
    "ZMTP 99": _blasting(greeting(version=b"\x63\x63")),
    "half a signature": _blasting(b"\xff\0\0\0"),
    "half a greeting": _blasting(greeting()[:40]),
    "greeting alone": _blasting(greeting()),
    "unknown mechanism": _blasting(greeting(b"\xff" * 20)),
    "GSSAPI": _blasting(greeting(b"GSSAPI"), command(b"INITIATE", bytes(100))),
    "two servers": _blasting(greeting(b"CURVE", is_server=1), command(b"WELCOME", bytes(160))),
    "NULL and a frame": _blasting(greeting(), ready(), wrap(bytes(64), LONG)),
    "NULL and 2^63 bytes": _blasting(greeting(), ready(), b"\x02" + b"\x80" + bytes(7) + b"x"),
    "NULL and -1 bytes": _blasting(greeting(), ready(), b"\x02" + b"\xff" * 8 + b"x"),
    "NULL and 64 MiB": _blasting(greeting(), ready(), wrap(bytes(64 << 20))),
    "NULL, metadata of 2^31": _blasting(greeting(), command(b"READY", b"\x01X" + b"\x80\0\0\0")),
    "NULL, READY twice": _blasting(greeting(), ready() * 2),
    "NULL, reserved flags": _blasting(greeting(), ready(), b"\xf8\x01x"),
    "pings before hands are shaken": _blasting(greeting(), command(b"PING", b"\0\1x") * 2000),
    "PLAIN, an empty hello": _blasting(greeting(b"PLAIN"), command(b"HELLO")),
    "PLAIN, a broken hello": _blasting(greeting(b"PLAIN"), command(b"HELLO", b"\xff\xff")),
    "PLAIN, INITIATE first": _blasting(greeting(b"PLAIN"), command(b"INITIATE")),
    "CURVE, a hello of zeros": _blasting(greeting(b"CURVE"), command(b"HELLO", bytes(194))),
    "CURVE, a short hello": _blasting(greeting(b"CURVE"), command(b"HELLO", b"\1\0")),
    "CURVE, INITIATE first": _blasting(greeting(b"CURVE"), command(b"INITIATE", bytes(250))),
    "a byte at a time": lambda port: _knock(port, _slowly),
    "idle connections": lambda port: _knock(port, number=200),
    "connections that leave": _storm,
    "resets": _reset,
    "urgent data": lambda port: _knock(port, _urgent),
    "a PUSH socket": _speaking(zmq.PUSH),
    "a PUB socket": _speaking(zmq.PUB),
    "a REQ socket": _speaking(zmq.REQ),
    "a DEALER socket": _speaking(zmq.DEALER),
    "a ROUTER socket": _speaking(zmq.ROUTER),
    "a PAIR socket": _speaking(zmq.PAIR),
    "a password of nobody": _speaking(zmq.PUSH, _plain(b"1", b"guess")),
    "a password too long": _speaking(zmq.PUSH, _plain(b"1", b"x" * 255)),
    "a rank that is none": _speaking(zmq.PUSH, _plain(b"4294967296", b"\xff" * 64)),
    "keys of nobody": _speaking(zmq.PUSH, _curve),
    "keys of nobody, DEALER": _speaking(zmq.DEALER, _curve),
}


def frame(**fields: int) -> np.ndarray:
    """A header of an all_reduce, with `fields` changed."""
    usual = {"kind": wire.Kind.ALL_REDUCE, "job": 77, "rank": 1, "sequence": 0, "dtype": 2}
    return wire.encode(wire.Header(**{**usual, **fields}))
