"""The process's own communicator: what ``ringreduce.init()`` makes and ``rank()`` asks."""

from __future__ import annotations

import threading

from ringreduce.communicator.communicator import Communicator
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import ClosedError, ConfigError

__all__ = [
    "default_communicator",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

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
    join_timeout_s: float | None = None,
    link_timeout_s: float | None = None,
    segment_bytes: int | None = None,
    transport: str | None = None,
    integrity: str | None = None,
    host_id: str | None = None,
    secret: str | None = None,
    encryption: str | None = None,
    log_dir: str | None = None,
) -> Communicator:
    """Form the ring and make it this process's default; return its communicator.

    What is not given comes from the variables that ``ringreduce run`` sets
    (``RINGREDUCE_RANK`` and so on). With none of them the process is a world of one, and
    every collective returns at once, so that a script runs alone unchanged.

    Called again while the default is open, it returns the same communicator.

    Args:
        rank, size: this process's number and how many there are.
        local_rank, local_size: the same among the processes of this host.
        rendezvous: ``host:port`` of rank 0, free to listen on there.
        job_id: any text, equal on all ranks of the job.
        timeout_s: seconds without progress after which a collective gives up (30).
        join_timeout_s: seconds for all ranks to meet (120, or `timeout_s` where given).
        link_timeout_s: seconds that a connection may carry nothing of what is due (2).
        segment_bytes: payload of a full frame, equal on all ranks.
        transport: ``"auto"`` (shared memory within a host, ZeroMQ between hosts), ``"shm"`` or
            ``"zmq"``; equal on all ranks.
        integrity: ``"crc32"`` or ``"off"``: whether frames over ZeroMQ carry a checksum;
            ``"auto"``: those that leave the host do, unless encrypted. Equal on all ranks.
        host_id: name of this host, where the system's own does not tell hosts apart.
        secret: text of 16 characters or more that only ranks of this job know; needed where
            the rendezvous is not a loopback address. Not to be written into a program that
            others can read: leave it to ``RINGREDUCE_SECRET_FILE``.
        encryption: ``"auto"`` (between hosts), ``"on"`` or ``"off"``; equal on all ranks.
        log_dir: folder for flight records; see ``ringreduce report``.

    Raises:
        ConfigError: settings are impossible or incomplete, or differ from the open default's.
        RendezvousError, MismatchError, PeerError, NativeError: as `Communicator`.
    """
    global _default
    config = Config.from_environment(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        rendezvous=rendezvous,
        job_id=job_id,
        timeout_s=timeout_s,
        join_timeout_s=join_timeout_s,
        link_timeout_s=link_timeout_s,
        segment_bytes=segment_bytes,
        transport=transport,
        integrity=integrity,
        host_id=host_id,
        secret=secret,
        encryption=encryption,
        log_dir=log_dir,
    )
    with _lock:
        if _default is not None and not _default.closed:
            if _default.config != config:
                raise ConfigError(
                    f"init() was called before, with {_default.config}, and now with {config}",
                    remedy="Call shutdown() first, or make a second ring with Communicator().",
                )
            return _default
        _default = Communicator(config)
        return _default


def shutdown() -> None:
    """Close the default communicator, if there is one; happens by itself when Python exits."""
    global _default
    with _lock:
        if _default is not None:
            _default.close()
            _default = None


def is_initialized() -> bool:
    """Whether `init` was called and the communicator is open."""
    return _default is not None and not _default.closed


def default_communicator() -> Communicator:
    """The default communicator.

    Raises:
        ClosedError: `init` was not called, or the communicator was closed.
    """
    if _default is None or _default.closed:
        raise ClosedError(
            "there is no ring in this process", remedy="Call ringreduce.init() first."
        )
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
