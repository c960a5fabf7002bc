"""A man in the middle of a sealed ring: a right result or a named error, and no hang."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ringreduce.communicator.communicator import Communicator
from ringreduce.testing import ring_of_threads
from ringreduce.transport import listening
from ringreduce.transport.frames import SEALED_OVERHEAD_BYTES
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import (
    CorruptionError,
    PeerLostError,
    PeerTimeoutError,
    RingReduceError,
)
from tests.fuzzing import blast, command, frame, greeting, ready
from tests.middleman import (
    ATTACKS,
    CORRUPTING,
    CUTTING,
    HARMLESS,
    SILENCING,
    Eavesdropper,
    Man,
    wrap,
)

# Of a job whose second ring is another communicator of the same.
JOB = {"secret": secrets.token_hex(32), "job_id": "the same"}
SIZE, ROUNDS = 3, 3
# Frames of 16 KiB, so that a large call has several in each step. The time a rank waits for one:
# where nothing else ends the wait, and where something does.
SEGMENT_BYTES, SHORT_S, WAIT_S = 16_384, 1.0, 15.0
SMALL, LARGE = 40, 30_000


def all_reduce(comm: Communicator, count: int) -> bool:
    array = np.arange(float(count)) * (comm.rank + 1)
    return np.array_equal(comm.all_reduce(array), np.arange(float(count)) * 6)


def broadcast(comm: Communicator, count: int) -> bool:
    array = np.arange(float(count)) * (comm.rank == 0)
    return np.array_equal(comm.broadcast(array), np.arange(float(count)))


CALLS: dict[str, tuple[Callable[[Communicator, int], bool], int]] = {
    "small all_reduce": (all_reduce, SMALL),
    "large all_reduce": (all_reduce, LARGE),
    "small broadcast": (broadcast, SMALL),
    "large broadcast": (broadcast, LARGE),
}


def run(call: str, **settings: Any) -> list[RingReduceError | None]:
    """Each rank's error; all results before it were right, and it did not take long."""
    function, count = CALLS[call]
    errors: list[RingReduceError | None] = [None] * SIZE

    def work(comm: Communicator) -> None:
        try:
            for _ in range(ROUNDS):
                assert function(comm, count), f"a wrong result on rank {comm.rank}"
            comm.barrier()
        except RingReduceError as error:
            errors[comm.rank] = error

    usual = {**JOB, "transport": "zmq", "encryption": "on", "timeout_s": WAIT_S}
    usual |= {"segment_bytes": SEGMENT_BYTES, "streams": 2}
    usual |= {"link_timeout_s": TIMES.link_warning_s}
    try:
        ring_of_threads(SIZE, work, **usual | settings)
    except RingReduceError as error:
        # Of the ranks that were still in the first barrier one is named, for all.
        return [own or error for own in errors]
    return errors


