"""Phrases about one rank's flight record. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from ringreduce.pure.flight import Dump, Frame
from ringreduce.vocabulary import errors

__all__ = [
    "amount",
    "call_of",
    "capital",
    "clean",
    "in_bytes",
    "location",
    "location_of",
    "nbytes_of",
    "numbered",
    "raised_at",
    "said",
    "seconds",
    "sentence",
    "shorten",
    "source_of",
    "state_of",
    "stood_s",
    "those",
    "was",
]

_TEXT_SHOWN = 240


def call_of(dump: Dump) -> str | None:
    """The call that a rank is in, or was in when it failed; None in user code."""
    return dump.failure.standing if dump.failure is not None else dump.operation


def state_of(dump: Dump) -> str:
    """What a rank is doing, or did when it failed, and for how long."""
    for_s = seconds(stood_s(dump))
    failure = dump.failure
    if failure is None:
        if dump.operation is not None:
            return f"in {numbered(dump.operation, dump)} for {for_s}"
        return f"in user code for {for_s}{location_of(dump)}"
    if failure.standing is not None:
        return f"failed in {numbered(failure.standing, dump)} after {for_s}"
    if failure.kind in errors.__all__:
        return f"in user code for {for_s}{location_of(dump)}, when the ring broke"
    return f"failed in user code after {for_s}{raised_at(dump)}"


def was(dump: Dump) -> str:
    """The same as a predicate: ``was in user code ...``, ``failed in ...``."""
    state = state_of(dump)
    return state if state.startswith("failed") else f"was {state}"


def raised_at(dump: Dump) -> str:
    """``, at train.py:12``: the line of the user's program that raised a rank's error."""
    trace = dump.failure.trace if dump.failure is not None else []
    return location([frame for frame in trace if not frame.library]) or location_of(dump)


def stood_s(dump: Dump) -> float:
    """How long a rank has been in its call or in user code, or had been when it failed."""
    if dump.failure is None:
        return dump.when - dump.since
    if dump.failure.standing is None:
        return max(0.0, dump.failure.when - dump.since)
    failed = [call.seconds for call in dump.entries if call.error is not None]
    return (failed[-1] if failed else None) or 0.0


def amount(dump: Dump) -> str:
    """`` of 4 MB``: the payload of its call; empty for none."""
    return f" of {in_bytes(nbytes_of(dump))}" if nbytes_of(dump) else ""


def nbytes_of(dump: Dump) -> int:
    """Payload of the call that a rank is in, or was in when it failed."""
    if dump.failure is None:
        return dump.nbytes
    failed = [call.nbytes for call in dump.entries if call.error is not None]
    return failed[-1] if failed else 0


def said(dump: Dump) -> str:
    """A rank's error as a sentence; empty for none."""
    failure = dump.failure
    if failure is None:
        return ""
    text = shorten(failure.text)
    return sentence(f"{clean(failure.kind)}: {text}" if text else clean(failure.kind))


def numbered(operation: str | None, dump: Dump) -> str:
    """``all_reduce #17``: a call and its number."""
    return f"{clean(operation or 'user code')} #{dump.calls}"


def location_of(dump: Dump) -> str:
    """``, at train.py:12``: the line of the user's program that the main thread is in."""
    for stack in dump.stacks:
        if stack.main:
            return location(stack.frames)
    return ""


def location(frames: Sequence[Frame]) -> str:
    """``, at train.py:12``: the innermost line of the user's program in `frames`."""
    frame = _frame(frames)
    return f", at {clean(PurePath(frame.file).name)}:{frame.line}" if frame else ""


def source_of(dump: Dump) -> str:
    """The source of that line, if the rank is in user code."""
    frame = next((_frame(stack.frames) for stack in dump.stacks if stack.main), None)
    if frame is None or call_of(dump) is not None or not frame.text:
        return ""
    return f" ({shorten(frame.text, 60)})"


def _frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's program, or of any code if there is none."""
    own = [frame for frame in frames if not frame.library]
    shown = own or frames
    return shown[-1] if shown else None


def those(ranks: Sequence[int], several: str, one: str) -> str:
    """``ranks 0-2 and 5 wait``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts = []
    for span in spans:
        parts += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else [str(rank) for rank in span]
    if len(ranks) == 1:
        return f"rank {parts[0]} {one}"
    joined = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"ranks {joined} {several}"


def capital(text: str) -> str:
    """`text` as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def seconds(duration_s: float) -> str:
    """``1.5 s``, ``12 min``."""
    return f"{duration_s:.1f} s" if duration_s < 600 else f"{duration_s / 60:.0f} min"


def in_bytes(nbytes: int) -> str:
    """``80 bytes``, ``4.2 MB``."""
    return f"{nbytes} bytes" if nbytes < 10_000 else f"{nbytes / 1e6:.3g} MB"


def sentence(text: str) -> str:
    """`text` on one line, shortened, with a full stop."""
    short = shorten(text)
    return short if short.endswith((".", "!", "?")) else f"{short}."


def shorten(text: str, length: int = _TEXT_SHOWN) -> str:
    """`text` on one line, without control characters, cut to `length`."""
    line = " ".join(clean(text).split())
    return line if len(line) <= length else line[: length - 3] + "..."


def clean(text: str) -> str:
    """`text` without control characters."""
    return "".join(c if c.isprintable() else " " for c in text)
