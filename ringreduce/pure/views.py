"""Which of a ring's ranks go on after a failure: one answer, whoever is lost meanwhile. Pure.

The ranks of a ring are a view. Those that are left agree on the next one by single-decree Paxos
(Lamport, "Paxos made simple", 2001), in memory, since a rank that has died never comes back. Any of
them may begin a ballot: if enough promise to take part in none before it, it has enough of them
accept a value, which is the one of the highest ballot that any of these had accepted, if any had.

Enough are more than half of the last view; or half of it with its first rank; or all that have not
been proven dead. Ranks that are dead count in the half all the same: of 0, 1 and 2, let 1 and 2
choose themselves, and 1 die; were it not counted, 0 and 2 would both be half, and go on apart.

Those proven dead are told to all with a ballot's first message. From then on nobody listens to
them: a message of theirs may still be on its way, from a choice that no living rank knows of.

A rank that has gone is not dead for that: it may have gone on with a ring of others, and ended
well. So each leaves behind how far it has come (`Standing`), before it goes on or ends; of one that
has left nothing, as on another host without a launcher, nothing is proven (`fate`).

A view may take newcomers in: processes at places of the job that are free, as that of a rank which
was lost and started again. A member stays its place, an int, since tables, errors and frames go by
it; members stand in the order in which they joined, and the life of a place says which of its
processes is meant, so that only what compares messages needs to know of lives.

Newcomers vote for nothing until all members of their view have taken it over (`has_vote`), and come
only where nobody is left out who may be alive (`admitted`). Else two rings form: of 0 and 1, let 0
choose a ring with a newcomer, and die; the newcomer goes on, and so does 1, which has not heard of
it. A rank that asks what has become of others asks only those that were in its view.
"""

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from ringreduce.pure.networks import are_networks

# A number that grows, and the rank that has begun it.
Ballot = tuple[int, int]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A newcomer, as all tables of the job have it once it is taken in."""

    place: int  # its rank in the job
    life: int  # larger than those of all processes before it at this place
    host: str
    domain: str  # name of the memory that it can share; empty for none
    standby: str  # where it can be met, ``tcp://host:port``
    key: str = ""  # its public key; empty without a secret
    networks: tuple[str, ...] = ()  # all its addresses, with prefixes

    def __post_init__(self) -> None:
        if self.place < 0 or self.life <= 0 or not are_networks(self.networks):
            raise ValueError("a newcomer's row that cannot be read")


class View(msgspec.Struct, frozen=True, array_like=True):
    """The ranks of a ring, and the number of the ballot that proposed them, new for each ring."""

    number: int
    members: tuple[int, ...]  # those that have been in longest first: rank 0 of a ring is never new
    lives: tuple[int, ...] = ()  # by place, of its last process; 0 if there is none: of its first
    newcomers: tuple[Row, ...] = ()  # those of `members` that it takes in

    def life_of(self, place: int) -> int:
        return self.lives[place] if place < len(self.lives) else 0

    def knows(self, message: "Message") -> bool:
        """Whether it is from and for the processes that are, or were last, at these places."""
        is_of_it = message.view != self.number or message.sender in self.members
        lives = self.life_of(message.sender), self.life_of(message.receiver)
        return is_of_it and message.lives == lives


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
    lives: tuple[int, int] = (0, 0)  # of sender and receiver


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
    # It has passed the first barrier of `view`: all members have taken it over.
    has_passed: bool = False
    # Those that this view or one before it has left out, and that may be alive.
    left_out: frozenset[int] = frozenset()

    def to(self, receiver: int, kind: Verb, view: int | None = None, **fields: Any) -> Message:
        """A message from this rank, about the successor of its view unless `view` is another's."""
        lives = self.view.life_of(self.own), self.view.life_of(receiver)
        about = self.view.number if view is None else view
        return Message(kind, self.own, receiver, about, lives=lives, **fields)


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


def may_choose(members: Sequence[int], those: Collection[int], dead: Collection[int]) -> bool:
    """Whether `those` of the `members` of a view are enough, if `dead` are proven so."""
    twice = 2 * len(set(those) & set(members))
    return (
        set(members) <= {*those, *dead}
        or twice > len(members)
        or (twice == len(members) and members[0] in those)
    )


def has_vote(state: Agreement, member: int) -> bool:
    """Whether a member of the view takes part in choosing its successor, as far as `state` says.

    Newcomers do not before the view's first barrier. If it is not passed they come to an end.
    """
    return state.has_passed or all(member != row.place for row in state.view.newcomers)


