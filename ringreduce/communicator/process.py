"""The process's own communicator: what ``ringreduce.init()`` makes and ``rank()`` asks."""

import logging
import threading
from inspect import signature

from ringreduce.communicator.arrival import Arrival
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.journal import keep_calls
from ringreduce.communicator.program import facts_of_program
from ringreduce.effects.notice import EndsInOrder
from ringreduce.transport.door import JobEndedError
from ringreduce.vocabulary.config import Config, describe, elastic_minimum
from ringreduce.vocabulary.errors import ClosedError, ConfigError
from ringreduce.vocabulary.worker_environment import door_name, own_life, tell_children

_log = logging.getLogger(__name__)

_lock = threading.Lock()
_default: Communicator | None = None


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    rendezvous: str | None = None,
    job_id: str | None = None,
    timeout_s: float | None = None,
    busy_timeout_s: float | None = None,
    join_timeout_s: float | None = None,
    link_timeout_s: float | None = None,
    segment_bytes: int | None = None,
    transport: str | None = None,
    host_id: str | None = None,
    secret: str | None = None,
    encryption: str | None = None,
    log_dir: str | None = None,
) -> Communicator:
    """Form the ring and make it this process's default; return its communicator.

    Other settings come from the variables that ``ringreduce run`` sets (``RINGREDUCE_RANK`` and so
    on) or another launcher, such as mpirun, srun or torchrun. Without them the process is a world
    of one, so that a script runs alone unchanged.

    Called again while the default is open, it returns the same communicator. In a child process of
    a rank it returns one with the parent's rank and size, which refuses collectives.

    Args: settings, see `Config`.

    Raises:
        ConfigError: settings are impossible or incomplete, differ from the open default's, or two
            launchers contradict each other; or ``RINGREDUCE_ELASTIC`` is no number from 1 on.
        RendezvousError, MismatchError, PeerError, NativeError: as `Communicator`.
    """
    global _default
    config = Config.from_environment(**locals())
    with _lock:
        if _default is not None and not _default.closed:
            if _default.config != config:
                raise ConfigError(
                    f"init() was called before, with {_default.config}, and now with {config}",
                    remedy="Call shutdown() first, or make a second ring with Communicator().",
                )
            return _default
        may_grow = elastic_minimum() is not None and bool(door_name())
        if may_grow and own_life():
            _default = _arrived(config)
            return _default
        _default = Communicator(config)
        if may_grow and _default.size > 1 and not _default._session.is_inherited:
            keep_calls(_default).facts = facts_of_program()
        tell_children(config, _default.members, _default.local_rank, _default.local_size)
        return _default


init.__doc__ = (init.__doc__ or "").replace(
    " settings, see `Config`.\n", f"\n{describe(signature(init).parameters)}\n"
)


def _arrived(config: Config) -> Communicator:
    """The communicator of a rank that comes back; SystemExit with 0 if the job has ended."""
    try:
        arrival = Arrival(config)
    except JobEndedError as error:
        _log.warning("%s", error)
        raise EndsInOrder(0) from None
    ring = arrival.ring
    ring._arrival = arrival
    tell_children(config, ring.members, ring.local_rank, ring.local_size)
    return ring


def shutdown() -> None:
    """Close the default communicator, if there is one; also done when Python exits."""
    global _default
    with _lock:
        if _default is not None:
            _default.close()
            _default = None


def is_initialized() -> bool:
    """Whether `init` was called and the communicator is open."""
    return _default is not None and not _default.closed


def default_communicator() -> Communicator:
    """The default communicator. Raises ClosedError before `init` and after `close`."""
    if _default is None or _default.closed:
        remedy = "Call ringreduce.init() first: rr.init() of ringreduce.keras is the same."
        raise ClosedError("there is no ring in this process", remedy=remedy)
    return _default


def rank() -> int:
    """This process's number, 0 to size() - 1. Raises ClosedError before `init`."""
    return default_communicator().rank


def size() -> int:
    """Number of processes in the ring. Raises ClosedError before `init`."""
    return default_communicator().size


def local_rank() -> int:
    """This process's number among those of its host. Raises ClosedError before `init`."""
    return default_communicator().local_rank


def local_size() -> int:
    """Number of processes on this host. Raises ClosedError before `init`."""
    return default_communicator().local_size
