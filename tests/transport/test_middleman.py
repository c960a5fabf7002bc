"""A man in the middle of a sealed ring: a right result or a named error, and no hang.

He understands ZMTP 3.1 and stands before the ports of all ranks of a ring in threads. He lets
everything pass, the handshake with PLAIN's password included, until it is time for his attack. An
attack gets each message of one connection from then on, its parts joined, and says what is sent
instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import re
import secrets
import socket
import struct
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.pure import wire
from ringreduce.testing import ring_of_threads
from ringreduce.transport import listening
from ringreduce.transport.frames import SEALED_OVERHEAD_BYTES
from ringreduce.transport.zeromq import ZmqLink
from ringreduce.vocabulary.config import TIMES
from tests.fuzzing import blast, frame
from tests.proxy import COMMAND, LONG, MORE, Change, Frames, Proxy, command, greeting, ready, wrap
from tests.rings import outcome
from tests.scope import in_full

# Of the man, the number of the message since the attack began, and its content: what is sent.
Attack = Callable[["Man", int, bytes], Iterable[bytes]]
# The rank that gets something, and the channel.
Where = tuple[int, int]

# What is attacked, what that rank sends itself to the next, and what comes to it on the other
# stream, or over another distance.
ATTACKED, OWN, OTHERS = (1, 0), (2, 0), ((1, 1), (1, 2))


class Man:
    """Does `attack` to what rank 1 gets on channel 0, from its second message on.

    Attributes:
        seen: all messages, by the rank that gets them and the channel.
        commands: the handshakes' raw commands, in the same way.
        earlier: what another man has `seen`, of another ring.
        ports: where the ranks really listen, by the same.
        has_attacked: whether it came to that.
    """

    def __init__(self, attack: Attack | None = None, earlier: Man | None = None) -> None:
        self._attack = attack
        self.seen: dict[Where, list[bytes]] = defaultdict(list)
        self.commands: dict[Where, list[bytes]] = defaultdict(list)
        self.ports: dict[Where, int] = {}
        self.earlier = earlier
        self.has_attacked = False
        self.chance = random.Random(1)
        self.kept = b""  # of an attack, for later

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """All links that are made meanwhile are reached through this man."""
        listen = ZmqLink.__init__

        def through_the_man(link: ZmqLink, **options: Any) -> None:
            listen(link, **options)
            host, _, ports = link.address.rpartition(":")
            ours = []
            for channel, port in enumerate(map(int, ports.split(","))):
                where = options["security"].rank, channel
                self.ports[where] = port
                change = functools.partial(self._change_of, where)
                ours.append(str(proxy.open(f"127.0.0.1:{port}", str(where), change)))
            link.address = f"{host}:{','.join(ours)}"

        with Proxy() as proxy, pytest.MonkeyPatch.context() as patch:
            patch.setattr(ZmqLink, "__init__", through_the_man)
            yield

    def handshake(self, where: Where, raw: bytes) -> None:
        """A command has come, and is sent on when this returns."""
        self.commands[where].append(raw)

    def _change_of(self, where: Where) -> Change:
        frames, parts = Frames(), []

        async def change(data: bytes) -> AsyncIterator[bytes]:
            for flags, part, raw in frames.split(data):
                if flags & COMMAND:
                    self.handshake(where, raw)
                    yield raw
                    continue
                number = len(self.seen[where]) - 1
                is_attacked = self._attack is not None and where == ATTACKED and number >= 0
                parts.append(part)
                if not is_attacked:
                    yield raw
                if flags & MORE:
                    continue
                body = b"".join(parts)
                parts.clear()
                if is_attacked:
                    while not (self.seen[OWN] and self.of_other_channel()):
                        await asyncio.sleep(0.001)
                    self.has_attacked = True
                    for piece in self._attack(self, number, body):
                        yield piece
                # Afterwards, so that an attack finds the messages before its own there.
                self.seen[where].append(body)

        return change

    def of_other_channel(self) -> bytes | None:
        """The newest message on another channel to the rank that is attacked."""
        return next((self.seen[where][-1] for where in OTHERS if self.seen[where]), None)

    def of_other_ring(self) -> bytes:
        """The message with the same number on this channel of an earlier ring."""
        return self.earlier.seen[ATTACKED][1]


class Eavesdropper(Man):
    """Has read a password, and connects with it before or after the rank whose it is.

    He does not change what that rank sends. `send` is what he sends himself after his handshake;
    `is_admitted` says whether that was completed.
    """

    def __init__(
        self, send: Callable[[Eavesdropper], bytes], is_first: bool, channel: int, earlier: Man
    ) -> None:
        super().__init__(earlier=earlier)
        self._send, self._is_first, self._where = send, is_first, (1, channel)
        self.socket: socket.socket | None = None
        self.is_admitted = False

    def handshake(self, where: Where, raw: bytes) -> None:
        super().handshake(where, raw)
        # PLAIN's HELLO has the password, INITIATE follows when it was accepted.
        due = b"\5HELLO" if self._is_first else b"\x08INITIATE"
        if where != self._where or due not in raw[:12] or self.socket is not None:
            return
        self.socket = socket.create_connection(("127.0.0.1", self.ports[where]), 10)
        answers = self._answers(self.socket)
        commands = self.commands[where]
        self.socket.sendall(b"".join(commands if self._is_first else commands[:-1]))
        # libzmq 4.3.5 misspells its ERROR.
        verdict = next(raw for raw in answers if b"WELCOME" in raw or b"RROR" in raw)
        if b"WELCOME" in verdict:
            self.socket.sendall(command(b"INITIATE", b"\x0bSocket-Type\0\0\0\4PUSH"))
            self.is_admitted = any(b"\5READY" in answer for answer in answers)
        with contextlib.suppress(OSError):
            self.socket.sendall(self._send(self))

    def _answers(self, connected: socket.socket) -> Iterator[bytes]:
        frames = Frames()
        while data := connected.recv(4096):
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


def second_before(is_kept: bool) -> Attack:
    """Send the first message again after the second; or only then, unless it `is_kept`."""

    def attack(man: Man, number: int, body: bytes) -> Iterator[bytes]:
        if number == 0:
            man.kept = body
        if number or is_kept:
            yield wrap(body)
        if number == 1:
            yield wrap(man.kept)

    return attack


def cut(nbytes: int) -> Attack:
    """End the connection after so many bytes of the message."""

    def attack(man: Man, number: int, body: bytes) -> Iterator[bytes]:
        yield wrap(body)[:nbytes]
        raise EOFError

    return attack


def delay(man: Man, number: int, body: bytes) -> Iterator[bytes]:
    time.sleep(0.002)
    yield wrap(body)


def bytewise(man: Man, body: bytes) -> list[bytes]:
    raw = wrap(body)
    return [*(raw[at : at + 1] for at in range(200)), raw[200:]]


EPOCH_AT, TAG_AT = 16, wire.HEADER_BYTES

# Each ends with a frame that does not open; that no bit of a header may change: test_sealing.
CORRUPTING: dict[str, Attack] = {
    "replay at once": once(lambda man, body: [wrap(body)] * 2),
    "replay later": second_before(is_kept=True),
    "replay instead": once(lambda man, body: [wrap(man.seen[ATTACKED][-1])]),
    "replay the first": once(lambda man, body: [wrap(man.seen[ATTACKED][0])]),
    "own frame back": once(lambda man, body: [wrap(man.seen[OWN][-1])]),
    "another channel's": once(lambda man, body: [wrap(man.of_other_channel())]),
    "another ring's": once(lambda man, body: [wrap(man.of_other_ring())]),
    "empty": changed(lambda body: b""),
    "header alone": changed(lambda body: body[:TAG_AT]),
    "a byte less than a header and a tag": changed(lambda body: body[: SEALED_OVERHEAD_BYTES - 1]),
    "header and tag alone": changed(lambda body: body[:SEALED_OVERHEAD_BYTES]),
    "a byte short": changed(lambda body: body[:-1]),
    "a byte long": changed(lambda body: body + b"x"),
    "much too long": changed(lambda body: body + bytes(10_000)),
    "a byte in front": changed(lambda body: b"x" + body),
    "another magic": flipped(0),
    "another kind": kind(wire.Kind.SPLIT),
    "kind that is none": kind(129),
    "another epoch": flipped(EPOCH_AT),
    "a changed tag": flipped(TAG_AT),
    "a changed end of the tag": flipped(SEALED_OVERHEAD_BYTES - 1, 7),
    "a changed text": flipped(SEALED_OVERHEAD_BYTES),
    "a changed end": flipped(-1, 7),
    "zeros": changed(lambda body: bytes(len(body))),
    "a tag of zeros": changed(
        lambda body: body[:TAG_AT] + bytes(32) + body[SEALED_OVERHEAD_BYTES:]
    ),
    "split in the header": once(lambda man, body: [wrap(body[:64], MORE), wrap(body[64:])]),
    "split in the text": once(lambda man, body: [wrap(body[:97], MORE), wrap(body[97:])]),
    "in three parts": once(
        lambda man, body: [wrap(body[:96], MORE), wrap(b"", MORE), wrap(body[96:])]
    ),
    "an empty part behind": once(lambda man, body: [wrap(body, MORE), wrap(b"")]),
    "a thousand parts": once(lambda man, body: [wrap(b"x", MORE) * 1000, wrap(body)]),
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
    "reorder": second_before(is_kept=False),
    "two in one": lambda man, number, body: [wrap(body, MORE if number == 0 else 0)],
    "a part that never comes": once(lambda man, body: [wrap(body, MORE)]),
}
# The connection ends.
CUTTING: dict[str, Attack] = {
    "cut": cut(0),
    "cut in the middle": cut(150),
    "a huge length": once(lambda man, body: [bytes([LONG]) + struct.pack(">Q", 1 << 62)]),
}
# Nothing that is received changes.
HARMLESS: dict[str, Attack] = {
    "nothing": lambda man, number, body: [wrap(body)],
    "delay": delay,
    "a byte at a time": once(bytewise),
    "a long frame for a short one": once(lambda man, body: [wrap(body, LONG)]),
    "split behind the tag": lambda man, number, body: [wrap(body[:96], MORE), wrap(body[96:])],
    "ping": inserted(command(b"PING", b"\0\0me") * 20),
    "error": inserted(command(b"ERROR", b"\5never")),
    "unknown command": inserted(command(b"PLEASE", b"me")),
    "empty command": inserted(command(b"")),
}
ATTACKS = {**CORRUPTING, **SILENCING, **CUTTING, **HARMLESS}

# --- What comes of them ---------------------------------------------------------------------

# Of a job whose second ring is another communicator of the same. Frames of 16 KiB, so that a large
# call has several in each step.
JOB: dict[str, Any] = {"secret": secrets.token_hex(32), "job_id": "the same", "transport": "zmq"}
JOB |= {"encryption": "on", "segment_bytes": 16_384, "streams": 2}
SIZE, ROUNDS = 3, 3
# The time a rank waits for a frame: where nothing else ends the wait, and where something does.
SHORT_S, WAIT_S = 1.0, 15.0
LENGTHS = {"small": 40, "large": 30_000}
CALLS = [f"{size} {name}" for name in ("all_reduce", "broadcast", "all_gather") for size in LENGTHS]


def is_right(comm: rr.Communicator, call: str) -> bool:
    """Whether such a call gives what it should."""
    size, name = call.split()
    array = np.arange(float(LENGTHS[size]))
    factors = {"all_reduce": comm.rank + 1, "broadcast": comm.rank == 0, "all_gather": 1}
    due = {"all_reduce": array * 6, "broadcast": array, "all_gather": np.tile(array, SIZE)}
    return np.array_equal(getattr(comm, name)(array * factors[name]), due[name])


def run(call: str, **settings: Any) -> list[rr.RingReduceError | None]:
    """Each rank's error, raised again by the next call; all results before it were right."""
    errors: list[rr.RingReduceError | None] = [None] * SIZE

    def work(comm: rr.Communicator) -> None:
        def rounds() -> None:
            for _ in range(ROUNDS):
                assert is_right(comm, call), f"a wrong result on rank {comm.rank}"
            comm.barrier()

        errors[comm.rank] = outcome(rounds)
        if errors[comm.rank] is not None:
            assert type(outcome(comm.barrier)) is type(errors[comm.rank])

    limits = {"timeout_s": WAIT_S, "link_timeout_s": TIMES.link_warning_s}
    started = time.monotonic()
    try:
        ring_of_threads(SIZE, work, **JOB | limits | settings)
    except rr.RingReduceError as error:
        # Of the ranks that were still in the first barrier one is named, for all.
        errors = [own or error for own in errors]
    assert time.monotonic() - started < 10
    return errors


