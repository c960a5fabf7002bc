"""``python -m bench simulate``: measures, compares, extends, prints and draws."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import chart, report
from bench.chart import Panel, Series
from bench.facts import facts
from bench.namespaces import UnavailableError, bits_per_second, require
from bench.peers import short_size
from bench.simulate import check, model, scale
from bench.simulate.check import Check, Network, Row
from bench.simulate.model import Link, Memory
from bench.simulate.rings import FailedError
from bench.simulate.scale import GBITS, MODELS, RANKS, RANKS_PER_HOST, Cluster, Parameters, Scale
from bench.simulate.training import Conditions, Model
from bench.turns import Turns, ended_by_signals
from ringreduce.effects import native
from ringreduce.pure.buckets import BUCKET_BYTES

# Of docs/scaling.md; for --no-check, and where there are no namespaces.
STORED = Parameters(Link(8.46e-5, 0.0, 5.18e-10), Memory(1.36e-6, 5.63e-11), 1.043)
ERROR_MAX = 0.15
CHECKED = (
    f"{'network':<9} {'what':<13} {'ranks':>5} {'size':>5} {'measured':>9} {'model':>9} "
    f"{'error':>7} {'cores':>6} {'goal':>6}"
)
CHECKED_UNITS = f"{'':<35} {'(ms)':>9} {'(ms)':>9} {'(%)':>7} {'(%)':>6}"


def run(
    *,
    rate: str,
    ranks: Sequence[int],
    seconds: float,
    is_checked: bool,
    conditions: Conditions,
    plot: str | None,
    json_file: str | None,
) -> int:
    """Print all tables; write the plot and the rows. 1 if the model is off where links limit.

    Args:
        rate: of the links that the model is checked on.
        ranks: how many the rings that are checked have.
        seconds: about how long each size is measured.
        is_checked: whether real rings are measured; else the stored parameters are used.
    """
    header = facts()
    report.describe(header, "alpha-beta-gamma model of the collectives")
    parameters, rows = STORED, []
    if is_checked:
        try:
            parameters, rows = _measure(rate, ranks, seconds)
        except UnavailableError as error:
            print(f"# not checked: {error}")
        except FailedError as error:
            print(f"# stopped: {error}")
            return 1
    if not rows:
        print("# parameters are those of docs/scaling.md")
        _print_links({"sockets": parameters.sockets}, parameters.memory)
    scaled = Scale(parameters, conditions)
    _print_scale(scaled)
    _print_failures(scaled)
    if plot is not None:
        Path(plot).write_text(chart.draw(_panels(scaled, rows)), encoding="utf-8")
        print(f"\n# drawn: {plot}")
    listed = [dataclasses.asdict(row) | {"error": row.error} for row in rows]
    report.write(json_file, listed, header | {"parameters": dataclasses.asdict(parameters)})
    return int(check.worst(rows) > ERROR_MAX)


def _measure(rate: str, sizes: Sequence[int], seconds: float) -> tuple[Parameters, list[Row]]:
    """Fit and check on real rings, showing each row."""
    require()
    rows: list[Row] = []
    cores = len(os.sched_getaffinity(0))
    levels = [] if native.library() is None else [(2, 2), (4, 2)]
    levels = [pair for pair in levels if pair[0] * pair[1] <= max(sizes)]
    links: dict[str, Link] = {}
    with ended_by_signals(), Turns() as turns:
        sockets, memory = check.fit_cores(turns, seconds)
        print(f"\n# checked on links of {rate}; goal: within {ERROR_MAX:.0%} where links limit,")
        print("# which is where the cores alone would take at most 25 % of the time")
        print(CHECKED, CHECKED_UNITS, sep="\n", flush=True)

        def compare(network: Network, rate: str, **more: Any) -> Link:
            checked = Check(turns, network, sockets, memory, cores=cores, seconds=seconds, **more)
            is_fitted = bool(network.fitted)
            for row in checked.run(
                rate, sizes if is_fitted else sizes[:1], levels if is_fitted else ()
            ):
                rows.append(row)
                print(row_line(row), flush=True)
            return checked.link

        links["rate"] = compare(check.RATE, rate)
        try:
            links["distance"] = compare(check.DISTANCE, rate)
        except UnavailableError as error:
            print(f"# distance: left out, since {error}")
        wire = links["rate"].beta * bits_per_second(rate) / 8
        found = Parameters(sockets, memory, wire)
        compare(check.FAST, f"{check.FAST_GBIT}gbit", link=found.link(check.FAST_GBIT))
    held = [row for row in rows if row.is_of_links]
    print(
        f"# {sum(abs(row.error) <= ERROR_MAX for row in held)} of {len(held)} rows that links "
        f"limit are within {ERROR_MAX:.0%}; the worst is off by {check.worst(rows):.1%}"
    )
    _print_links({"sockets": sockets} | links, memory)
    return found, rows


def row_line(row: Row) -> str:
    """A row as text."""
    goal = "" if not row.is_of_links else "met" if abs(row.error) <= ERROR_MAX else "missed"
    return (
        f"{row.network:<9} {row.what:<13} {row.ranks:>5} {short_size(row.nbytes):>5} "
        f"{row.measured_s * 1e3:>9.2f} {row.predicted_s * 1e3:>9.2f} {row.error * 100:>7.1f} "
        f"{row.cores_s / row.predicted_s * 100:>6.0f} {goal:>6}"
    ).rstrip()


def _print_links(links: dict[str, Link], memory: Memory) -> None:
    print("\n# fitted to 2 ranks: a message, and Gbit/s of the wire and of a core")
    print(f"{'':<10} {'alpha (us)':>11} {'wire':>9} {'core':>9}")
    for name, each in {**links, "memory": Link(memory.alpha, 0.0, memory.gamma)}.items():
        wire = f"{8e-9 / each.beta:.4f}" if each.beta else ""
        core = f"{8e-9 / each.gamma:.1f}" if each.gamma else ""
        print(f"{name:<10} {each.alpha * 1e6:>11.1f} {wire:>9} {core:>9}".rstrip())


def _table(title: str, cell: Any, labels: Sequence[tuple[str, Any]]) -> None:
    """Rows of cells, one for each number of ranks."""
    print(f"\n# {title}")
    print(f"{'ranks':<24}" + "".join(f"{ranks:>9}" for ranks in RANKS))
    for label, of in labels:
        print(f"{label:<24}" + "".join(f"{cell(of, ranks):>9}" for ranks in RANKS))


def _print_scale(scaled: Scale) -> None:
    """The tables of many ranks."""
    parameters = scaled.parameters

    def clusters(gbit: float, ranks: int) -> tuple[Cluster, Cluster]:
        ring = Cluster(parameters, gbit, ranks, 1)
        return ring, dataclasses.replace(ring, each=RANKS_PER_HOST)

    def bucket(gbit: float, ranks: int) -> str:
        one, many = (each.all_reduce(BUCKET_BYTES) for each in clusters(gbit, ranks))
        return f"{_milliseconds(one)}/{_milliseconds(many)}"

    def shares(of: tuple[Any, float], ranks: int) -> str:
        trained, gbit = of
        one, many = (
            scaled.efficiency(trained, each, BUCKET_BYTES) for each in clusters(gbit, ranks)
        )
        return f"{one * 100:.0f}/{many * 100:.0f}"

    def best_shares(of: tuple[Any, float], ranks: int) -> str:
        trained, gbit = of
        one, many = (scaled.best(trained, each)[1] for each in clusters(gbit, ranks))
        return f"{one * 100:.0f}/{many * 100:.0f}"

    def best_sizes(of: tuple[Any, float], ranks: int) -> str:
        trained, gbit = of
        one, many = (scaled.best(trained, each)[0] >> 20 for each in clusters(gbit, ranks))
        return f"{one}/{many}"

    def bound(gbit: float, ranks: int) -> str:
        return _short(model.latency_bound_below(ranks, parameters.link(gbit)))

    def pays(gbit: float, ranks: int) -> str:
        return _short(scale.exchange_pays_up_to(ranks, parameters.link(gbit)))

    rates = [(f"{gbit} Gbit/s", gbit) for gbit in GBITS]
    trainings = [
        (f"{trained.name}, {gbit:>3} G", (trained, gbit)) for trained in MODELS for gbit in GBITS
    ]
    short = short_size(BUCKET_BYTES)
    print(f"\n# below, a / b: hosts of one rank (ring) / of {RANKS_PER_HOST} (two levels)")
    _table(f"time of an all-reduce of {short}, ms", bucket, rates)
    _table("a ring spends most of its time on latency below", bound, rates)
    _table("an exchange is faster than the ring up to", pays, rates)
    _table(f"efficiency in % with buckets of {short}, the default", shares, trainings)
    _table("efficiency in % with the best bucket size", best_shares, trainings)
    _table("that size, MiB", best_sizes, trainings)
    _table(
        "efficiency in % if communication took no time",
        lambda _, ranks: f"{scaled.alone(ranks) * 100:.0f}",
        [("", None)],
    )
    print("\n# steps of 2 hosts at 1 Gbit/s that docs/performance.md lists, ms")
    print(f"{'':<24}{'measured':>9}{'model':>9}{'error (%)':>10}")
    for each in scale.MEASURED:
        predicted = each.predicted_s(parameters)
        print(
            f"{each.trained.name:<24}{each.step_s * 1e3:>9.1f}{predicted * 1e3:>9.1f}"
            f"{(predicted / each.step_s - 1) * 100:>10.1f}"
        )


def _print_failures(scaled: Scale) -> None:
    conditions = scaled.conditions
    print(
        f"\n# {conditions.failures_a_day:g} failures a day for each host, a checkpoint takes "
        f"{conditions.checkpoint_s:g} s, a restart {conditions.restart_s:g} s"
    )
    print(f"{'hosts':>6} {'a day':>9} {'save each':>10} {'goodput':>8} {'with 1 h':>9}")
    print(f"{'':>6} {'':>9} {'(min)':>10} {'(%)':>8} {'(%)':>9}")
    for hosts in RANKS:
        often, interval, best, hourly = scaled.failures(hosts)
        print(
            f"{hosts:>6} {often:>9.3f} {interval / 60:>10.1f} {best * 100:>8.1f} "
            f"{hourly * 100:>9.1f}"
        )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{int(seconds < 0.01)}f}"


def _short(nbytes: float) -> str:
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g}{unit}"
    return f"{nbytes:.0f}"


def _panels(scaled: Scale, rows: Sequence[Row]) -> list[Panel]:
    networks = [(check.RATE.name, "limited rate"), (check.DISTANCE.name, "and 10 ms each way")]
    panels = [_checked(rows, name, f"Measured (points), model: {what}") for name, what in networks]
    return [
        *(panel for panel in panels if panel.series),
        _times(scaled.parameters),
        *(_efficiency(scaled, trained) for trained in MODELS),
        _progress(scaled),
    ]


def _checked(rows: Sequence[Row], network: str, title: str) -> Panel:
    """Measured points and the model's line, for calls that were measured at several sizes."""
    here = [row for row in rows if row.network == network]
    series = []
    for what, nbytes in sorted({(row.what, row.nbytes) for row in here}):
        same = [row for row in here if (row.what, row.nbytes) == (what, nbytes)]
        if len(same) >= 3:
            number = len(series) // 2
            lines = [(row.ranks, row.predicted_s * 1e3) for row in same]
            marks = [(row.ranks, row.measured_s * 1e3) for row in same]
            series.append(Series(f"{what} {short_size(nbytes)}", lines, colour=number))
            series.append(Series("", marks, are_marks=True, colour=number))
    return Panel(title, "ranks", "ms", series, is_log_y=True)


