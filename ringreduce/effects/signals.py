"""SIGUSR1: the flight records of this process are written, whatever its threads are doing.

A process that hangs is asked from outside, and its main thread may be stuck in TensorFlow or
in C for good. Python runs signal handlers in the main thread alone, between two bytecodes, so
a handler would not be reached. What the C level does at once, in any state, is write the
signal's number to the wakeup descriptor (`signal.set_wakeup_fd`). A small thread reads the
other end and dumps.

That descriptor is one for the whole process, and others want it too (asyncio does): it is
taken only when it is free. Where it is taken, or has been taken since, Python's handler
dumps: in such a process that is the main thread at its event loop, which reaches handlers.

The thread begins with the first file that is added in the main thread, and ends when the last
one is removed, which writes a 0, no signal's number, to the descriptor; it is a daemon, so that
a process that never closes can end too. The handler stays, and then does nothing, and when
Python ends the signal is ignored: one that comes a moment too late shall not kill a job that
saves its model, nor change the exit code of one that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Protocol

from ringreduce.vocabulary.config import TIMES

__all__ = ["Dumps", "add", "listening_thread", "remove"]

_SIGNAL = getattr(signal, "SIGUSR1", None)  # Windows has none.


class Dumps(Protocol):
    """What is added here."""

    def dump(self, why: str) -> object:
        """Write the file; never raises."""


def add(file: Dumps) -> None:
    """Have SIGUSR1 dump `file` from now on, unless the program handles the signal itself.

    Only a weak reference is kept. Outside of the main thread no handler can be set: then one
    that was set before serves.
    """
    _files.add(file)
    _listener.start()


def remove(file: Dumps) -> None:
    """No longer dump `file`; nothing if it was not added."""
    if file in _files:
        _files.discard(file)
        _listener.stop()


def listening_thread() -> int | None:
    """Identity of the thread that waits for the signal, if there is one."""
    thread = _listener.thread
    return None if thread is None else thread.ident


class _Listener:
    """The process's handler of SIGUSR1, and the thread behind the wakeup descriptor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.thread: threading.Thread | None = None
        # Both ends of a pipe; the second is the wakeup descriptor.
        self._ends: tuple[int, int] | None = None
        self._watches_forks = False

    def start(self) -> None:
        """Receive SIGUSR1 from now on, where that is possible and the program does not."""
        if _SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return
        with self._lock:
            handler = signal.getsignal(_SIGNAL)
            # The launcher has it ignored until there is a handler.
            if handler in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(_SIGNAL, self._handle)
                # Calls of the system's in the middle of anything go on, as if nothing were.
                signal.siginterrupt(_SIGNAL, False)
            elif handler != self._handle:
                return
            if not self._watches_forks:
                os.register_at_fork(after_in_child=self._forget)
                self._watches_forks = True
            if self.thread is None:
                self._listen()

    def _listen(self) -> None:
        if self._ends is None:
            self._ends = os.pipe()
            os.set_blocking(self._ends[1], False)
        source, target = self._ends
        if _set_wakeup(target, ours=target) not in (-1, target):
            self._close_ends()
            return
        self.thread = threading.Thread(
            target=_read, args=(source,), name="ringreduce flight recorder", daemon=True
        )
        self.thread.start()

    def stop(self) -> None:
        """End the thread. In another than the main thread, its descriptors stay for the next."""
        with self._lock:
            if len(_files) or self.thread is None or self._ends is None:
                return  # Another communicator was made in between, or there is no thread.
            thread, self.thread = self.thread, None
            with contextlib.suppress(BlockingIOError):
                os.write(self._ends[1], b"\0")
            # It may be dumping to a slow disk, which is not waited for.
            thread.join(TIMES.join_thread_s)
            if thread.is_alive() or threading.current_thread() is not threading.main_thread():
                return
            _set_wakeup(-1, ours=self._ends[1])
            self._close_ends()

    def _close_ends(self) -> None:
        ends, self._ends = self._ends, None
        for end in ends or ():
            os.close(end)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Python's handler: dump, unless the C level has notified the thread."""
        if self.thread is not None and self._ends is not None:
            target = self._ends[1]
            if _set_wakeup(target, ours=target) == target:
                return
        _dump_all()

    def end(self) -> None:
        """Ignore SIGUSR1 from now on: Python is about to put its default action back, to kill."""
        if _SIGNAL is not None and signal.getsignal(_SIGNAL) == self._handle:
            signal.signal(_SIGNAL, signal.SIG_IGN)

    def _forget(self) -> None:
        """In a forked child: the thread is its parent's, and so is what it would dump."""
        self._lock = threading.Lock()
        self.thread = None
        if self._ends is not None:
            # Else a signal to the child would make the parent dump.
            with contextlib.suppress(ValueError):
                _set_wakeup(-1, ours=self._ends[1])
            self._close_ends()


def _set_wakeup(descriptor: int, ours: int) -> int:
    """Set the wakeup descriptor where it is ours or nobody's; return what it was."""
    before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if before not in (-1, ours):
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
    return before


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


_files: weakref.WeakSet[Dumps] = weakref.WeakSet()
_listener = _Listener()


# Runs after the communicators were closed, which is registered later.
atexit.register(_listener.end)
