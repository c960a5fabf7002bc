"""The share of a slow network's rate that an all-reduce between hosts reaches.

The hosts are network namespaces on links of that rate (`namespaces`). An iperf3 stream over
them is the ceiling. ringreduce over ZeroMQ and, if installed, Gloo alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench import report
from bench.facts import facts
from bench.namespaces import require, shaped, stream_bits_per_second
from bench.peers import ITEMSIZE, Comparison, Pace, short_size
from bench.systems import ENTRIES
from bench.turns import Turns, ended_by_signals

SYSTEMS = (("ringreduce", "zmq"), ("gloo", None))
COLUMNS = (
    f"{'size':>6} {'system':<16} {'time':>10} {'p99':>10} {'algbw':>9} {'busbw':>9} "
    f"{'of raw':>7} {'#wrong':>6}"
)
UNITS = f"{'':>6} {'':<16} {'(ms)':>10} {'(ms)':>10} {'(Gbit/s)':>9} {'(Gbit/s)':>9} {'(%)':>7}"


def run(
    *,
    workers: int,
    rate: str,
    latency_ms: float,
    size_range: Sequence[int],
    pace: Pace,
    json_file: str | None,
) -> int:
    """Measure, print, write rows; 1 if any element was wrong or a system failed.

    `latency_ms` is how much later a packet arrives at another host.

    Raises:
        UnavailableError: the namespaces cannot be made here.
    """
    require("iperf3")
    entries = [entry for entry in ENTRIES if (entry.system, entry.transport) in SYSTEMS]
    rows: list[dict[str, Any]] = []
    with ended_by_signals(), shaped(workers, rate, latency_ms) as hosts:
        raw = stream_bits_per_second(hosts[0], hosts[1]) / 1e9
        header = {**facts(), "rate": rate, "latency_ms": latency_ms, "raw_gbit_s": raw}
        report.describe(header, f"{workers} ranks; float32 sum")
        late = f" and {latency_ms:g} ms each way" if latency_ms else ""
        print(f"# one host each, links of {rate}{late}; iperf3: {raw:.3f} Gbit/s of payload")
        for entry in entries:
            if (remedy := entry.missing()) is not None:
                print(f"# {entry.label}: not installed: {remedy}")
        with Turns() as turns:
            here = [entry for entry in entries if entry.missing() is None]
            comparison = Comparison(turns, here, hosts, pace)
            print(COLUMNS, UNITS, sep="\n", flush=True)
            for size in size_range:
                measured = comparison.measure(max(1, size // ITEMSIZE))
                rows += [with_share(row, raw) for row in measured]
                print(*map(table_line, rows[-len(measured) :]), sep="\n", flush=True)
    report.write(json_file, rows, header)
    return int(comparison.failed or any(row["wrong"] for row in rows))


def with_share(row: dict[str, Any], raw_gbit_s: float) -> dict[str, Any]:
    """The row with its bus bandwidth in the network's unit, and its share of the raw stream."""
    busbw = row["busbw_gb_s"] * 8
    return {**row, "busbw_gbit_s": busbw, "share_of_raw": busbw / raw_gbit_s}


def table_line(row: dict[str, Any]) -> str:
    """A row as text."""
    label = " ".join(filter(None, (row["system"], row["transport"])))
    return (
        f"{short_size(row['size_bytes']):>6} {label:<16} {row['time_us'] / 1e3:>10.1f} "
        f"{row['time_us_p99'] / 1e3:>10.1f} {row['algbw_gb_s'] * 8:>9.3f} "
        f"{row['busbw_gbit_s']:>9.3f} {row['share_of_raw'] * 100:>7.1f} {row['wrong']:>6}"
    )
