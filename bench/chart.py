"""Charts as SVG: lines and points over logarithmic axes, in panels side by side. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 500, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 118, 34, 46
# Distinct for the colour-blind too (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


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
        x_ticks: where the x axis has numbers; by default at each x.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    is_log_y: bool = False
    shares: tuple[float, float] = (0, 1)
    x_ticks: Sequence[float] = ()


def draw(panels: Sequence[Panel], columns: int = 2) -> str:
    """The panels as one SVG document, row by row."""
    rows = -(-len(panels) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * columns}"'
        f' height="{HEIGHT * rows}" viewBox="0 0 {WIDTH * columns} {HEIGHT * rows}"'
        ' font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        x, y = WIDTH * (index % columns), HEIGHT * (index // columns)
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


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
        parts.append(_text(at_x(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", "middle"))
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


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
