"""The choice of a view's successor: every order of everything, and long random ones."""

import functools
import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.pure.views import (
    Agreement,
    Fate,
    Message,
    Standing,
    Step,
    Verb,
    View,
    fate,
    may_choose,
    propose,
    receive,
)

# States by rank; which ranks are alive, and messages under way, as bits; ballots begun; which ranks
# have gone on with the successor.
World = tuple[tuple[int, ...], int, int, int, int]


def bits(of: int) -> Iterator[int]:
    while of:
        lowest = of & -of
        yield lowest.bit_length() - 1
        of ^= lowest


class Checker:
    """All worlds that `size` ranks can come to, with so many ballots and so many ranks killed.

    `ballots` are the ranks that may begin each.

    A message under way may arrive at any time, or never: so messages are lost, late and in any
    order, between ranks that are stopped, cut off or suspected, as any set of ranks may be proposed
    at any time. A rank that dies unseen, stands still, or ends well is one that does nothing more:
    the others may find its port refused, and prove its death only if it has not gone on before.
    Not so if they trust `refusals`. With `at_once` an answer arrives at once or never.
    """

    def __init__(
        self,
        size: int,
        ballots: Sequence[str],
        kills: int,
        *,
        at_once: bool = False,
        refusals: bool = False,
    ) -> None:
        self.size, self.ballots, self.at_once = size, (*ballots, ""), at_once
        self.deaths = [each for each in range(1 << size) if each.bit_count() <= kills]
        self.kills, self.refusals = kills, refusals
        self.states: list[Agreement] = []
        self.messages: list[Message] = []
        self.numbers: dict[Agreement | Message, int] = {}
        self.to = [0] * size  # by rank, the messages for it, as bits
        self.answered = functools.cache(self._answered)
        self.proposed = functools.cache(self._proposed)
        self.pending = functools.cache(self._pending)

    def number(self, each: Agreement | Message) -> int:
        if (found := self.numbers.get(each)) is None:
            kept: list[object] = self.messages if isinstance(each, Message) else self.states  # type: ignore[assignment]
            found = self.numbers[each] = len(kept)
            kept.append(each)
            if isinstance(each, Message):
                self.to[each.receiver] |= 1 << found
        return found

    def taken(self, step: Step) -> tuple[int, int]:
        state, sent = step
        return self.number(state), sum(1 << self.number(each) for each in set(sent))

    def _answered(self, state: int, message: int) -> tuple[int, int]:
        return self.taken(receive(self.states[state], self.messages[message]))

    def _proposed(self, state: int, dead: int) -> tuple[int, int]:
        return self.taken(propose(self.states[state], [self.states[state].own], bits(dead)))

    def _pending(self, state: int, messages: int) -> int:
        """Those of `messages` that may still change anything."""
        asks = Verb.PREPARE, Verb.ACCEPT
        return sum(
            1 << each
            for each in bits(messages)
            if self.messages[each].kind in asks or self.answered(state, each) != (state, 0)
        )

    def world(self, world: World, moved: dict[int, int], sent: int, **changes: int) -> World:
        """What `world` becomes; of the messages that are `sent`, those that still matter."""
        states = tuple(moved.get(rank, state) for rank, state in enumerate(world[0]))
        alive, begun = changes.get("alive", world[1]), changes.get("begun", world[3])
        went = changes.get("went", world[4])
        kept = [
            self.pending(state, sent & self.to[rank])
            for rank, state in enumerate(states)
            if alive >> rank & 1
        ]
        return states, alive, sum(kept), begun, went

    def after(self, world: World) -> Iterator[World]:
        states, alive, sent, begun, went = world
        for rank in bits(alive):
            # A ring has formed once all its ranks know of it, and goes on one by one.
            if (chosen := self.states[states[rank]].successor) is not None and not went >> rank & 1:
                members = sum(1 << each for each in chosen.members)
                knows = [self.states[states[each]].successor == chosen for each in chosen.members]
                if members >> rank & 1 and not members & ~alive and all(knows):
                    yield self.world(world, {}, sent, went=went | 1 << rank)
            for message in bits(sent & self.to[rank]):
                left = sent & ~(1 << message)
                state, answers = self.answered(states[rank], message)
                asker = self.messages[message].sender
                if not self.at_once or not answers:
                    yield self.world(world, {rank: state}, left | answers)
                    continue
                yield self.world(world, {rank: state}, left)
                if alive >> asker & 1:
                    told, more = self.answered(states[asker], answers.bit_length() - 1)
                    yield self.world(world, {rank: state, asker: told}, left | more)
            if str(rank) not in self.ballots[begun] or self.states[states[rank]].successor:
                continue
            for dead in self.deaths:
                left = alive & ~dead
                standings = [Standing(ring=went >> each & 1, is_gone=True) for each in bits(dead)]
                if not self.refusals and {fate(each, 0) for each in standings} - {Fate.DEAD}:
                    continue
                if not dead >> rank & 1 and self.size - left.bit_count() <= self.kills:
                    state, more = self.proposed(states[rank], dead)
                    yield self.world(world, {rank: state}, sent | more, alive=left, begun=begun + 1)

    def run(self) -> None:
        view = View(0, tuple(range(self.size)))
        first = tuple(self.number(Agreement(rank, view)) for rank in view.members)
        start: World = first, (1 << self.size) - 1, 0, 0, 0
        seen, pending = {start}, [start]
        while pending:
            states, alive, *_, went = world = pending.pop()
            chosen = {self.states[states[rank]].successor for rank in bits(alive | went)} - {None}
            assert len(chosen) < 2, f"a fork: {chosen}"
            for each in self.after(world):
                if each not in seen:
                    seen.add(each)
                    pending.append(each)
        assert any(state.successor is not None for state in self.states)


