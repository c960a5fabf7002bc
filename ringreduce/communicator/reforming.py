"""Forms a job's ring anew, of the ranks that are left; internal, for elastic training.

They meet at their standby ports, agree which of them go on (`ringreduce.pure.views`), and form the
ring as a group is formed, with these ports instead of a parent. The new ring is a session of its
own: new links, keys and watcher, in the next epoch. What stays is the job: its number, the
ranks' own numbers and key pairs, and the standby ports. Arrays that were registered in the old ring
are ordinary memory from its failure on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from ringreduce.commands.launch import handover
from ringreduce.commands.launch.worker_records import Killed
from ringreduce.communicator import formation
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.session import Lasting, Session
from ringreduce.pure.membership import Membership
from ringreduce.pure.views import (
    Fate,
    Row,
    Step,
    Verb,
    View,
    fate,
    follow,
    has_vote,
    may_choose,
    propose,
    receive,
    taken_in,
)
from ringreduce.pure.watcher_messages import FORMS_ANEW
from ringreduce.transport.routes import Routes
from ringreduce.transport.unix import end_process, has_ended, is_stopped
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import (
    ClosedError,
    ConfigError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    RendezvousError,
)
from ringreduce.vocabulary.words import named
from ringreduce.vocabulary.worker_environment import tell_children

_log = logging.getLogger(__name__)

_ATTEMPTS = 5  # to form the ring that was agreed on; ranks that die before take none


class EndedError(RendezvousError):
    """The ring is not formed anew: another rank has come to the end of what it was for."""


def reform(
    communicator: Communicator,
    without: Collection[int] = (),
    *,
    leaving: Collection[int] = (),
    newcomers: Collection[Row] = (),
    at_end: bool = False,
) -> None:
    """Make `communicator`, that of the whole job, work again, of the ranks that are left.

    All ranks that are left must call it, whether or not the ring has failed on them; it returns
    when all have done so and passed a first barrier. Those of `leaving` have told all that they
    leave (`leave`): nobody waits for them. Those that do not come within
    ``join_timeout_s``, or of `without` within a second, or if they are stopped here within
    ``timeout_s``, are left out; on this host they are killed. One that says that it is in user code
    is waited for until ``busy_timeout_s``.
    Then `communicator` has ranks from 0 on again, in the order of before. Its groups are closed;
    form them anew with `split`. Errors and logs go on naming the ranks of the job.

    The ranks of `newcomers` come last, if all others are there, and if they answer at their standby
    ports, where they are told. Else the ring is formed without them: see who is in it.

    `at_end`: this rank may be told by another that it has ended (`answer_others`).

    Raises:
        ClosedError: `communicator` was closed.
        ConfigError: this system cannot shut a port, so that no rank waits for others.
        EndedError: as said.
        RendezvousError: the others have left this rank out; or those that are left are too few, so
            that the rest may go on, or may have gone on and ended. It can be called again.
        PeerError: others were lost time and again while the ring formed.
    """
    old = communicator._session
    job, config = old.job, old.config
    if old.is_closed if job is None else job.standby.is_closed:
        raise ClosedError("cannot form the ring anew after close()", **config.who)
    if job is not None and not all(job.standbys):
        raise ConfigError(
            f"cannot form the ring anew: rank {job.standbys.index('')} has no port for that",
            **config.who,
            remedy="Rings are formed anew on Linux alone.",
        )
    old.leave(FORMS_ANEW, gives_way=True)
    if job is None:
        alone = replace(old.membership, epoch=old.membership.epoch + 1)
        communicator._use(Session(config, alone, None, None, old.lasting))
        return
    for attempts_left in reversed(range(_ATTEMPTS)):
        with Survivors(job, without, at_end, leaving, newcomers) as survivors:
            leaving = ()  # If some have not heard of it, those may be in the next view.
            view = survivors.agree()
            try:
                session = form_chosen(job, survivors, old.lasting)
            except (PeerError, RendezvousError):  # Ranks were lost meanwhile: on without them.
                if attempts_left:
                    continue
                raise
        communicator._use(session)
        tell_children(config, view.members, session.local_rank, session.local_size)
        text = "[%d/%d] ring formed anew, epoch %d, of ranks %s"
        _log.info(text, config.rank, config.size, view.number, list(view.members))
        return


def form_chosen(job: formation.Job, survivors: Survivors, lasting: Lasting) -> Session:
    """Form the ring of the view that was chosen; it has passed its first barrier then.

    Raises PeerError or RendezvousError if it does not form: ranks were lost, or gave up.
    """
    config, view = job.config, job.agreement.view
    membership = Membership(view.members, 0, view.number)
    # Ways that were found before may be what has failed.
    routes = Routes(config.rank, config.size, job.routes.networks)
    how = replace(job, routes=routes), membership, survivors, survivors.check
    form = functools.partial(formation.form_group, *how) if len(view.members) > 1 else None
    session = Session(config, membership, job, form, lasting)
    if session.job is not None:
        # Votes may have been given while it formed.
        session.job.agreement = job.agreement._replace(has_passed=True)
        session.job.stand(ring=view.number)  # Before anything is done with it.
    return session


def leave(communicator: Communicator, why: str) -> None:
    """Leave `communicator`, that of the whole job, for good, as all ranks know from an exchange.

    The others form the ring anew without this rank, at that point. `why` says what has told it to,
    for one that is late.
    """
    communicator._session.go(f"a notice to go ({why})")


def answer_others(communicator: Communicator, *, has_ended: bool, training: int = 0) -> None:
    """Choose what others hear that form the ring anew: that it has ended on this rank, or nothing.

    `training` is the number of what begins or has ended, equal on all ranks; 0 for none. They may
    go on without it then, if it has come to an end that all have come to. A thread answers, until
    this is called again, `reform` is, the communicator is closed, or the time for it is over. If
    the ring fails while this rank is in user code, it answers as well.
    """
    job = communicator._session.job
    if job is not None and all(job.standbys):
        job.has_ended, job.training = has_ended, training
        if has_ended:
            job.stand(ended=training)
        job.answer()


class Survivors:
    """This rank among those that are left: they agree who goes on, and exchange what they need.

    `without` are ranks that are probably lost; `at_end` as in `reform`. This rank's standby port is
    open as long as this is, and longer if a rank was left out that may wake, to tell it so. Those
    of `leaving` count as dead: they take part in nothing any more. Those of `newcomers` that the
    next view may take in are proposed with it.
    """

    def __init__(
        self,
        job: formation.Job,
        without: Collection[int],
        at_end: bool = False,
        leaving: Collection[int] = (),
        newcomers: Collection[Row] = (),
    ) -> None:
        with job.standby.lock:
            job.standby.answering.close()
            job.standby.is_in_use = True
        self._config, self._job, self._at_end = job.config, job, at_end
        self._rank, self._who = job.config.rank, job.config.who
        members = job.agreement.view.members
        # Newcomers of a ring that has not formed.
        ending = {member for member in members if not has_vote(job.agreement, member)}
        self._without = {*without, *ending}
        self._newcomers = [row for row in newcomers if job.has_place_for(row)]
        self._others = [peer for peer in members if peer != self._rank]
        self._visits = job.visits()
        if newcomers and (left := job.agreement.left_out):
            gone = {rank for rank in left if job.standing_of(rank).is_gone}
            gone |= self._visits.refused(left - gone)
            job.agreement = job.agreement._replace(left_out=left - gone)
        self._deadline = math.inf  # until the ranks are agreed on
        self._leaving = self._dead = frozenset(leaving)
        self._refused: set[int] = set()  # whose ports are refused, which proves nothing
        self._went_on: set[int] = set()  # without this rank
        # By rank: when it last took part, or said that it is in user code; its last values. The
        # values that this one passes on; when.
        self._heard: dict[int, float] = {}
        self._busy: dict[int, float] = {}
        self._told: dict[int, tuple[Any, ...]] = {}
        self._values: tuple[Any, ...] = ()
        self._sends_s = 0.0
        self._is_told = False  # by one that has ended

    def __enter__(self) -> Survivors:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._job.standby.is_in_use = False
        if kind is None and self._job.has_left_out:
            self._job.standby.answering.callback(self._visits.close)
            self._visits.answer(self._job.agreement.view, math.inf)
        else:
            self._visits.close()

    def agree(self) -> View:
        """The next view, once it is chosen; raises RendezvousError if this rank is not in it."""
        job, kills_s, proposes_s = self._job, 0.0, 0.0
        # When it began, and when a rank was last known to be in user code.
        began_s = busy_s = time.monotonic()
        warns_s = began_s + TIMES.slow_warning_s
        members = job.agreement.view.members
        seen: tuple[Any, ...] = ()
        dying: set[int] = set()  # processes of this host
        # If others have proven it dead, they do not listen to it any more.
        while (chosen := job.agreement.successor) is None and self._rank not in job.agreement.dead:
            self._receive(TIMES.poll_s)
            self._find_dead(members)
            if self._is_told:
                raise EndedError("was told that the ring has ended", **self._who)
            if self._went_on:
                break
            now = time.monotonic()
            here = set(members) - self._dead - self._silent(members, TIMES.silent_s)
            here = {member for member in here if has_vote(job.agreement, member)}
            unknown = set(members) - self._dead - here
            busy = {*filter(self._is_busy, unknown)} - self._without
            if busy and now - began_s < max(self._config.timeout_s, self._config.busy_timeout_s):
                busy_s = now
            if unknown and now >= warns_s:
                warns_s = math.inf
                missing = named("rank", sorted(unknown)), "in user code" if busy else "silent"
                text = "[%d/%d] waits for %s, %s, to form the ring anew"
                _log.warning(text, self._rank, self._config.size, *missing)
            if unknown and now - busy_s < self._limit_s(members, here, busy):
                continue
            are_enough = may_choose(members, here, self._dead)
            if unknown and not kills_s:
                kills_s = now
                # Another rank may have killed one already, which has not ended yet.
                dying = {peer for peer in unknown if self._kill(peer) or self._process(peer)}
            dying &= unknown
            if dying and now - kills_s < (TIMES.silent_s if are_enough else self._config.timeout_s):
                continue
            if not are_enough:
                raise self._too_few(members, here, unknown)
            # The first proposes; the others do if nothing comes of it.
            delay_s = [*filter(here.__contains__, members)].index(self._rank) * TIMES.answer_s
            if seen != (here, self._dead):
                seen, proposes_s = (here, self._dead), now + delay_s
            if now >= proposes_s:
                proposes_s = now + TIMES.answer_s + delay_s
                begun = propose(job.agreement, here, self._dead, self._newcomers)
                if self._take(begun) & here:
                    proposes_s = now + TIMES.poll_s + delay_s  # One has opened its port just now.
        if chosen is None or self._rank not in chosen.members:
            went_on = self._went_on if chosen is None else chosen.members
            others = named("rank", sorted(went_on)) if went_on else "the others"
            raise RendezvousError(
                f"was left out of the ring: {others} went on without it, since it did not answer "
                "them in time",
                **self._who,
                remedy="It was stopped, or cut off from them: end its process.",
            )
        if left := set(members) - set(chosen.members):
            self._find_dead(members)  # Another rank may have proposed who goes on.
            self._end_left_out(left - self._leaving)
            where = self._rank, self._config.size
            _log.info("[%d/%d] goes on without %s", *where, self._described(left))
        job.agreement = follow(job.agreement, self._dead | self._refused)
        self._told.clear()  # Of an attempt before this one, which others may still be in.
        self._deadline = time.monotonic() + self._config.join_timeout_s
        if chosen.newcomers:
            self._take_in(chosen.newcomers)
        return chosen

    def await_choice(self, row: Row, limit_s: float) -> View:
        """Wait until the newcomer of that row, which is this rank, is told that a view has it.

        Raises PeerTimeoutError if that takes longer than `limit_s`. If the ring does not form
        (`form_chosen`), the newcomer has to end: it has no vote, and the others go on without it.
        """
        job, until_s = self._job, time.monotonic() + limit_s
        while time.monotonic() < until_s:
            for message in self._visits.receive(TIMES.poll_s):
                if (begun := taken_in(row, message)) is not None:
                    job.agreement = begun
                    self._others = [peer for peer in begun.view.members if peer != self._rank]
                    self._take_in([each for each in begun.view.newcomers if each != row])
                    return begun.view
        raise PeerTimeoutError(f"waited {limit_s:g} s to be taken into the ring", **self._who)

    def _take_in(self, rows: Collection[Row]) -> None:
        """From now on know the newcomers of the view that was chosen, instead of the dead."""
        self._job.take_in(rows)
        places = {row.place for row in rows}
        for place in places:
            self._visits.turn_to(place, self._job.ways(place))
            self._heard.pop(place, None)
        self._dead, self._refused = self._dead - places, self._refused - places
        self._others = [*dict.fromkeys([*self._others, *sorted(places)])]
        # They have prepared all before: a late one must not hold the others.
        limit_s = min(self._config.timeout_s, self._config.join_timeout_s)
        self._deadline = time.monotonic() + limit_s

    def _silent(self, members: Collection[int], for_s: float) -> set[int]:
        """The others that are not known to be dead, and have sent nothing for so long."""
        since_s = time.monotonic() - for_s
        others = {*members} - {self._rank, *self._dead}
        return {peer for peer in others if self._heard.get(peer, -1.0) < since_s}

    def _limit_s(
        self, members: Sequence[int], here: Collection[int], busy: Collection[int]
    ) -> float:
        """How long to wait for those of `members` that are not `here`, nor proven dead."""
        unknown, config = {*members} - {*here} - self._dead, self._config
        missing = unknown - self._refused
        if not missing and not any(map(self._job.neighbours.get, unknown)):
            # They will not come; but a launcher may still tell that they have died.
            if may_choose(members, here, self._dead):
                return 0.0
            has_launcher = handover.word_of(self._rank) is not None
            return config.timeout_s if has_launcher else TIMES.silent_s
        if missing <= {*self._without, *busy}:
            return TIMES.silent_s
        if all(map(self._is_stopped, missing - self._without)):
            return config.timeout_s
        return config.join_timeout_s

    def _find_dead(self, members: Collection[int]) -> None:
        """Find out what has become of the others, but of those proven dead already."""
        others = {*members} - {self._rank, *self._dead}
        number, training = self._job.agreement.view.number, self._job.training
        standings = {peer: self._job.standing_of(peer) for peer in others}
        fates = {peer: fate(each, number, training) for peer, each in standings.items()}
        self._dead |= {peer for peer, found in fates.items() if found is Fate.DEAD}
        self._went_on |= {peer for peer, found in fates.items() if found is Fate.WENT_ON}
        # One that is there says so itself; or it will come, from a training after that.
        ended = [peer for peer, found in fates.items() if found is Fate.ENDED]
        self._is_told |= self._at_end and any(standings[peer].is_gone for peer in ended)
        silent = self._silent(members, 2 * TIMES.poll_s)
        silent = {peer for peer in silent if not self._is_busy(peer)}
        self._refused = self._refused & silent | self._visits.refused(silent)

    def _is_busy(self, rank: int) -> bool:
        return time.monotonic() - self._busy.get(rank, -math.inf) < TIMES.silent_s

    def _process(self, rank: int) -> tuple[int, int] | None:
        """The process of another rank, if it is known to be one of this host."""
        neighbour = self._job.neighbours.get(rank)
        process = None if neighbour is None else neighbour.process
        return None if process is None or process[0] == os.getpid() else process

    def _is_stopped(self, rank: int) -> bool:
        """Whether it is known to be a process of this host that is stopped now."""
        process = self._process(rank)
        return process is not None and is_stopped(process)

    def _end_left_out(self, ranks: Collection[int]) -> None:
        """End those of this host that may still go on, before the ring goes on without them."""
        number, training = self._job.agreement.view.number, self._job.training
        until_s = time.monotonic() + TIMES.silent_s
        killed = [
            process
            for rank in ranks
            if fate(self._job.standing_of(rank), number, training) is Fate.UNKNOWN
            and (process := self._process(rank)) is not None
            and self._kill(rank)
        ]
        while not all(map(has_ended, killed)) and time.monotonic() < until_s:
            time.sleep(TIMES.shared_memory_poll_s)

    def _kill(self, rank: int) -> bool:
        """End the process of a rank of this host, so that it is proven dead; whether it did."""
        process = self._process(rank)
        if process is None or not end_process(process):
            return False
        _log.warning(
            "[%d/%d] killed rank %d, process %d of this host, which did not answer",
            *(self._rank, self._config.size, rank, process[0]),
        )
        handover.tell(Killed(rank))
        return True

    def _described(self, gone: Collection[int]) -> str:
        refused = {*gone} & self._refused - self._dead
        silent = {*gone} - self._dead - self._refused
        dead, left = {*gone} & self._dead - self._leaving, {*gone} & self._leaving
        states = {"left in order": left, "dead": dead, "no longer there": refused, "silent": silent}
        return "; ".join(
            f"{named('rank', sorted(who))}, {how}" for how, who in states.items() if who
        )

    def _too_few(
        self, members: Collection[int], here: Collection[int], unknown: Collection[int]
    ) -> RendezvousError:
        return RendezvousError(
            f"cannot form the ring anew of {named('rank', sorted(here))} alone: gone are "
            f"{self._described({*members} - {*here})}. They were lost, or rank {self._rank} was "
            "stopped or cut off; the others may have gone on without it. "
            f"More than half of {named('rank', members)} are needed, or half with the lowest",
            **self._who,
            peer=min(unknown),
            remedy=f"See how {named('rank', sorted(unknown))} ended: if with exit code 0, the "
            "job is done; else start it again from its last checkpoint.",
        )

    def _receive(self, wait_s: float) -> None:
        """Say that this rank is here, and what it passes on; process what has come."""
        job, now = self._job, time.monotonic()
        view, to = job.agreement.view, job.agreement.to
        number = view.number
        if now >= self._sends_s:
            self._sends_s = now + TIMES.poll_s
            for place in {row.place for row in view.newcomers} - {self._rank, *self._heard}:
                # It may not know that it was taken in.
                self._visits.send(to(place, Verb.CHOSEN, view=number - 1, value=view))
            for peer in self._others:
                self._visits.send(to(peer, Verb.HERE, values=self._values))
        for message in self._visits.receive(wait_s):
            if not job.agreement.view.knows(message):
                continue
            is_end = message.value is not None and not message.value.members
            # Where this rank is not at the end, what has ended there came before; it will come.
            if message.view == number and (message.kind is Verb.BUSY or is_end):
                self._busy[message.sender] = time.monotonic()
                self._is_told |= is_end and self._at_end
                continue  # Neither is a choice.
            if message.view == job.agreement.view.number:
                self._heard[message.sender] = time.monotonic()
                if message.kind is Verb.HERE:
                    self._told[message.sender] = message.values
            self._take(receive(job.agreement, message))

    def _take(self, step: Step) -> set[int]:
        """Take over that state, and send its messages; the ranks to which there is no way yet."""
        self._job.agreement, messages = step
        return {message.receiver for message in messages if not self._visits.send(message)}

    def exchange(self, value: Any) -> dict[int, Any]:
        """Return each value of a member of the next ring, by rank, once all have passed one.

        Raises PeerError if one is lost, or does not come.
        """
        place, members = len(self._values), self._job.agreement.view.members
        self._told[self._rank] = self._values = (*self._values, value)
        self._sends_s = 0.0
        self.check()  # It sends, also where the others were faster.
        while missing := [member for member in members if len(self._told.get(member, ())) <= place]:
            self.check(TIMES.poll_s, missing[0])
        return {member: self._told[member][place] for member in members}

    def guarded(self) -> AbstractContextManager[None]:
        """Nothing: a rank that fails ends, which others see, or forms the ring anew with them."""
        return contextlib.nullcontext()

    def check(self, wait_s: float = 0.0, missing: int | None = None) -> None:
        """Take what comes in that time; raise PeerError if the ring cannot form any more."""
        self._receive(wait_s)
        self._find_dead(self._job.agreement.view.members)
        if lost := (self._dead | self._refused) & {*self._job.agreement.view.members}:
            text = f"lost rank {min(lost)} while the ring was formed anew: it is no longer there"
            raise PeerLostError(text, **self._who, peer=min(lost))
        if self._job.agreement.successor is not None or self._is_told:
            raise PeerError("gave up to form the ring anew, as others did", **self._who)
        if time.monotonic() > self._deadline:
            text = f"waited {self._config.join_timeout_s:g} s to form the ring anew"
            raise PeerTimeoutError(text, **self._who, peer=missing)