def _times(parameters: Parameters) -> Panel:
    """An all-reduce of a bucket, in a ring and on two levels."""
    series = []
    for number, gbit in enumerate(GBITS):
        for each in (1, RANKS_PER_HOST):
            clusters = [Cluster(parameters, gbit, ranks, each) for ranks in RANKS if ranks > each]
            points = [(one.ranks, one.all_reduce(BUCKET_BYTES) * 1e3) for one in clusters]
            label = f"{gbit} Gbit/s" if each == 1 else ""
            series.append(Series(label, points, is_dashed=each > 1, colour=number))
    title = f"All-reduce of {short_size(BUCKET_BYTES)}: ring, two levels (dashed)"
    return Panel(title, "ranks", "ms", series, is_log_y=True)


def _efficiency(scaled: Scale, trained: Model) -> Panel:
    """What a model reaches on hosts of several ranks, with the best buckets and the default."""
    series = []
    for number, gbit in enumerate(GBITS):
        clusters = [Cluster(scaled.parameters, gbit, ranks, RANKS_PER_HOST) for ranks in RANKS]
        best = [(one.ranks, scaled.best(trained, one)[1]) for one in clusters]
        default = [(one.ranks, scaled.efficiency(trained, one, BUCKET_BYTES)) for one in clusters]
        series.append(Series(f"{gbit} Gbit/s", best, colour=number))
        series.append(Series("", default, is_dashed=True, colour=number))
    title = f"{trained.name}, {RANKS_PER_HOST} a host: best, 4 MiB buckets (dashed)"
    return Panel(title, "ranks", "efficiency", series)


def _progress(scaled: Scale) -> Panel:
    """Goodput with failures."""
    found = [(hosts, scaled.failures(hosts)) for hosts in RANKS]
    series = [
        Series("Young's interval", [(hosts, each[2]) for hosts, each in found]),
        Series("each hour", [(hosts, each[3]) for hosts, each in found], colour=1),
    ]
    return Panel("Progress with failures, by checkpoint", "hosts", "of all time", series)
