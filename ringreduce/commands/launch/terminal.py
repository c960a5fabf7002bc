"""Lends the launcher's terminal to one worker, through a pseudo-terminal.

The worker leads a session whose terminal is the pseudo-terminal, so Ctrl-C reaches it alone and
debuggers work. The launcher passes on each key; what the worker writes comes back marked with its
rank, as other output does. Job control keeps a worker from the launcher's own terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
from typing import IO

# What keys do before a program reads them; a terminal's output stays as it is.
_INPUT = termios.ICRNL | termios.INLCR | termios.IGNCR | termios.IXON | termios.BRKINT
_LOCAL = termios.ICANON | termios.ECHO | termios.ISIG | termios.IEXTEN


class Terminal:
    """A pseudo-terminal for a worker, and the launcher's, whose keys go there until `close`.

    Attributes:
        keyboard: the launcher's standard input, which is a terminal.
        tty: the worker's end; closed here once it has started.
        output: what the worker writes to its terminal.
    """

    def __init__(self, columns: int | None) -> None:
        self.keyboard = sys.stdin.fileno()
        self._before = termios.tcgetattr(self.keyboard)
        end, self.tty = pty.openpty()
        self.output: IO[bytes] = os.fdopen(end, "r+b", 0)
        os.set_blocking(end, False)
        self._keys = b""
        self._size = (0, 0)
        termios.tcsetattr(self.tty, termios.TCSANOW, self._before)
        self.resize(columns)
        passing = termios.tcgetattr(self.keyboard)
        passing[0] &= ~_INPUT
        passing[3] &= ~_LOCAL
        termios.tcsetattr(self.keyboard, termios.TCSANOW, passing)

    @staticmethod
    def is_possible() -> bool:
        """Whether the launcher's standard input is a terminal."""
        return sys.stdin is not None and sys.stdin.isatty()

    def resize(self, columns: int | None) -> None:
        """Make the worker's terminal as wide as `columns`, by default as the launcher's."""
        size = os.get_terminal_size(self.keyboard)
        wanted = (size.lines, columns or size.columns)
        if wanted != self._size:
            self._size = wanted
            fcntl.ioctl(self.output, termios.TIOCSWINSZ, struct.pack("HHHH", *wanted, 0, 0))

    def read_keys(self) -> None:
        """Take the keys that were pressed, and pass them on."""
        with contextlib.suppress(OSError):
            self._keys += os.read(self.keyboard, 1 << 12)
        self.pass_keys()

    def pass_keys(self) -> None:
        """Pass on keys, as far as the worker has room for them."""
        # It may also have ended.
        with contextlib.suppress(OSError):
            if self._keys:
                self._keys = self._keys[os.write(self.output.fileno(), self._keys) :]

    def close(self) -> None:
        """Give the launcher its terminal back; `output` may still be read."""
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self.keyboard, termios.TCSANOW, self._before)
