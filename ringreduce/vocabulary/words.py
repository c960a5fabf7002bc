"""Words that many messages share."""

from collections.abc import Iterable

_NAMED_MAX = 16


def named(kind: str, numbers: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 1, 3``; of many the first sixteen."""
    texts = list(map(str, numbers))
    more = ", ..." if len(texts) > _NAMED_MAX else ""
    return f"{kind}{'' if len(texts) == 1 else 's'} {', '.join(texts[:_NAMED_MAX])}{more}"
