"""Measure a collective over a range of sizes: spawn the ring, print a table, write rows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench import report
from bench.facts import facts
from ringreduce.commands.launch.plan import JobPlan
from ringreduce.commands.launch.supervisor import supervise

COLUMNS = f"{'size':>11} {'count':>11} {'type':>9} {'op':>7} {'time':>10} {'p99':>10} " + (
    f"{'algbw':>7} {'busbw':>7} {'#wrong':>6}"
)
UNITS = f"{'(B)':>11} {'(elements)':>11} {'':>9} {'':>7} {'(us)':>10} {'(us)':>10} " + (
    f"{'(GB/s)':>7} {'(GB/s)':>7} {'':>6}"
)


def sizes(begin: int, end: int, factor: float) -> list[int]:
    """Sizes in bytes from `begin` to `end`, each `factor` times the one before."""

    def grow() -> Iterator[int]:
        size = begin
        while size <= end:
            yield size
            size = max(size + 1, int(size * factor))

    return list(grow())


def run(
    collective: str,
    *,
    workers: int,
    size_range: list[int],
    dtype: str,
    op: str,
    warmup: int,
    transport: str,
    registered: bool,
    json_file: str | None,
) -> int:
    """Measure; return the exit code, 1 if any element was wrong."""
    header = facts()
    report.describe(header, f"{workers} ranks")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows")
        arguments = [
            *("-m", "bench.worker", collective, "--dtype", dtype, "--op", op),
            *("--warmup", str(warmup), "--rows", str(file), "--sizes", *map(str, size_range)),
            *(["--registered"] if registered else []),
        ]
        code = supervise(JobPlan(arguments, workers, {"transport": transport})).conclude()
        if code:
            return code
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    if rows:
        print(f"# transport {rows[0]['transport']}")
    print(COLUMNS, UNITS, sep="\n")
    for row in rows:
        count = row["size_bytes"] // _itemsize(row["dtype"])
        print(
            f"{row['size_bytes']:>11} {count:>11} {row['dtype']:>9} {row['op']:>7} "
            f"{row['time_us']:>10.1f} {row['time_us_p99']:>10.1f} {row['algbw_gb_s']:>7.3f} "
            f"{row['busbw_gb_s']:>7.3f} {row['wrong']:>6}"
        )
    report.write(json_file, rows, header)
    return int(any(row["wrong"] for row in rows))


def _itemsize(dtype: str) -> int:
    return int("".join(filter(str.isdigit, dtype))) // 8
