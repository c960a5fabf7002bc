"""Writes the flight record to disk, when a communicator breaks and on SIGUSR1.

On the signal it is written whatever the threads of this process are doing. Python runs signal
handlers in the main thread, between two bytecodes, so a main thread that is stuck in C would never
run one. But `faulthandler`'s handler is in C, and writes at once: here into a pipe, which a thread
reads that dumps.

The thread, a daemon, starts with the first file made in the main thread, and stays. Python is told
to ignore the signal, as it does again when it ends: a late one must neither kill a job that saves
its model nor change an exit code.
"""

import contextlib
import datetime
import faulthandler
import logging
import os
import signal
import socket
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from ringreduce.effects.recorder import Recorder
from ringreduce.effects.stacks import stacks, trace
from ringreduce.pure import flight
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import record_fields

_log = logging.getLogger(__name__)


class FlightFile:
    """The flight record's file of one rank of a job; without a `log_dir` nothing is written.

    It holds what `recorder`, of the whole job's communicator, says, and those of its groups. Made
    in the main thread with a `log_dir`, it is also written on SIGUSR1, unless the program handles
    that signal itself.
    """

    def __init__(self, config: Config, recorder: Recorder) -> None:
        self._config, self._recorder = config, recorder
        self._groups: dict[int, Recorder] = {}  # by numbers; those that broke stay
        self._process = os.getpid()
        # Several threads may dump at once: the latest record has to stay. Reentrant, since a signal
        # handler may dump within a dump; then the outer one, a moment older, stays.
        self._lock = threading.RLock()
        # Absolute: the program may change its working folder.
        self._folder = Path(config.log_dir).absolute() if config.log_dir else None
        if self._folder is not None:
            _listener.files.add(self)
            _listener.start()

    def add(self, group: Recorder) -> None:
        """Record a group too, from now on."""
        self._groups[group.membership.group] = group

    def remove(self, group: Recorder) -> None:
        """Record a group that was closed only if it broke."""
        if group.first_error is None:
            self._groups.pop(group.membership.group, None)
            return
        broken = [other for other in self._groups.values() if other.first_error is not None]
        for other in broken[: -flight.GROUPS_MAX]:
            self._groups.pop(other.membership.group, None)

    def elsewhere(self, recorder: Recorder) -> str:
        """The call that this rank is in beside those of `recorder`; empty for none."""
        for other in (self._recorder, *list(self._groups.values())):
            operation = other.current_call().operation
            if other is not recorder and operation is not None:
                name = other.membership.name
                if name == recorder.membership.name:
                    name = f"another {name.removeprefix('the ')}"
                return f"{operation} of {name}"
        return ""

    def dump(self, why: str) -> None:
        """Replace the file, whole or not at all, in some milliseconds; from any thread.

        Never raises: without a `log_dir` it does nothing, and a failure is logged as a warning.
        """
        if self._folder is None or self._process != os.getpid():
            return
        rank, size = self._config.rank, self._config.size
        try:
            path = self._folder / flight.file_name(rank)
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._lock:
                _replace(path, flight.encode_dump(self._taken(why)))
            _log.debug("[%d/%d] wrote %s: %s", rank, size, path, why)
        except Exception as error:
            text = "[%d/%d] could not write the flight record to %s: %s: %s"
            _log.warning(text, rank, size, self._folder, type(error).__name__, error)

    def close(self) -> None:
        """Stop dumping on SIGUSR1; calling it again does nothing."""
        _listener.files.discard(self)

    def _taken(self, why: str) -> flight.Dump:
        when, now = time.time(), time.monotonic()
        # Groups that broke come last, then those used last.
        groups = sorted(
            self._groups.values(),
            key=lambda group: (group.first_error is not None, group.current_call().since_s),
        )[-flight.GROUPS_MAX :]
        # In user code since the last call of all.
        last_s = max(recorder.current_call().since_s for recorder in (self._recorder, *groups))
        part = self._part(self._recorder, when - now, last_s)
        return flight.Dump(
            format=flight.FORMAT,
            why=flight.cut(why),
            when=when,
            iso=datetime.datetime.fromtimestamp(when).astimezone().isoformat(),
            rank=self._config.rank,
            size=self._config.size,
            host=flight.cut(socket.gethostname(), flight.NAME_MAX),
            pid=os.getpid(),
            job=flight.cut(self._config.job_id, flight.NAME_MAX),
            stacks=stacks(),
            groups=[
                flight.Group(
                    number=group.membership.group,
                    epoch=group.membership.epoch,
                    members=list(group.membership.members),
                    **self._part(group, when - now, last_s),
                )
                for group in groups
            ],
            **part,
        )

    def _part(self, recorder: Recorder, wall: float, last_s: float) -> dict[str, Any]:
        """The fields of both `Dump` and `Group`; `wall` turns times into seconds of the epoch."""
        current = recorder.current_call()
        pending = recorder.pending()
        return {
            "transport": recorder.transport,
            "calls": current.calls,
            "operation": current.operation,
            "nbytes": current.nbytes,
            "since": wall + (last_s if current.operation is None else current.since_s),
            "pending": pending.describe() if pending else self.elsewhere(recorder) or None,
            "failure": _failure(recorder, wall),
            "entries": recorder.entries(),
        }


class _Listener:
    """The process's handler of SIGUSR1, and the thread that reads what it writes."""

    def __init__(self) -> None:
        self.files: weakref.WeakSet[FlightFile] = weakref.WeakSet()  # those that it dumps
        self._ends = -1, -1  # of the pipe
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, in the main thread, unless the program handles the signal itself."""
        is_main = threading.current_thread() is threading.main_thread()
        if self.thread is not None or not is_main:
            return
        # The launcher ignores it, for the time without a handler.
        if signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN):
            return
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        source, target = self._ends = os.pipe()
        os.set_blocking(target, False)
        faulthandler.register(signal.SIGUSR1, target, all_threads=False)
        name = "ringreduce flight recorder"
        self.thread = threading.Thread(target=self._read, args=(source,), name=name, daemon=True)
        self.thread.start()

    def _read(self, source: int) -> None:
        """The thread: dump on each SIGUSR1, which writes a head and several lines."""
        while True:
            if b"most recent call first" in os.read(source, 1 << 16):
                for file in list(self.files):
                    file.dump("SIGUSR1")

    def forget(self) -> None:
        """In a forked child: a signal to it is not the parent's, whose the thread is."""
        if self.thread is not None:
            # This only changes the file: a handler that the program has set since stays.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.register(signal.SIGUSR1, nowhere, all_threads=False)
            for end in self._ends:
                os.close(end)
            self.thread = None


def _failure(recorder: Recorder, wall: float) -> flight.Failure | None:
    first_error = recorder.first_error
    if first_error is None:
        return None
    error = first_error.error
    return flight.Failure(
        **record_fields(error),
        text=flight.cut(str(error)),
        when=wall + first_error.when_s,
        in_call=first_error.call.operation,
        trace=trace(error),
    )


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


_listener = _Listener()

os.register_at_fork(after_in_child=_listener.forget)
