"""Frames that nobody should send, from a rank with the key.

They come to real rings, and to the compiled loop of a real link. Nothing may crash, hang, take
memory beyond its limits or change a result; the job may end, with one named error on every rank.
"""

import ctypes
import os
import random
import secrets
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

import ringreduce as rr
from ringreduce.effects.events import Events
from ringreduce.pure import watcher_messages, wire
from ringreduce.pure.membership import whole
from ringreduce.pure.notification import abort_error
from ringreduce.pure.schedule import Schedule
from ringreduce.pure.timeouts import Timeouts
from ringreduce.pure.watcher_messages import TEXT_MAX, Abort
from ringreduce.testing import ring_of_threads
from ringreduce.transport import loop, records
from ringreduce.transport.frames import INLINE_BYTES_MAX, SEALED_OVERHEAD_BYTES
from ringreduce.transport.link_calls import RingCall
from ringreduce.transport.listening import Bind
from ringreduce.transport.security import MATERIAL_BYTES, Security
from ringreduce.transport.stalls import Waiting
from ringreduce.transport.zeromq import ZmqLink
from tests.fuzzing import bounded_memory, mutate_bytes, mutate_frame
from tests.rings import SOON_S, outcome
from tests.scope import in_full
from tests.sealing import Sealer

SECRET = secrets.token_hex(32)
# How often the tests of frames do what they do.
TIMES = (1, in_full(5))


def words(header: np.ndarray, **changes: int) -> bytes:
    """`header` with other fields, as bytes."""
    fields = {**vars(wire.decode(header)), **changes}
    return wire.encode(wire.Header(**fields)).tobytes()


def one(**changes: int) -> Any:
    return lambda header, data: [[words(header, **changes), data]]


# What rank 1 of 3 sends to rank 2 instead of its first frame of an all_reduce.
ERRORS: dict[str, Any] = {
    **{f"rank {rank}": one(rank=rank) for rank in (0, 2, 3, 1 << 31, 0xFFFFFFFF)},
    "future epoch": one(epoch=1),
    "last epoch of all": one(epoch=0xFFFF),
    "old sequence": lambda h, d: [[words(h, sequence=int(h[3]) - 1), d]],
    "future sequence": lambda h, d: [[words(h, sequence=int(h[3]) + 1), d]],
    "replayed frame": lambda h, d: [[h.tobytes(), d], [h.tobytes(), d]],
    **{f"dtype {dtype}": one(dtype=dtype) for dtype in (1, 255)},  # of another width; none
    **{f"count {count}": one(count=count) for count in (29_999, 1 << 63)},
    **{f"length {nbytes}": one(nbytes=nbytes) for nbytes in (0, 1 << 63)},
    "skipped step": one(step=1),
    "segment beyond the end": one(segment=0xFFFFFFFF),
    "operation that is none": one(kind=99),
    "operator that is none": one(op=255),
    "length one more": lambda h, d: [[words(h, nbytes=len(d) + 1), d + b"x"]],
    "a byte short": lambda h, d: [[h.tobytes(), d[:-1]]],
    "a byte long": lambda h, d: [[h.tobytes(), d + b"x"]],
    "no payload": lambda h, d: [[h.tobytes()]],
    "payload in the header's part": lambda h, d: [[h.tobytes() + d]],
    "a thousand parts": lambda h, d: [[h.tobytes(), *[b"x"] * 1000]],
    "parts the wrong way round": lambda h, d: [[d, h.tobytes()]],
    **{f"other {field}": one(**{field: 255}) for field in ("job", "magic", "version", "signature")},
    "short header": lambda h, d: [[h.tobytes()[:63], d]],
    "empty message": lambda h, d: [[b""]],
}
# Of another epoch, as frames are that were under way when a ring shrank; the right one follows.
PASSED_OVER = ("future epoch", "last epoch of all")


