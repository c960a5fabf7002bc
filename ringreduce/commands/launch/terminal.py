"""Lends the launcher's terminal to one worker, through a pseudo-terminal.

The worker leads a session whose terminal is the pseudo-terminal, so Ctrl-C reaches it alone and
debuggers work. The launcher passes on each key; what the worker writes comes back marked with its
rank, as other output does. Job control keeps a worker from the launcher's own terminal.
"""

import contextlib
import fcntl
import os
import pty
import selectors
import struct
import sys
import termios
from collections.abc import Callable
from typing import IO

# What keys do before a program reads them; a terminal's output stays as it is.
_INPUT = termios.ICRNL | termios.INLCR | termios.IGNCR | termios.IXON | termios.BRKINT
_LOCAL = termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN


class Terminal:
    """A pseudo-terminal for a worker, and the launcher's, whose keys go there until `close`.

    `selector` gets the launcher's standard input, which is a terminal, and what reads it. The
    worker's is `columns` wide; None: as the launcher's. Its end, `tty`, is closed here once it has
    started; from `output` comes what it writes.
    """

    def __init__(self, selector: selectors.BaseSelector, columns: Callable[[], int | None]) -> None:
        self._keyboard, self._selector, self._columns = sys.stdin.fileno(), selector, columns
        self._before = termios.tcgetattr(self._keyboard)
        end, self.tty = pty.openpty()
        self.output: IO[bytes] = os.fdopen(end, "r+b", 0)
        os.set_blocking(end, False)
        self._keys = b""
        self._size = (0, 0)
        termios.tcsetattr(self.tty, termios.TCSANOW, self._before)
        self._resize()
        passing = termios.tcgetattr(self._keyboard)
        passing[0] &= ~_INPUT
        passing[3] &= ~_LOCAL
        termios.tcsetattr(self._keyboard, termios.TCSANOW, passing)
        selector.register(self._keyboard, selectors.EVENT_READ, self._read_keys)

    @staticmethod
    def is_possible() -> bool:
        """Whether the launcher's standard input is a terminal."""
        return sys.stdin is not None and sys.stdin.isatty()

    def poll(self) -> None:
        """Pass on the launcher's size, and keys, as far as the worker has room for them."""
        self._resize()
        # It may also have ended.
        with contextlib.suppress(OSError):
            if self._keys:
                self._keys = self._keys[os.write(self.output.fileno(), self._keys) :]

    def close(self) -> None:
        """Give the launcher its terminal back; `output` may still be read."""
        self._selector.unregister(self._keyboard)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._keyboard, termios.TCSANOW, self._before)

    def _resize(self) -> None:
        size = os.get_terminal_size(self._keyboard)
        wanted = (size.lines, self._columns() or size.columns)
        if wanted != self._size:
            self._size = wanted
            fcntl.ioctl(self.output, termios.TIOCSWINSZ, struct.pack("HHHH", *wanted, 0, 0))

    def _read_keys(self) -> None:
        with contextlib.suppress(OSError):
            self._keys += os.read(self._keyboard, 1 << 12)
        self.poll()