@pytest.fixture(scope="module")
def earlier():
    """Who has recorded a ring of the same job, of the same calls, in which nothing happened."""
    men = {call: Man() for call in CALLS}
    for call, man in men.items():
        with man.standing():
            assert run(call) == [None] * SIZE
    return men


def assert_told(errors: list[Any], kinds: tuple[type[rr.RingReduceError], ...], call: str) -> None:
    """Each is of one of these kinds, about the link that was attacked."""
    assert {type(error) for error in errors} <= set(kinds), errors
    for error in errors:
        assert "rank 0" in str(error) or "rank 1" in str(error), error
        if isinstance(error, rr.CorruptionError):
            assert (error.rank if error.origin is None else error.origin) == 1, error
            assert error.peer == 0, error
            assert "rank 1 of 3 received a frame from rank 0 (tcp://127.0.0.1:" in str(error)
            assert "that does not open with the key of this connection" in str(error)
            assert re.search(rf", in ({call.split()[-1]}|barrier) #\d+, \S", str(error)), error


def cases(names: Iterable[str]) -> Iterator[Any]:
    """Every attack on every call; outside the full suite on one of them."""
    for number, (name, call) in enumerate(itertools.product(names, CALLS)):
        is_chosen = number % len(CALLS) == number // len(CALLS) % len(CALLS)
        yield (name, call) if is_chosen else in_full(name, call)


