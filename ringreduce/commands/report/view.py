"""Prints ``ringreduce report``: one paragraph, and a table with a row for each rank."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringreduce.commands.report.flight_records import Records, clean, shorten
from ringreduce.commands.report.verdict import Verdict, judge, state_of
from ringreduce.vocabulary.config import color_wanted

# Limits the table if one record is left of thousands, or a record's job size is wrong.
_MISSING_SHOWN = 64


def show(records: Records, console: Console | None = None) -> None:
    """Print the report in the terminal's width, or 80 columns without a terminal."""
    console = console or Console(highlight=False, no_color=not color_wanted())
    verdict = judge(records)
    console.print(Text(verdict.text))
    # The whole job, and the groups that say more than that they were at rest.
    parts = [
        part
        for part in records.groups()
        if part == verdict.of or any(dump.failure or dump.operation for dump in part.dumps.values())
    ]
    for part in (records, *parts):
        console.print()
        if parts:
            name = "the whole job" if part.group is None else part.group.name
            console.print(Text(f"{name[:1].upper()}{name[1:]}:"))
        _show_table(part, verdict, console)
    for name, why in records.skipped.items():
        console.print(Text(f"skipped {name}: {why}"))


def _show_table(records: Records, verdict: Verdict, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("calls", justify="right")
    table.add_column("state", overflow="fold", ratio=1)
    has_errors = any(dump.failure for dump in records.dumps.values())
    if has_errors:
        table.add_column("error", overflow="fold", ratio=1)
    for rank in sorted({*records.dumps, *records.missing[:_MISSING_SHOWN]}):
        dump = records.dumps.get(rank)
        if dump is None:
            unreadable = f"flight-rank{rank}.json" in records.skipped
            cells = [str(rank), "-", "unreadable record" if unreadable else "no record", ""]
        else:
            failure = dump.failure
            error = f"{clean(failure.kind)}: {shorten(failure.text, 120)}" if failure else ""
            cells = [str(rank), str(dump.calls), state_of(dump), error]
        style = "bold red" if rank in verdict.culprits else ""
        # As Text, so that brackets from a file are not markup.
        table.add_row(*map(Text, cells[: 4 if has_errors else 3]), style=style)
    console.print(table)
    hidden = len(records.ranks) - table.row_count
    if hidden:
        console.print(Text(f"and {hidden} more ranks without a record"))
