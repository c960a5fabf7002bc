"""A newcomer's way into the job: it knocks, is told the job, and is taken into the ring.

    Arrival(config)     in init(): knocks; its communicator answers as the job has answered
    Arrival.join        in training: is ready, waits until a ring has it, and is a rank of that

A first rank that is lost, or another ring, ends the visit: the newcomer knocks at the next door.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringreduce._version import __version__
from ringreduce.commands.launch.standings import Standings
from ringreduce.communicator.coming import coming, join
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.formation import Job
from ringreduce.communicator.journal import Replay
from ringreduce.communicator.opened_sockets import bind_of
from ringreduce.communicator.reforming import Survivors, form_chosen
from ringreduce.pure.arrivals import Knock, Welcome
from ringreduce.pure.views import Row, View, outside
from ringreduce.transport.door import Visit, knock
from ringreduce.transport.interfaces import own_networks
from ringreduce.transport.routes import Routes
from ringreduce.transport.security import MATERIAL_BYTES, Security
from ringreduce.transport.standby import Standby
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.errors import PeerLostError, PeerTimeoutError
from ringreduce.vocabulary.worker_environment import door_name, own_life


class Arrival:
    """That of the process with `config`, whose communicator is `ring` from the beginning.

    Attributes:
        variables: those that the program has broadcast before training, by the number of the call;
            they get the first rank's values of now with the rest of the state.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._name = config, door_name()
        self._visit: Visit | None = None
        self._welcome = self._enter()
        self.variables: dict[int, Sequence[Any]] = {}
        replay = Replay.of(self._welcome.journal, self._note)
        self.ring = coming(
            config,
            replay,
            transport=self._welcome.transport,
            local_rank=config.local_rank or 0,
            local_size=config.local_size or 1,
        )

    @property
    def is_waiting(self) -> bool:
        """Whether it has not joined yet."""
        return self.ring._session.job is None

    def _note(self, number: int, variables: Sequence[Any]) -> list[Any]:
        self.variables[number] = list(variables)
        return []

    def _enter(self) -> Welcome:
        """Knock until somebody answers; raises as `door.knock`."""
        config, life = self._config, own_life()
        message = Knock(__version__, config.job_id, config.rank, life)
        how = self._name, Security.of(config), message, config.join_timeout_s
        welcome, self._visit = knock(*how)
        return welcome

    def join(self, facts: Mapping[str, str], check: Callable[[], None]) -> View:
        """Be taken into the ring: the communicator works from then on, as a rank of the view.

        The others wait for what it does next. While this waits it calls `check`, which may raise.

        Raises JobEndedError, and as `door.Visit.check` and `reforming.form_chosen`: the process has
        to end then.
        """
        while True:
            if self._visit is None:
                self._welcome = self._enter()
            visit = self._visit
            assert visit is not None
            job, row = self._job()
            try:
                visit.ready(row, dict(facts), self._config.join_timeout_s)
                with Survivors(job, ()) as survivors:
                    view = self._await(visit, survivors, row, check)
                    if view is not None:
                        join(self.ring, functools.partial(form_chosen, job, survivors))
            except PeerLostError:
                if not self.is_waiting or not visit.is_lost:
                    raise
                view = None
            visit.close()
            if view is not None:
                return view
            self._visit = None
            job.standby.close()

    def _await(
        self, visit: Visit, survivors: Survivors, row: Row, check: Callable[[], None]
    ) -> View | None:
        """The view that has the newcomer; None: the visit has ended, and nobody has told of one."""
        lost_s: float | None = None
        while lost_s is None or time.monotonic() - lost_s < TIMES.door_lost_s:
            check()
            try:
                return survivors.await_choice(row, TIMES.door_look_s)
            except PeerTimeoutError:
                pass
            try:
                visit.check()
            except PeerLostError:
                # The others may have chosen a ring with this one before the first was lost.
                lost_s = lost_s or time.monotonic()
        return None

    def _job(self) -> tuple[Job, Row]:
        """The job as this newcomer knows it, and what the others are to know of this newcomer."""
        config, told = self._config, self._welcome
        place, networks = config.rank, own_networks(config)
        bind, security = bind_of(config, networks), Security.of(config)
        after = place + 1
        keys = [*told.keys[:place], security.public, *told.keys[after:]]
        security.learn(keys, bytes(MATERIAL_BYTES), told.number)
        standby = Standby(bind, rank=place, size=config.size)
        row = Row(
            place,
            own_life(),
            told.hosts[place],
            told.domains[place],
            standby.address,
            security.public,
            tuple(networks),
        )
        others = dict(enumerate(told.networks))
        job = Job(
            config,
            told.number,
            security,
            hosts=told.hosts,
            domains=told.domains,
            standby=standby,
            standbys=(*told.standbys[:place], standby.address, *told.standbys[after:]),
            bind=bind,
            routes=Routes(place, config.size, {**others, place: networks}),
            agreement=outside(place),
            left_behind=Standings.create(1),
            training=told.training,
            has_ended=told.has_ended,
        )
        return job, row


def arrival_of(ring: Communicator) -> Arrival | None:
    """That of a newcomer, also once it has joined; None of a rank from the beginning."""
    return ring._arrival
