"""What a watcher decides: facts that follow a script, at full time scale, and no thread."""

from dataclasses import dataclass
from typing import Any

import pytest

from ringreduce.pure import liveness, watcher_messages, watching
from ringreduce.pure.claims import Claim
from ringreduce.pure.liveness import Flow
from ringreduce.pure.membership import whole
from ringreduce.pure.notification import abort_for
from ringreduce.pure.watcher_messages import Heartbeat, Heartbeats, Left, Listening, Overdue, encode
from ringreduce.pure.watching import Action, End, Found, Send, Warn, Watch
from ringreduce.vocabulary.errors import (
    MismatchError,
    PeerLostError,
    PeerTimeoutError,
)
from ringreduce.vocabulary.times import Times


@dataclass(frozen=True)
class Here:
    calls: int = 5
    operation: str | None = None
    since_s: float = 0.0


@pytest.fixture(autouse=True)
def full_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (liveness, watching):
        monkeypatch.setattr(module, "TIMES", Times())


def a_watch(size: int = 2, limit_s: float = 2.0, rank: int = 0) -> Watch:
    return Watch(rank, size, whole(size), limit_s, 0.0)


def sent(actions: list[Action]) -> list[watcher_messages.Message]:
    return [watcher_messages.decode(a.message, 3) for a in actions if isinstance(a, Send)]


def errors(actions: list[Action]) -> list[Exception]:
    return [action.error for action in actions if isinstance(action, End)]


WAITING = Here(operation="all_reduce", since_s=0.1)


def logged(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, Warn)]


ABORT = encode(abort_for(MismatchError("is the cause", rank=1, size=2), 1))


def heartbeat(
    calls: int = 5, operation: str = "", *due: Overdue, number: int = 1, rank: int = 1, age_s=0.0
) -> bytes:
    own = Heartbeat(rank, number, calls, operation, 0.0, due)
    return encode(Heartbeats(((own, age_s),)))


def test_a_loss_that_was_none_does_not_shorten_the_wait_after_a_later_one():
    watch = a_watch()
    # The first message has come before the event of its connection.
    assert not watch.look_for_losses({1: False}, Here(), 0.0)
    for number in range(1, 20):
        watch.receive(1, heartbeat(number=number), 0.2 * number)
        assert not watch.look_for_losses({}, Here(), 0.2 * number)
    assert not watch.look_for_losses({1: False}, Here(), 4.0)
    [error] = errors(watch.receive(1, ABORT, 4.1))
    assert isinstance(error, MismatchError)
    assert "was told by rank 1: rank 1 of 2 is the cause" in str(error)
    assert not watch.look_for_losses({1: True}, Here(), 9.0)


@pytest.mark.parametrize(("has_ended", "limit_s"), [(False, 1.0), (True, 0.1)])
def test_a_loss_that_lasts_ends_the_ring(has_ended, limit_s):
    watch = a_watch()
    assert not watch.look_for_losses({1: has_ended}, Here(), 0.5)
    assert not watch.look_for_losses({1: has_ended}, Here(), 0.5 + 0.9 * limit_s)
    actions = watch.look_for_losses({1: has_ended}, Here(), 0.5 + 1.1 * limit_s)
    assert isinstance(sent(actions)[0], watcher_messages.Abort)
    [error] = errors(actions)
    assert isinstance(error, PeerLostError)
    assert error.peer == 1


@pytest.mark.parametrize(("silent_s", "kind"), [(1.9, PeerLostError), (2.0, PeerTimeoutError)])
def test_a_neighbour_is_late_only_after_the_limit_for_links(silent_s, kind):
    """Others go on without one that is late; one that has lost a connection may still come."""
    watch = a_watch()
    assert not watch.look_for_losses({1: False}, Here(), silent_s)
    [error] = errors(watch.look_for_losses({1: False}, Here(), silent_s + 0.2))
    assert type(error) is kind
    assert "nothing came from it" in str(error)


def test_a_loss_after_a_leave_is_no_failure():
    left, leaves = a_watch(), a_watch()
    left.receive(1, encode(Left(1, 5)), 0.1)
    leaves.is_closing = True
    for at_s in (0.2, 5.0, 10.0):
        for watch in (left, leaves):
            assert not watch.look_for_losses({1: True}, Here(), at_s)


