"""Results as files: rows under a header that says where they come from."""

from __future__ import annotations

import json
from typing import Any

from bench.facts import facts


def write(
    path: str | None, rows: list[dict[str, Any]], header: dict[str, Any] | None = None
) -> None:
    """Write ``{"header": facts, "rows": rows}`` to `path`; nothing when it is None."""
    if path is None:
        return
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"header": header or facts(), "rows": rows}, file, indent=2)
        file.write("\n")