# On a slow machine the last take minutes.
@pytest.mark.timeout(400)
# Ranks of a view of three are alike, so any may begin first; of four, the lowest is not.
@pytest.mark.parametrize(
    ("size", "ballots", "at_once"),
    [
        (2, ("01", "01", "01"), False),
        (3, ("0", "012"), False),
        (4, ("1", "1"), True),
        pytest.param(3, ("0", "012", "012"), True, marks=pytest.mark.full),
        pytest.param(4, ("1", "0123"), True, marks=pytest.mark.full),
    ],
)
def test_every_view_has_one_successor(size, ballots, at_once):
    Checker(size, ballots, size - 1, at_once=at_once).run()


def test_a_refused_port_proves_nothing():
    """Ranks that went on without one, and ended well, are not there when it wakes."""
    with pytest.raises(AssertionError, match="a fork"):
        Checker(3, ("0", "2"), 2, at_once=True, refusals=True).run()


@pytest.mark.parametrize(
    ("standing", "found"),
    [
        (Standing(), Fate.UNKNOWN),
        (Standing(ring=3, ended=1), Fate.UNKNOWN),
        (Standing(ring=3, ended=1, is_gone=True), Fate.DEAD),
        (Standing(is_gone=True), Fate.DEAD),
        (Standing(ring=3, ended=2), Fate.ENDED),
        (Standing(ring=3, ended=2, is_gone=True), Fate.ENDED),
        (Standing(ring=4), Fate.WENT_ON),
        (Standing(ring=4, ended=2, is_gone=True), Fate.WENT_ON),
    ],
)
def test_what_a_rank_leaves_behind_says_what_has_become_of_it(standing, found):
    assert fate(standing, view=3, training=2) is found


def test_the_end_of_a_training_is_none_where_there_is_no_training():
    assert fate(Standing(ended=0, is_gone=True), view=0) is Fate.DEAD