def test_an_abort_is_passed_on_once_and_acknowledged_each_time():
    watch, acknowledgement = a_watch(3), watcher_messages.Acknowledgement()
    first = watch.receive(1, ABORT, 0.1)
    answers = [Send(encode(acknowledgement), frozenset({2})), Send(ABORT, frozenset({1}))]
    assert [action for action in first if isinstance(action, Send)] == answers
    assert len(errors(first)) == 1
    again = watch.receive(2, ABORT, 0.2)
    assert sent(again) == [acknowledgement]
    assert not errors(again)


def test_a_rank_that_leaves_waits_for_neighbours_that_are_there_and_have_not_acknowledged():
    watch = a_watch(3)
    watch.send(Left(0, 5))
    assert watch.is_owed([])
    watch.receive(1, encode(watcher_messages.Acknowledgement()), 0.1)
    assert watch.is_owed([1])
    assert not watch.is_owed([2])
    watch.receive(2, encode(Left(2, 5)), 0.2)
    assert not watch.is_owed([])


def test_messages_that_cannot_be_read_are_logged_a_few_times():
    watch = a_watch()
    texts = [text for _ in range(20) for text in logged(watch.receive(1, b"\xc1", 0.1))]
    assert len(texts) == 8
    assert "rank 1" in texts[0]


def test_a_call_that_a_rank_which_left_will_never_make_ends_the_ring_when_seen_twice():
    watch, here = a_watch(), Here(operation="all_reduce")
    watch.receive(1, encode(Left(1, 5, "ValueError: no")), 0.1)
    assert not errors(watch.beat(here, Flow(), 0, 0.2))
    assert watch.due_s == pytest.approx(0.3)
    [error] = errors(watch.beat(here, Flow(), 0, 0.3))
    assert "was left by rank 1, which ended with ValueError: no" in str(error)


def test_a_value_that_a_neighbour_has_differently_ends_the_ring_on_both_sides():
    watch = a_watch()
    own = Claim("order", b"own", "and rank {peer} differ", "Do so.")
    assert sent(watch.send(own)) == [watcher_messages.Value("order", b"own")]
    [error] = errors(watch.receive(1, encode(watcher_messages.Value("order", b"other")), 0.1))
    assert str(error) == "rank 0 of 2 and rank 1 differ. Do so."
    late = a_watch()
    assert not late.receive(1, encode(watcher_messages.Value("order", b"other")), 0.1)
    notified, message = sent(late.send(own))
    assert notified == watcher_messages.Value("order", b"own")
    assert isinstance(message, watcher_messages.Abort)


def test_a_value_that_should_differ_is_a_warning_once():
    watch = a_watch()
    watch.send(Claim("rows", b"own", "as rank {peer} has.", "Do so.", finds_equals=True))
    same = encode(watcher_messages.Value("rows", b"own"))
    told = [logged(watch.receive(1, same, at_s)) for at_s in (0.1, 0.2)]
    assert told == [["as rank 1 has. Do so."], []]


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_warning_names_the_rank_that_is_waited_for_once(is_silent):
    watch, here, texts = a_watch(), Here(operation="all_reduce", since_s=0.4), []
    for number in range(9 if is_silent else 29):
        if not is_silent or number == 0:
            watch.receive(1, heartbeat(number=number + 1), 0.2 * number)
        texts += logged(watch.beat(here, Flow(), 0, 0.2 * number))
    [text] = [text for text in texts if "in all_reduce" in text]
    place = "has shown no sign of life for" if is_silent else "is alive, in user code"
    assert f"in all_reduce after 5 calls: rank 1 {place}" in text


@pytest.mark.parametrize("grows", [True, False])
def test_a_neighbour_whose_bytes_grow_without_heartbeats_is_reported_alive(grows):
    watch = a_watch(3)
    watch.receive(1, heartbeat(number=1), 0.25)
    reported = []
    for number in range(1, 20):
        at_s = 0.25 + 0.25 * number
        watch.receive(2, heartbeat(calls=6, number=number + 1, rank=2), at_s)
        late = watch.late(at_s)
        assert late == ([] if number == 1 else [1])
        watch.note_bytes({each: 9 * number if grows else 9 for each in late}, at_s)
        [message] = sent(watch.beat(WAITING, Flow(), 0, at_s))
        assert isinstance(message, Heartbeats)
        reported.append(message.heartbeats[0][0].locked)
    assert reported == [(1,) if grows and number >= 4 else () for number in range(1, 20)]
    assert watch.is_busy == grows


