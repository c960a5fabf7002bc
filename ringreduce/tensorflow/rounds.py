"""The tensors of a plan's buckets on their way through the engine, in a graph and in XLA.

    gradients of bucket 0 --> start 0 --token--+--> wait 0 --> means of bucket 0
                                 |  engine     |
    gradients of bucket 1 --> start 1 --token--+--> wait 1 --> means of bucket 1

Every wait depends on every start, so that no wait holds a thread that a start needs; where XLA
compiles, every start also on the token of the collective before it, and the last wait on all
others.

XLA has its own memory for what it computes. What comes from elsewhere, such as weights that the
engine has gathered, it would copy there. So a compiled function may leave waits to the graph around
it, which takes results as they are (`collecting`).
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import engine_of
from ringreduce.effects.handoff import BucketItem, Layout
from ringreduce.pure.buckets import BucketPlan
from ringreduce.tensorflow import ops, order, xla

# The graph that is being traced, and what it has left so far.
_Left = list[Callable[[], None]]
_collecting: ContextVar[tuple[Any, _Left]] = ContextVar("collecting", default=(None, []))


@contextmanager
def collecting(left: _Left) -> Iterator[None]:
    """Append what is left in this graph to `left`, to be called in the graph around it."""
    token = _collecting.set((tf.compat.v1.get_default_graph(), left))
    try:
        yield
    finally:
        _collecting.reset(token)


def left_here() -> _Left | None:
    """What is left here to the graph around; None where that cannot be, as in a branch."""
    graph, left = _collecting.get()
    return left if graph is tf.compat.v1.get_default_graph() else None


def serve(
    owner: Any, ring: Communicator, layouts: list[Layout], run: Callable[[BucketItem], None]
) -> int:
    """Have the engine call `run` for each packed bucket as long as `owner` lives; its number."""
    engine = engine_of(ring)
    assert engine.native is not None
    number = engine.native.register(layouts)
    engine.serve(number, run)
    weakref.finalize(owner, engine.forget, number).atexit = False
    return number


class Round:
    """Hands over a tensor for each slot of `plan`, which the engine has under `number`.

    `given` are by gradient. XLA's own memory is used for buckets that are `in_place`.
    """

    def __init__(
        self,
        ring: Communicator,
        number: int,
        plan: BucketPlan,
        given: Sequence[Any],
        in_place: Sequence[bool] = (),
    ) -> None:
        self._ring, self._number = ring, number
        self._places = [[slot.gradient for slot in bucket.slots] for bucket in plan.buckets]
        parts = [[given[place] for place in places] for places in self._places]
        if xla.is_compiling():
            after = order.token(ring)
            each = enumerate(zip(parts, in_place or [False] * len(parts), strict=True))
            started = [xla.start(number, i, part, after, stays) for i, (part, stays) in each]
        else:
            with order.in_order(ring):
                started = [[ops.start(number, i, part)] for i, part in enumerate(parts)]
        self._kept = [kept for *kept, _ in started]
        self._tokens = [token for *_, token in started]

    def give(self, kinds: Sequence[Any], use: Callable[[list[Any]], None]) -> None:
        """Call `use` with the results, in the order of the gradients; later if that can be."""
        if (left := left_here()) is None:
            use([*self.results(kinds).values()])
            return
        order.follow(self._ring, self._tokens[-1])
        self._tokens = []
        left.append(lambda: use([*self.results(kinds).values()]))

    def results(self, kinds: Mapping[int, Any] | Sequence[Any]) -> dict[int, Any]:
        """What the engine has made of them, by gradient; `kinds` are shape and dtype of each."""
        likes = [
            [(tf.TensorShape(kinds[place][0]), tf.as_dtype(kinds[place][1])) for place in places]
            for places in self._places
        ]
        waited = self._compiled(likes) if xla.is_compiling() else self._in_graph(likes)
        chained = itertools.chain.from_iterable
        found = zip(chained(self._places), chained(waited), strict=True)
        return dict(sorted(found, key=itemgetter(0)))

    def _in_graph(self, likes: Sequence[Any]) -> list[list[Any]]:
        tokens = self._tokens or [order.token(self._ring)]
        waited = [ops.wait(self._number, i, like, tokens) for i, like in enumerate(likes)]
        order.done(self._ring, list(itertools.chain.from_iterable(waited)))
        return waited

    def _compiled(self, likes: Sequence[Any]) -> list[list[Any]]:
        waited: list[list[Any]] = []
        over: list[Any] = []
        for place, (like, kept) in enumerate(zip(likes, self._kept, strict=True)):
            # The last wait keeps XLA from dropping the others.
            last = place == len(likes) - 1
            before = [*self._tokens, *over] if last else self._tokens
            *results, token = xla.wait(self._number, place, like, before, kept, last)
            waited.append(results)
            over.append(token)
        order.follow(self._ring, over[-1])
        return waited
