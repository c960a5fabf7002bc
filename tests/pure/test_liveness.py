"""What a rank concludes from what it has heard: with a clock of our own, no sockets, no waiting."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from ringreduce.pure import liveness
from ringreduce.pure.liveness import PeerTable, Waits, describe_cycle
from ringreduce.pure.membership import Membership, whole
from ringreduce.pure.watcher_messages import (
    OVERDUE_MAX,
    Abort,
    Acknowledgement,
    Heartbeat,
    Heartbeats,
    Left,
    Listening,
    Message,
    Overdue,
    Pending,
    decode,
    encode,
    message_bytes_max,
)
from ringreduce.vocabulary.times import Times

TIMES = Times()


@pytest.fixture(autouse=True)
def full_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times here are written out, so that no scale may change the others."""
    monkeypatch.setattr(liveness, "TIMES", TIMES)


@dataclass(frozen=True)
class Here:
    calls: int = 5
    operation: str | None = "all_reduce"
    since_s: float = 10.0


def heartbeat(
    rank: int, number: int = 1, calls: int = 5, operation: str = "all_reduce"
) -> Heartbeat:
    return Heartbeat(rank, number, calls, operation, 0.5)


def board(size: int = 3, now_s: float = 10.0) -> PeerTable:
    return PeerTable(0, whole(size), now_s)


@pytest.mark.parametrize(
    "message",
    [
        Heartbeats(((heartbeat(0), 0.0), (heartbeat(2), 1.5))),
        Heartbeats(
            (
                (
                    Heartbeat(*(1, 2, 3, "", 1.0, (Overdue(2, 0, 7, 0.1),), (0,))),
                    0.0,
                ),
            )
        ),
        Abort("PeerLostError", 1, "lost it", 2),
        Left(1, 7, "ValueError: x"),
        Acknowledgement(),
        Heartbeats(((Heartbeat(0, 1, 1, "", 0.0, pending=Pending(True, 2, 1 << 62)), 0.0),)),
        Listening(2, 0, 1, "tcp://127.0.0.1:4187"),
    ],
)
def test_a_message_arrives_as_it_was(message: Message) -> None:
    assert decode(encode(message), 3) == message


def test_the_longest_message_fits_the_limit() -> None:
    overdue = (Overdue(63, 1 << 17, 1 << 60, 1e8),) * OVERDUE_MAX
    one = Heartbeat(63, 1 << 60, 1 << 60, "x" * 64, 1e8, overdue)
    for size in (2, 64, 512):
        heartbeats = Heartbeats(tuple((one, 1e8) for _ in range(size)))
        assert len(encode(heartbeats)) <= message_bytes_max(size)


@pytest.mark.parametrize(
    "message",
    [
        Heartbeats(((heartbeat(3), 0.0),)),
        Heartbeats(tuple((heartbeat(0), 0.0) for _ in range(4))),
        Heartbeats(((Heartbeat(0, 1, 1, "", 0.0, (Overdue(9, 0, 0, 0.0),)), 0.0),)),
        Left(3, 0),
        Heartbeats(((Heartbeat(0, -1, 1, "", 0.0), 0.0),)),
        Heartbeats(((Heartbeat(0, 1, 1, "x" * 65, 0.0), 0.0),)),
        Heartbeats(((Heartbeat(0, 1, 1, "", float("nan")), 0.0),)),
        Abort("MismatchError", 1, "x" * 5000, 2),
        Abort("x" * 65, 1, "", None),
        Abort("MismatchError", -1, "", None),
        Left(0, 0, "x" * 5000),
        Heartbeats(((Heartbeat(0, 1, 1, "", 0.0, pending=Pending(True, 3, 0)), 0.0),)),
        Heartbeats(((Heartbeat(0, 1, 1, "", 0.0, pending=Pending(True, 1, -1)), 0.0),)),
        Listening(3, 0, 0, "tcp://127.0.0.1:4187"),
        Listening(0, 3, 0, "tcp://127.0.0.1:4187"),
        Listening(0, 1, 2, "tcp://127.0.0.1:4187"),
        Listening(0, 1, 0, "ipc:///tmp/x"),
        Listening(0, 1, 0, "tcp://" + "1" * 200),
    ],
)
def test_what_cannot_be_is_refused(message: Message) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        decode(encode(message), 3)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", bytes(1000), b"\x93\x01\x02\x03"])
def test_bytes_that_are_no_message_are_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(payload, 3)