def test_bytes_from_before_a_rank_was_late_are_no_sign_of_life():
    watch = a_watch()
    for at_s in (0.5, 0.75):
        watch.note_bytes(dict.fromkeys(watch.late(at_s), 9), at_s)
    watch.receive(1, heartbeat(number=1), 1.0)
    watch.note_bytes({}, 1.0)
    # The heartbeat's own bytes were counted meanwhile.
    watch.note_bytes({1: 100}, 1.75)
    assert watch.peer_table.silent_s(1, 1.75) == 0.75


@pytest.mark.parametrize(
    ("calls", "operation", "is_busy"),
    [(5, "", True), (4, "all_reduce", False), (5, "barrier", False)],
)
def test_a_rank_is_busy_outside_calls_until_the_call_that_waits_for_it_ends(
    calls, operation, is_busy
):
    watch = a_watch()
    watch.receive(1, heartbeat(calls, operation), 0.2)
    watch.beat(WAITING, Flow(), 0, 0.25)
    assert watch.is_busy == is_busy
    watch.beat(Here(calls=6), Flow(), 1, 0.5)
    assert not watch.is_busy


def overdue(frames: int, dry_s: float, channel: int = 0, **more: Any) -> bytes:
    """Rank 1 has got that many frames of rank 0, and waits for more since then."""
    return heartbeat(5, "all_reduce", Overdue(0, channel, frames, dry_s), **more)


def step(watch: Watch, payload: bytes, frames: int, at_s: float) -> list[Action]:
    """Take a heartbeat of rank 1, to which this rank has sent that many frames."""
    watch.receive(1, payload, at_s)
    watch.tick(at_s)
    return watch.beat(WAITING, Flow(sent=((1, 0, frames),)), 0, at_s)


@pytest.mark.parametrize(
    ("sent", "frames", "channel", "dry", "is_dead"),
    [
        (7, 6, 0, 1.0, True),
        (7, 7, 0, 1.0, False),  # all has arrived: the sender is late
        (7, 6, 0, 0.0, False),  # bytes are coming
        (7, 6, 1, 1.0, False),  # another connection
    ],
)
def test_a_connection_that_carries_nothing_is_warned_of_and_ends_the_ring(
    sent, frames, channel, dry, is_dead
):
    watch, texts = a_watch(limit_s=5.0), dict[str, float]()
    for number in range(30):
        at_s = 0.25 * number
        payload = overdue(frames, dry * at_s, channel, number=number + 1)
        actions = step(watch, payload, sent, at_s)
        for text in (*logged(actions), *map(str, errors(actions))):
            if "has waited" not in text:
                texts.setdefault(text, at_s)
    assert list(texts.values()) == [2.0, 5.0] * is_dead
    if is_dead:
        warning, error = texts
        assert "sends to rank 1, and not a byte has come there for 2.0 s" in warning
        assert "lost the connection from rank 0 to rank 1" in error
        assert "RINGREDUCE_LINK_TIMEOUT_S" in error


def test_two_silent_connections_are_warned_of_and_counted_at_the_same_time():
    watch, flow = a_watch(3, limit_s=5.0), Flow(sent=((1, 0, 7), (2, 1, 7)))
    warned, ended = [], []
    for number in range(21):
        at_s = 0.25 * number
        for rank, channel in ((1, 0), (2, 1)):
            watch.receive(rank, overdue(6, at_s, channel, rank=rank, number=number + 1), at_s)
        watch.tick(at_s)
        actions = watch.beat(WAITING, flow, 0, at_s)
        warned += [(at_s, text[:15]) for text in logged(actions) if "sends to" in text]
        ended += [at_s for _ in errors(actions)]
    assert warned == [(2.0, "sends to rank 1"), (2.0, "sends to rank 2")]
    assert ended == [5.0]


def test_frames_sent_just_now_or_while_the_process_stood_still_are_not_held_against_a_link():
    watch, times = a_watch(limit_s=2.0), [0.25 * number for number in range(20)]
    for frames, at_s in enumerate(times):
        assert not errors(step(watch, overdue(frames, at_s, number=frames + 1), frames + 1, at_s))
    # From now on no more is sent, and the process is stopped meanwhile.
    watch.tick(times[-1] + 1.9)
    assert not errors(step(watch, overdue(19, 7.0, number=99), 20, times[-1] + 2.1))


