"""What `tensorflow/` and `keras/` use of a communicator beside its public calls; not for users.

A ring that is formed anew has another session: each of these asks for it anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np

from ringreduce.collectives.base import Shared
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.session import Explainer
from ringreduce.engine.engine import Engine
from ringreduce.pure.claims import Claim
from ringreduce.pure.membership import Membership
from ringreduce.pure.spans import SpanKind
from ringreduce.pure.views import Row
from ringreduce.vocabulary.errors import RingReduceError


def membership_of(ring: Communicator) -> Membership:
    """Which ranks of the job it has now, and how often it was formed anew."""
    return ring._session.membership


def job_size(ring: Communicator) -> int:
    """How many ranks of its job there are now, also where `ring` is a group of some of them."""
    while ring.parent is not None:
        ring = ring.parent
    return ring.size


def newcomers_of(ring: Communicator) -> tuple[Row, ...]:
    """The ranks that the ring, as it is now, has taken in when it was formed; last in its order."""
    job = ring._session.job
    return () if job is None else job.agreement.view.newcomers


def lives_of(ring: Communicator) -> tuple[int, ...]:
    """By rank of the job, which of its processes was in the ring last."""
    job = ring._session.job
    return () if job is None else job.agreement.view.lives


def fail(ring: Communicator, error: RingReduceError) -> RingReduceError:
    """Break the ring with `error`; return it, or what has broken it before, to be raised.

    Every other rank gets that from its present or next call.
    """
    return ring._session.fail(error)


def check(ring: Communicator) -> None:
    """Raise the error of a call that may not begin: it is broken, closed, or refuses calls."""
    if ring._before_training is None or not ring._before_training.replays:
        ring._session.check()


def note_unkept(ring: Communicator, what: str) -> None:
    """Note a collective that `call` does not see as the program's, such as one in a graph.

    MismatchError at a newcomer before training: the others have made none.
    """
    if ring._before_training is not None:
        ring._before_training.note_other(what)


def refusing(ring: Communicator, error: Exception) -> AbstractContextManager[None]:
    """Within the block all calls of this thread raise `error`, before anything is sent.

    Those of groups too. Calls of other threads wait for its end.
    """
    return ring._session.refusing(error)


def explain_by(ring: Communicator, explainer: Explainer) -> None:
    """Have `explainer`, as long as it lives, asked for a better error where calls differ."""
    ring._session.lasting.explainers.add(explainer)


def claim(ring: Communicator, value: Claim) -> None:
    """Have the neighbours on the ring compare a value with theirs, without waiting.

    No collective: from any thread, at any time. A difference breaks the ring with a MismatchError.
    """
    ring._session.claim(value)


def engine_of(ring: Communicator) -> Engine:
    """The background thread, started by its first use. Raises ClosedError after `close`."""
    return ring._session.engine


def drain_engine(ring: Communicator) -> None:
    """Wait for what the background thread was given, if there is one."""
    if (engine := ring._session.lasting.engine) is not None:
        engine.drain()


def note_step(ring: Communicator, began_s: float, ended_s: float) -> None:
    """Note that a training step has lasted from one to the other, of `time.monotonic`."""
    ring._session.events.part(SpanKind.TRAINING, began_s, ended_s)


def note_blocked(ring: Communicator, seconds: float, reducing_s: float) -> None:
    """Note that a training step was blocked so long by reducing, which took that in any thread."""
    ring._session.blocked_for(seconds, reducing_s)


def share_count(ring: Communicator) -> int:
    """By what a number of elements is to be divisible for equal `shares`."""
    return ring._session.collectives.share_count


def shares(ring: Communicator, count: int, itemsize: int) -> list[tuple[int, int]]:
    """Where the share of each rank of an array of `count` elements begins and ends."""
    return ring._session.collectives.shares(count, itemsize)


def reduce_shares(ring: Communicator, flat: np.ndarray, signature: int) -> None:
    """Make this rank's share of `flat`, shape (n,), the mean over all ranks. Collective."""
    ring._session.calls.reduce_shares(flat, signature)


def gather_shares(ring: Communicator, flat: np.ndarray, signature: int) -> None:
    """Fill `flat`, shape (n,), with all ranks' shares of it. Collective."""
    ring._session.calls.gather_shares(flat, signature)


def shared_memory(ring: Communicator, sizes: Sequence[int]) -> list[Shared] | None:
    """Memory of so many bytes each, which the ranks of each host have in common. Collective.

    None where they cannot share any.
    """
    return ring._session.calls.share(sizes)
