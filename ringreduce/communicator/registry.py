"""All sessions of this process: what becomes of them when Python ends, or forks."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Registered(Protocol):
    """A session, as the process sees it."""

    def inherit(self) -> None:
        """Refuse to work: this is a forked child's copy."""

    def close(self) -> None:
        """Leave the ring."""


opened: weakref.WeakSet[Registered] = weakref.WeakSet()
# Those with sockets live until they are closed: a context of libzmq that is collected as garbage
# waits forever for its sockets.
formed: set[Registered] = set()


def _inherit_all() -> None:
    """In a forked child: its copies refuse to work, since the sockets are the parent's."""
    for session in {*opened, *formed}:
        session.inherit()


os.register_at_fork(after_in_child=_inherit_all)


@atexit.register
def _close_all() -> None:
    """At exit, notify the ranks that wait for this one and release waiting framework threads."""
    for session in list(opened):
        session.close()
