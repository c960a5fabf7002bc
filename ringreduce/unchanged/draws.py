"""Random numbers without a seed: alike on all ranks, and others in each process that a rank forks.

A forked process has the generators of its parent, and would draw what that and its siblings draw.
Its numbers follow from its place among the forks: the same on all ranks whose programs fork alike.
What plain Python draws alike in all forks, by ``numpy.random.rand`` for one, stays so.
"""

import itertools
import os
import random
import sys
import threading
from typing import Any

SEED = 1


class _Forks:
    # Of this process and those it comes from, up to the rank: which of its parent's forks it was.
    path: tuple[int, ...] = ()
    made = 0
    # Held while a process forks: else two threads at once might make children with one number.
    lock = threading.RLock()
    # That TensorFlow had from us last.
    tensorflow_seed: int | None = None


def begin() -> None:
    """Seed Python's own generator, here and in all processes that this one forks."""
    random.seed(_number(32))
    os.register_at_fork(
        before=_count, after_in_parent=_Forks.lock.release, after_in_child=_begin_in_child
    )


def begin_numpy() -> None:
    """Seed what numpy draws, also in generators that are made without a seed."""
    sys.modules["numpy"].random.seed(_number(32))
    _seed_new_generators()


def begin_tensorflow() -> None:
    """Seed what TensorFlow draws."""
    _Forks.tensorflow_seed = _number(31)
    sys.modules["tensorflow"].random.set_seed(_Forks.tensorflow_seed)


def _seed_new_generators() -> None:
    numbers = itertools.count(1)
    # This draws the seeds of all generators of numpy made without one.
    bit_generator: Any = sys.modules["numpy"].random.bit_generator
    bit_generator.randbits = lambda bits: _number(bits, next(numbers))


def _number(bits: int, *parts: object) -> int:
    """A number below 2^bits, this process's own, for these parts."""
    if not (_Forks.path or parts):
        return SEED
    return random.Random(repr((_Forks.path, parts))).getrandbits(bits)


def _count() -> None:
    _Forks.lock.acquire()
    _Forks.made += 1


def _begin_in_child() -> None:
    _Forks.path, _Forks.made = (*_Forks.path, _Forks.made), 0
    _Forks.lock.release()
    # Of its own accord Python seeds this with other numbers on each rank.
    random.seed(_number(32))
    if "numpy" in sys.modules:
        _seed_new_generators()
    if _Forks.tensorflow_seed is not None:
        context = sys.modules["tensorflow.python.eager.context"]
        # One that has begun to compute cannot go on in a fork. A seed of the program's stays.
        is_ours = context.global_seed() == _Forks.tensorflow_seed
        if is_ours and not context.context()._initialized:
            begin_tensorflow()
