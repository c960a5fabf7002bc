"""The communicator of a newcomer: a process that takes the place of a rank that was lost.

It runs the program from its first line, alone. Its communicator looks as that of the job at its
start, and its calls give what the job's have given (`ringreduce.communicator.journal`). After
`begin_training` calls are refused; the engine and what is traced are kept when it joins, with a
session in this one's place:

    replay.begin(ring)      calls are answered
    begin_training(ring)    calls are refused
    join(ring, ...)         calls are the ring's
"""

from collections.abc import Callable
from dataclasses import replace

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.journal import Replay
from ringreduce.communicator.lifecycle import SessionState
from ringreduce.communicator.session import Lasting, Session
from ringreduce.pure.membership import Membership
from ringreduce.pure.watcher_messages import FORMS_ANEW
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.worker_environment import tell_children


def coming(
    config: Config, replay: Replay, *, transport: str, local_rank: int, local_size: int
) -> Communicator:
    """The communicator of a newcomer at the place ``config.rank``, whose calls `replay` answers.

    It has all ranks of the job's start, and is never rank 0, which does what must be done once: at
    place 0 it is the last. `transport`, `local_rank` and `local_size` are those of that place. The
    calling thread is the one whose calls are answered. Files of `config` stay its predecessor's.

    Raises ConfigError if it is a job of one rank.
    """
    if config.size < 2:
        raise ConfigError("a rank cannot come back to a job of one rank", **config.who)
    first, *others = range(config.size)
    members = (*others, first) if config.rank == first else (first, *others)
    own = replace(config, log_dir="", trace_dir="")
    session = Session(own, Membership(members), None, None, Lasting(), SessionState.COMING)
    session.transport, session.local_rank, session.local_size = transport, local_rank, local_size
    ring = Communicator.__new__(Communicator)
    ring._use(session)
    ring._config = config
    replay.begin(ring)
    return ring


def join(ring: Communicator, form: Callable[[Lasting], Session]) -> None:
    """Make `ring`, a newcomer's that has begun to train, work with the session of `form`.

    That gets what the communicator's sessions have in common, as `reforming.form_chosen` does, and
    raises as it. Then `ring` is closed.
    """
    before = ring._session
    before.leave(FORMS_ANEW, gives_way=True)
    session = form(before.lasting)
    ring._use(session)
    members = session.membership.members
    tell_children(ring.config, members, session.local_rank, session.local_size)
