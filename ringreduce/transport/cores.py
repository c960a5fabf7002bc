"""Whether the ranks of a host have a core each, which decides how they wait."""

from __future__ import annotations

import os


def are_crowded(ranks: int) -> bool:
    """Whether `ranks` share the cores that this process may use."""
    return ranks > len(os.sched_getaffinity(0))