class Ranks:
    """Ranks that choose one view after another, over a network that does as `chance` says."""

    def __init__(self, size: int, chance: random.Random) -> None:
        self.chance, view = chance, View(0, tuple(range(size)))
        self.states = {rank: Agreement(rank, view) for rank in range(size)}
        self.sent: list[Message] = []
        self.gone: set[int] = set()  # killed, or ended well
        self.left_behind = dict.fromkeys(range(size), Standing())
        self.stopped: set[int] = set()
        self.side: set[int] = set()  # cut off from the others
        # What each has taken for the next view, by the number of the one before.
        self.taken: dict[int, dict[int, View]] = {rank: {} for rank in range(size)}

    def step(self) -> None:
        chance = self.chance
        able = [rank for rank in self.states if rank not in self.gone | self.stopped]
        action = chance.random()
        if action < 0.8 and self.sent:
            # Old messages come too, but seldom.
            place = len(self.sent) - 1 - min(int(chance.expovariate(0.3)), len(self.sent) - 1)
            message = self.sent.pop(place)
            to = message.receiver
            if (message.sender in self.side) == (to in self.side) and to in able:
                self.take(to, receive(self.states[to], message))
            elif chance.random() < 0.8:
                self.sent.insert(0, message)
        elif action < 0.9 and able:
            rank = chance.choice(able)
            if self.states[rank].successor is None:
                members = self.states[rank].view.members
                others = [each for each in members if chance.random() < 0.7]
                seen = [each for each in self.gone if chance.random() < 0.8]
                number = self.states[rank].view.number
                fates = {each: fate(self.left_behind[each], number) for each in seen}
                if Fate.WENT_ON in fates.values():
                    self.end(rank)  # It was left out.
                    return
                dead = [each for each in seen if fates[each] is Fate.DEAD]
                self.take(rank, propose(self.states[rank], {rank, *others}, dead))
        elif action < 0.93:
            self.stopped ^= {chance.choice(list(self.states))}
        elif action < 0.96:
            self.side = {rank for rank in self.states if chance.random() < 0.3}
        elif action < 0.98 and able:
            # All ranks of a ring have formed it, and one goes on with it, stops or not, or ends.
            rank = chance.choice(able)
            view = self.states[rank].view
            if all(self.states[each].view.number >= view.number for each in view.members):
                self.left_behind[rank] = Standing(ring=view.number)
        elif len(able) > 1:
            self.check()
            self.end(chance.choice(able))

    def end(self, rank: int) -> None:
        self.gone.add(rank)
        self.left_behind[rank] = self.left_behind[rank]._replace(is_gone=True)

    def take(self, rank: int, step: Step) -> None:
        state, sent = step
        self.sent += sent
        if (chosen := state.successor) is not None and self.states[rank].successor is None:
            self.taken[rank][state.view.number] = chosen
            if rank in chosen.members:
                state = Agreement(rank, chosen)
        self.states[rank] = state

    def check(self) -> None:
        """Of what two ranks took for the next view, one is the other, or comes after it.

        Of those that have gone that counts with which they had gone on before.
        """
        counted = [
            {
                number: view
                for number, view in self.taken[rank].items()
                if rank not in self.gone or view.number <= self.left_behind[rank].ring
            }
            for rank in self.states
        ]
        for one, other in itertools.permutations(counted, 2):
            for number in one.keys() & other.keys():
                if one[number].number <= other[number].number:
                    later = {one[number]}
                    for view in sorted(range(number, other[number].number)):
                        later |= {
                            each[view]
                            for each in self.taken.values()
                            if view in {found.number for found in later} & each.keys()
                        }
                    assert other[number] in later, f"a fork after {number}: {one}, {other}"


@settings(max_examples=200)
@given(st.integers(2, 6), st.integers(0, 1 << 32))
def test_ranks_in_trouble_never_part(size, seed):
    ranks = Ranks(size, random.Random(seed))
    for _ in range(300):
        ranks.step()
    ranks.check()


def test_those_who_may_choose():
    five = range(5)
    assert may_choose(five, {2, 3, 4}, set())
    assert not may_choose(five, {3, 4}, {1, 2})  # The dead count.
    assert may_choose(five, {3, 4}, {0, 1, 2})
    four = range(1, 5)
    assert may_choose(four, {1, 4}, set())
    assert not may_choose(four, {2, 3}, {4})


