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
from pathlib import PurePath
from typing import Any

from ringreduce.unchanged.job import job
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.own_folder import own_folder
from ringreduce.vocabulary.words import for_rr

_log = logging.getLogger(__name__)
_WRITING = os.O_WRONLY | os.O_RDWR
# In the order in which they were found.
_names: dict[str, None] = {}
_told = 0


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


class _Downloads:
    """This process's part in downloads, of which one process of a host and user makes some."""

    def __init__(self) -> None:
        # Held while this process waits for others: then all its threads wait.
        self.entry = threading.Lock()
        self.under_way = 0
        self.file = -1  # locked while any is under way
        self.process = os.getpid()


_downloads = _Downloads()


@contextlib.contextmanager
def alone_on_host() -> Iterator[None]:
    """Within the block no other process of this host and user is in one: the first downloads.

    A block may be within another, and threads of a process may be in one at a time, as a download
    that makes others needs it; so may processes that it has forked. ConfigError where other users
    could hold or exchange the file that is locked.
    """
    ours = _downloads
    if os.getpid() != ours.process:
        yield
        return
    with ours.entry:
        if not ours.under_way:
            ours.file = _locked()
        ours.under_way += 1
    try:
        yield
    finally:
        with ours.entry:
            ours.under_way -= 1
            if not ours.under_way:
                fcntl.flock(ours.file, fcntl.LOCK_UN)  # A forked child has the file open too.
                os.close(ours.file)


def _locked() -> int:
    """Wait for other processes, and return the descriptor of the file that they find locked."""
    try:
        # Without O_NONBLOCK a pipe could block here.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(os.path.join(own_folder(), "download.lock"), flags, 0o600)
        try:
            _wait_for(file)
            os.ftruncate(file, 0)
            rank, size = job().who.values()
            us = f"process {os.getpid()}, rank {rank} of {size} of {os.path.basename(sys.argv[0])},"
            os.pwrite(file, us.encode(), 0)
        except BaseException:  # Ctrl-C, above all.
            os.close(file)
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot have one process at a time download: {error}",
            **job().who,
            remedy="Set TMPDIR to a folder of your own, the same for all ranks of a host; or "
            "remove what is in the way.",
        ) from error
    return file


def _wait_for(file: int) -> None:
    """Lock the file of this descriptor; log who has it, where that takes long."""
    began, is_told = time.monotonic(), False
    while not _try_to_lock(file):
        waited_s = time.monotonic() - began
        if waited_s > TIMES.remind_s and not is_told:
            is_told = True
            holder = os.pread(file, 1000, 0).decode(errors="replace") or "another process"
            _log.warning(
                "[%d/%d] has waited %.0f s to download, which one process of a host does at a time "
                "under --unchanged: %s is at it. This rank goes on when that is done or has ended.",
                *(*job().who.values(), waited_s, holder),
            )
        time.sleep(TIMES.poll_s)


def _try_to_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def watch(is_left_out: Callable[[], bool]) -> None:
    """From now on note files that this process opens to write, unless `is_left_out`."""
    temporary = tempfile.gettempdir() + os.sep
    ours = os.path.join(temporary, "ringreduce-")
    places = ("/dev/", "/proc/", os.path.expanduser("~/.keras/"), ours)
    own: set[str] = set()  # what `tempfile` has made, under a name that no other rank has

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("tempfile.mkstemp", "tempfile.mkdtemp"):
            own.add(os.path.abspath(os.fsdecode(arguments[0])))
        if event != "open":
            return
        path, _, flags = arguments
        if isinstance(path, str) and (flags & _WRITING) and not is_left_out():
            path = os.path.abspath(path)
            is_own = not own.isdisjoint((path, *map(str, PurePath(path).parents)))
            # A folder too: for a nameless file in it.
            is_left = f"{path}{os.sep}".startswith(places) or f"{path}{os.sep}" == temporary
            if not (is_own or is_left or "__pycache__" in path):
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
            "[%d/%d] each rank has written %s%s: what is appended is there %d times. Only what is "
            "saved through Keras, such as by CSVLogger, is written once. Write by that; or once, "
            "with %s.",
            *job().who.values(),
            ", ".join(first),
            more,
            job().size,
            for_rr("rr.on_rank_zero"),
        )
