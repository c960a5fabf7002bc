"""Keeps values for a communicator, a model or the like, as long as that lives."""

from typing import Any, TypeVar

_NAME = "_ringreduce_kept"
Kept = TypeVar("Kept")


def kept(owner: Any, kind: type[Kept]) -> Kept:
    """The `kind` that is kept for `owner`; made when it is first asked for, by ``kind()``.

    It is an attribute of its owner, which it may refer to; Keras saves and copies models without
    it.
    """
    # Not by setattr, which Keras tracks.
    table = vars(owner).setdefault(_NAME, {})
    if kind not in table:
        table.setdefault(kind, kind())  # Another thread may have made one.
    return table[kind]  # type: ignore[no-any-return]
