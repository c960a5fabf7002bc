"""Flight records to disk: when a communicator breaks, and when somebody asks by SIGUSR1.

A process that hangs is asked from outside, and its main thread may be stuck in TensorFlow or
in C for good. Python runs signal handlers in the main thread alone, between two bytecodes, so
a handler would not be reached. What the C level does at once, in any state, is write the
signal's number to the wakeup descriptor (`signal.set_wakeup_fd`). A small thread reads the
other end and dumps.

That descriptor is one for the whole process, and others want it too (asyncio does): it is
taken only when it is free. Where it is taken, or somebody has taken it since, Python's handler
dumps: in such a process that is the main thread at its event loop, which reaches handlers.

The thread begins with the first communicator that has a `log_dir`, made in the main thread,
and ends with the last one's `close`, which writes a 0, no signal's number, to the descriptor;
it is a daemon, so that a process that never closes can end too. The handler stays, and then
does nothing, and when Python ends the signal is ignored: one that comes a moment too late shall
not kill a job that saves its model, nor change the exit code of one that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import linecache
import logging
import os
import platform
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ringreduce._version import __version__
from ringreduce.effects.recorder import Recorder
from ringreduce.pure.flight import (
    FORMAT,
    FRAMES_MAX,
    TEXT_MAX,
    THREADS_MAX,
    Call,
    Dump,
    Failure,
    Frame,
    Stack,
    encode_dump,
    file_name,
)
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.errors import RingReduceError

__all__ = ["FlightFile"]

_log = logging.getLogger(__name__)

_SIGNAL = getattr(signal, "SIGUSR1", None)  # Windows has none.
_NAME_MAX = 512
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# Of Python and of installed packages, on whatever system.
_LIBRARY_PATHS = ("/lib/python", "site-packages", "dist-packages", "<frozen")
_VERSIONS_OF = ("numpy", "numba", "zmq", "tensorflow", "keras")


class FlightFile:
    """The file that one communicator's flight record goes to; nothing without a `log_dir`.

    Args:
        config: of the communicator. Where `log_dir` is set and this is called in the main
            thread, SIGUSR1 dumps from now on, unless the program handles it itself.
        recorder: of the communicator.

    Attributes:
        transport: how the ranks reach each other, once that is known.
    """

    def __init__(self, config: Config, recorder: Recorder) -> None:
        self.transport = "none"
        self._config, self._recorder = config, recorder
        self._process = os.getpid()
        # The thread and the one whose ring breaks may dump at once, and the handler may come
        # in between: what was taken last shall be what stays.
        self._lock = threading.RLock()
        self._taken_count, self._written = 0, 0
        # The program may change its folder.
        self._folder = Path(config.log_dir).absolute() if config.log_dir else None
        if self._folder is not None:
            _files.add(self)
            _listener.start()

    def dump(self, why: str) -> Path | None:
        """Write the file anew, whole or not at all; never raises.

        Callable from any thread. Takes some milliseconds.

        Returns:
            Where it is; None when there is no `log_dir`, or it could not be written, which is
            logged as a warning.
        """
        if self._folder is None or self._process != os.getpid():
            return None
        rank, size = self._config.rank, self._config.size
        try:
            path = self._folder / file_name(rank)
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._lock:
                self._taken_count += 1
                number = self._taken_count
                dump = self._taken(why)
            self._write(path, encode_dump(dump), number)
        except Exception as error:
            text = "[%d/%d] could not write the flight record to %s: %s: %s"
            _log.warning(text, rank, size, self._folder, type(error).__name__, error)
            return None
        _log.debug("[%d/%d] wrote %s: %s", rank, size, path, why)
        return path

    def close(self) -> None:
        """No longer dump by SIGUSR1; calling it again does nothing."""
        if self._process != os.getpid() or self not in _files:
            return
        _files.discard(self)
        if not len(_files):
            _listener.stop()

    def _write(self, path: Path, data: bytes, number: int) -> None:
        """Have the file seen whole or not at all, and never older than it was."""
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            with self._lock:
                if number > self._written:
                    os.replace(name, path)
                    self._written = number
                    return
            os.unlink(name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _taken(self, why: str) -> Dump:
        recorder = self._recorder
        standing = recorder.standing()
        when, now = time.time(), time.monotonic()
        return Dump(
            format=FORMAT,
            why=_cut(why),
            when=when,
            iso=datetime.datetime.fromtimestamp(when).astimezone().isoformat(),
            rank=self._config.rank,
            size=self._config.size,
            host=_cut(socket.gethostname(), _NAME_MAX),
            pid=os.getpid(),
            job=_cut(self._config.job_id, _NAME_MAX),
            versions=_versions(),
            transport=self.transport,
            calls=standing.calls,
            operation=standing.operation,
            nbytes=standing.nbytes,
            since=when - (now - standing.since_s),
            failure=self._failure(when - now),
            peers=self._peers(),
            entries=[_call(entry) for entry in recorder.entries()],
            stacks=_stacks(),
        )

    def _failure(self, wall: float) -> Failure | None:
        mishap = self._recorder.mishap
        if mishap is None:
            return None
        error = mishap.error
        failure = Failure(
            kind=type(error).__name__,
            text=_cut(str(error)),
            when=wall + mishap.when_s,
            standing=mishap.standing.operation,
            trace=_trace(error),
        )
        if isinstance(error, RingReduceError):
            failure.peer, failure.origin = error.peer, error.origin
            failure.operation, failure.sequence = error.operation, error.sequence
            failure.step = error.step
        return failure

    def _peers(self) -> list[dict[str, Any]]:
        peers = self._recorder.peers
        if peers is None:
            return []
        try:
            return peers()
        except Exception as error:  # Half a record is better than none.
            _log.warning("could not ask for what other ranks did: %s", error)
            return []


def _call(entry: dict[str, Any]) -> Call:
    call = Call(**entry)
    call.thread = _cut(call.thread, _NAME_MAX)
    call.error = None if call.error is None else _cut(call.error)
    return call


def _versions() -> dict[str, str]:
    # Only what is loaded: an import could wait for the very thread that hangs.
    found = {"python": platform.python_version(), "ringreduce": __version__}
    for name in _VERSIONS_OF:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = _cut(version, _NAME_MAX)
    return found


def _stacks() -> list[Stack]:
    """Where each thread is, the main one first, the one that asks last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sorted(sys._current_frames().items(), key=lambda item: (item[0] != main, item[0]))
    stacks = []
    for thread, frame in frames[:THREADS_MAX]:
        if thread == own and _listener.is_current():
            continue
        name = _cut(names.get(thread, f"thread {thread}"), _NAME_MAX)
        found = _frames(frame)
        if thread == own:
            while found and found[-1].file == __file__:
                found.pop()
        stacks.append(Stack(thread=name, main=thread == main, frames=found[-FRAMES_MAX:]))
    return stacks


