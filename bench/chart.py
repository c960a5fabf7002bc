"""Charts as SVG: lines and points over logarithmic axes, bars, and what happens when. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 500, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 118, 34, 46
BAR = 28  # the height of a bar, with the space around it
# Distinct for the colour-blind too (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")


@dataclass(frozen=True)
class Series:
    """Points (x, y), joined by a line unless they `are_marks`; `label` stands at the last one."""

    label: str
    points: Sequence[tuple[float, float]]
    are_marks: bool = False
    is_dashed: bool = False
    colour: int = 0


@dataclass(frozen=True)
class Panel:
    """A chart.

    Attributes:
        is_log_y: whether the y axis is logarithmic; else it is a share, in the range `shares`.
        x_ticks: where the x axis has numbers, by default at each x; `x_text`: as what.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    is_log_y: bool = False
    shares: tuple[float, float] = (0, 1)
    x_ticks: Sequence[float] = ()
    x_text: Callable[[float], str] = "{:g}".format


@dataclass(frozen=True)
class Bar:
    """A value from 0 on, with a name before it and a text behind it."""

    name: str
    value: float
    text: str
    colour: int = 0


@dataclass(frozen=True)
class Bars:
    """Bars, one below the other."""

    title: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Track:
    """What is done when: (begin, end, number of a colour), one row of a timeline."""

    name: str
    spans: Sequence[tuple[float, float, int]]


@dataclass(frozen=True)
class Timeline:
    """Tracks over the same time, with what colours mean; it is as wide as two other panels."""

    title: str
    x_label: str
    tracks: Sequence[Track]
    colours: Sequence[str]


