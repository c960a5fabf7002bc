r"""Makes lines of chunks of bytes, so that ranks' outputs never mix in a line. Pure.

Programs redraw a line with ``\r`` and ``\b``, as progress bars do: of such a line the last state
counts. Keras draws so into a pipe too.
"""

import codecs
import re
from collections.abc import Sequence

_LINE_MAX = 1 << 16  # a longer line is cut, so that it does not fill memory
_COLOR = r"\x1b\[[\d;:]*m"
_COLORS = re.compile(_COLOR)
# Control sequences, such as those that move the cursor or set the window's title.
_CONTROLS = re.compile(
    rf"(?!{_COLOR})\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\^_])"
)


class LineBuffer:
    """Collects bytes until a line is whole."""

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
        return [last_state(line) for line in lines]

    @property
    def partial(self) -> str:
        return last_state(self._rest)


def last_state(line: str) -> str:
    """Reduce a line to what it shows once redrawn; of control sequences, colors stay."""
    text = _CONTROLS.sub("", line).rstrip("\r\b").rpartition("\r")[2]
    if "\b" not in text:
        return text
    kept: list[str] = []
    for character in without_colors(text):
        if character != "\b":
            kept.append(character)
        elif kept:
            kept.pop()
    return "".join(kept)


def added(lines: Sequence[str], written: str) -> Sequence[str]:
    """`lines` without the beginning of the first that was `written`, if it was not redrawn."""
    if not written or not lines[0].startswith(written):
        return lines
    rest = lines[0].removeprefix(written)
    return [rest, *lines[1:]] if rest else lines[1:]


def without_colors(text: str) -> str:
    """`text` without the sequences that set colors."""
    return _COLORS.sub("", text)


def cut(text: str, columns: int) -> str:
    """`text` as far as it fits into `columns`, with its colors."""
    kept = []
    for part in re.split(f"({_COLOR})", text.expandtabs()):
        if part.startswith("\x1b"):
            kept.append(part)
        else:
            kept.append(part[:columns])
            columns -= len(kept[-1])
    return "".join(kept)