@pytest.mark.parametrize(("name", "call"), list(cases(ATTACKS)))
def test_an_attack_is_a_named_error_or_changes_nothing(earlier, name, call):
    man = Man(ATTACKS[name], earlier[call])
    with man.standing():
        errors = run(call, timeout_s=SHORT_S if name in SILENCING else WAIT_S)
    assert man.has_attacked
    if name in HARMLESS:
        assert errors == [None] * SIZE
    elif name in CORRUPTING:
        assert_told(errors, (rr.CorruptionError,), call)
    elif name in SILENCING:
        # What comes first depends on the limits: a link that carries nothing, or a rank that waits.
        assert_told(errors, (rr.CorruptionError, rr.PeerTimeoutError, rr.PeerLostError), call)
    else:
        assert name in CUTTING
        assert_told(errors, (rr.PeerLostError,), call)


@pytest.mark.parametrize("at", range(0, wire.HEADER_BYTES, 5))
def test_a_flipped_bit_in_a_header_is_an_error_where_nothing_is_sealed(at):
    man = Man(flipped(at, at % 8))
    with man.standing():
        errors = run("small all_reduce", encryption="off", timeout_s=SHORT_S)
    assert man.has_attacked
    for error in errors:
        assert isinstance(error, rr.RingReduceError)
        assert "rank" in str(error)