def test_the_latest_beat_counts_whichever_way_it_came() -> None:
    known = board()
    known.note(heartbeat(1, number=7, calls=9), 0.1, 10.5)
    known.note(heartbeat(1, number=6, calls=8), 0.0, 10.6)  # the long way round
    known.note(heartbeat(0, number=99), 0.0, 10.6)  # our own, back again
    [(latest, age_s)] = known.heartbeats(10.6)
    assert latest.calls == 9
    assert age_s == pytest.approx(0.2)


def test_ages_add_up_on_the_way() -> None:
    far, near = PeerTable(2, whole(4), 0.0), PeerTable(1, whole(4), 100.0)
    far.note(heartbeat(3), 0.0, 5.0)
    [(passed_on, age_s)] = far.heartbeats(5.25)
    near.note(passed_on, age_s, 101.0)
    assert near.silent_s(3, 101.0) == pytest.approx(0.25)


def test_a_rank_that_is_not_heard_is_suspected_first() -> None:
    known = board()
    known.note(heartbeat(1), 0.0, 10.1)
    known.note(heartbeat(2, operation=""), 0.0, 12.1)
    suspicion = known.suspect(Here(), 12.2)
    assert suspicion is not None
    assert (suspicion.rank, suspicion.is_silent) == (1, True)
    assert suspicion.text == (
        "rank 1 has shown no sign of life for 2.1 s (last heard: in all_reduce after 5 calls)"
    )


def test_a_rank_that_never_spoke_is_suspected_in_time() -> None:
    known = board(2)
    assert known.suspect(Here(), 10.0 + TIMES.silent_s - 0.1) is None
    suspicion = known.suspect(Here(), 10.0 + TIMES.silent_s)
    assert suspicion is not None
    assert suspicion.rank == 1


def test_far_ranks_are_given_the_time_that_word_of_them_takes() -> None:
    known = PeerTable(0, whole(8), 0.0)
    now = TIMES.silent_s + 0.01
    assert known.is_silent(1, now)
    assert known.is_silent(7, now)
    assert not known.is_silent(4, now)
    assert known.is_silent(4, now + 3 * TIMES.heartbeat_s)


@pytest.mark.parametrize(
    ("other", "is_busy", "words"),
    [
        (heartbeat(1, operation=""), True, "is alive, in user code for 0.6 s"),
        (heartbeat(1, calls=4), False, "is alive and still in all_reduce after 4 calls"),
        (heartbeat(1, operation="barrier"), False, "is in barrier after 5 calls instead"),
    ],
)
def test_a_live_rank_is_suspected_for_where_it_is(
    other: Heartbeat, is_busy: bool, words: str
) -> None:
    known = board(2)
    known.note(other, 0.0, 11.0)
    suspicion = known.suspect(Here(), 11.1)
    assert suspicion is not None
    assert (suspicion.is_silent, suspicion.is_busy) == (False, is_busy)
    assert words in suspicion.text


@pytest.mark.parametrize(
    "other", [heartbeat(1), heartbeat(1, calls=6), heartbeat(1, calls=6, operation="")]
)
def test_ranks_that_wait_too_or_have_gone_on_are_not_suspected(other: Heartbeat) -> None:
    known = board(2)
    known.note(other, 0.0, 11.0)
    assert known.suspect(Here(), 11.1) is None


def test_a_rank_that_sends_bytes_and_no_heartbeats_is_locked() -> None:
    known = board(2)
    known.note(heartbeat(1, operation=""), 0.0, 9.9)
    known.note_alive(1, 12.0)
    suspicion = known.suspect(Here(), 12.2)
    assert suspicion is not None
    assert (suspicion.rank, suspicion.is_silent, suspicion.is_busy) == (1, False, True)
    assert suspicion.text == (
        "rank 1 is alive, Python's lock has been held there for 2.2 s "
        "(last heard: in user code after 5 calls)"
    )
    # Then it was stopped.
    suspicion = known.suspect(Here(), 12.0 + TIMES.silent_s)
    assert suspicion is not None
    assert (suspicion.is_silent, suspicion.is_busy) == (True, False)
    assert "for 1.0 s" in suspicion.text


