"""Room for the files and sockets that a ring needs, made before it is needed.

libzmq ends the whole process when it runs out of descriptors at some places (it asserts that an
event descriptor or a poll set can be had). So a rank counts before it starts.
"""

from __future__ import annotations

import os

from ringreduce.errors import ConfigError

__all__ = ["needed", "reserve"]

# Of a pair of sockets: the two, two monitors with two ends each, a listener, two connections.
_PER_CHANNEL = 9
# A connection at the rendezvous; one, a segment and a spare within the host.
_PER_RANK = 4
# Contexts, their threads, the doorkeeper, the rendezvous, and what the program opens meanwhile.
_ALWAYS = 64


def needed(size: int, channels: int, streams: int) -> int:
    """Descriptors that a rank of a ring of `size` opens at most while it forms."""
    return _ALWAYS + _PER_CHANNEL * channels + 2 * streams + _PER_RANK * size


def reserve(count: int, *, rank: int, size: int) -> None:
    """See to it that this process may open `count` more files; raises its own limit if need be.

    Raises:
        ConfigError: the hard limit is too low for that.
    """
    try:
        import resource
    except ImportError:  # No such limits here.
        return
    try:
        is_open = len(os.listdir("/proc/self/fd"))
    except OSError:
        is_open = 32
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = is_open + count
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"may open {hard} files, of which {is_open} are open, and needs up to {count} more",
            rank=rank,
            size=size,
            remedy=f"Raise the limit of open files (ulimit -n) to {wanted} at least.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