def admitted(
    state: Agreement, members: Collection[int], dead: Collection[int], newcomers: Iterable[Row]
) -> tuple[Row, ...]:
    """Those of `newcomers` that the next view may take in, beside `members` of this one.

    None at all if a member that is not proven dead would be left out, or one that may be alive was
    before: it could go on with others, and would not know the newcomers. None if the ring of this
    view has not formed: newcomers must not keep others from forming one. No more than there are
    members: then these are enough to choose again, whatever becomes of the newcomers. And none at a
    place that is not free, or of a life that is over.
    """
    if state.left_out or not {*state.view.members} <= {*members, *dead}:
        return ()
    if not state.has_passed:
        return ()
    fit = {
        row.place: row
        for row in sorted(newcomers, key=lambda row: row.life)
        if row.place not in members and row.life > state.view.life_of(row.place)
    }
    return tuple(fit[place] for place in sorted(fit)[: len(members)])


def propose(
    state: Agreement,
    members: Iterable[int],
    dead: Iterable[int] = (),
    newcomers: Iterable[Row] = (),
) -> Step:
    """Begin a ballot for those members, and those of `newcomers` that are `admitted`.

    `dead` are proven so. Returns what is to be sent. Raises ValueError if this rank has no vote.
    """
    if not has_vote(state, state.own):
        raise ValueError("a newcomer begins no ballot before its ring's first barrier")
    number = 1 + max(state.promised[0], state.view.number)
    ballot, dead, view = (number, state.own), state.dead | frozenset(dead), state.view
    wanted, lives = {member for member in members if has_vote(state, member)}, view.lives
    rows = admitted(state, wanted, dead, newcomers)
    if rows:
        of_rows = {row.place: row.life for row in rows}
        places = range(max(len(lives), 1 + max(of_rows)))
        lives = tuple(of_rows.get(place, view.life_of(place)) for place in places)
    ordered = (*filter(wanted.__contains__, view.members), *(row.place for row in rows))
    value = View(number, ordered, lives, rows)
    state = state._replace(dead=dead, campaign=Campaign(ballot, value, (0, 0), dead))
    return _to_all(state, Verb.PREPARE, ballot, dead=tuple(sorted(dead)))


def follow(state: Agreement, gone: Collection[int]) -> Agreement:
    """The state of a member of the successor; `gone` have no process any more, proven or not."""
    view = state.successor
    assert view is not None
    left = {*state.view.members} - {*view.members} | state.left_out
    return Agreement(state.own, view, left_out=frozenset(left - {*gone}))


def outside(place: int) -> Agreement:
    """The state of a newcomer that no view has taken in yet."""
    return Agreement(place, View(-1, ()))


def taken_in(row: Row, message: Message) -> Agreement | None:
    """The first state of the newcomer of that row, if `message` says that a view has it."""
    view = message.value
    is_told = message.kind is Verb.CHOSEN and view is not None and row in view.newcomers
    return Agreement(row.place, view) if is_told and view is not None else None


def receive(state: Agreement, message: Message) -> Step:
    """Return this rank's state after `message`, and the messages to be sent."""
    known = state.successor if message.view == state.view.number else state.view
    if message.view > state.view.number or message.sender in state.dead:
        return state, ()
    if not state.view.knows(message):
        return state, ()
    if known is not None:  # Else the sender, which may be out, would never know.
        is_told = message.kind is Verb.CHOSEN
        answer = state.to(message.sender, Verb.CHOSEN, view=message.view, value=known)
        return state, () if is_told else (answer,)
    if message.kind is Verb.CHOSEN:
        begun = Agreement(state.own, state.view, left_out=state.left_out)
        return begun._replace(successor=message.value, has_passed=state.has_passed), ()
    state = state._replace(dead=state.dead | frozenset(message.dead))
    if message.kind in (Verb.PREPARE, Verb.ACCEPT):
        return _voted(state, message)
    return _counted(state, message)


def _voted(state: Agreement, message: Message) -> Step:
    ballot, sender = message.ballot, message.sender
    if not has_vote(state, state.own):
        return state, ()
    if ballot < state.promised:
        return state, ()  # Its rank tries again, with a higher one.
    state = state._replace(promised=ballot)
    if message.kind is Verb.ACCEPT:
        state = state._replace(value=message.value, valued=ballot)
        return state, (state.to(sender, Verb.ACCEPTED, ballot=ballot),)
    known, valued = state.value, state.valued
    return state, (state.to(sender, Verb.PROMISE, ballot=ballot, value=known, valued=valued),)


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
    pending = [
        state.to(member, kind, ballot=ballot, **fields)
        for member in state.view.members
        if member not in state.dead
    ]
    sent = []
    for message in pending:
        if message.receiver != state.own:
            sent.append(message)
            continue
        state, more = receive(state, message)
        pending += more
    return state, tuple(sent)