@pytest.fixture(scope="module")
def earlier() -> dict[str, Man]:
    """Who has recorded a ring of the same job, of the same calls, in which nothing happened."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for call in CALLS:
            found[call] = Man()
            found[call].stand(patch)
            assert run(call) == [None] * SIZE
            patch.undo()
    return found


def assert_told(errors: Sequence[Any], kinds: tuple[type[RingReduceError], ...]) -> None:
    """Each of one of these kinds, about the link that was attacked."""
    assert {type(error) for error in errors} <= set(kinds), errors
    for error in errors:
        assert "rank 0" in str(error) or "rank 1" in str(error), error
        if isinstance(error, CorruptionError):
            assert (error.rank if error.origin is None else error.origin) == 1, error
            assert error.peer == 0, error
            assert "rank 1 of 3 received a frame from rank 0 (tcp://127.0.0.1:" in str(error)
            assert "that does not open with the key of this connection" in str(error)


def once_each() -> Iterator[Any]:
    """Every attack on every call; outside the full suite on one of them."""
    for number, (name, call) in enumerate(itertools.product(ATTACKS, CALLS)):
        is_rare = number % len(CALLS) != number // len(CALLS) % len(CALLS)
        yield pytest.param(name, call, marks=pytest.mark.full if is_rare else ())


@pytest.mark.parametrize(("name", "call"), list(once_each()))
def test_an_attack_is_a_named_error_or_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, earlier: dict[str, Man], name: str, call: str
) -> None:
    man = Man(ATTACKS[name], earlier=earlier[call])
    man.stand(monkeypatch)
    started = time.monotonic()
    errors = run(call, timeout_s=SHORT_S if name in SILENCING else WAIT_S)
    assert time.monotonic() - started < 10
    assert man.has_attacked
    if name in HARMLESS:
        assert errors == [None] * SIZE
    elif name in CORRUPTING:
        assert_told(errors, (CorruptionError,))
    elif name in SILENCING:
        # What comes first depends on the limits: a link that carries nothing, or a rank that waits.
        assert_told(errors, (CorruptionError, PeerTimeoutError, PeerLostError))
    else:
        assert name in CUTTING
        assert_told(errors, (PeerLostError,))


def test_who_reads_a_sealed_ring_finds_only_headers(earlier: dict[str, Man]) -> None:
    """No eight bytes of what was sent, on any connection; and no two ciphertexts alike."""
    numbers = np.arange(1.0, LARGE).tobytes()
    words = {numbers[at : at + 8] for at in range(0, len(numbers), 8)}
    for man in earlier.values():
        bodies = [body for seen in man.seen.values() for body in seen]
        assert len(bodies) > 10
        texts = [body[SEALED_OVERHEAD_BYTES:] for body in bodies]
        assert not any(
            text[at : at + 8] in words for text in texts for at in range(0, len(text) - 7, 8)
        )
        longer = [text for text in texts if len(text) >= 16]
        assert len(set(longer)) == len(longer)


# What somebody sends who has read PLAIN's password and connects before the ports are shut.
EAVESDROPPERS: dict[str, Callable[[Eavesdropper], bytes]] = {
    "nothing": lambda man: b"",
    "half a message": lambda man: wrap(bytes(1000))[:500],
    "a message without an end": lambda man: wrap(bytes(100), 1),
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
        *(
            pytest.param(is_first, channel, marks=pytest.mark.full)
            for is_first in (False, True)
            for channel in range(3)
            if is_first or channel
        ),
    ],
)
@pytest.mark.parametrize("name", EAVESDROPPERS)
def test_an_eavesdropper_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    earlier: dict[str, Man],
    name: str,
    is_first: bool,
    channel: int,
) -> None:
    """A password opens one connection; one who takes it first ends the job, with an error."""
    call = "large all_reduce"
    man = Eavesdropper(
        EAVESDROPPERS[name], is_first=is_first, channel=channel, earlier=earlier[call]
    )
    man.stand(monkeypatch)
    started = time.monotonic()
    try:
        errors = run(call)
    finally:
        assert man.socket is not None
        man.socket.close()
    assert time.monotonic() - started < 10
    assert man.is_admitted is is_first
    if is_first:
        named = {CorruptionError, PeerLostError, PeerTimeoutError}
        assert {type(error) for error in errors} <= named, errors
    else:
        assert errors == [None] * SIZE


def test_a_stranger_with_a_recording_does_not_hurt_a_ring(
    monkeypatch: pytest.MonkeyPatch, earlier: dict[str, Man]
) -> None:
    """He has all that was ever sent, but his connection is refused; here the ports stay open."""
    monkeypatch.setattr(listening, "shut", lambda listener: False)
    man = Man(earlier=earlier["large all_reduce"])
    man.stand(monkeypatch)

    def visit() -> None:
        for where, port in man.ports.items():
            handshake = b"".join(man.commands[where])
            messages = b"".join(map(wrap, man.seen[where]))
            blast(port, greeting(), ready(), messages)
            blast(port, handshake, messages)
        last = man.seen[1, 0][-1]
        for attack in CORRUPTING.values():
            blast(man.ports[1, 0], b"".join(man.commands[1, 0]), *attack(man, 0, last))

    def work(comm: Communicator) -> bool:
        assert all_reduce(comm, LARGE)
        comm.all_reduce(np.ones(LARGE))
        if comm.rank == 0:
            visit()
        return all_reduce(comm, LARGE) and all_reduce(comm, SMALL)

    usual = {**JOB, "transport": "zmq", "encryption": "on", "segment_bytes": SEGMENT_BYTES}
    assert ring_of_threads(SIZE, work, **usual, streams=2) == [True] * SIZE
