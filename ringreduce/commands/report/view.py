"""Prints ``ringreduce report``: one paragraph, and a table with a row for each rank."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringreduce.commands.report.records import Records
from ringreduce.commands.report.verdict import judge
from ringreduce.commands.report.words import clean, shorten, state_of
from ringreduce.vocabulary.config import color_wanted

__all__ = ["State", "show", "states"]

# Limits the table if one record is left of thousands, or a record's job size is wrong.
_MISSING_SHOWN = 64


@dataclass(frozen=True)
class State:
    """One rank's row of the report; `calls` is None without a record."""

    rank: int
    text: str
    calls: int | None
    error: str


def states(records: Records) -> list[State]:
    """A row for each rank with a record, and for the first few without."""
    rows = []
    for rank in sorted({*records.dumps, *records.missing[:_MISSING_SHOWN]}):
        dump = records.dumps.get(rank)
        if dump is None:
            unreadable = f"flight-rank{rank}.json" in records.skipped
            rows.append(State(rank, "unreadable record" if unreadable else "no record", None, ""))
            continue
        failure = dump.failure
        error = f"{clean(failure.kind)}: {shorten(failure.text, 120)}" if failure else ""
        rows.append(State(rank, state_of(dump), dump.calls, error))
    return rows


def show(records: Records, console: Console | None = None) -> None:
    """Print the report in the terminal's width, or 80 columns without a terminal."""
    console = console or Console(highlight=False, no_color=not color_wanted())
    verdict = judge(records)
    console.print(Text(verdict.text))
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("calls", justify="right")
    table.add_column("state", overflow="fold", ratio=1)
    rows = states(records)
    if any(state.error for state in rows):
        table.add_column("error", overflow="fold", ratio=1)
    for state in rows:
        style = "bold red" if state.rank in verdict.culprits else ""
        calls = "-" if state.calls is None else str(state.calls)
        # As Text, so that brackets from a file are not markup.
        cells = [Text(str(state.rank)), Text(calls), Text(state.text)]
        if len(table.columns) == 4:
            cells.append(Text(state.error))
        table.add_row(*cells, style=style)
    console.print(table)
    hidden = records.size - len(rows)
    if hidden:
        console.print(Text(f"and {hidden} more ranks without a record"))
    for name, why in records.skipped.items():
        console.print(Text(f"skipped {name}: {why}"))