def _trace(error: BaseException) -> list[Frame]:
    """The innermost frames that `error` has passed on its way to where it was caught."""
    kept: deque[TracebackType] = deque(maxlen=FRAMES_MAX)
    traceback = error.__traceback__
    while traceback is not None:
        kept.append(traceback)
        traceback = traceback.tb_next
    return [_frame(passed.tb_frame, passed.tb_lineno) for passed in kept]


def _frames(innermost: FrameType | None) -> list[Frame]:
    found: list[Frame] = []
    frame = innermost
    # A few more than are kept, for those of this file.
    while frame is not None and len(found) < FRAMES_MAX + 8:
        found.append(_frame(frame, frame.f_lineno or 0))
        frame = frame.f_back
    return found[::-1]


def _frame(frame: FrameType, line: int) -> Frame:
    file = frame.f_code.co_filename
    library = file.startswith(_PACKAGE) or any(part in file for part in _LIBRARY_PATHS)
    # Nobody asks for the source of a library; reading it would take longer than all the rest.
    text = "" if library or file.startswith("<") else linecache.getline(file, line).strip()
    return Frame(
        file=_cut(file),
        line=line,
        function=_cut(frame.f_code.co_name, _NAME_MAX),
        text=_cut(text, _NAME_MAX),
        library=library,
    )


