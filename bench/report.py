"""Results: rows under a header with the facts of the run, as a file and as text."""

from __future__ import annotations

import json
from typing import Any

from bench.facts import facts


def describe(header: dict[str, Any], what: str) -> None:
    """Print the lines above a table: command, machine, what is measured, and the ceilings."""
    print(f"# {header['command']}  (commit {header['commit']})")
    print(f"# {header['cpu']}, {header['cores']} cores; {what}")
    print(
        f"# ceilings in this run: memcpy {header['memcpy_gb_s']} GB/s, "
        f"one loopback stream {header['loopback_stream_gb_s']} GB/s",
        flush=True,
    )


def write(
    path: str | None, rows: list[dict[str, Any]], header: dict[str, Any] | None = None
) -> None:
    """Write ``{"header": facts, "rows": rows}`` to `path`; nothing when it is None."""
    if path is None:
        return
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"header": header or facts(), "rows": rows}, file, indent=2)
        file.write("\n")
