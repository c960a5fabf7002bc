"""Writes the flight record to disk, when a communicator breaks and on SIGUSR1."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import platform
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringreduce._version import __version__
from ringreduce.effects import signals
from ringreduce.effects.recorder import Recorder
from ringreduce.effects.signals import listener
from ringreduce.effects.stacks import stacks, trace
from ringreduce.pure.flight import FORMAT, NAME_MAX, Dump, Failure, cut, encode_dump, file_name
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import RingReduceError

_log = logging.getLogger(__name__)

_VERSIONS_OF = ("numpy", "numba", "zmq", "tensorflow", "keras")


class FlightFile:
    """The flight record's file of one communicator; does nothing without a `log_dir`.

    Made in the main thread with a `log_dir`, it is also written on SIGUSR1, unless the program
    handles that signal itself.

    Attributes:
        transport: how the ranks reach each other, once that is known.
        elsewhere: returns the call of another group that this process is in; empty for none.
    """

    def __init__(self, config: Config, recorder: Recorder) -> None:
        self.transport = "none"
        self.elsewhere: Callable[[], str] = str
        self._config, self._recorder = config, recorder
        self._process = os.getpid()
        # Several threads may dump at once: the latest record has to stay. Reentrant, since a signal
        # handler may dump within a dump; then the outer one, a moment older, stays.
        self._lock = threading.RLock()
        # Absolute: the program may change its working folder.
        self._folder = Path(config.log_dir).absolute() if config.log_dir else None
        if self._folder is not None:
            listener.add(self)

    def dump(self, why: str) -> None:
        """Replace the file, whole or not at all, in some milliseconds; from any thread.

        Never raises: without a `log_dir` it does nothing, and a failure is logged as a warning.
        """
        if self._folder is None or self._process != os.getpid():
            return
        rank, size = self._config.rank, self._config.size
        try:
            path = self._folder / file_name(rank)
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._lock:
                _replace(path, encode_dump(self._taken(why)))
            _log.debug("[%d/%d] wrote %s: %s", rank, size, path, why)
        except Exception as error:
            text = "[%d/%d] could not write the flight record to %s: %s: %s"
            _log.warning(text, rank, size, self._folder, type(error).__name__, error)

    def close(self) -> None:
        """Stop dumping on SIGUSR1; calling it again does nothing."""
        if self._process == os.getpid():
            listener.remove(self)

    def _taken(self, why: str) -> Dump:
        recorder = self._recorder
        standing = recorder.standing()
        when, now = time.time(), time.monotonic()
        return Dump(
            format=FORMAT,
            why=cut(why),
            when=when,
            iso=datetime.datetime.fromtimestamp(when).astimezone().isoformat(),
            rank=self._config.rank,
            size=self._config.size,
            host=cut(socket.gethostname(), NAME_MAX),
            pid=os.getpid(),
            job=cut(self._config.job_id, NAME_MAX),
            versions=_versions(),
            transport=self.transport,
            calls=standing.calls,
            operation=standing.operation,
            nbytes=standing.nbytes,
            since=when - (now - standing.since_s),
            pending=self._pending(),
            failure=self._failure(when - now),
            peers=self._peers(),
            entries=recorder.entries(),
            stacks=stacks(asking=(__file__, signals.__file__), unless=listener.thread),
        )

    def _failure(self, wall: float) -> Failure | None:
        first_error = self._recorder.first_error
        if first_error is None:
            return None
        error = first_error.error
        failure = Failure(
            kind=type(error).__name__,
            text=cut(str(error)),
            when=wall + first_error.when_s,
            standing=first_error.standing.operation,
            trace=trace(error),
        )
        if isinstance(error, RingReduceError):
            failure.peer, failure.origin = error.peer, error.origin
            failure.operation, failure.sequence = error.operation, error.sequence
            failure.step = error.step
        return failure

    def _pending(self) -> str | None:
        pending = None if self._recorder.pending is None else self._recorder.pending()
        return (self.elsewhere() or None) if pending is None else pending.describe()

    def _peers(self) -> list[dict[str, Any]]:
        peers = self._recorder.peers
        if peers is None:
            return []
        try:
            return peers()
        except Exception as error:  # Half a record is better than none.
            _log.warning("could not ask for what other ranks did: %s", error)
            return []


def _replace(path: Path, data: bytes) -> None:
    """Write the file whole or not at all."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _versions() -> dict[str, str]:
    # Only loaded modules: an import could wait for the thread that hangs.
    found = {"python": platform.python_version(), "ringreduce": __version__}
    for name in _VERSIONS_OF:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = cut(version, NAME_MAX)
    return found
