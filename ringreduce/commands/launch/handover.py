"""A worker's side of the pipe to its launcher, and of what it says of an exception."""

import os
import re
import runpy
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from traceback import StackSummary, TracebackException, walk_tb

from ringreduce.commands.launch.frames import encode
from ringreduce.commands.launch.standings import Standings
from ringreduce.commands.launch.worker_records import Raised, WorkerRecord
from ringreduce.pure.views import Standing
from ringreduce.vocabulary.errors import RingReduceError, record_fields

_PACKAGE = f"{Path(__file__).parents[2]}{os.sep}"
# Files that call a program or function: the first frames of its traceback are from there.
_CALLERS = (
    f"{_PACKAGE}commands",
    f"{_PACKAGE}ray",
    f"{_PACKAGE}unchanged",
    runpy.__file__,
    "<frozen ",
)
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
_KEPT_FAILURES = 8  # a program may form several rings
_TEXT_MAX = 1 << 18
# Such a line in the text of an exception names its cause.
_CAUSE = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt|Warning)\b(: .*)?")

_lock = threading.Lock()
# The pipe, and the process that has it; a forked child must not speak for its parent.
_pipe: tuple[int, int] | None = None
_failures: deque[RingReduceError] = deque(maxlen=_KEPT_FAILURES)
_standings: Standings | None = None  # what the launcher knows of all ranks
exiting = ""  # the SystemExit that ends the program, which atexit does not see


def use_pipe(descriptor: int) -> None:
    """From now on `tell` writes to `descriptor`, which no child inherits."""
    global _pipe
    os.set_inheritable(descriptor, False)
    _pipe = descriptor, os.getpid()


def use_standings(descriptor: int) -> None:
    """From now on `word_of` reads what the launcher writes into that file."""
    global _standings
    os.set_inheritable(descriptor, False)
    _standings = Standings(descriptor)


def word_of(rank: int, life: int = 0) -> Standing | None:
    """What the launcher knows of a rank of the job, on whichever host; None without a launcher.

    `life` is the one of its processes that is meant (`pure.views.Row`).
    """
    return None if _standings is None else _standings.read(rank, life)


def tell(record: WorkerRecord) -> bool:
    """Hand a record to the launcher; return whether there is one that took it."""
    if _pipe is None or _pipe[1] != os.getpid():
        return False
    data = encode(record)
    try:
        with _lock:
            while data:
                data = data[os.write(_pipe[0], data) :]
    except OSError:  # The launcher was killed.
        return False
    return True


def note_failure(error: RingReduceError) -> None:
    """Remember what has broken a ring of this process: exceptions of others may quote it."""
    _failures.append(error)


def described(error: BaseException) -> Raised:
    """Describe an exception that ends a program, or a function."""
    ring = next((link for link in _chain(error) if isinstance(link, RingReduceError)), None)
    text = str(error)
    ring = ring or next((failure for failure in _failures if failure.is_quoted_in(text)), None)
    fields = record_fields(ring or error)
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            place = place_of(error)
            named = f"SystemExit: {error.code} in {place}" if place else ""
            return Raised(**fields, exception=named, code=error.code & 255)
        return Raised(**fields, exception=_named(error))
    whole, shown = _lines(error), _lines(error, hides=(_PACKAGE, *_frameworks()))
    whole = whole if whole != shown else []
    return Raised(**fields, exception=_named(error), traceback=shown, whole=whole)


def _frameworks() -> list[str]:
    """The folders of Keras and TensorFlow, if their frames are left out of tracebacks."""
    modules = [sys.modules.get(name) for name in ("keras", "tensorflow")]
    is_filtering = getattr(
        getattr(modules[0], "config", None), "is_traceback_filtering_enabled", None
    )
    if is_filtering is None or not is_filtering():
        return []
    files = [getattr(module, "__file__", None) for module in modules]
    return [f"{Path(file).parent}{os.sep}" for file in files if file]


def place_of(error: BaseException) -> str:
    """The line of the program that raised an exception: ``train.py:12``; empty if unknown."""
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [place for place in places if not place[0].startswith((*_CALLERS, *_LIBRARIES))]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that it follows from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _lines(error: BaseException, hides: tuple[str, ...] = ()) -> list[str]:
    """The traceback, from the program's first frame on, without frames of files below `hides`.

    The last one stays, which raised it, unless that is an error of ours, whose text says all.
    """
    start = error.__traceback__
    while start and start.tb_frame.f_code.co_filename.startswith(_CALLERS):
        start = start.tb_next
    described = TracebackException(type(error), error, start)
    if hides and isinstance(error.__cause__, RingReduceError):
        described.__cause__ = None  # The same error, as it was raised first.
    link: TracebackException | None = described
    raised: BaseException | None = error
    while hides and link is not None and raised is not None:
        last = None if isinstance(raised, RingReduceError) else link.stack[-1:]
        frames = [frame for frame in link.stack if not frame.filename.startswith(hides)]
        if last and last != frames[-1:]:
            frames += last
        link.stack = StackSummary.from_list(frames)
        is_caused = link.__cause__ is not None
        link = link.__cause__ if is_caused else link.__context__
        raised = raised.__cause__ if is_caused else raised.__context__
    return _text(described.format())


def _named(error: BaseException) -> str:
    """The line that names an exception; after one that ends with a colon, what it announces."""
    lines = _text(TracebackException(type(error), error, None).format_exception_only())
    # In a SyntaxError's text, others come first.
    start = next((i for i, line in enumerate(lines) if not line.startswith(" ")), 0)
    first, rest = lines[start], [line.strip() for line in lines[start + 1 :]]
    if not first.endswith(":"):
        return first
    causes = (line for line in rest if _CAUSE.fullmatch(line))
    return f"{first} {next(causes, next(filter(None, rest), ''))}".rstrip()


def _text(parts: Iterable[str]) -> list[str]:
    """The lines of a text, with a cut in the middle of a long one."""
    text = "".join(parts).encode(errors="backslashreplace").decode()
    if len(text) > _TEXT_MAX:
        text = f"{text[: _TEXT_MAX // 2]}\n...\n{text[-_TEXT_MAX // 2 :]}"
    return text.splitlines() or [""]