@pytest.mark.parametrize(("age_s", "is_dead"), [(0.4, False), (0.0, True)])
def test_what_a_receiver_said_before_it_was_stopped_says_nothing(age_s, is_dead):
    """It had waited for long, said so, and was stopped as soon as a frame was on its way."""
    watch, found = a_watch(limit_s=0.7), []
    for number, at_s in enumerate((1.0, 1.25, 1.5, 1.75), 1):
        found += errors(step(watch, overdue(6, 9.0, number=number, age_s=age_s), 7, at_s))
    assert bool(found) is is_dead


def test_a_neighbour_whose_heartbeats_come_the_other_way_is_alive():
    watch = a_watch(3)
    assert not watch.look_for_losses({1: True}, Here(), 1.0)
    watch.receive(2, heartbeat(number=9), 1.05)
    [error] = errors(watch.look_for_losses({1: True}, Here(), 1.2))
    assert "lost the connection with rank 1, which is alive" in str(error)
    assert "RINGREDUCE_LINK_TIMEOUT_S" in str(error)


def test_a_timeout_names_the_rank_that_all_wait_for_or_that_this_process_stood_still():
    watch = a_watch()
    watch.receive(1, heartbeat(), 0.2)
    watch.tick(0.2)
    met = PeerTimeoutError("waited 2.0 s", peer=0, remedy="Read rank 0's log first; raise it.")
    named = watch.named(met, WAITING, 0.3)
    assert named.peer == 1
    assert "Rank 1 is alive, in user code for 0.1 s" in str(named)
    assert str(named).endswith("raise it.")
    watch.tick(3.2)
    assert "This process stood still for 3.0 s" in str(watch.named(met, WAITING, 3.3))


@pytest.mark.parametrize(
    ("ticks_s", "peer"), [((0.2, 0.6, 1.0, 2.1, 2.6, 3.1), 1), ((0.2, 2.5, 3.1), 0)]
)
def test_a_short_pause_of_this_process_does_not_hide_a_rank_that_is_silent_for_longer(
    ticks_s, peer
):
    watch = a_watch(3)
    watch.receive(1, heartbeat(), 0.2)
    for number, at_s in enumerate(ticks_s, 1):
        watch.tick(at_s)
        watch.receive(2, heartbeat(5, "all_reduce", number=number, rank=2), at_s)
    met = PeerTimeoutError("waited 2.0 s", peer=0, remedy="Read rank 0's log first; raise it.")
    named = watch.named(met, WAITING, 3.2)
    assert named.peer == peer
    assert ("stood still" in str(named)) == (peer == 0)


def test_where_a_rank_listens_reaches_the_rank_that_it_listens_for():
    listening = Listening(2, 0, 1, "tcp://127.0.0.1:4187")
    payload = encode(listening)
    between, receiver = a_watch(3, rank=1), a_watch(3)
    # It goes on to the other neighbour, once, whichever way it came.
    assert between.receive(2, payload, 0.1) == [Send(payload, frozenset({2}))]
    assert not between.receive(0, payload, 0.2)
    assert receiver.receive(1, payload, 0.3) == [Found(listening)]
    assert not receiver.receive(2, payload, 0.4)
    # The rank that listens does not pass on its own.
    sender = a_watch(3, rank=2)
    assert sender.send(listening) == [Send(payload)]
    assert not sender.receive(1, payload, 0.5)


def test_a_rank_behind_two_that_have_left_is_out_of_reach_and_not_busy():
    """Ranks 0 and 2 of four: 1 and 3, which would pass on where 2 listens, have gone."""
    watches = {rank: a_watch(4, rank=rank) for rank in (0, 2)}
    assert sent(watches[2].send(Listening(2, 0, 0, "tcp://127.0.0.1:4187")))
    for watch in watches.values():
        for rank in (1, 3):
            watch.receive(rank, heartbeat(rank=rank), 0.2)
            watch.receive(rank, encode(Left(rank, 5)), 0.3)
    for own, other in ((0, 2), (2, 0)):
        # It may have something under way; then it is silent, and so waited for no longer.
        assert watches[own].peer_table.doing(other, 0.4).is_busy
        assert not watches[own].peer_table.doing(other, 2.0).is_busy
