"""The stacks of this process's threads, as frames for a flight record."""

import linecache
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import FrameType

from ringreduce.pure.flight import FRAMES_MAX, NAME_MAX, THREADS_MAX, Frame, Stack, cut

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# Parts of paths of Python and of installed packages, on any system.
_LIBRARY_PATHS = ("/lib/python", "site-packages", "dist-packages", "<frozen")


def stacks() -> list[Stack]:
    """Each thread's stack, the main thread's first."""
    name_of = thread_names()
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: (item[0] != main, item[0]))
    result = []
    for thread, frame in frames[:THREADS_MAX]:
        walked = islice(traceback.walk_stack(frame), FRAMES_MAX)
        found = [_frame(passed, line or 0) for passed, line in walked][::-1]
        result.append(Stack(thread=name_of(thread), main=thread == main, frames=found))
    return result


def thread_names() -> Callable[[int], str]:
    """Names of threads by their numbers."""
    known = {thread.ident: thread.name for thread in threading.enumerate()}
    return lambda thread: cut(known.get(thread, f"thread {thread}"), NAME_MAX)


def trace(error: BaseException) -> list[Frame]:
    """The innermost frames of `error`'s traceback."""
    kept = deque(traceback.walk_tb(error.__traceback__), maxlen=FRAMES_MAX)
    return [_frame(frame, line) for frame, line in kept]


def _frame(frame: FrameType, line: int) -> Frame:
    file = frame.f_code.co_filename
    library = file.startswith(_PACKAGE) or any(part in file for part in _LIBRARY_PATHS)
    # No source lines of libraries: reading them would take longer than all the rest.
    text = "" if library or file.startswith("<") else linecache.getline(file, line).strip()
    function, text = cut(frame.f_code.co_name, NAME_MAX), cut(text, NAME_MAX)
    return Frame(cut(file), line, function, text, library)
