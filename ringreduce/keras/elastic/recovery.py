"""Brings the ranks that are left after a loss together; for `rr.fit` and loops of one's own."""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ringreduce.commands.launch import conclusion, handover
from ringreduce.commands.launch.worker_records import Goes, Reformed
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.integration import lives_of, membership_of
from ringreduce.communicator.rank_zero import on_rank_zero
from ringreduce.communicator.reforming import EndedError, answer_others, reform
from ringreduce.pure.views import Row
from ringreduce.tensorflow.kept import kept
from ringreduce.vocabulary.errors import (
    PeerError,
    PeerTimeoutError,
    RendezvousError,
    RingReduceError,
)
from ringreduce.vocabulary.words import named

_log = logging.getLogger(__name__)

# A step that fails so often is not repeated, unless training has gone on meanwhile.
REPEATS_MAX = 8


class _Trainings:
    """How many this rank has begun that end together."""

    begun = 0


@contextlib.contextmanager
def ending_together(ring: Communicator) -> Iterator[int]:
    """Around what is made again on `ring` after losses, and ends with an exchange `at_end`.

    If a rank is lost in that, some have left it, and the others leave it as soon as they know.
    Gives the number of such trainings of this ring.
    """
    (trainings := kept(ring, _Trainings)).begun += 1
    answer_others(ring, has_ended=False, training=trainings.begun)
    with contextlib.suppress(EndedError):
        yield trainings.begun
    answer_others(ring, has_ended=True, training=trainings.begun)


def go_on(
    ring: Communicator,
    error: RingReduceError | None,
    minimum: int,
    where: str,
    catch_up: Callable[[], None],
    back_up: Callable[[], str],
    *,
    at_end: Callable[[], bool],
    leaving: Mapping[int, str] = MappingProxyType({}),
    newcomers: Collection[Row] = (),
) -> None:
    """Form `ring`, which `error` has broken, anew; then `catch_up` brings all to one point.

    That is collective, and made again where one more rank is lost. `where` says in an error and in
    the log when it was: ``in step 7``. `at_end` as `reform`; it is asked again after `catch_up`.
    Without `error` all ranks know that those of `leaving` leave, and what has told them to, or that
    the first rank may bring `newcomers`. If one more rank is lost meanwhile none of these come.

    Raises:
        RendezvousError: fewer than `minimum` ranks are left, before the end. Then rank 0 has called
            `back_up`, which says how to go on. Or as `reform`.
        PeerError: as `reform`.
        EndedError: as `reform`.
    """
    began, before = time.monotonic(), ring.members
    for attempts_left in reversed(range(REPEATS_MAX)):
        try:
            # One whose connection has ended may be in a callback.
            late = []
            if isinstance(error, PeerTimeoutError) and error.peer not in (None, ring.config.rank):
                late = [error.peer]
            how: Any = {"leaving": leaving, "newcomers": newcomers} if error is None else {}
            reform(ring, late, at_end=at_end(), **how)
            gone = sorted({*before} - {*ring.members})
            lost = named("rank", gone)
            catch_up()
            if ring.size >= minimum or any(ring.all_gather_object(at_end())):
                break
            raise RendezvousError(
                f"has {ring.size} ranks left without {lost}, lost {where}, and was to go on "
                f"with at least {minimum}",
                **ring.config.who,
                peer=gone[0],
                remedy=f"See the log of {lost}. {on_rank_zero(back_up, communicator=ring)}",
            )
        except PeerError as another:  # One more is lost.
            if not attempts_left:
                raise
            error = another
    seconds = time.monotonic() - began
    membership = membership_of(ring)
    told = Reformed(membership.epoch, membership.members, where, seconds, lives_of(ring))
    is_said = handover.tell(told)
    if gone and not is_said:
        how = f"lost {lost} {where}"
        if {*gone} <= {*leaving}:
            how = conclusion.left({r: Goes({r: leaving[r]}, where, 0) for r in gone})
        _log.warning(
            "[%d/%d] %s; %s went on after %.1f s",
            *(ring.config.rank, ring.config.size, how, named("rank", ring.members), seconds),
        )