def test_a_locked_rank_is_seen_by_its_neighbours_and_all_that_hear_them() -> None:
    known = board(5)
    sees = msgspec.structs.replace(heartbeat(1), locked=(2,))
    for rank in (1, 3, 4):
        known.note(sees if rank == 1 else heartbeat(rank), 0.1, 13.0)
    assert known.is_locked(2, 13.0)
    assert known.silent_s(2, 13.0) == pytest.approx(0.1)


@pytest.mark.parametrize(("locked", "is_silent"), [((1, 4), False), ((1,), True)])
def test_ranks_behind_locked_ones_are_not_taken_for_silent(
    locked: tuple[int, ...], is_silent: bool
) -> None:
    """All but this rank unpickle, say; those that are locked forward no heartbeats."""
    known = board(5)
    for rank in range(1, 5):
        known.note(heartbeat(rank, operation=""), 0.0, 10.1)
        if rank in locked:
            known.note_alive(rank, 13.0)
    suspicion = known.suspect(Here(), 13.1)
    assert suspicion is not None
    assert suspicion.is_silent == is_silent


def test_what_was_said_before_the_call_began_says_nothing_of_it() -> None:
    known = board(2)
    known.note(heartbeat(1, operation=""), 0.0, 9.9)
    assert known.suspect(Here(), 10.3) is None


def test_of_ranks_in_user_code_the_one_that_is_furthest_behind_is_named() -> None:
    known = board(4)
    for rank, calls in ((1, 5), (2, 3), (3, 4)):
        known.note(heartbeat(rank, calls=calls, operation=""), 0.0, 11.0)
    suspicion = known.suspect(Here(), 11.1)
    assert suspicion is not None
    assert suspicion.rank == 2


def test_ranks_that_left_are_absent_from_later_calls_only() -> None:
    known = board(4)
    assert known.leave(Left(1, 5))
    assert not known.leave(Left(1, 5))
    assert known.absent(4) is None
    left = known.absent(5)
    assert left is not None
    assert left.rank == 1
    # Who was made to leave by an exception is the cause of the others' leaving.
    known.leave(Left(3, 5, "ValueError"))
    left = known.absent(6)
    assert left is not None
    assert left.rank == 3
    assert known.suspect(Here(), 30.0).rank == 2  # type: ignore[union-attr]


def test_hearing_nobody_points_at_oneself_unless_there_is_only_one_other() -> None:
    assert board(3).is_cut_off(10.0 + 2 * TIMES.silent_s)
    assert not board(2).is_cut_off(10.0 + 2 * TIMES.silent_s)
    known = board(3)
    known.note(heartbeat(2), 0.0, 12.0)
    assert not known.is_cut_off(12.1)


def test_only_ranks_that_are_heard_and_wait_for_this_one_are_unanswered() -> None:
    known = board(4, 0.0)
    ours, theirs = Overdue(0, 0, 7, 3.0), Overdue(2, 0, 7, 3.0)
    known.note(Heartbeat(1, 1, 5, "all_reduce", 0.5, (theirs, ours)), 0.5, 10.0)
    known.note(Heartbeat(2, 1, 5, "all_reduce", 0.5, (ours,)), 9.0, 10.0)
    known.note(Heartbeat(3, 1, 5, "all_reduce", 0.5, (theirs,)), 0.0, 10.0)
    assert known.unanswered(10.0) == [(1, ours, 0.5)]


@pytest.mark.parametrize(
    ("operation", "pending", "text", "is_busy"),
    [
        ("", None, "rank 1 is alive, in user code after 5 calls", True),
        ("barrier", None, "rank 1 is alive, in barrier after 5 calls", True),
        (
            "",
            Pending(False, 2, 7),
            "rank 1 is alive, in recv from rank 2, tag 7, after 5 calls",
            True,
        ),
        # With this rank: neither waits for anything else.
        (
            "",
            Pending(True, 0, 3),
            "rank 1 is alive, in send to rank 0, tag 3, after 5 calls",
            False,
        ),
        (
            "",
            Pending(False, 0, 3),
            "rank 1 is alive, in recv from rank 0, tag 3, after 5 calls",
            False,
        ),
    ],
)
def test_what_the_rank_does_that_a_message_waits_for(
    operation: str, pending: Pending | None, text: str, is_busy: bool
) -> None:
    known = board()
    known.note(Heartbeat(1, 1, 5, operation, 0.5, pending=pending), 0.0, 10.1)
    waits = () if is_busy else ((1, pending),)
    assert known.doing(1, 10.2) == (text, is_busy, waits)
    # Of the third rank nothing was heard yet; later, that it is silent.
    assert known.doing(2, 10.2) == ("rank 2 is alive", True, ())
    known.note(Heartbeat(1, 2, 5, operation, 0.5, pending=pending), 0.0, 15.0)
    assert known.doing(2, 15.0) == ("rank 2 has shown no sign of life for 5.0 s", False, ())


