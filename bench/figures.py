"""``python -m bench report``: draws what other commands have measured, from small files of it.

`add` takes from a result what is drawn, into the folder of figures; `draw` draws all that are
there. So a figure can be drawn again, and differently, without measuring again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import chart
from bench.chart import Bar, Bars, Panel, Series, Timeline, Track
from bench.peers import short_size
from bench.strategies.run import curves

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
_HEADER = ("command", "commit", "cpu", "cores", "memcpy_gb_s")
_OURS, _OTHERS = 0, 1
# What is drawn of a rank's step: a track, events of which categories are in it, and of what colour.
_SHOWN = {"reduce": 0, "blocked": 1, "pack": 2, "unpack": 3, "queue": 4}
_MEANING = ("all-reduce", "the step waits for buckets", "pack", "unpack", "queued")


def add(file: Path, folder: Path = FOLDER) -> Path:
    """Take what is drawn from a result, of another command's ``--json`` or of ``ringreduce trace``.

    Raises ValueError if it is neither.
    """
    found = json.loads(file.read_text(encoding="utf-8"))
    if "traceEvents" in found:
        name, kept = "step", {"events": _last_step(found["traceEvents"])}
    else:
        name = _question(found.get("header", {}).get("command", ""))
        header = {key: found["header"][key] for key in _HEADER}
        header["command"] = re.sub(r" --(json|plot) \S+", "", header["command"])
        kept = {"header": header, "rows": [_kept(name, row) for row in found["rows"]]}
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.json"
    rows = next(value for value in kept.values() if isinstance(value, list))
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = f'{{"header": {json.dumps(kept["header"])},\n' if "header" in kept else "{"
    last = "rows" if "rows" in kept else "events"
    target.write_text(f'{head}"{last}": [\n{lines}\n]}}\n', encoding="utf-8")
    return target


def draw(folder: Path = FOLDER) -> list[Path]:
    """Draw each figure that `folder` has data of; return the files."""
    drawn = []
    for name, figure in FIGURES.items():
        data = folder / f"{name}.json"
        if data.exists():
            drawn.append(data.with_suffix(".svg"))
            drawn[-1].write_text(figure(json.loads(data.read_text(encoding="utf-8"))), "utf-8")
    return drawn


def _question(command: str) -> str:
    words = command.split()
    name = words[words.index("bench") + 1] if "bench" in words else ""
    if name == "strategies" and "--accuracy" in words:
        name = "accuracy"
    if name not in FIGURES:
        raise ValueError(f"nothing is drawn of {command or 'a file without a command'!r}")
    return name


def _kept(name: str, row: dict[str, Any]) -> dict[str, Any]:
    kept = {key: row[key] for key in _KEPT[name] if key in row}
    if name == "accuracy":
        kept["curves"] = [row["curves"][0]]
    return json.loads(json.dumps(kept), parse_float=lambda text: float(f"{float(text):.4g}"))


def _last_step(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ranks did with buckets in rank 0's last step but one, whose end was awaited."""
    steps = [e for e in events if e.get("cat") == "training" and e["pid"] == 0]
    step = max(steps[:-1] or steps, key=lambda event: event["ts"])
    begin, end = step["ts"], step["ts"] + step["dur"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    found = []
    for event in events:
        is_shown = event["ph"] == "X" and event["cat"] in _SHOWN
        if is_shown and event["ts"] < end and event["ts"] + event["dur"] > begin:
            track = names[event["pid"], event["tid"]]
            first, last = (
                round((min(max(at, begin), end) - begin) / 1e3, 3)
                for at in (event["ts"], event["ts"] + event["dur"])
            )
            found.append({"rank": event["pid"], "track": track, "what": event["cat"]})
            found[-1] |= {"begin_ms": first, "end_ms": last}
    return found


def _notes(data: dict[str, Any]) -> list[str]:
    header = data["header"]
    machine = f"{header['cpu']}, {header['cores']} cores, memcpy {header['memcpy_gb_s']:g} GB/s"
    return [header["command"], f"commit {header['commit']}; {machine}"]


def _peers(data: dict[str, Any]) -> str:
    rows, ceiling = data["rows"], data["header"]["memcpy_gb_s"]
    sizes = sorted({row["size_bytes"] for row in rows})
    panels = []
    for title, key, unit, factor in (
        ("Bus bandwidth of an all-reduce", "busbw_gb_s", "GB/s", 1.0),
        ("Time of an all-reduce", "time_us", "ms", 1e-3),
    ):
        lines = []
        for number, (label, name) in enumerate(_SYSTEMS.items()):
            points = [
                (row["size_bytes"], row[key] * factor) for row in rows if _label(row) == label
            ]
            lines += [Series(name, points, colour=number)] if points else []
        if key == "busbw_gb_s":
            ends = [(sizes[0], ceiling), (sizes[-1], ceiling)]
            lines.append(Series("memcpy of 64 MiB", ends, is_dashed=True, colour=6))
        panels.append(
            Panel(
                f"{title}, {rows[0]['world_size']} ranks on one host",
                "bytes",
                unit,
                lines,
                is_log_y=True,
                x_ticks=sizes,
                x_text=lambda size: short_size(int(size)),
            )
        )
    return chart.draw(panels, notes=_notes(data))


def _label(row: dict[str, Any]) -> str:
    return " ".join(filter(None, (row["system"], row["transport"])))


def _train(data: dict[str, Any]) -> str:
    # With a link those on hosts; the others are said below.
    rows = [row for row in data["rows"] if row["link"]] or data["rows"]
    bars = [
        Bar(
            row["system"],
            row["samples_per_s"],
            f"{row['samples_per_s']:,.0f} samples/s",
            _OURS if row["system"].startswith("ringreduce") else _OTHERS,
        )
        for row in rows
    ]
    workers = max(row["workers"] for row in rows)
    link = next((f", links of {row['link']}" for row in rows if row["link"]), "")
    title = f"Training {rows[0]['model']}, {workers} workers{link}"
    others = [
        f"{row['system']} {row['samples_per_s']:,.0f}" for row in data["rows"] if row not in rows
    ]
    notes = [f"without a network: {', '.join(others)} samples/s"] if others else []
    return chart.draw([Bars(title, bars)], columns=1, notes=[*notes, *_notes(data)])


def _embedding(data: dict[str, Any]) -> str:
    panels = []
    cases = [(row["tables"], row["ids"], row["optimizer"]) for row in data["rows"]]
    for case in dict.fromkeys(cases):
        bars = [
            Bar(
                row["system"],
                row["samples_per_s"],
                f"{row['samples_per_s']:,.0f} samples/s",
                _OTHERS if row["system"].startswith(("single", "mirrored")) else _OURS,
            )
            for row, own in zip(data["rows"], cases, strict=True)
            if own == case
        ]
        panels.append(Bars("Tables: {}; ids: {}; {}".format(*case), bars))
    notes = ["orange: one process, or MirroredStrategy; blue: two ranks", *_notes(data)]
    return chart.draw(panels, notes=notes)


def _accuracy(data: dict[str, Any]) -> str:
    tasks = dict.fromkeys(row["task"] for row in data["rows"])
    panels = [curves([row for row in data["rows"] if row["task"] == task]) for task in tasks]
    return chart.draw(panels, notes=_notes(data))


def _step(data: dict[str, Any]) -> str:
    found: dict[tuple[int, str], list[tuple[float, float, int]]] = {}
    for event in data["events"]:
        span = event["begin_ms"], event["end_ms"], _SHOWN[event["what"]]
        found.setdefault((event["rank"], event["track"]), []).append(span)
    tracks = [Track(f"rank {rank}: {name}", spans) for (rank, name), spans in found.items()]
    notes = ["ringreduce run -n 2 --trace DIR train.py; ringreduce trace DIR"]
    return chart.draw_timeline(Timeline("A training step", "ms", tracks, _MEANING), notes)


_SYSTEMS = {
    "ringreduce shm-registered": "comm.empty arrays",
    "ringreduce shm": "other arrays",
    "ringreduce zmq": "over sockets",
    "openmpi": "Open MPI",
    "gloo": "Gloo",
    "tf-ring": "TensorFlow's ring",
}
_KEPT = {
    "peers": ("system", "transport", "world_size", "size_bytes", "time_us", "busbw_gb_s"),
    "train": ("system", "model", "workers", "samples_per_s", "link"),
    "embedding": ("tables", "ids", "optimizer", "system", "samples_per_s"),
    "accuracy": ("system", "task", "seconds"),
}
# By the name of data and figure.
FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "peers": _peers,
    "train": _train,
    "embedding": _embedding,
    "accuracy": _accuracy,
    "step": _step,
}
