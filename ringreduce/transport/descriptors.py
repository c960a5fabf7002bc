"""File descriptors: ensured before a ring forms, since without them libzmq aborts; and borrowed."""

import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator

from ringreduce.pure.networks import OFFERED_MAX
from ringreduce.vocabulary.errors import ConfigError

# Descriptors of a pair of sockets: the two, two monitors with two ends each, two connections, an
# attempt at each address before; and listeners.
_PER_CHANNEL = 8 + OFFERED_MAX
# A connection at the rendezvous; two connections, a segment and a standing within the host.
_PER_RANK = 5
# Contexts, their threads, the authenticator, the rendezvous, silent strangers at the Unix socket,
# and what the program opens meanwhile.
_ALWAYS = 80


def needed(size: int, channels: int, streams: int, addresses: int = 1) -> int:
    """Most descriptors that a rank of `size` opens while it forms, listening at `addresses`."""
    per_channel = _PER_CHANNEL + addresses
    return _ALWAYS + per_channel * channels + 2 * streams + _PER_RANK * size


def reserve(count: int, *, rank: int, size: int) -> None:
    """Ensure that `count` more files can be opened, by a higher soft limit; or ConfigError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        is_open = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        # There is no descriptor left even to list them, or no such folder.
        is_open = soft if error.errno in (errno.EMFILE, errno.ENFILE) else 32
    wanted = is_open + count
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        text = f"may open {hard} files, of which {is_open} are open, and needs up to {count} more"
        remedy = f"Raise the limit of open files (ulimit -n) to {wanted} at least."
        raise ConfigError(text, rank=rank, size=size, remedy=remedy)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A Python socket for a descriptor that somebody else owns, such as libzmq; or OSError."""
    duplicate = os.dup(descriptor)  # A Python socket closes what it is given.
    try:
        opened = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with opened:
        yield opened
