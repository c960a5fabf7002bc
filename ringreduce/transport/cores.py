"""Whether the ranks of a host have a core each, which decides how they wait."""

from __future__ import annotations

from ringreduce.vocabulary.cores import usable_cores


def are_crowded(ranks: int) -> bool:
    """Whether `ranks` share the cores that this process may use."""
    return ranks > usable_cores()
