"""Groups: sessions of a part of another session's ranks."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ringreduce.communicator.formation import form_group, take_no_part
from ringreduce.communicator.session import Lasting, Session
from ringreduce.pure.membership import GROUPS_MAX, Choice, Membership
from ringreduce.pure.wire import Kind, signature_of
from ringreduce.vocabulary.errors import ArrayError, PeerLostError, RendezvousError


def split(parent: Session, color: int | str | None, key: int) -> Session | None:
    """The session of the ranks that pass the same color, this one among them.

    All ranks of `parent` must call it; raises as `Communicator.split`.
    """
    config, membership, job = parent.config, parent.membership, parent.job
    joined = _own_group(parent, color, key)
    form = None
    if joined is not None and joined.size > 1:
        assert job is not None
        form = functools.partial(form_group, job, joined, _Parent(parent), parent.check)
    elif membership.size > 1:
        assert job is not None
        take_no_part(job, _Parent(parent))
    if joined is None:
        return None
    try:
        group = Session(config, joined, job, form, Lasting())
    except PeerLostError:
        # A member that learns sooner that the parent has broken leaves the group, and seems lost.
        parent.check_soon()
        raise
    parent.groups.add(group)
    return group


class _Parent(NamedTuple):
    """Exchanges what ranks need to form groups, by the collectives of `session`."""

    session: Session

    def exchange(self, value: Any, why: str = "") -> dict[int, Any]:
        """Return each parent rank's value, by rank; RendezvousError if one says `why` it failed."""
        parent = self.session
        told = parent.calls.gather(Kind.SPLIT, [value, why], signature_of("split", "announced"))
        for rank, (_, reason) in zip(parent.membership.members, told, strict=True):
            if reason and rank != parent.config.rank:
                raise RendezvousError(
                    f"cannot form a group: rank {rank} failed with {reason}",
                    **parent.config.who,
                    peer=rank,
                    remedy=f"Read rank {rank}'s log first.",
                )
        return dict(zip(parent.membership.members, (passed for passed, _ in told), strict=True))

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Say why this rank fails to those that wait for what it passes."""
        try:
            yield
        except BaseException as error:
            self.exchange(None, f"{type(error).__name__}: {error}")
            raise


def _own_group(parent: Session, color: int | str | None, key: int) -> Membership | None:
    """The group that this rank will be in; None for none."""
    membership, job = parent.membership, parent.job
    highest = 0 if job is None else job.highest_group
    told = parent.calls.gather(Kind.SPLIT, (color, key, highest), signature_of("split"))
    groups = membership.split([Choice(*choice) for choice in told])
    if groups and groups[-1].group >= GROUPS_MAX:
        # The same on all ranks, and nothing was formed.
        raise ArrayError(
            f"cannot split: the job has formed {GROUPS_MAX - 1} groups, as many as have numbers",
            **parent.config.who,
            remedy="Form groups once, and use them again.",
        )
    if job is not None:
        job.highest_group = max(job.highest_group, *(group.group for group in groups), 0)
    return next((group for group in groups if parent.config.rank in group.members), None)
