"""What a step that XLA compiles leaves to the graph around it.

    with later.collecting(left):      in the function that is compiled
        ... later.leave(work) ...
    for work in left: work()          in the graph around it, after its call

XLA has its own memory for what it computes. What comes from elsewhere, such as weights that the
engine has gathered, it would copy there; the graph around it takes them as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

_Work = Callable[[], None]
# The graph that is being traced, and what it has left so far.
_collecting: ContextVar[tuple[Any, list[_Work]] | None] = ContextVar("collecting", default=None)


@contextmanager
def collecting(left: list[_Work]) -> Iterator[None]:
    """Have the work that is left within the block, in this graph, appended to `left`."""
    token = _collecting.set((tf.compat.v1.get_default_graph(), left))
    try:
        yield
    finally:
        _collecting.reset(token)


def is_possible() -> bool:
    """Whether work can be left here: not in a branch, which may not run."""
    now = _collecting.get()
    return now is not None and now[0] is tf.compat.v1.get_default_graph()


def leave(work: _Work) -> None:
    """Have `work` called where the graph around this one is traced, after its call of this one."""
    now = _collecting.get()
    assert now is not None
    now[1].append(work)
