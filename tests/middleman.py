"""A man in the middle who understands ZMTP 3.1: he reads a connection and changes its frames.

He stands before the ports of all ranks of a ring in threads (`tests.forwarder`) and lets everything
pass, the handshake with PLAIN's password included, until it is time for his attack. An attack gets
each message of one connection from then on, its parts joined, and says what is sent instead.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from ringreduce.pure import wire
from ringreduce.transport.frames import SEALED_OVERHEAD_BYTES
from ringreduce.transport.zeromq import ZmqLink
from tests.forwarder import Change, stand_before
from tests.fuzzing import command

__all__ = ["ATTACKS", "CORRUPTING", "CUTTING", "HARMLESS", "SILENCING", "Attack", "Man", "wrap"]

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4

# Of the man, the number of the message since the attack began, and its content: what is sent.
Attack = Callable[["Man", int, bytes], Iterable[bytes]]


def wrap(body: bytes, flags: int = 0) -> bytes:
    """`body` as a frame of ZMTP."""
    if len(body) > 255:
        return bytes([flags | _LONG]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


class Frames:
    """Splits a connection into its greeting, and then its frames: (flags, content, raw bytes)."""

    def __init__(self) -> None:
        self._rest = b""
        self._greeting_bytes = _GREETING_BYTES  # that are still to come

    def split(self, data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
        """What is complete now. Pieces of the greeting count as commands; each end awaits them."""
        piece, self._rest = data[: self._greeting_bytes], self._rest + data[self._greeting_bytes :]
        if piece:
            self._greeting_bytes -= len(piece)
            yield _COMMAND, b"", piece
        while len(self._rest) >= 2:
            flags = self._rest[0]
            start = 9 if flags & _LONG else 2
            end = start + int.from_bytes(self._rest[1:start], "big")
            if len(self._rest) < max(start, end):
                return
            raw, self._rest = self._rest[:end], self._rest[end:]
            yield flags, raw[start:], raw


class Man:
    """Does `attack` to what `receiver` gets on `channel`, from its message number `at` on.

    Attributes:
        seen: all messages, by the rank that gets them and the channel.
        commands: the handshakes' raw commands, in the same way.
        earlier: what another man has `seen`, of another ring.
        ports: where the ranks really listen, by the same.
        has_attacked: whether it came to that.
    """

    def __init__(
        self,
        attack: Attack | None = None,
        *,
        receiver: int = 1,
        channel: int = 0,
        at: int = 1,
        earlier: Man | None = None,
    ) -> None:
        self._attack, self._where, self._at = attack, (receiver, channel), at
        self.seen: dict[tuple[int, int], list[bytes]] = defaultdict(list)
        self.commands: dict[tuple[int, int], list[bytes]] = defaultdict(list)
        self.ports: dict[tuple[int, int], int] = {}
        self.earlier = earlier
        self.has_attacked = False
        self.chance = random.Random(1)
        self.kept = b""  # of an attack, for later
        self._changed = threading.Condition()  # guards `seen`

    def stand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have all links that are made from now on reached through this man."""
        listen = ZmqLink.__init__

        def through_the_man(link: ZmqLink, **options: Any) -> None:
            listen(link, **options)
            stand_before(link, lambda *where: self._connection(options["security"].rank, *where))

        monkeypatch.setattr(ZmqLink, "__init__", through_the_man)

    def handshake(self, where: tuple[int, int], raw: bytes) -> None:
        """A command has come, and is sent on when this returns."""
        self.commands[where].append(raw)

    def _connection(self, rank: int, channel: int, port: int) -> Change:
        where, frames = (rank, channel), Frames()
        self.ports[where] = port
        parts: list[bytes] = []

        def change(data: bytes) -> Iterator[bytes]:
            for flags, part, raw in frames.split(data):
                if flags & _COMMAND:
                    self.handshake(where, raw)
                    yield raw
                    continue
                number = len(self.seen[where]) - self._at
                is_attacked = self._attack is not None and where == self._where and number >= 0
                parts.append(part)
                if not is_attacked:
                    yield raw
                if flags & _MORE:
                    continue
                body = b"".join(parts)
                parts.clear()
                if is_attacked:
                    self.has_attacked = True
                    yield from self._attack(self, number, body)
                # Afterwards, so that an attack finds the messages before its own there.
                with self._changed:
                    self.seen[where].append(body)
                    self._changed.notify_all()

        return change

    def own_frame(self) -> bytes:
        """A message that the attacked rank has sent itself, to the next."""
        receiver, channel = self._where
        return self._first_of(((receiver + 1) % 3, channel))

    def of_other_channel(self) -> bytes:
        """A message to the same rank on another stream, or over another distance."""
        receiver, channel = self._where
        return self._first_of(*((receiver, other) for other in range(3) if other != channel))

    def of_other_ring(self) -> bytes:
        """The message with the same number on this channel of an earlier ring."""
        assert self.earlier is not None
        return self.earlier.seen[self._where][self._at]

    def before(self) -> bytes:
        """The message that passed last."""
        return self.seen[self._where][-1]

    def first(self) -> bytes:
        """The first of all, of the barrier that ends the forming of the ring."""
        return self.seen[self._where][0]

    def _first_of(self, *wheres: tuple[int, int]) -> bytes:
        """The newest message on the first of these connections that has carried any."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(self.seen.get, wheres)), 10)
            return next(self.seen[where][-1] for where in wheres if self.seen[where])


class Eavesdropper(Man):
    """Has read a password, and connects with it before or after the rank whose it is.

    He does not change what that rank sends. `send` is what he sends himself after his handshake;
    `is_admitted` says whether that was completed.
    """

    def __init__(
        self, send: Callable[[Eavesdropper], bytes], *, is_first: bool, **options: Any
    ) -> None:
        super().__init__(**options)
        self._send, self._is_first = send, is_first
        self.socket: socket.socket | None = None
        self.is_admitted = False

    def handshake(self, where: tuple[int, int], raw: bytes) -> None:
        super().handshake(where, raw)
        # PLAIN's HELLO has the password, INITIATE follows when it was accepted.
        due = b"\5HELLO" if self._is_first else b"\x08INITIATE"
        if where != self._where or due not in raw[:12] or self.socket is not None:
            return
        own = self.socket = socket.create_connection(("127.0.0.1", self.ports[where]), 10)
        answers = self._answers()
        commands = self.commands[where]
        own.sendall(b"".join(commands if self._is_first else commands[:-1]))
        # libzmq 4.3.5 misspells its ERROR.
        verdict = next(raw for raw in answers if b"WELCOME" in raw or b"RROR" in raw)
        if b"WELCOME" in verdict:
            own.sendall(command(b"INITIATE", b"\x0bSocket-Type\0\0\0\4PUSH"))
            self.is_admitted = any(b"\5READY" in answer for answer in answers)
        with contextlib.suppress(OSError):
            own.sendall(self._send(self))

    def _answers(self) -> Iterator[bytes]:
        assert self.socket is not None
        frames = Frames()
        while data := self.socket.recv(4096):
            for _, _, raw in frames.split(data):
                yield raw


# --- Attacks --------------------------------------------------------------------------------


def once(make: Callable[[Man, bytes], Iterable[bytes]]) -> Attack:
    """Do something to the first frame, and let the others pass."""
    return lambda man, number, body: make(man, body) if number == 0 else [wrap(body)]


def changed(change: Callable[[bytes], bytes]) -> Attack:
    return once(lambda man, body: [wrap(change(body))])


def inserted(raw: bytes) -> Attack:
    return once(lambda man, body: [raw, wrap(body)])


def flipped(at: int, bit: int = 0) -> Attack:
    def change(body: bytes) -> bytes:
        return body[:at] + bytes([body[at] ^ 1 << bit]) + body[at:][1:]

    return changed(change)


def kind(number: int) -> Attack:
    """Another kind in the header: one about the ring itself is not believed either."""
    return changed(lambda body: body[:5] + bytes([number]) + body[6:])


def _replay_later(man: Man, number: int, body: bytes) -> Iterator[bytes]:
    if number == 0:
        man.kept = body
    yield wrap(body)
    if number == 1:
        yield wrap(man.kept)


def _reorder(man: Man, number: int, body: bytes) -> Iterator[bytes]:
    if number == 0:
        man.kept = body
        return
    yield wrap(body)
    if number == 1:
        yield wrap(man.kept)


def _cut(man: Man, number: int, body: bytes) -> Iterator[bytes]:
    raise ConnectionResetError
    yield b""


def _cut_in_the_middle(man: Man, number: int, body: bytes) -> Iterator[bytes]:
    yield wrap(body)[: len(body) // 2]
    raise ConnectionResetError


def _delay(man: Man, number: int, body: bytes) -> Iterator[bytes]:
    time.sleep(0.002)
    yield wrap(body)


def _a_byte_at_a_time(man: Man, number: int, body: bytes) -> Iterator[bytes]:
    raw = wrap(body)
    yield from (raw[at : at + 1] for at in range(200)) if number == 0 else [raw]
    if number == 0:
        yield raw[200:]


_OTHER_EPOCH_AT, _OTHER_RANK_AT, _STEP_AT, _LENGTH_AT = 16, 20, 40, 48
_TAG_AT = wire.HEADER_BYTES

# Each ends with a frame that does not open.
CORRUPTING: dict[str, Attack] = {
    "replay at once": once(lambda man, body: [wrap(body)] * 2),
    "replay later": _replay_later,
    "replay instead": once(lambda man, body: [wrap(man.before())]),
    "replay the first": once(lambda man, body: [wrap(man.first())]),
    "own frame back": once(lambda man, body: [wrap(man.own_frame())]),
    "another channel's": once(lambda man, body: [wrap(man.of_other_channel())]),
    "another ring's": once(lambda man, body: [wrap(man.of_other_ring())]),
    "empty": changed(lambda body: b""),
    "header alone": changed(lambda body: body[: wire.HEADER_BYTES]),
    "a byte less than a header and a tag": changed(lambda body: body[: SEALED_OVERHEAD_BYTES - 1]),
    "header and tag alone": changed(lambda body: body[:SEALED_OVERHEAD_BYTES]),
    "a byte short": changed(lambda body: body[:-1]),
    "a byte long": changed(lambda body: body + b"x"),
    "much too long": changed(lambda body: body + bytes(10_000)),
    "a byte in front": changed(lambda body: b"x" + body),
    "another magic": flipped(0),
    "another version": flipped(4),
    "another kind": kind(wire.Kind.SPLIT),
    "kind that is none": kind(129),
    "another job": flipped(8),
    "another epoch": flipped(_OTHER_EPOCH_AT),
    "another group": flipped(_OTHER_EPOCH_AT + 2),
    "another rank": flipped(_OTHER_RANK_AT),
    "another step": flipped(_STEP_AT),
    "another length": flipped(_LENGTH_AT),
    "a changed tag": flipped(_TAG_AT),
    "a changed end of the tag": flipped(SEALED_OVERHEAD_BYTES - 1, 7),
    "a changed text": flipped(SEALED_OVERHEAD_BYTES),
    "a changed end": flipped(-1, 7),
    "zeros": changed(lambda body: bytes(len(body))),
    "a tag of zeros": changed(
        lambda body: body[:_TAG_AT] + bytes(32) + body[SEALED_OVERHEAD_BYTES:]
    ),
    "split in the header": once(lambda man, body: [wrap(body[:64], _MORE), wrap(body[64:])]),
    "split in the text": once(lambda man, body: [wrap(body[:97], _MORE), wrap(body[97:])]),
    "in three parts": once(
        lambda man, body: [wrap(body[:96], _MORE), wrap(b"", _MORE), wrap(body[96:])]
    ),
    "an empty part behind": once(lambda man, body: [wrap(body, _MORE), wrap(b"")]),
    "a thousand parts": once(lambda man, body: [wrap(b"x", _MORE) * 1000, wrap(body)]),
    # libzmq hands this command on as if it were a message.
    "subscription": inserted(command(b"SUBSCRIBE", b"me")),
    "random frames": once(
        lambda man, body: [wrap(man.chance.randbytes(100)) for _ in range(10)] + [wrap(body)]
    ),
}
# Frames come too late or not at all: a frame that does not open, or none.
SILENCING: dict[str, Attack] = {
    "drop": once(lambda man, body: []),
    "drop all": lambda man, number, body: [],
    "reorder": _reorder,
    "two in one": lambda man, number, body: [wrap(body, _MORE if number == 0 else 0)],
    "a part that never comes": once(lambda man, body: [wrap(body, _MORE)]),
}
# The connection ends.
CUTTING: dict[str, Attack] = {
    "cut": _cut,
    "cut in the middle": _cut_in_the_middle,
    "a huge length": once(lambda man, body: [bytes([_LONG]) + struct.pack(">Q", 1 << 62)]),
}
# Nothing that is received changes.
HARMLESS: dict[str, Attack] = {
    "nothing": lambda man, number, body: [wrap(body)],
    "delay": _delay,
    "a byte at a time": _a_byte_at_a_time,
    "a long frame for a short one": once(
        lambda man, body: [bytes([_LONG]) + struct.pack(">Q", len(body)) + body]
    ),
    "split behind the tag": lambda man, number, body: [wrap(body[:96], _MORE), wrap(body[96:])],
    "ping": inserted(command(b"PING", b"\0\0me") * 20),
    "error": inserted(command(b"ERROR", b"\5never")),
    "unknown command": inserted(command(b"PLEASE", b"me")),
    "empty command": inserted(command(b"")),
}
ATTACKS = {**CORRUPTING, **SILENCING, **CUTTING, **HARMLESS}
