"""Files and folders that each rank of an unchanged program makes: ``open`` stays as it is."""

import contextlib
import fcntl
import functools
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ringreduce.unchanged.job import job

_log = logging.getLogger(__name__)
_WRITING = os.O_WRONLY | os.O_RDWR
# In the order in which they were found.
_names: dict[str, None] = {}
_told = 0
_lock = threading.Lock()


def share_folders() -> None:
    """From now on a folder that another rank has just made is no error."""
    make, began = os.mkdir, time.time() - 2.0  # Ranks start at about the same time.

    @functools.wraps(make)
    def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
        try:
            make(path, *arguments, **options)
        except FileExistsError:
            if options or os.stat(path).st_ctime < began:
                raise

    os.mkdir = mkdir


@contextlib.contextmanager
def alone_on_host() -> Iterator[None]:
    """Within the block no other process of this host and user is in one: the first downloads."""
    name = os.path.join(tempfile.gettempdir(), f"ringreduce-download-{os.geteuid()}.lock")
    with _lock, open(name, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def watch(is_left_out: Callable[[], bool]) -> None:
    """From now on note files that this process opens to write, unless `is_left_out`."""
    places = ("/dev/", "/proc/", tempfile.gettempdir() + os.sep, os.path.expanduser("~/.keras/"))

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open":
            return
        path, _, flags = arguments
        if isinstance(path, str) and (flags & _WRITING) and not is_left_out():
            path = os.path.abspath(path)
            # A folder too: for a nameless file in it.
            if not f"{path}{os.sep}".startswith(places) and "__pycache__" not in path:
                _names.setdefault(os.path.relpath(path))

    sys.addaudithook(look)


def found(rank: int) -> list[str]:
    """List for rank 0 the files that this rank has written since it was asked last."""
    global _told
    new = list(_names)[_told:]
    _told = len(_names)
    return new if rank else []


def note(names: Iterable[str]) -> None:
    """Add what other ranks have written."""
    _names.update(dict.fromkeys(names))


def warn() -> None:
    """At exit: rank 0 says in a line what every rank has written."""
    if job().rank == 0 and _names:
        first, rest = list(_names)[:3], len(_names) - 3
        more = f" and {rest} more" if rest > 0 else ""
        _log.warning(
            "[%d/%d] each rank has written %s%s: only what is saved through Keras is written once.",
            *job().who.values(),
            ", ".join(first),
            more,
        )
