"""Which of a ring's ranks go on after a failure: one answer, whoever is lost meanwhile. Pure.

The ranks of a ring are a view. Those that are left agree on the next one by single-decree Paxos
(Lamport, "Paxos made simple", 2001), in memory, since a rank that has died never comes back. Any of
them may begin a ballot: if enough promise to take part in none before it, it has enough of them
accept a value, which is the one of the highest ballot that any of these had accepted, if any had.

Enough are more than half of the last view; or half of it with its lowest rank; or all that have not
been proven dead. Ranks that are dead count in the half all the same: of 0, 1 and 2, let 1 and 2
choose themselves, and 1 die; were it not counted, 0 and 2 would both be half, and go on apart.

Those proven dead are told to all with a ballot's first message. From then on nobody listens to
them: a message of theirs may still be on its way, from a choice that no living rank knows of.

A rank that has gone is not dead for that: it may have gone on with a ring of others, and ended
well. So each leaves behind how far it has come (`Standing`), before it goes on or ends; of one that
has left nothing, as on another host without a launcher, nothing is proven (`fate`).
"""

import enum
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import msgspec

# A number that grows, and the rank that has begun it.
Ballot = tuple[int, int]


class View(msgspec.Struct, frozen=True, array_like=True):
    """The ranks of a ring, and the number of the ballot that proposed them, new for each ring."""

    number: int
    members: tuple[int, ...]


class Verb(enum.IntEnum):
    """Kinds of messages."""

    HERE = 0  # its sender takes part
    PREPARE = 1  # promise to take part in no lower ballot
    PROMISE = 2
    ACCEPT = 3  # accept a value
    ACCEPTED = 4
    CHOSEN = 5
    BUSY = 6  # its sender is in user code, and will take part


class Message(msgspec.Struct, frozen=True, array_like=True):
    """From one rank to another, about the successor of the view with that number."""

    kind: Verb
    sender: int
    receiver: int
    view: int
    ballot: Ballot = (0, 0)
    # value: what is to be accepted, was chosen, or was accepted in the ballot `valued`.
    value: View | None = None
    valued: Ballot = (0, 0)
    dead: tuple[int, ...] = ()  # proven so, with `PREPARE`
    values: tuple[Any, ...] = ()  # with `HERE`, for those that form the next ring with it


class Campaign(NamedTuple):
    """A ballot that a rank has begun; what it counts are the answers to its last message."""

    ballot: Ballot
    value: View
    valued: Ballot
    # Ranks that die later do not count: who answers could still hear of a choice by them.
    dead: frozenset[int]
    answered: frozenset[int] = frozenset()
    awaits: Verb = Verb.PROMISE


class Agreement(NamedTuple):
    """Rank `own`'s knowledge of the choice of the successor of `view`."""

    own: int
    view: View
    dead: frozenset[int] = frozenset()
    promised: Ballot = (0, 0)
    # The last that it accepted, and in which ballot.
    value: View | None = None
    valued: Ballot = (0, 0)
    campaign: Campaign | None = None
    successor: View | None = None


Step = tuple[Agreement, tuple[Message, ...]]


class Standing(NamedTuple):
    """What a rank leaves behind; it only grows, and is written before what it says is done."""

    ring: int = 0  # the number of the last view that it has gone on with, once all formed its ring
    ended: int = 0  # of its trainings, the last that has ended with the others
    # It does nothing more: its process has ended, or it has closed its communicator for good.
    is_gone: bool = False


class Fate(enum.Enum):
    """What has become of another rank, for one that chooses its view's successor."""

    UNKNOWN = enum.auto()
    DEAD = enum.auto()  # proven: it has gone on with no successor, and never will
    ENDED = enum.auto()  # the training is over for it, and so for all
    WENT_ON = enum.auto()  # with a later ring, whose ranks have left out the one that asks