def test_ranks_that_wait_for_each_other_are_followed_to_this_one() -> None:
    known = board(4)
    first, second = Pending(False, 2, 1), Pending(False, 0, 1)
    known.note(Heartbeat(1, 1, 5, "", 0.5, pending=first), 0.0, 10.1)
    assert known.doing(1, 10.2).is_busy
    known.note(Heartbeat(2, 1, 5, "", 0.5, pending=second), 0.0, 10.1)
    assert known.doing(1, 10.2)[1:] == (False, ((1, first), (2, second)))
    # Another rank has a part of it again.
    known.note(Heartbeat(2, 2, 5, "", 0.5), 0.0, 10.3)
    assert known.doing(1, 10.4).is_busy


def test_a_cycle_of_others_does_not_lead_to_this_rank() -> None:
    known = board(3)
    known.note(Heartbeat(1, 1, 5, "", 0.5, pending=Pending(False, 2, 1)), 0.0, 10.1)
    known.note(Heartbeat(2, 1, 5, "", 0.5, pending=Pending(False, 1, 1)), 0.0, 10.1)
    assert known.doing(1, 10.2).is_busy


def test_a_rank_outside_the_group_is_waited_for_by_none_of_it() -> None:
    known = PeerTable(0, Membership((0, 2), group=1), 10.0)
    known.note(Heartbeat(2, 1, 5, "", 0.5, pending=Pending(False, 1, 1)), 0.0, 10.1)
    known.note(Heartbeat(1, 1, 5, "", 0.5, pending=Pending(False, 0, 1)), 0.0, 10.1)
    assert known.doing(2, 10.2).is_busy


def test_a_rank_that_is_silent_or_has_left_waits_for_nobody() -> None:
    known = board(3)
    known.note(Heartbeat(1, 1, 5, "", 0.5, pending=Pending(False, 0, 1)), 0.0, 10.1)
    assert known.waits(1, 10.2)
    assert not known.waits(1, 15.0)
    known.leave(Left(1, 5))
    assert not known.waits(1, 10.2)


def test_a_rank_in_a_recv_is_not_said_to_be_in_user_code() -> None:
    known = board(2)
    known.note(Heartbeat(1, 1, 5, "", 3.0, pending=Pending(False, 1, 7)), 0.0, 10.1)
    suspicion = known.suspect(Here(), 10.2)
    assert suspicion is not None
    assert suspicion.is_busy
    assert suspicion.text == "rank 1 is alive, in recv from rank 1, tag 7, for 3.1 s"


def cycle(*sends: bool) -> tuple[Waits, ...]:
    size = len(sends)
    return tuple(Waits(rank, Pending(sends[rank], (rank + 1) % size, 3)) for rank in range(size))


@pytest.mark.parametrize(
    ("sends", "text"),
    [
        (
            (False, False, False),
            "Ranks wait for each other: rank 0 receives from rank 1, rank 1 receives from rank 2, "
            "rank 2 receives from rank 0. Let one of them send first.",
        ),
        (
            (True, True),
            "Ranks wait for each other: rank 0 sends to rank 1, rank 1 sends to rank 0. Let one of "
            "them receive first; arrays can be sent with async_op=True.",
        ),
        (
            (True, False, False),
            "Ranks wait for each other: rank 0 sends to rank 1, rank 1 receives from rank 2, "
            "rank 2 receives from rank 0. Let one of them make its calls in another order.",
        ),
        # One receives what the other sends.
        ((True, False), None),
    ],
)
def test_a_cycle_is_described_with_what_to_do(sends: tuple[bool, ...], text: str | None) -> None:
    assert describe_cycle(cycle(*sends)) == text