@pytest.mark.parametrize(
    ("call", "encryption"), [("large all_reduce", "off"), ("large broadcast", "auto")]
)
def test_unsealed_a_flipped_bit_behind_it_makes_a_wrong_result(call, encryption):
    """So the same man is why sealed frames do not open; on loopback auto is off."""
    with (
        Man(flipped(wire.HEADER_BYTES + 4, 5)).standing(),
        pytest.raises(AssertionError, match="a wrong result on rank 1"),
    ):
        run(call, encryption=encryption)


def test_who_reads_a_sealed_ring_finds_only_headers(earlier):
    """No eight bytes of what was sent, on any connection; and no two ciphertexts alike."""
    numbers = np.arange(1.0, LENGTHS["large"]).tobytes()
    words = {numbers[at : at + 8] for at in range(0, len(numbers), 8)}
    for man in earlier.values():
        bodies = [body for seen in man.seen.values() for body in seen]
        assert len(bodies) > 10
        texts = [body[SEALED_OVERHEAD_BYTES:] for body in bodies]
        parts = (text[at : at + 8] for text in texts for at in range(0, len(text) - 7, 8))
        assert words.isdisjoint(parts)
        longer = [text for text in texts if len(text) >= 16]
        assert len(set(longer)) == len(longer)


# What somebody sends who has read PLAIN's password and connects before the ports are shut.
EAVESDROPPERS: dict[str, Callable[[Eavesdropper], bytes]] = {
    "nothing": lambda man: b"",
    "half a message": lambda man: wrap(bytes(1000))[:500],
    "a message without an end": lambda man: wrap(bytes(100), MORE),
    "pings": lambda man: command(b"PING", b"\0\0me") * 100,
    "a huge length": lambda man: b"\2" + b"\x7f" * 8,
    "an empty message": lambda man: wrap(b""),
    "random messages": lambda man: wrap(man.chance.randbytes(100)) * 20,
    "a frame of no kind": lambda man: wrap(frame(kind=128).tobytes() + bytes(99)),
    "a frame of another ring": lambda man: wrap(man.of_other_ring()),
    "a flood": lambda man: wrap(bytes(SEALED_OVERHEAD_BYTES)) * 5000,
}


