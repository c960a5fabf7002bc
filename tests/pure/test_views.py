"""The choice of a view's successor: every order of everything, and long random ones."""

import contextlib
import functools
import itertools
import random
from collections.abc import Collection, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.pure import views
from ringreduce.pure.views import (
    Agreement,
    Fate,
    Message,
    Row,
    Standing,
    Step,
    Verb,
    View,
    admitted,
    fate,
    follow,
    has_vote,
    may_choose,
    outside,
    propose,
    receive,
    taken_in,
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


# Where each newcomer is to come, and the processes as Agreements, messages as bits: as above.
# Besides: the number of the last ring with which each has gone on; views with which any has, and
# which view was taken for the next of which, as bits.
Grown = tuple[tuple[int, ...], int, int, int, tuple[int, ...], int, int]


def a_row(place: int, life: int = 1) -> Row:
    return Row(place, life, "host", "memory", f"tcp://host:{place}")


class Growing(Checker):
    """Views one after the other, of `size` ranks at first, that may take newcomers in.

    `ballots` are as above, and newcomers, whose `places` those of `rows` are, may be in them. Each
    is for its rank alone or for all that are not dead, with newcomers or without. A rank that is
    told takes a view over at once; it goes on with it once all its ranks have taken it over, or
    never does.
    """

    def __init__(
        self, size: int, ballots: Sequence[str], kills: int, rows: Sequence[Row] = ()
    ) -> None:
        self.rows = {row.place: row for row in rows or [a_row(size)]}
        super().__init__(max(size, *(place + 1 for place in self.rows)), ballots, kills)
        self.first = View(0, tuple(range(size)))
        self.views: dict[View, int] = {}
        self.edges: dict[tuple[int, int], int] = {}
        self.begins = functools.cache(self._begins)
        self.later = functools.cache(self._later)
        self.at_once = True

    def at(self, view: View) -> int:
        """Its number among the views that were seen in any world."""
        return self.views.setdefault(view, len(self.views))

    def taken(self, step: Step) -> tuple[int, int]:
        """As above; what is told of a view that takes newcomers in is told to them too."""
        (state, sent), told = step, list[Message]()
        if (view := state.successor) is not None and state.own in view.members:
            assert len({*view.members}) == len(view.members), f"two in one place: {view}"
            state = follow(state, ())
            told = [
                state.to(row.place, Verb.CHOSEN, view=view.number - 1, value=view)
                for row in view.newcomers
            ]
        return super().taken((state, (*sent, *told)))

    def _answered(self, state: int, message: int) -> tuple[int, int]:
        before, about = self.states[state], self.messages[message]
        if before == outside(before.own):
            begun = taken_in(self.rows[before.own], about)
            return (state, 0) if begun is None else self.taken((begun, ()))
        return super()._answered(state, message)

    def _pending(self, state: int, messages: int) -> int:
        later = [
            1 << each
            for each in bits(messages)
            if self.messages[each].view > self.states[state].view.number
        ]
        return super()._pending(state, messages) | sum(later)

    def _begins(self, state: int, dead: int, alive: int) -> list[tuple[int, int]]:
        """The ballots that a rank may begin, if `dead` are proven so."""
        of, gone = self.states[state], [*bits(dead)]
        of = of._replace(left_out=frozenset(rank for rank in of.left_out if alive >> rank & 1))
        others = [rank for rank in of.view.members if rank not in gone]
        rows = [row for place, row in self.rows.items() if alive >> place & 1]
        new = [of.own, *(row.place for row in of.view.newcomers)]
        steps = []
        for members, newcomers in itertools.product(([of.own], new, others), ((), rows)):
            with contextlib.suppress(ValueError):  # It has no vote.
                steps.append(self.taken(propose(of, members, gone, newcomers)))
        return list(dict.fromkeys(steps))

    def come(self, world: Grown, moved: dict[int, int], sent: int, **changes: int) -> Grown:
        """What `world` becomes, if these ranks come to those states."""
        states, edges = world[0], world[6]
        for rank, state in moved.items():
            before, after = self.states[states[rank]].view, self.states[state].view
            if before.members and before != after:
                edge = self.at(before), self.at(after)
                edges |= 1 << self.edges.setdefault(edge, len(self.edges))
        plain = self.world((states, *world[1:4], 0), moved, sent, **changes)
        return *plain[:4], world[4], world[5], edges

    def _later(self, view: int, edges: int) -> set[int]:
        every, found = [*self.edges], {view}
        of_world = [every[each] for each in bits(edges)]
        while more := {later for earlier, later in of_world if earlier in found} - found:
            found |= more
        return found

    def grown(self, world: Grown) -> Iterator[Grown]:
        states, alive, sent, begun, rings, gone_on, edges = world
        for rank in bits(alive):
            state = self.states[states[rank]]
            can_act = state.successor is None and state.view.members
            if can_act and not state.has_passed:
                view = self.at(state.view)
                views = {self.at(self.states[states[each]].view) for each in state.view.members}
                if views <= self.later(view, edges):
                    passed = {rank: self.number(state._replace(has_passed=True))}
                    on = gone_on | 1 << view
                    numbers = (*rings[:rank], state.view.number, *rings[rank + 1 :])
                    yield (*self.come(world, passed, sent)[:4], numbers, on, edges)
            for message in bits(sent & self.to[rank]):
                left, asker = sent & ~(1 << message), self.messages[message].sender
                after_it, answers = self.answered(states[rank], message)
                yield self.come(world, {rank: after_it}, left | answers * (not self.at_once))
                back = answers & self.to[asker]
                if self.at_once and back and alive >> asker & 1:
                    told, more = self.answered(states[asker], back.bit_length() - 1)
                    moved = {rank: after_it, asker: told}
                    yield self.come(world, moved, left | answers & ~back | more)
            if str(rank) not in self.ballots[begun] or not can_act:
                continue
            for dead in self.deaths:
                left = alive & ~dead
                fates = {
                    fate(Standing(ring=rings[each], is_gone=True), state.view.number)
                    for each in bits(dead)
                }
                killed = self.size - left.bit_count()
                if dead >> rank & 1 or killed > self.kills or fates - {Fate.DEAD}:
                    continue
                for begun_by, more in self.begins(states[rank], dead, left):
                    yield self.come(
                        world, {rank: begun_by}, sent | more, alive=left, begun=begun + 1
                    )

    def check(self, world: Grown) -> None:
        """Of two views with which ranks have gone on, one has come after the other."""
        for one, other in itertools.combinations(bits(world[5]), 2):
            is_later = other in self.later(one, world[6]) or one in self.later(other, world[6])
            assert is_later, f"two rings: {[*self.views][one]}, {[*self.views][other]}"

    def run(self) -> None:
        first = [Agreement(rank, self.first, has_passed=True) for rank in self.first.members]
        first += [outside(place) for place in range(len(first), self.size)]
        numbers = tuple(map(self.number, first))
        start: Grown = numbers, (1 << self.size) - 1, 0, 0, (0,) * self.size, 0, 0
        seen, pending, checked = {start}, [start], set[tuple[int, int]]()
        while pending:
            world = pending.pop()
            if world[5:] not in checked:
                checked.add(world[5:])
                self.check(world)
            for each in self.grown(world):
                if each not in seen:
                    seen.add(each)
                    pending.append(each)
        self.worlds = len(seen)


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
    """Ranks that choose one view after another, over a network that does as `chance` says.

    The first processes have the numbers of their ranks; newcomers have the next ones.
    """

    def __init__(self, size: int, chance: random.Random, *, grows: bool = False) -> None:
        self.size, self.chance, view = size, chance, View(0, tuple(range(size)))
        self.grows = grows
        # Of what may happen: messages, ballots, stops, cuts, rings that go on, and else.
        chances = (86, 2, 1, 1, 8, 2) if grows else (80, 10, 3, 3, 2, 2)
        self.limits = [each / 100 for each in itertools.accumulate(chances)]
        # None: it waits to be taken in.
        self.states: dict[int, Agreement | None] = {
            rank: Agreement(rank, view, has_passed=True) for rank in range(size)
        }
        self.processes = {(rank, 0): rank for rank in range(size)}  # by place and life
        self.rows: dict[int, Row] = {}
        self.sent: list[Message] = []
        self.gone: set[int] = set()  # killed, or ended well
        self.left_behind = dict.fromkeys(range(size), Standing())
        self.stopped: set[int] = set()
        self.side: set[int] = set()  # cut off from the others
        # What each has taken for the next view, by the number of the one before; newcomers, for
        # their first. Views that came one after the other, and those with which ranks have gone on.
        self.taken: dict[int, dict[int, View]] = {rank: {} for rank in range(size)}
        self.followed: dict[View, set[View]] = {}
        self.gone_on: list[View] = []

    def step(self) -> None:
        chance, limits = self.chance, self.limits
        able = [each for each in self.states if each not in self.gone | self.stopped]
        action = chance.random()
        if self.grows and not self.sent:
            action = limits[0] + (1 - limits[0]) * action
        if action < limits[0] and self.sent:
            # Old messages come too, but seldom.
            place = len(self.sent) - 1 - min(int(chance.expovariate(0.3)), len(self.sent) - 1)
            self.deliver(self.sent.pop(place), able)
        elif action < limits[1] and (began := [each for each in able if self.states[each]]):
            self.begin(chance.choice(began))
        elif action < limits[2]:
            self.stopped ^= {chance.choice(list(self.states))}
        elif action < limits[3]:
            self.side = {each for each in self.states if chance.random() < 0.3}
        elif action < limits[4]:
            if self.grows:
                able = [each for each in able if chance.random() < 0.7]
            for each in able if self.grows else able[:1] and [chance.choice(able)]:
                self.go_on(each)
        elif self.grows and chance.random() < 0.6:
            lost = [self.place(each) for each in self.gone]
            self.start(chance.choice(lost if lost and chance.random() < 0.8 else range(self.size)))
        elif len(able) > 1:
            self.check()
            self.end(chance.choice(able))

    def deliver(self, message: Message, able: Collection[int]) -> None:
        sender, to = (
            self.processes[place, life]
            for place, life in zip((message.sender, message.receiver), message.lives, strict=True)
        )
        if self.chance.random() < 0.02:  # Another process has got its port.
            to = max(each for (place, _), each in self.processes.items() if place == self.place(to))
        if (sender in self.side) == (to in self.side) and to in able:
            self.arrive(to, message)
        elif self.chance.random() < 0.8:
            self.sent.insert(0, message)

    def arrive(self, to: int, message: Message) -> None:
        if (state := self.states[to]) is not None:
            self.take(to, receive(state, message))
        elif (begun := taken_in(self.rows[to], message)) is not None:
            self.states[to] = begun
            before = next(view for view, after in self.followed.items() if begun.view in after)
            self.taken[to][before.number] = begun.view

    def place(self, process: int) -> int:
        return self.rows[process].place if process in self.rows else process

    def begin(self, rank: int) -> None:
        """Begin a ballot, if that process has a vote and knows of no choice."""
        chance, state = self.chance, self.states[rank]
        if state is None or state.successor is not None:
            if state is not None and self.grows:
                self.end(rank)  # It was told that it was left out.
            return
        view = state.view
        those = {each: self.processes[each, view.life_of(each)] for each in view.members}
        others = [each for each in view.members if chance.random() < 0.7]
        seen = [each for each in those if those[each] in self.gone and chance.random() < 0.8]
        fates = {each: fate(self.left_behind[those[each]], view.number) for each in seen}
        if Fate.WENT_ON in fates.values():
            self.end(rank)  # It was left out.
            return
        dead = [each for each in seen if fates[each] is Fate.DEAD]
        waiting = [row for each, row in self.rows.items() if self.states[each] is None]
        rows = [row for row in waiting if chance.random() < 0.8]
        if self.grows and chance.random() < 0.9:
            others = [each for each in view.members if each not in dead]
        known = {place: self.processes[place, view.life_of(place)] for place in state.left_out}
        left = {place for place, process in known.items() if process not in self.gone}
        state = state._replace(left_out=frozenset(left))
        with contextlib.suppress(ValueError):
            self.take(rank, propose(state, {state.own, *others}, dead, rows))

    def go_on(self, rank: int) -> None:
        """All ranks of a ring have formed it, and one goes on with it, stops or not, or ends."""
        if (state := self.states[rank]) is None or state.successor is not None:
            return
        view = state.view
        for place in view.members:
            process = self.processes.get((place, view.life_of(place)))
            # Newcomers come, where they are told.
            theirs = None if process is None else self.states[process]
            found = None if theirs is None else theirs.view
            if found != view and (found is None or found not in self.after(view)):
                return
        self.left_behind[rank] = Standing(ring=view.number)
        self.states[rank] = state._replace(has_passed=True)
        if view not in self.gone_on:
            self.gone_on.append(view)

    def after(self, view: View) -> set[View]:
        found, new = set[View](), [view]
        while new:
            found.add(view := new.pop())
            new += self.followed.get(view, ())
        return found

    def start(self, place: int) -> None:
        """A process at that place waits to be taken in, even if there is another one."""
        life = max(1, sum(each == place for each, _ in self.processes))
        process = self.processes[place, life] = len(self.states)
        self.rows[process] = a_row(place, life)
        self.states[process], self.taken[process] = None, {}
        self.left_behind[process] = Standing()

    def end(self, rank: int) -> None:
        self.gone.add(rank)
        self.left_behind[rank] = self.left_behind[rank]._replace(is_gone=True)

    def take(self, rank: int, step: Step) -> None:
        (state, sent), before = step, self.states[rank]
        self.sent += sent
        chosen = state.successor
        if chosen is not None and before is not None and before.successor is None:
            self.taken[rank][state.view.number] = chosen
            if state.own in chosen.members:
                self.followed.setdefault(state.view, set()).add(chosen)
                state = follow(state, ())
                self.welcome(state)
        self.states[rank] = state

    def welcome(self, state: Agreement) -> None:
        """Newcomers are told, by each member of their view."""
        view = state.view
        for row in view.newcomers:
            for (place, life), process in self.processes.items():
                theirs = self.states[process]
                if place == row.place and life != row.life and process not in self.gone:
                    acts = theirs is not None and has_vote(theirs, place)
                    assert not acts, f"two in one place: {view}"
            told = {"view": view.number - 1, "value": view}
            self.sent.append(state.to(row.place, Verb.CHOSEN, **told))

    def check_rings(self) -> None:
        """Rings with which ranks have gone on came one after the other."""
        rings = sorted(self.gone_on, key=lambda view: view.number)
        for one, other in itertools.pairwise(rings):
            assert other in self.after(one), f"two rings: {one}, {other}"

    def check(self) -> None:
        """Of what two ranks took for the next view, one is the other, or comes after it.

        Of those that have gone, and of newcomers before their ring's first barrier, that counts
        with which they had gone on before.
        """
        counted = [
            {
                number: view
                for number, view in self.taken[rank].items()
                if (rank not in self.gone and (state is None or has_vote(state, state.own)))
                or view.number <= self.left_behind[rank].ring
            }
            for rank, state in self.states.items()
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
    ranks.check_rings()


def come_and_go(seed: int) -> Ranks:
    chance = random.Random(seed)
    ranks = Ranks(chance.randint(2, 5), chance, grows=True)
    for _ in range(300):
        ranks.step()
    ranks.check()
    ranks.check_rings()
    return ranks


def test_ranks_that_come_and_go_never_part():
    found = [come_and_go(seed).gone_on for seed in range(2000)]
    assert sum(any(view.newcomers for view in rings) for rings in found) > 400


def test_those_who_may_choose():
    five = range(5)
    assert may_choose(five, {2, 3, 4}, set())
    assert not may_choose(five, {3, 4}, {1, 2})  # The dead count.
    assert may_choose(five, {3, 4}, {0, 1, 2})
    four = range(1, 5)
    assert may_choose(four, {1, 4}, set())
    assert not may_choose(four, {2, 3}, {4})


# What breaks each rule by itself: the function that embodies it, and what it is then.
def leaving_out(state, members, dead, newcomers):
    return admitted(state, members, {*dead, *state.view.members}, newcomers)


def after_leaving_out(state, members, dead, newcomers):
    return admitted(state._replace(left_out=frozenset()), members, dead, newcomers)


def at_any_place(state, members, dead, newcomers):
    of_others = range(100, 100 + len({*members}))
    found = admitted(state, of_others, {*dead, *state.view.members}, newcomers)
    return found if {*state.view.members} <= {*members, *dead} else ()


def any_number(state, members, dead, newcomers):
    is_allowed = admitted(state, members, dead, newcomers)
    return tuple(newcomers) if is_allowed else ()


def votes_at_once(state, member):
    return member == state.own or has_vote(state, member)


def comes_again(state, member):
    return member != state.own or has_vote(state, member)


# Each with ballots, ranks that die, and newcomers, by which all orders find two rings.
RULES = {
    "nobody who may be alive is left out": ("admitted", leaving_out, 2, ("0", "01"), 1, []),
    "newcomers have no vote": ("has_vote", votes_at_once, 2, ("0", "1", "2"), 2, []),
    "places are free": ("admitted", at_any_place, 2, ("0",), 0, [a_row(1)]),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_about_newcomers_is_needed(rule, monkeypatch):
    name, broken, size, ballots, kills, rows = RULES[rule]
    monkeypatch.setattr(views, name, broken)
    with pytest.raises(AssertionError, match="two"):
        Growing(size, ballots, kills, rows).run()


def test_every_view_has_one_successor_where_newcomers_come():
    """Every order of events; of three ranks and a newcomer there are too many for a test."""
    Growing(2, ("01", "012"), 2).run()


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_newcomer_of_a_ring_that_did_not_form_is_in_no_later_one(is_broken, monkeypatch):
    """Rank 2 has heard of neither; 0 and 1 die before they go on with the second one."""
    if is_broken:
        monkeypatch.setattr(views, "has_vote", comes_again)
    ranks = Ranks(3, random.Random(0))
    ranks.start(3)
    begin(ranks, 0, (0, 1, 2), newcomers=[ranks.rows[3]])
    among(ranks, 0, 1, 3)
    assert ranks.states[1].view.members == ranks.states[3].view.members == (0, 1, 2, 3)
    begin(ranks, 0, (0, 3))
    among(ranks, 0, 1, 3)
    ranks.go_on(3)
    ranks.end(0)
    ranks.end(1)
    begin(ranks, 2, (2,), dead=(0, 1))
    assert chosen(ranks, 2) == [(2,)]
    ranks.go_on(2)
    if is_broken:
        with pytest.raises(AssertionError, match="two rings"):
            ranks.check_rings()
    else:
        assert [view.members for view in ranks.gone_on] == [(2,)]


def test_a_rank_that_was_left_out_and_is_alive_keeps_its_place(monkeypatch):
    def run():
        for seed in range(200):
            come_and_go(seed)

    monkeypatch.setattr(views, "admitted", after_leaving_out)
    with pytest.raises(AssertionError, match="two in one place"):
        run()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("is_limited", [True, False])
def test_members_are_enough_again_if_no_more_newcomers_come_than_they_are(
    size, is_limited, monkeypatch
):
    """Nothing is known of the newcomers, which have no vote yet, and may have died."""
    if not is_limited:
        monkeypatch.setattr(views, "admitted", any_number)
    ranks, old = Ranks(size, random.Random(0)), range(size)
    begin(ranks, 0, old, newcomers=[a_row(size + each) for each in range(size + 1)])
    among(ranks, *old)
    taken = ranks.taken[0][0]
    assert len(taken.newcomers) == (size if is_limited else size + 1)
    begin(ranks, 0, old)
    among(ranks, *old)
    assert [ranks.taken[each].get(taken.number) for each in old] == [
        View(2, tuple(old), taken.lives) if is_limited else None
    ] * size


def test_newcomers_come_last_and_the_first_has_been_in_longest():
    state, _ = propose(Agreement(2, View(4, (2,)), has_passed=True), [2], [], [a_row(0, 3)])
    grown = View(5, (2, 0), (3,), (a_row(0, 3),))
    assert state.successor == grown
    state = follow(state, ())._replace(has_passed=True)
    state, sent = propose(state, [0, 2], [], [a_row(1, 2), a_row(1), a_row(0, 4)])
    assert state.successor == View(6, (2, 0, 1), (3, 2), (a_row(1, 2),))
    assert {(each.receiver, each.lives) for each in sent} == {(0, (0, 3))}
    assert may_choose(grown.members, {2}, set())
    assert not may_choose(grown.members, {0}, set())


def test_a_newcomer_has_a_vote_once_its_ring_has_passed_its_first_barrier():
    view = View(5, (2, 0), (3,), (a_row(0, 3),))
    told = Message(Verb.CHOSEN, 2, 0, 4, value=view, lives=(0, 3))
    assert taken_in(a_row(0, 4), told) is None
    state = taken_in(a_row(0, 3), told)
    assert state == Agreement(0, view)
    asked = Message(Verb.PREPARE, 2, 0, 5, ballot=(6, 2), lives=(0, 3))
    assert receive(state, asked) == (state, ())
    with pytest.raises(ValueError, match="a newcomer begins no ballot"):
        propose(state, [0, 2])
    state, (answer,) = receive(state._replace(has_passed=True), asked)
    assert answer == Message(Verb.PROMISE, 0, 2, 5, ballot=(6, 2), lives=(3, 0))


def test_a_ring_that_has_not_formed_is_formed_again_without_newcomers():
    state = Agreement(0, View(5, (0, 1), (0, 1), (a_row(1),)))
    for dead in ([], [1]):
        after, _ = propose(state, [0, 1], dead, [a_row(2)])
        assert after.successor == View(6, (0,), (0, 1))


def test_a_message_of_a_former_life_is_not_taken_for_one_of_the_new_one():
    view = View(5, (0, 1, 2), (0, 2))
    state = Agreement(0, view, has_passed=True)
    of_it, of_another = (
        Message(Verb.PREPARE, 1, 0, 5, ballot=(6, 1), lives=(life, 0)) for life in (2, 1)
    )
    assert receive(state, of_another) == (state, ())
    assert receive(state, of_it)[0].promised == (6, 1)
    # The other way round: its port is another process's now.
    for_it, for_another = (
        Message(Verb.PREPARE, 0, 1, 5, ballot=(6, 0), lives=(0, life)) for life in (2, 1)
    )
    state = Agreement(1, view, has_passed=True)
    assert receive(state, for_another) == (state, ())
    assert receive(state, for_it)[0].promised == (6, 0)


def test_a_message_about_another_view_of_that_number_is_not_heard():
    """Rank 0 had chosen one with itself, and died before rank 1 heard of it."""
    state = Agreement(1, View(1, (1, 2)))
    late = Message(Verb.ACCEPT, 0, 1, 1, ballot=(2, 0), value=View(2, (0, 1)))
    assert receive(state, late) == (state, ())


def test_who_was_left_out_and_may_be_alive_stays_in_mind():
    state = Agreement(0, View(0, (0, 1, 2, 3)), successor=View(1, (0, 1)))
    state = follow(state, {2})
    assert state == Agreement(0, View(1, (0, 1)), left_out=frozenset({3}))
    state = state._replace(has_passed=True)
    assert admitted(state, [0, 1], [], [a_row(2)]) == ()
    assert admitted(state._replace(left_out=frozenset()), [0, 1], [], [a_row(2)]) == (a_row(2),)
    state, _ = receive(state, Message(Verb.CHOSEN, 1, 0, 1, value=View(2, (0,))))
    assert follow(state, {1}).left_out == {3}


@pytest.mark.parametrize("bad", [{"place": -1}, {"life": 0}, {"networks": ("nowhere",)}])
def test_a_row_that_cannot_be_read_is_refused(bad):
    fields = {"place": 1, "life": 1, "host": "", "domain": "", "standby": ""}
    with pytest.raises(ValueError, match="cannot be read"):
        Row(**{**fields, **bad})


def among(ranks: Ranks, *those: int, but: Verb | None = None) -> None:
    """All messages between these arrive, and their answers; one kind is lost."""
    while found := [each for each in ranks.sent if {each.sender, each.receiver} <= {*those}]:
        ranks.sent.remove(found[0])
        if found[0].kind is not but:
            ranks.arrive(found[0].receiver, found[0])


def chosen(ranks: Ranks, *those: int) -> list[tuple[int, ...] | None]:
    found = [ranks.taken[each].get(0) for each in those]
    return [None if each is None else each.members for each in found]


def begin(
    ranks: Ranks,
    rank: int,
    members: Sequence[int],
    dead: Sequence[int] = (),
    newcomers: Sequence[Row] = (),
) -> None:
    ranks.take(rank, propose(ranks.states[rank], members, dead, newcomers))


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
