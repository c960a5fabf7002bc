"""Prints what ``ringreduce doctor`` has found: what the ranks have, links, what to change."""

import contextlib
from collections.abc import Callable, Sequence
from statistics import mean

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringreduce.commands.doctor.findings import SIZES, HostFacts, Link, by_ranks, find, in_gib
from ringreduce.pure.decoding import UNREADABLE
from ringreduce.vocabulary.config import color_wanted
from ringreduce.vocabulary.words import named

_RECORD: msgspec.json.Decoder[HostFacts | Link] = msgspec.json.Decoder(HostFacts | Link)
_ROWS: dict[str, Callable[[HostFacts], str]] = {
    "host": lambda own: own.host,
    "versions": lambda own: ", ".join(map(" ".join, own.versions.items())),
    "native library": lambda own: "missing" if own.native else "found",
    "XLA": lambda own: own.xla or "can call the ring",
    "compiled code": lambda own: "compiled anew" if own.compiled else "cached",
    "cores": lambda own: f"{len(own.cores)}{f', limited to {own.quota:g}' if own.quota else ''}",
    "memory": lambda own: in_gib(own.memory),
    "open files": lambda own: f"up to {own.files or 'any number'}",
    "addresses": lambda own: own.addresses,
}


def records_in(printed: str) -> list[HostFacts | Link]:
    """The records among the lines that the ranks have printed, each after a label.

    Programs that Python starts by itself may have printed, too, also what looks like a record.
    """
    records = list[HostFacts | Link]()
    for line in printed.splitlines():
        with contextlib.suppress(*UNREADABLE):
            records.append(_RECORD.decode(line.partition("] ")[2]))
    return records


def show(printed: str, *, as_json: bool) -> int:
    """Print the report on the records in what the ranks have printed; return the exit code."""
    records = records_in(printed)
    facts = [record for record in records if isinstance(record, HostFacts)]
    links = [record for record in records if isinstance(record, Link)]
    findings = find(facts, links)
    exit_code = int(any(finding.is_problem for finding in findings))
    if as_json:
        report = {"findings": findings, "ranks": facts, "links": links}
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return exit_code
    console = Console(highlight=False, no_color=not color_wanted())
    table = Table.grid(padding=(0, 2, 0, 0))
    for label, text_of in _ROWS.items():
        for text, who in by_ranks({entry.rank: text_of(entry) for entry in facts}).items():
            table.add_row(label, Text(f"{who}: {text}" if who else text))
            label = ""
    hosts = list(dict.fromkeys(entry.host for entry in facts))
    for number, host in enumerate(hosts):
        load = max(entry.load for entry in facts if entry.host == host)
        table.add_row("" if number else "load", Text(f"{load:.1f} on {host}"))
    for number, host in enumerate(hosts):
        speed = SIZES[-1] / mean(entry.copied_s for entry in facts if entry.host == host) / 1e9
        label = "" if number else "copying"
        table.add_row(label, Text(f"{speed:.1f} GB/s by each rank of {host} at once"))
    console.print(table)
    if links:
        console.print()
        console.print(_table_of(links))
    console.print()
    if not findings:
        console.print("Nothing to change.")
    for finding in findings:
        kind = ("problem", "bold red") if finding.is_problem else ("note", "bold")
        who = f"{named('rank', finding.ranks)}: " if len(finding.ranks) < len(facts) else ""
        console.print(Text.assemble(kind, f": {who}{finding.text}"))
        console.print(Text(f"  {finding.advice}"))
    return exit_code


def _table_of(links: Sequence[Link]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in ("link", "all-reduce of", "takes"):
        table.add_column(name, justify="right" if name == "takes" else "left", overflow="fold")
    for link in links:
        name = f"{named('rank', link.ranks)} ({link.transport})"
        table.add_row(Text(name), "1 KiB", _time(link.seconds[0]))
        table.add_row("", "64 MiB", _time(link.seconds[1]))
    return table


def _time(seconds: float) -> str:
    """``2.3 us``, ``5.1 ms``, ``1200.0 ms``."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