@pytest.mark.parametrize(
    ("is_first", "channel"),
    [
        (False, 0),
        *(in_full(False, channel) for channel in (1, 2)),
        *(in_full(True, channel) for channel in range(3)),
    ],
)
@pytest.mark.parametrize("name", EAVESDROPPERS)
def test_an_eavesdropper_changes_nothing(earlier, name, is_first, channel):
    """A password opens one connection; one who takes it first ends the job, with an error."""
    call = "large all_reduce"
    man = Eavesdropper(EAVESDROPPERS[name], is_first, channel, earlier[call])
    with man.standing():
        try:
            errors = run(call)
        finally:
            man.socket.close()
    assert man.is_admitted is is_first
    if is_first:
        named = {rr.CorruptionError, rr.PeerLostError, rr.PeerTimeoutError}
        assert {type(error) for error in errors} <= named, errors
    else:
        assert errors == [None] * SIZE


def test_a_stranger_with_a_recording_does_not_hurt_a_ring(monkeypatch, earlier):
    """He has all that was ever sent, but his connection is refused; here the ports stay open."""
    monkeypatch.setattr(listening, "shut", lambda listener: False)
    man = Man(earlier=earlier["large all_reduce"])

    def visit():
        for where, port in man.ports.items():
            handshake = b"".join(man.commands[where])
            messages = b"".join(map(wrap, man.seen[where]))
            blast(port, greeting(), ready(), messages)
            blast(port, handshake, messages)
        last = man.seen[1, 0][-1]
        for attack in CORRUPTING.values():
            blast(man.ports[1, 0], b"".join(man.commands[1, 0]), *attack(man, 0, last))

    def work(comm):
        assert is_right(comm, "large all_reduce")
        comm.all_reduce(np.ones(30_000))
        if comm.rank == 0:
            visit()
        return is_right(comm, "large all_reduce") and is_right(comm, "small all_reduce")

    with man.standing():
        assert ring_of_threads(SIZE, work, **JOB) == [True] * SIZE
