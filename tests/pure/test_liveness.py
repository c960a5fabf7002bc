"""What a rank concludes from what it has heard: with a clock of our own, no sockets, no waiting."""

from dataclasses import dataclass

import msgspec
import pytest

from ringreduce.pure import liveness, watcher_messages
from ringreduce.pure.liveness import PeerTable, Suspicion, Waits, describe_cycle
from ringreduce.pure.membership import Membership, whole
from ringreduce.pure.watcher_messages import Heartbeat, Heartbeats, Left, Overdue, Pending
from ringreduce.vocabulary.times import Times

TIMES, ADDRESS = Times(), "tcp://127.0.0.1:4187"


@pytest.fixture(autouse=True)
def full_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times here are written out, so that no scale may change the others."""
    monkeypatch.setattr(liveness, "TIMES", TIMES)


@dataclass(frozen=True)
class Here:
    calls: int = 5
    operation: str | None = "all_reduce"
    since_s: float = 10.0


def beat(
    rank: int,
    operation: str = "all_reduce",
    pending: Pending | None = None,
    *,
    number: int = 1,
    calls: int = 5,
    since_s: float = 0.5,
    overdue: tuple[Overdue, ...] = (),
    locked: tuple[int, ...] = (),
) -> Heartbeat:
    return Heartbeat(rank, number, calls, operation, since_s, overdue, locked, pending)


def table(size: int, *beats: Heartbeat, at_s: float = 10.1) -> PeerTable:
    """What rank 0 knows since 10.0, when these heartbeats have come without delay."""
    known = PeerTable(0, whole(size), 10.0)
    for each in beats:
        known.note(each, 0.0, at_s)
    return known


def heard(*beats: Heartbeat) -> Heartbeats:
    return Heartbeats(tuple((each, 0.0) for each in beats))


def suspected(known: PeerTable, now_s: float) -> Suspicion | None:
    return known.suspect(Here(), now_s)


# --- Messages ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "message",
    [
        Heartbeats(((beat(0), 0.0), (beat(2), 1.5))),
        heard(beat(1, "", overdue=(Overdue(2, 0, 7, 0.1),), locked=(0,))),
        heard(beat(0, "", Pending(True, 2, 1 << 62))),
        watcher_messages.Abort(kind="PeerLostError", origin=1, text="lost it", peer=2),
        Left(1, 7, "ValueError: x"),
        watcher_messages.Acknowledgement(),
        watcher_messages.Listening(2, 0, 1, ADDRESS),
    ],
)
def test_a_message_arrives_as_it_was(message):
    assert watcher_messages.decode(watcher_messages.encode(message), 3) == message


def test_the_longest_message_fits_the_limit():
    overdue = (Overdue(63, 1 << 17, 1 << 60, 1e8),) * watcher_messages.OVERDUE_MAX
    longest = Heartbeat(63, 1 << 60, 1 << 60, "x" * 64, 1e8, overdue)
    for size in (2, 64, 512):
        heartbeats = Heartbeats(tuple((longest, 1e8) for _ in range(size)))
        assert len(watcher_messages.encode(heartbeats)) <= watcher_messages.message_bytes_max(size)


@pytest.mark.parametrize(
    "message",
    [
        heard(beat(3)),
        heard(*[beat(0)] * 4),
        heard(beat(0, overdue=(Overdue(9, 0, 0, 0.0),))),
        heard(beat(0, number=-1)),
        heard(beat(0, "x" * 65)),
        heard(beat(0, since_s=float("nan"))),
        heard(beat(0, pending=Pending(True, 3, 0))),
        heard(beat(0, pending=Pending(True, 1, -1))),
        watcher_messages.Abort(kind="MismatchError", origin=1, text="x" * 5000),
        watcher_messages.Abort(kind="x" * 513, origin=1, text=""),
        watcher_messages.Abort(kind="MismatchError", origin=-1, text=""),
        *(Left(3, 0), Left(0, 0, "x" * 5000)),
        *(watcher_messages.Listening(*of, ADDRESS) for of in ((3, 0, 0), (0, 3, 0), (0, 1, 2))),
        *(watcher_messages.Listening(0, 1, 0, at) for at in ("ipc:///tmp/x", f"tcp://{'1' * 200}")),
    ],
)
def test_what_cannot_be_is_refused(message):
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        watcher_messages.decode(watcher_messages.encode(message), 3)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", bytes(1000), b"\x93\x01\x02\x03"])
def test_bytes_that_are_no_message_are_refused(payload):
    with pytest.raises(msgspec.MsgspecError):
        watcher_messages.decode(payload, 3)


# --- What is known, and when ------------------------------------------------------------------
def test_the_latest_beat_counts_and_its_age_grows_on_the_way():
    known, near = table(3), PeerTable(2, whole(3), 0.0)
    known.note(beat(1, number=7, calls=9), 0.1, 10.5)
    known.note(beat(1, number=6, calls=8), 0.0, 10.6)  # the long way round
    known.note(beat(0, number=99), 0.0, 10.6)  # our own, back again
    [(latest, age_s)] = known.heartbeats(10.6)
    assert latest.calls == 9
    assert age_s == pytest.approx(0.2)
    near.note(latest, age_s, 101.0)  # It has another clock.
    assert near.silent_s(1, 101.0) == pytest.approx(0.2)


def test_far_ranks_are_given_the_time_that_word_of_them_takes():
    known = PeerTable(0, whole(8), 0.0)
    now = TIMES.silent_s + 0.01
    assert known.is_silent(1, now)
    assert known.is_silent(7, now)
    assert not known.is_silent(4, now)
    assert known.is_silent(4, now + 3 * TIMES.heartbeat_s)


def test_ranks_that_left_are_absent_from_later_calls_only():
    known = table(4)
    assert known.leave(Left(1, 5))
    assert not known.leave(Left(1, 5))
    assert known.absent(4) is None
    assert known.absent(5).rank == 1
    # A rank that an exception has made to leave is the cause of the others' leaving.
    known.leave(Left(3, 5, "ValueError"))
    assert known.absent(6).rank == 3
    assert suspected(known, 30.0).rank == 2


def test_hearing_nobody_points_at_oneself_unless_there_is_only_one_other():
    assert table(3).is_cut_off(10.0 + 2 * TIMES.silent_s)
    assert not table(2).is_cut_off(10.0 + 2 * TIMES.silent_s)
    assert not table(3, beat(2), at_s=12.0).is_cut_off(12.1)


def test_only_ranks_that_are_heard_and_wait_for_this_one_are_unanswered():
    known = PeerTable(0, whole(4), 0.0)
    ours, theirs = Overdue(0, 0, 7, 3.0), Overdue(2, 0, 7, 3.0)
    known.note(beat(1, overdue=(theirs, ours)), 0.5, 10.0)
    known.note(beat(2, overdue=(ours,)), 9.0, 10.0)
    known.note(beat(3, overdue=(theirs,)), 0.0, 10.0)
    assert known.unanswered(10.0) == [(1, ours, 0.5)]


# --- The rank that holds this one up ----------------------------------------------------------
def test_a_rank_that_is_not_heard_is_suspected_first():
    known = table(3, beat(1))
    known.note(beat(2, ""), 0.0, 12.1)
    heard = "has shown no sign of life for 2.1 s (last heard: in all_reduce after 5 calls)"
    assert suspected(known, 12.2) == Suspicion(1, f"rank 1 {heard}", is_silent=True)
    # In time, if it never spoke.
    assert table(2).suspect(Here(), 10.0 + TIMES.silent_s - 0.1) is None
    assert suspected(table(2), 10.0 + TIMES.silent_s).rank == 1


PENDING = beat(1, "", Pending(False, 1, 7), since_s=3.0)


@pytest.mark.parametrize(
    ("other", "is_busy", "words"),
    [
        (beat(1, ""), True, "is alive, in user code for 0.6 s"),
        (beat(1, calls=4), False, "is alive and still in all_reduce after 4 calls"),
        (beat(1, "barrier"), False, "is in barrier after 5 calls instead"),
        (PENDING, True, "is alive, in recv from rank 1, tag 7, for 3.1 s"),
    ],
)
def test_a_live_rank_is_suspected_for_where_it_is(other, is_busy, words):
    known = table(2, other, at_s=11.0)
    assert suspected(known, 11.1) == Suspicion(1, f"rank 1 {words}", is_busy=is_busy)


@pytest.mark.parametrize(
    ("other", "at_s"),
    [
        (beat(1), 11.0),
        (beat(1, calls=6), 11.0),
        (beat(1, "", calls=6), 11.0),
        (beat(1, ""), 9.9),  # before the call began
    ],
)
def test_ranks_that_wait_too_or_have_gone_on_are_not_suspected(other, at_s):
    assert table(2, other, at_s=at_s).suspect(Here(), at_s + 0.4) is None


def test_a_rank_that_sends_bytes_and_no_heartbeats_is_locked():
    known = table(2, beat(1, ""), at_s=9.9)
    known.note_alive(1, 12.0)
    held = "is alive, Python's lock has been held there for 2.2 s"
    text = f"rank 1 {held} (last heard: in user code after 5 calls)"
    assert suspected(known, 12.2) == Suspicion(1, text, is_busy=True)
    # Then it was stopped.
    suspicion = suspected(known, 12.0 + TIMES.silent_s)
    assert (suspicion.is_silent, suspicion.is_busy) == (True, False)
    assert "for 1.0 s" in suspicion.text


def test_a_locked_rank_is_seen_by_its_neighbours_and_all_that_hear_them():
    known = table(5)
    for rank, locked in ((1, (2,)), (3, ()), (4, ())):
        known.note(beat(rank, locked=locked), 0.1, 13.0)
    assert known.is_locked(2, 13.0)
    assert known.silent_s(2, 13.0) == pytest.approx(0.1)


@pytest.mark.parametrize(("locked", "is_silent"), [((1, 4), False), ((1,), True)])
def test_ranks_behind_locked_ones_are_not_taken_for_silent(locked, is_silent):
    """All but this rank unpickle, say; those that are locked forward no heartbeats."""
    known = table(5, *(beat(rank, "") for rank in range(1, 5)))
    for rank in locked:
        known.note_alive(rank, 13.0)
    assert suspected(known, 13.1).is_silent == is_silent


def test_of_ranks_in_user_code_the_one_that_is_furthest_behind_is_named():
    beats = [beat(rank, "", calls=calls) for rank, calls in ((1, 5), (2, 3), (3, 4))]
    assert suspected(table(4, *beats, at_s=11.0), 11.1).rank == 2


# --- Messages that ranks wait for -------------------------------------------------------------
@pytest.mark.parametrize(
    ("operation", "pending", "place", "is_busy"),
    [
        ("", None, "in user code", True),
        ("barrier", None, "in barrier", True),
        ("", Pending(False, 2, 7), "in recv from rank 2, tag 7,", True),
        # With this rank: neither waits for anything else.
        ("", Pending(True, 0, 3), "in send to rank 0, tag 3,", False),
        ("", Pending(False, 0, 3), "in recv from rank 0, tag 3,", False),
    ],
)
def test_what_the_rank_does_that_a_message_waits_for(operation, pending, place, is_busy):
    known = table(3, beat(1, operation, pending))
    text = f"rank 1 is alive, {place} after 5 calls"
    assert known.doing(1, 10.2) == Suspicion(1, text, is_busy=is_busy)
    assert known.waits(1, 10.2) == (() if is_busy else ((1, pending),))
    # Of the third rank nothing was heard yet; later, that it is silent.
    assert known.doing(2, 10.2) == Suspicion(2, "rank 2 is alive", is_busy=True)
    known.note(beat(1, operation, pending, number=2), 0.0, 15.0)
    text = "rank 2 has shown no sign of life for 5.0 s"
    assert known.doing(2, 15.0) == Suspicion(2, text, is_silent=True)


def test_ranks_that_wait_for_each_other_are_followed_to_this_one():
    first, second = Pending(False, 2, 1), Pending(False, 0, 1)
    known = table(4, beat(1, "", first))
    assert known.doing(1, 10.2).is_busy
    known.note(beat(2, "", second), 0.0, 10.1)
    assert known.waits(1, 10.2) == ((1, first), (2, second))
    assert not known.doing(1, 10.2).is_busy
    # Another rank has a part of it again.
    known.note(beat(2, "", number=2), 0.0, 10.3)
    assert known.doing(1, 10.4).is_busy


@pytest.mark.parametrize("members", [(0, 1, 2), (0, 2)])
def test_ranks_that_wait_for_each_other_or_for_one_outside_the_group_do_not_wait_for_this_one(
    members,
):
    known = PeerTable(0, Membership(members, group=1), 10.0)
    known.note(beat(2, "", Pending(False, 1, 1)), 0.0, 10.1)
    known.note(beat(1, "", Pending(False, 2 if 1 in members else 0, 1)), 0.0, 10.1)
    assert known.doing(2, 10.2).is_busy


def test_a_rank_that_is_silent_or_has_left_waits_for_nobody():
    known = table(3, beat(1, "", Pending(False, 0, 1)))
    assert known.waits(1, 10.2)
    assert not known.waits(1, 15.0)
    known.leave(Left(1, 5))
    assert not known.waits(1, 10.2)


@pytest.mark.parametrize(
    ("sends", "text"),
    [
        ((False, False, False), "send first."),
        ((True, True), "receive first; arrays can be sent with async_op=True."),
        ((True, False, False), "make its calls in another order."),
        ((True, False), None),  # One receives what the other sends.
    ],
)
def test_a_cycle_is_described_with_what_to_do(sends, text):
    peers = [*range(1, len(sends)), 0]
    cycle = [Waits(rank, Pending(sends[rank], peer, 3)) for rank, peer in enumerate(peers)]
    verbs = ["sends to" if each else "receives from" for each in sends]
    steps = ", ".join(f"rank {rank} {verbs[rank]} rank {peer}" for rank, peer in enumerate(peers))
    said = text and f"Ranks wait for each other: {steps}. Let one of them {text}"
    assert describe_cycle(cycle) == said