@pytest.mark.parametrize("name", ERRORS)
def test_a_rank_that_errs_is_one_named_error_on_every_other(name):
    def work(comm):
        link = comm._session.collectives._link
        right = link.run

        def erring(call, buffer, sequence):
            call.number(sequence)
            header, memory = np.array(call._record.outgoing), buffer.view(np.uint8)
            start, end = call._record.first_start, call._record.first_end
            header[5], header[6] = call.schedule.offset, end - start
            for parts in ERRORS[name](header, memory[start:end].tobytes()):
                link.sockets.outgoing[0].socket.send_multipart(parts)
            link.run = right
            right(call, buffer, sequence)  # Until the others have said what they found.

        comm.barrier()  # All have joined before one errs.
        if comm.rank == 1:
            link.run = erring
        started = time.monotonic()
        found = outcome(lambda: comm.all_reduce(np.ones(30_000)))
        return found, time.monotonic() - started, outcome(comm.barrier)

    first, _, third = ring_of_threads(3, work, transport="zmq")
    for error, seconds, again in (first, third):
        if name in PASSED_OVER:
            assert not isinstance(error, rr.RingReduceError)
            assert again is None
            continue
        assert isinstance(error, (rr.ProtocolError, rr.MismatchError)), error
        assert "rank 1" in str(error) or "rank 2" in str(error), error
        assert seconds < SOON_S
        assert (type(again), str(again)) == (type(error), str(error))  # One error, kept.


# --- A rank that errs: the compiled loop, frame after frame ---------------------------------

_FRAMES = 90_000
_GUARD = 4096