def _cut(text: str, length: int = TEXT_MAX) -> str:
    # File names may hold bytes that are no text; JSON may not.
    whole = text.encode(errors="replace").decode()
    return whole if len(whole) <= length else whole[: length - 3] + "..."


class _Listener:
    """The process's handler of SIGUSR1, and the thread behind the wakeup descriptor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Both ends of a pipe; the second is the wakeup descriptor.
        self._ends: tuple[int, int] | None = None
        self._watches_forks = False

    def start(self) -> None:
        """Hear SIGUSR1 from now on, where that is possible and not somebody else's."""
        if _SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return
        with self._lock:
            handler = signal.getsignal(_SIGNAL)
            # The launcher has it ignored until there is somebody to hear it.
            if handler in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(_SIGNAL, self._heard)
                # Calls of the system's in the middle of anything go on, as if nothing were.
                signal.siginterrupt(_SIGNAL, False)
            elif handler != self._heard:
                return
            if not self._watches_forks:
                os.register_at_fork(after_in_child=self._forget)
                self._watches_forks = True
            if self._thread is None:
                self._listen()

    def _listen(self) -> None:
        if self._ends is None:
            self._ends = os.pipe()
            os.set_blocking(self._ends[1], False)
        source, target = self._ends
        before = signal.set_wakeup_fd(target, warn_on_full_buffer=False)
        if before not in (-1, target):
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            self._close_ends()
            return
        self._thread = threading.Thread(
            target=_read, args=(source,), name="ringreduce flight recorder", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread. In another than the main thread, its descriptors stay for the next."""
        with self._lock:
            if len(_files) or self._thread is None or self._ends is None:
                return  # Another communicator was made in between, or there is no thread.
            thread, self._thread = self._thread, None
            with contextlib.suppress(BlockingIOError):
                os.write(self._ends[1], b"\0")
            # It may be in the midst of a dump to a slow disk, which nobody need wait for.
            thread.join(TIMES.join_thread_s)
            if thread.is_alive() or threading.current_thread() is not threading.main_thread():
                return
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, self._ends[1]):
                signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            self._close_ends()

    def is_current(self) -> bool:
        """Whether the caller is the thread."""
        return threading.current_thread() is self._thread

    def _close_ends(self) -> None:
        ends, self._ends = self._ends, None
        for end in ends or ():
            os.close(end)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """Python's handler: dump, unless the thread was told by the C level already."""
        if self._thread is not None and self._ends is not None:
            before = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
            if before == self._ends[1]:
                return
            if before != -1:
                signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        _dump_all()

    def end(self) -> None:
        """Ignore SIGUSR1 from now on: Python is about to put its default action back, to kill."""
        if _SIGNAL is not None and signal.getsignal(_SIGNAL) == self._heard:
            signal.signal(_SIGNAL, signal.SIG_IGN)

    def _forget(self) -> None:
        """In a forked child: the thread is its parent's, and so is what it would dump."""
        self._lock = threading.Lock()
        self._thread = None
        if self._ends is not None:
            # Else a signal to the child would make the parent dump.
            with contextlib.suppress(ValueError):
                before = signal.set_wakeup_fd(-1)
                if before not in (-1, self._ends[1]):
                    signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            self._close_ends()


def _read(source: int) -> None:
    """The thread: dump at each SIGUSR1 until a 0 comes."""
    while True:
        numbers = os.read(source, 4096)
        if _SIGNAL is not None and _SIGNAL in numbers:
            _dump_all()
        if not numbers or 0 in numbers:
            return


def _dump_all() -> None:
    for file in list(_files):
        file.dump("SIGUSR1")


_files: weakref.WeakSet[FlightFile] = weakref.WeakSet()
_listener = _Listener()


# Runs after the communicators were closed, which is registered later.
atexit.register(_listener.end)
