"""What tests have measured: kept when asked for, and shown as the table of docs/reliability.md.

With RINGREDUCE_TEST_FIGURES naming a file, each `record` adds a line of JSON to it;
``python -m tests.figures FILE`` prints median and maximum of each fault.
"""

import json
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path

__all__ = ["record", "table"]

VARIABLE = "RINGREDUCE_TEST_FIGURES"


def record(fault: str, *seconds: float) -> None:
    """Keep how long it took until `fault` was told, on each rank that told it."""
    path = os.environ.get(VARIABLE)
    if path:
        lines = "".join(f"{json.dumps({'fault': fault, 'seconds': s})}\n" for s in seconds)
        # One write at the end of the file: tests of several processes record at once.
        with Path(path).open("ab", buffering=0) as file:
            file.write(lines.encode())


def table(figures: dict[str, list[float]]) -> str:
    """Count, median and maximum of each fault, in seconds, as Markdown."""
    width = max(map(len, figures), default=5)
    lines = [
        f"| {'fault':<{width}} | count | median | max |",
        f"| {'-' * width} | --- | --- | --- |",
    ]
    for fault, seconds in sorted(figures.items()):
        middle = statistics.median(seconds)
        lines.append(f"| {fault:<{width}} | {len(seconds)} | {middle:.3f} | {max(seconds):.3f} |")
    return "\n".join(lines)


def main(path: str) -> None:
    figures: dict[str, list[float]] = defaultdict(list)
    for line in Path(path).read_text().splitlines():
        fact = json.loads(line)
        figures[fact["fault"]].append(fact["seconds"])
    print(table(figures))


if __name__ == "__main__":
    main(sys.argv[1])
