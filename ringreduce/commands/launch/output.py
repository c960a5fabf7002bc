"""Makes whole lines of chunks of bytes, so that ranks' outputs never mix in a line. Pure."""

from __future__ import annotations

import codecs

# A longer line is cut, so that it does not fill memory.
_LINE_MAX = 1 << 16


class LineBuffer:
    r"""Collects bytes until a line is whole.

    Of a line that is redrawn with ``\r``, as progress bars do, the last state is kept.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes, without their ends; for no data, the rest as a line."""
        *lines, rest = (self._rest + self._decoder.decode(data, final=not data)).split("\n")
        if rest and (not data or len(rest) > _LINE_MAX):
            lines.append(rest)
            rest = ""
        self._rest = rest
        return [_shown(line) for line in lines]


def _shown(line: str) -> str:
    # Keras ends and redraws lines with backspaces.
    return line.removesuffix("\r").rpartition("\r")[2].replace("\b", "")