def among(ranks: Ranks, *those: int, but: Verb | None = None) -> None:
    """All messages between these arrive, and their answers; one kind is lost."""
    while found := [each for each in ranks.sent if {each.sender, each.receiver} <= {*those}]:
        ranks.sent.remove(found[0])
        if found[0].kind is not but:
            ranks.take(found[0].receiver, receive(ranks.states[found[0].receiver], found[0]))


def chosen(ranks: Ranks, *those: int) -> list[tuple[int, ...] | None]:
    found = [ranks.taken[each].get(0) for each in those]
    return [None if each is None else each.members for each in found]


def begin(ranks: Ranks, rank: int, members: Sequence[int], dead: Sequence[int] = ()) -> None:
    ranks.take(rank, propose(ranks.states[rank], members, dead))


def test_of_accepted_values_that_of_the_highest_ballot_is_proposed():
    ranks = Ranks(3, random.Random(0))
    begin(ranks, 0, (0, 1))
    among(ranks, 0, 1, but=Verb.ACCEPT)  # Rank 0 alone accepts.
    begin(ranks, 1, (1, 2))
    among(ranks, 1, 2, but=Verb.ACCEPTED)  # Chosen, without a rank that knows it.
    ranks.sent.clear()
    begin(ranks, 2, (0, 2))
    among(ranks, 0, 2)
    assert chosen(ranks, 0, 2) == [(1, 2)] * 2


def test_what_the_dead_have_chosen_is_not_heard_of_later():
    ranks = Ranks(4, random.Random(0))
    begin(ranks, 0, (0, 3))
    among(ranks, 0, 3)
    assert chosen(ranks, 0, 3) == [(0, 3)] * 2
    # Both die. What they have sent is still on its way to 1 and 2.
    begin(ranks, 1, (1, 2), dead=(0, 3))
    for each in [each for each in ranks.sent if each.sender == 1]:
        ranks.sent.remove(each)
        ranks.take(2, receive(ranks.states[2], each))
    among(ranks, 0, 2)
    assert chosen(ranks, 2) == [None]
    among(ranks, 1, 2)
    assert chosen(ranks, 1, 2) == [(1, 2)] * 2


def test_those_that_die_while_a_ballot_runs_do_not_help_it():
    """Rank 3 hears who is dead from 1, whose ballot is lower; rank 2 does not."""
    ranks = Ranks(6, random.Random(0))
    begin(ranks, 0, (0, 4, 5))
    among(ranks, 0, 4, 5)
    assert chosen(ranks, 0) == [(0, 4, 5)]
    late, ranks.sent = ranks.sent, []
    begin(ranks, 3, (1, 2, 3))
    begin(ranks, 1, (1, 2, 3), dead=(0, 4, 5))
    among(ranks, 1, 3)
    among(ranks, 2, 3)
    among(ranks, 1, 3)
    assert chosen(ranks, 3) == [None]
    ranks.sent += late
    among(ranks, 0, 2)
    begin(ranks, 3, (1, 2, 3), dead=(0, 4, 5))
    among(ranks, 1, 2, 3)
    assert chosen(ranks, 1, 2, 3) == [(0, 4, 5)] * 3


def test_a_rank_that_was_left_out_is_told_so_whenever_it_wakes():
    old, new = View(0, (0, 1, 2)), View(7, (0, 2))
    here = Message(Verb.HERE, 1, 0, old.number)
    state, (told,) = receive(Agreement(0, new), here)
    assert (state, told.kind, told.value) == (Agreement(0, new), Verb.CHOSEN, new)
    woken, answer = receive(Agreement(1, old), told)
    assert woken.successor == new
    assert answer == ()
    assert receive(woken, told) == (woken, ())


def test_a_ballot_has_a_number_above_all_that_its_rank_has_heard_of():
    state, sent = propose(Agreement(1, View(4, (0, 1, 2))), (1, 2), dead=[0])
    assert [each.receiver for each in sent] == [2]
    assert sent[0].ballot == (5, 1)
    state, _ = receive(state, Message(Verb.PREPARE, 2, 1, 4, ballot=(8, 2)))
    _, sent = propose(state, (1, 2))
    assert sent[0].ballot == (9, 1)
    assert sent[0].dead == (0,)
