"""Makes whole lines of chunks of bytes, so that ranks' outputs never mix in a line. Pure."""

from __future__ import annotations

__all__ = ["LineBuffer"]

# A longer line is cut, so that it does not fill memory.
_LINE_BYTES_MAX = 1 << 16


class LineBuffer:
    r"""Collects bytes until a line is whole.

    Of a line that is redrawn with ``\r``, as progress bars do, the last state is kept.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX:
            cut = len(self._rest) - _unfinished_bytes(self._rest)
            lines.append(self._rest[:cut])
            self._rest = self._rest[cut:]
        return [_shown(line) for line in lines]

    def flush(self) -> list[str]:
        """The rest without a line end, as a line; empty if there is none."""
        rest, self._rest = self._rest, b""
        return [_shown(rest)] if rest else []


def _unfinished_bytes(text: bytes) -> int:
    """Number of bytes at the end of `text` that are an incomplete UTF-8 character."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte & 0xC0 == 0x80:
            continue  # inside a character
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if length > back else 0
    return 0


def _shown(line: bytes) -> str:
    line = line.removesuffix(b"\r").rpartition(b"\r")[2]
    # Keras ends and redraws lines with backspaces.
    return line.replace(b"\b", b"").decode(errors="replace")
