"""Writes the flight records of this process on SIGUSR1, whatever its threads are doing.

Python runs signal handlers in the main thread, between two bytecodes, so a main thread that is
stuck in C would never run one. But Python's C code always writes the signal's number to the wakeup
descriptor (`signal.set_wakeup_fd`); a thread reads its other end and dumps. Others use that
descriptor too (asyncio does), so it is taken only while it is free. Otherwise Python's handler
dumps: then the main thread is in an event loop, which runs handlers.

The thread, a daemon, starts with the first file added in the main thread. It and the handler stay,
and when Python ends the signal is ignored: a late one must neither kill a job that saves its model
nor change an exit code.
"""

import atexit
import contextlib
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Protocol


class Dumps(Protocol):
    """An object that the listener calls."""

    def dump(self, why: str) -> None:
        """Write the file; never raises."""


class _Listener:
    """The process's handler of SIGUSR1, and the thread behind the wakeup descriptor."""

    def __init__(self) -> None:
        self._files: weakref.WeakSet[Dumps] = weakref.WeakSet()
        self.thread: threading.Thread | None = None
        # Both ends of its pipe; the second is the wakeup descriptor.
        self._ends: tuple[int, int] | None = None

    def add(self, file: Dumps) -> None:
        """Dump `file` on SIGUSR1 from now on, unless the program handles the signal itself.

        Only a weak reference is kept. Only the main thread can set the handler; from another thread
        this works if one was set before.
        """
        self._files.add(file)
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGUSR1)
        # SIG_IGN is from the launcher, for the time without a handler.
        if handler in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGUSR1, self._handle)
            signal.siginterrupt(signal.SIGUSR1, False)  # Interrupted system calls restart.
        elif handler != self._handle:
            return
        if self.thread is None:
            self._listen()

    def _listen(self) -> None:
        source, target = self._ends = os.pipe()
        os.set_blocking(target, False)
        if _set_wakeup(target, ours=target) != -1:
            self._close_ends()
            return
        self.thread = threading.Thread(
            target=self._read, args=(source,), name="ringreduce flight recorder", daemon=True
        )
        self.thread.start()

    def remove(self, file: Dumps) -> None:
        """Stop dumping `file`; does nothing if it was not added."""
        self._files.discard(file)

    def _close_ends(self) -> None:
        ends, self._ends = self._ends, None
        for end in ends or ():
            os.close(end)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Python's handler: dump, unless the thread is notified by the wakeup descriptor."""
        if self._ends is not None:
            target = self._ends[1]
            if _set_wakeup(target, ours=target) == target:
                return
        self._dump_all()

    def _read(self, source: int) -> None:
        """The thread: dump on each SIGUSR1."""
        while True:
            if signal.SIGUSR1 in os.read(source, 4096):
                self._dump_all()

    def _dump_all(self) -> None:
        for file in list(self._files):
            file.dump("SIGUSR1")

    def end(self) -> None:
        """Ignore SIGUSR1: Python is about to restore its default action, which kills."""
        if signal.getsignal(signal.SIGUSR1) == self._handle:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def forget(self) -> None:
        """In a forked child, drop the thread and the descriptors, which are the parent's."""
        self.thread = None
        if self._ends is not None:
            # Else a signal to the child would make the parent dump.
            with contextlib.suppress(ValueError):
                _set_wakeup(-1, ours=self._ends[1])
            self._close_ends()


def _set_wakeup(descriptor: int, ours: int) -> int:
    """Set the wakeup descriptor if it is ours or unset; return what it was."""
    before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if before not in (-1, ours):
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
    return before


listener = _Listener()

# Registered before the closing of the communicators, so it runs after that.
atexit.register(listener.end)
os.register_at_fork(after_in_child=listener.forget)
