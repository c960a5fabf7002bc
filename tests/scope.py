"""What a change is tested with, and what only `make test-full` adds."""

from typing import Any

import pytest

__all__ = ["in_full"]


def in_full(*values: Any) -> Any:
    """Values of a parametrization that only `make test-full` runs.

    For a combination in which the code takes no branch that others do not take.
    """
    return pytest.param(*values, marks=pytest.mark.full)