def fate(standing: Standing, view: int, training: int = 0) -> Fate:
    """The fate of a rank, seen from the view of that number, in that training; 0: in none."""
    if standing.ring > view:
        return Fate.WENT_ON
    if 0 < training <= standing.ended:
        return Fate.ENDED
    return Fate.DEAD if standing.is_gone else Fate.UNKNOWN


def may_choose(members: Collection[int], those: Collection[int], dead: Collection[int]) -> bool:
    """Whether `those` of the `members` of a view are enough, if `dead` are proven so."""
    twice = 2 * len(set(those) & set(members))
    return (
        set(members) <= {*those, *dead}
        or twice > len(members)
        or (twice == len(members) and min(members) in those)
    )


def propose(state: Agreement, members: Iterable[int], dead: Iterable[int] = ()) -> Step:
    """Begin a ballot for those members; `dead` are proven so. Returns what is to be sent."""
    number = 1 + max(state.promised[0], state.view.number)
    ballot, dead = (number, state.own), state.dead | frozenset(dead)
    wanted = View(number, tuple(sorted(members)))
    state = state._replace(dead=dead, campaign=Campaign(ballot, wanted, (0, 0), dead))
    return _to_all(state, Verb.PREPARE, ballot, dead=tuple(sorted(dead)))


def receive(state: Agreement, message: Message) -> Step:
    """Return this rank's state after `message`, and the messages to be sent."""
    known = state.successor if message.view == state.view.number else state.view
    if message.view > state.view.number or message.sender in state.dead:
        return state, ()
    if known is not None:  # Else the sender, which may be out, would never know.
        is_told = message.kind is Verb.CHOSEN
        answer = Message(Verb.CHOSEN, state.own, message.sender, message.view, value=known)
        return state, () if is_told else (answer,)
    if message.kind is Verb.CHOSEN:
        return Agreement(state.own, state.view, successor=message.value), ()
    state = state._replace(dead=state.dead | frozenset(message.dead))
    if message.kind in (Verb.PREPARE, Verb.ACCEPT):
        return _voted(state, message)
    return _counted(state, message)


def _voted(state: Agreement, message: Message) -> Step:
    ballot = message.ballot
    if ballot < state.promised:
        return state, ()  # Its rank tries again, with a higher one.
    state = state._replace(promised=ballot)
    kind, known = Verb.PROMISE, (state.value, state.valued)
    if message.kind is Verb.ACCEPT:
        state = state._replace(value=message.value, valued=ballot)
        kind, known = Verb.ACCEPTED, (None, (0, 0))
    return state, (Message(kind, state.own, message.sender, message.view, ballot, *known),)


def _counted(state: Agreement, message: Message) -> Step:
    campaign = state.campaign
    if campaign is None or (message.kind, message.ballot) != (campaign.awaits, campaign.ballot):
        return state, ()
    campaign = campaign._replace(answered=campaign.answered | {message.sender})
    if message.value is not None and message.valued > campaign.valued:
        campaign = campaign._replace(value=message.value, valued=message.valued)
    if not may_choose(state.view.members, campaign.answered, campaign.dead):
        return state._replace(campaign=campaign), ()
    if campaign.awaits is Verb.ACCEPTED:
        return _to_all(state, Verb.CHOSEN, value=campaign.value)
    campaign = campaign._replace(answered=frozenset(), awaits=Verb.ACCEPTED)
    state = state._replace(campaign=campaign)
    return _to_all(state, Verb.ACCEPT, campaign.ballot, value=campaign.value)


def _to_all(state: Agreement, kind: Verb, ballot: Ballot = (0, 0), **fields: Any) -> Step:
    """Messages to all members; what this rank sends itself arrives at once."""
    own, number = state.own, state.view.number
    pending = [
        Message(kind, own, member, number, ballot, **fields)
        for member in state.view.members
        if member not in state.dead
    ]
    sent = []
    for message in pending:
        if message.receiver != own:
            sent.append(message)
            continue
        state, more = receive(state, message)
        pending += more
    return state, tuple(sent)
