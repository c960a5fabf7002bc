"""Groups: sessions of a part of another session's ranks."""

from __future__ import annotations

import functools
from typing import Any

from ringreduce.communicator.formation import form_group, take_no_part
from ringreduce.communicator.lasting import Lasting
from ringreduce.communicator.session import Session
from ringreduce.pure.membership import GROUPS_MAX, Choice, Membership
from ringreduce.pure.wire import Kind, signature_of
from ringreduce.vocabulary.errors import ArrayError, MismatchError


def split(parent: Session, color: int | str | None, key: int) -> Session | None:
    """The session of the ranks that pass the same color, this one among them.

    All ranks of `parent` must call it; raises as `Communicator.split`.
    """
    config, membership, job = parent.config, parent.membership, parent.job
    own = _own_group(parent, color, key)

    def exchange(value: tuple[Any, ...]) -> dict[int, list[Any]]:
        found = parent.gather(Kind.SPLIT, value, signature_of("split", "announced"))
        return dict(zip(membership.members, found, strict=True))

    form = None
    if own is not None and own.size > 1:
        assert job is not None
        form = functools.partial(form_group, config, job, own, exchange, parent.check)
    elif membership.size > 1:
        assert job is not None
        take_no_part(config, job, exchange)
    if own is None:
        return None
    group = Session(config, own, job, form, Lasting())
    parent.adopt(group)
    return group


def _own_group(parent: Session, color: int | str | None, key: int) -> Membership | None:
    """The group that this rank will be in; None for none."""
    membership, job = parent.membership, parent.job
    highest = 0 if job is None else job.highest_group
    told = parent.gather(Kind.SPLIT, (color, key, highest), signature_of("split"))
    choices = [Choice(*each) for each in told]
    if len({type(choice.color) for choice in choices} - {type(None)}) > 1:
        named = zip(membership.members, choices, strict=True)
        shown = ", ".join(f"rank {rank} {choice.color!r:.40}" for rank, choice in named)
        raise parent.fail(
            MismatchError(
                f"cannot split by colors of different types: {shown:.300}",
                rank=parent.config.rank,
                size=parent.config.size,
                operation="split",
                remedy="Pass whole numbers or text on all ranks, or None to take no part.",
            )
        )
    groups = membership.split(choices)
    if groups and groups[-1].group >= GROUPS_MAX:
        # The same on all ranks, and nothing was formed.
        raise ArrayError(
            f"cannot split: the job has formed {GROUPS_MAX - 1} groups, as many as have numbers",
            rank=parent.config.rank,
            size=parent.config.size,
            remedy="Form groups once, and use them again.",
        )
    if job is not None:
        job.highest_group = max(job.highest_group, *(each.group for each in groups), 0)
    return next((each for each in groups if parent.config.rank in each.members), None)
