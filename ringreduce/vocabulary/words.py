"""Words that many messages share."""

from collections.abc import Iterable
from typing import Any

_NAMED_MAX = 16
_SHOWN_MAX = 80
_is_unchanged = False


def named(kind: str, numbers: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 1, 3``; of many the first sixteen."""
    texts = list(map(str, numbers))
    more = ", ..." if len(texts) > _NAMED_MAX else ""
    return f"{kind}{'' if len(texts) == 1 else 's'} {', '.join(texts[:_NAMED_MAX])}{more}"


def note_unchanged() -> None:
    """From now on advice is for a program that nobody has changed, and that imports no `rr`."""
    global _is_unchanged
    _is_unchanged = True


def is_unchanged() -> bool:
    """Whether the program is one that nobody has changed."""
    return _is_unchanged


def for_rr(advice: str, unchanged: str | None = None) -> str:
    """`advice` that names what only a program with `rr` has; to another one `unchanged` instead.

    By default the same, and what it takes to follow it.
    """
    if not _is_unchanged:
        return advice
    return (
        f"{advice} in a program with rr.fit, without --unchanged"
        if unchanged is None
        else unchanged
    )


def brief(value: Any) -> str:
    """What `value` is, in a few words: its ``repr`` if that is short, else its class and size."""
    kind = type(value).__name__
    if not isinstance(value, type):
        shape = getattr(value, "shape", None)
        if shape is not None and str(shape) != "()":
            return f"{kind} of shape {shape}"
        if (
            isinstance(value, (list, tuple, dict, set)) and value
        ):  # Whose text may take long to make.
            return f"{kind} of length {len(value)}"
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX and "\n" not in text else kind