def draw(panels: Sequence[Panel | Bars], columns: int = 2, notes: Sequence[str] = ()) -> str:
    """The panels as one SVG document, row by row, above lines of text."""
    parts, rows = [], -(-len(panels) // columns)
    height = max(
        TOP + BAR * len(panel.bars) + 10 if isinstance(panel, Bars) else HEIGHT for panel in panels
    )
    for index, panel in enumerate(panels):
        x, y = WIDTH * (index % columns), height * (index // columns)
        inner = _bars(panel) if isinstance(panel, Bars) else _panel(panel)
        parts += [f'<g transform="translate({x} {y})">', *inner, "</g>"]
    return _document(WIDTH * columns, height * rows, parts, notes)


def draw_timeline(timeline: Timeline, notes: Sequence[str] = ()) -> str:
    """It as an SVG document, above lines of text."""
    left, right, row = 130, 20, 18
    low = min(begin for track in timeline.tracks for begin, _, _ in track.spans)
    high = max(end for track in timeline.tracks for _, end, _ in track.spans)
    scale = (2 * WIDTH - left - right) / (high - low)
    bottom = TOP + row * len(timeline.tracks)
    parts = [_text(WIDTH, 18, timeline.title, "middle", ' font-weight="bold"')]
    step = 10.0 ** math.floor(math.log10(high - low))
    ticks = [step * n / 2 for n in range(math.floor((high - low) / step * 2) + 1)]
    for tick in ticks:
        x = left + scale * tick
        parts += [_line(x, TOP, x, bottom), _text(x, bottom + 14, f"{tick:g}", "middle")]
    for number, track in enumerate(timeline.tracks):
        y = TOP + row * number
        parts.append(_text(left - 6, y + 13, track.name, "end"))
        for begin, end, colour in track.spans:
            x, width = left + scale * (begin - low), max(scale * (end - begin), 0.5)
            parts.append(_box(x, y + 2, width, row - 4, colour))
    parts.append(_text(WIDTH, bottom + 32, timeline.x_label, "middle"))
    for number, name in enumerate(timeline.colours):
        x = left + number * (2 * WIDTH - left - right) / len(timeline.colours)
        parts.append(_box(x, bottom + 44, 10, 10, number))
        parts.append(_text(x + 15, bottom + 53, name, "start"))
    return _document(2 * WIDTH, bottom + 66, parts, notes)


def _document(width: float, height: float, parts: Sequence[str], notes: Sequence[str]) -> str:
    below = [
        _text(8, height + 14 * number, note, "start", ' fill="#555"')
        for number, note in enumerate(notes, 1)
    ]
    height += 14 * len(notes) + 8 * bool(notes)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        *parts,
        *below,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _bars(panel: Bars) -> list[str]:
    left, right = 130, 120
    most = max(bar.value for bar in panel.bars)
    parts = [_text(WIDTH / 2, 18, panel.title, "middle", ' font-weight="bold"')]
    for number, bar in enumerate(panel.bars):
        y, width = TOP + BAR * number, (WIDTH - left - right) * bar.value / most
        parts.append(_text(left - 6, y + BAR / 2 + 4, bar.name, "end"))
        parts.append(_box(left, y + BAR / 6, width, BAR * 2 / 3, bar.colour))
        parts.append(_text(left + width + 6, y + BAR / 2 + 4, bar.text, "start"))
    return parts


def _panel(panel: Panel) -> list[str]:
    points = [point for series in panel.series for point in series.points]
    ends = [*(x for x, _ in points), *panel.x_ticks]
    at_x = _scale(ends, LEFT, WIDTH - RIGHT)
    if panel.is_log_y:
        ticks = _powers(min(y for _, y in points), max(y for _, y in points))
        at_y = _scale(ticks, HEIGHT - BOTTOM, TOP)
    else:
        low, high = panel.shares
        ticks = [low + (high - low) * fifth / 5 for fifth in range(6)]

        def at_y(y: float) -> float:
            return HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - BOTTOM - TOP)

    middle = (LEFT + WIDTH - RIGHT) / 2
    parts = [
        _text(middle, 18, panel.title, "middle", ' font-weight="bold"'),
        _text(middle, HEIGHT - 10, panel.x_label, "middle"),
        f'<g transform="translate(14 {(HEIGHT - BOTTOM + TOP) / 2}) rotate(-90)">'
        + _text(0, 0, panel.y_label, "middle")
        + "</g>",
    ]
    for tick in ticks:
        label = f"{tick:g}" if panel.is_log_y else f"{tick:.0%}"
        parts.append(_line(LEFT, at_y(tick), WIDTH - RIGHT, at_y(tick)))
        parts.append(_text(LEFT - 5, at_y(tick) + 4, label, "end"))
    for tick in sorted(panel.x_ticks or {x for x, _ in points}):
        parts.append(_line(at_x(tick), HEIGHT - BOTTOM, at_x(tick), HEIGHT - BOTTOM + 4))
        parts.append(_text(at_x(tick), HEIGHT - BOTTOM + 16, panel.x_text(tick), "middle"))
    labels = []
    for series in panel.series:
        colour = COLOURS[series.colour % len(COLOURS)]
        placed = [(at_x(x), at_y(y)) for x, y in series.points]
        if series.are_marks:
            mark = '<circle cx="{:.1f}" cy="{:.1f}" r="3.5" fill="{}"/>'
            parts += [mark.format(x, y, colour) for x, y in placed]
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            dashes = ' stroke-dasharray="5 3"' if series.is_dashed else ""
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"'
                f"{dashes}/>"
            )
        if series.label:
            labels.append((placed[-1][1], series.label, colour))
    return parts + _apart(labels)


def _apart(labels: list[tuple[float, str, str]], space: float = 12) -> list[str]:
    """Labels at the right, at the height of their lines, moved so that none covers another."""
    parts, lowest = [], -math.inf
    for y, label, colour in sorted(labels):
        lowest = max(y + 4, lowest + space)
        parts.append(_text(WIDTH - RIGHT + 6, lowest, label, "start", f' fill="{colour}"'))
    return parts


def _scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """What maps the least value to `start` and the greatest to `end`, logarithmically."""
    low, high = math.log(min(values)), math.log(max(values))
    return lambda value: start + (end - start) * (math.log(value) - low) / ((high - low) or 1)


def _powers(low: float, high: float) -> list[float]:
    """The powers of ten around `low` and `high`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ccc"/>'


def _box(x: float, y: float, width: float, height: float, colour: int) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{COLOURS[colour % len(COLOURS)]}"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