class Loop:
    """The loop of a real link, which waits for one frame of `nbytes` of an erring rank 1."""

    def __init__(self, nbytes: int, is_sealed: bool) -> None:
        common = {"secret": SECRET, "job_id": "ours", "size": 2, "is_encrypted": is_sealed}
        members = [Security(rank=rank, **common) for rank in range(2)]
        for member in members:
            member.learn([other.public for other in members], bytes(MATERIAL_BYTES), job=77)
        self.link = ZmqLink(
            bind=Bind(("127.0.0.1",)),
            segment_bytes=nbytes,
            waiting=Waiting(Timeouts(10.0, 10.0), Events()),
            security=members[0],
        )
        # Nobody has to be there: nothing is sent, and the frames come from here.
        addresses = dict.fromkeys(range(2), self.link.address)
        self.link.connect(job=77, addresses=addresses, membership=whole(2), ranks_here=2)
        self.context = zmq.Context()
        self.peer = self.context.socket(zmq.PUSH)
        self.peer.setsockopt(zmq.SNDTIMEO, 10_000)
        members[1].data.join(self.peer, 0, 0)
        self.sealer = Sealer(members[1].frame_key(1, 0, 0)) if is_sealed else None
        self.peer.connect(self.link.address)
        self.receiver = self.link.sockets.incoming[0].socket

        fields = {"kind": wire.Kind.ALL_REDUCE, "job": 77, "sequence": 3, "dtype": 1}
        fields |= {"count": nbytes // 4, "nbytes": nbytes, "signature": 9}
        self.header = wire.encode(wire.Header(rank=1, **fields))
        self.payload = bytes(range(256)) * (nbytes // 256)
        self.memory = np.full(nbytes + 2 * _GUARD, 0xA5, np.uint8)
        self.untouched = self.memory.tobytes()
        # One chunk, which is copied.
        ours, schedule = wire.Header(rank=0, **fields), Schedule(-1, (0,), (0,))
        self.call = RingCall(ours, schedule, (0, nbytes), size=2, itemsize=1)
        self.record = self.link._record
        place = self.memory.ctypes.data + _GUARD
        self.arguments = ctypes.addressof(self.record), self.call.address, place

    def right(self) -> list[bytes]:
        frame, start = self.header.tobytes() + self.payload, wire.HEADER_BYTES
        if self.sealer is not None:
            frame = self.sealer.seal(self.header.tobytes(), self.payload)
            start = SEALED_OVERHEAD_BYTES
        if len(self.payload) > INLINE_BYTES_MAX:
            return [frame[:start], frame[start:]]
        return [frame]

    def mutated(self, chance: random.Random) -> list[bytes]:
        """A wrong message; where frames are sealed, half of them are sealed rightly."""
        if self.sealer is None:
            return self._mutated(chance, len(self.payload) > INLINE_BYTES_MAX)
        if chance.random() < 0.5:
            sealed, changed = b"".join(self.right()), b""
            while changed in (b"", sealed):
                changed = mutate_bytes(chance, sealed)
            cut = chance.choice((0, SEALED_OVERHEAD_BYTES, chance.randrange(len(changed))))
            return [changed[:cut], changed[cut:]] if cut else [changed]
        [message, *rest] = self._mutated(chance, False)
        # What is sealed has a header.
        message = message.ljust(wire.HEADER_BYTES, b"?")
        header, payload = message[: wire.HEADER_BYTES], message[wire.HEADER_BYTES :]
        return [self.sealer.seal(header, payload), *rest]

    def _mutated(self, chance: random.Random, is_separate: bool) -> list[bytes]:
        right = [self.header.tobytes(), self.payload]
        if is_separate:
            parts = mutate_frame(chance, self.header, [self.payload])[1]
        else:
            right = [b"".join(right)]
            _, changed = mutate_frame(chance, self.header, [])
            # A header alone is changed as such, and what follows it stays.
            parts = [changed[0] + self.payload, *changed[1:]]
        return [b"?" * wire.HEADER_BYTES] if parts == right else parts

    def run(self) -> int:
        """The status of the loop for the next message, which it must have taken wholly."""
        self.record.step = self.record.segment = 0
        assert self.receiver.poll(10_000)
        status = int(loop.run(*self.arguments))
        # Nothing was due after a frame of another epoch.
        assert status != records.WAITING or self.record.received[2] & 0xFFFF != 0
        return status

    def close(self) -> None:
        self.peer.close(linger=0)
        self.context.term()
        self.link.close()


REFUSED = {records.FOREIGN, records.MISMATCH, records.MISSHAPEN, records.WAITING}


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(
    ("nbytes", "encryption", "share"),
    [(1024, "off", 60), in_full(65_536, "off", 20), in_full(1024, "on", 15), (65_536, "on", 5)],
)
def test_the_loop_refuses_every_frame_but_the_right_one(chance, nbytes, encryption, share, times):
    tried = Loop(nbytes, encryption == "on")
    seen: set[int] = set()
    try:
        with bounded_memory(os.getpid()):
            frames = times * _FRAMES * share // 100
            while frames:
                # As many as fit into the queues, so that neither side waits for the other.
                batch = [tried.mutated(chance) for _ in range(min(frames, 4))]
                for parts in batch:
                    tried.peer.send_multipart(parts)
                for parts in batch:
                    status = tried.run()
                    seen.add(status)
                    refused = REFUSED | ({records.CORRUPT} if tried.sealer is not None else set())
                    assert status in refused, (status, [part[:80] for part in parts])
                    if status == records.CORRUPT:
                        # libsodium has overwritten what did not open with zeros.
                        inside = tried.memory[_GUARD:-_GUARD]
                        assert not inside.any() or (inside == 0xA5).all()
                        inside[:] = 0xA5
                    assert tried.memory.tobytes() == tried.untouched, [p[:80] for p in parts]
                frames -= len(batch)
        assert seen >= REFUSED
        assert (records.CORRUPT in seen) is (tried.sealer is not None)
        tried.peer.send_multipart(tried.right())
        assert tried.run() == records.DONE
        assert tried.memory[_GUARD:-_GUARD].tobytes() == tried.payload
        assert (tried.memory[:_GUARD] == 0xA5).all()
        assert (tried.memory[-_GUARD:] == 0xA5).all()
    finally:
        tried.close()


@pytest.mark.parametrize("times", TIMES)
def test_an_abort_is_refused_or_an_error_of_bounded_length(chance, times):
    right = watcher_messages.encode(
        Abort(kind="PeerLostError", origin=1, text="rank 1 of 3 lost it", peer=2)
    )
    for _ in range(times * 10_000):
        try:
            message = watcher_messages.decode(mutate_bytes(chance, right), 3)
        except (ValueError, msgspec.MsgspecError):
            continue
        if isinstance(message, Abort):
            error = abort_error(message, rank=0, size=3)
            assert isinstance(error, rr.RingReduceError)
            assert len(str(error)) < 2 * TEXT_MAX
