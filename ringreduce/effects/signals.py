"""Writes the flight records of this process on SIGUSR1, whatever its threads are doing.

Python runs signal handlers in the main thread, between two bytecodes, so a main thread that is
stuck in C would never run one. But `faulthandler`'s handler is in C, and writes at once: here into
a pipe, which a thread reads that dumps.

The thread, a daemon, starts with the first file added in the main thread, and stays. Python is told
to ignore the signal, as it does again when it ends: a late one must neither kill a job that saves
its model nor change an exit code.
"""

import faulthandler
import os
import signal
import threading
import weakref
from typing import Protocol


class Dumps(Protocol):
    """An object that the listener calls."""

    def dump(self, why: str) -> None:
        """Write the file; never raises."""


class _Listener:
    """The process's handler of SIGUSR1, and the thread that reads what it writes."""

    def __init__(self) -> None:
        self._files: weakref.WeakSet[Dumps] = weakref.WeakSet()
        self._ends = -1, -1  # of the pipe
        self.thread: threading.Thread | None = None

    def add(self, file: Dumps) -> None:
        """Dump `file` on SIGUSR1 from now on, unless the program handles the signal itself.

        Only a weak reference is kept. Only the main thread can begin to listen; from another thread
        this works if it has.
        """
        self._files.add(file)
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

    def remove(self, file: Dumps) -> None:
        """Stop dumping `file`; does nothing if it was not added."""
        self._files.discard(file)

    def _read(self, source: int) -> None:
        """The thread: dump on each SIGUSR1, which writes a head and several lines."""
        while True:
            if b"most recent call first" in os.read(source, 1 << 16):
                for file in list(self._files):
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


listener = _Listener()

os.register_at_fork(after_in_child=listener.forget)
