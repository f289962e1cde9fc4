"""Two small pictures of curves on logarithmic axes: in the terminal and as an SVG file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console

WIDTH, HEIGHT = 720, 440  # of the SVG, in pixels
LEFT, RIGHT, TOP, BOTTOM = 70, 180, 24, 48
COLOURS = ("#c0392b", "#1f77b4", "#e59866", "#7fb3d5")
MARKS = "oxsd"
COLUMNS, ROWS = 64, 18


@dataclass(frozen=True)
class Series:
    """One curve: x and y above zero."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def exponent(series: Series) -> float:
    """Slope of the least-squares line through the logarithms of the upper two thirds of
    the points.
    """
    start = len(series.x) // 3
    xs, ys = [math.log(v) for v in series.x[start:]], [math.log(v) for v in series.y[start:]]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)


def draw_terminal(console: Console, all_series: Sequence[Series]) -> None:
    """Marks on a grid of characters; seconds upwards, tokens to the right."""
    low_x, high_x, low_y, high_y = _range(all_series)
    grid = [[" "] * COLUMNS for _ in range(ROWS)]
    for mark, series in zip(MARKS, all_series, strict=False):
        for x, y in zip(series.x, series.y, strict=True):
            column = round(_share(x, low_x, high_x) * (COLUMNS - 1))
            grid[ROWS - 1 - round(_share(y, low_y, high_y) * (ROWS - 1))][column] = mark
    for i, line in enumerate(grid):
        at = high_y * (low_y / high_y) ** (i / (ROWS - 1))
        label = f"{at:9.3g} s" if i % 4 == 0 or i == ROWS - 1 else " " * 11
        console.print(f"{label} |{''.join(line)}", markup=False)
    console.print(" " * 12 + "+" + "-" * COLUMNS)
    console.print(" " * 13 + f"{low_x:g} tokens" + f"{high_x:g} tokens".rjust(COLUMNS - len(f"{low_x:g} tokens")))
    console.print("   ".join(f"{m} {s.name}" for m, s in zip(MARKS, all_series, strict=False)), markup=False)


def draw_svg(path: Path, all_series: Sequence[Series]) -> None:
    """The same curves as a picture that needs nothing but a browser."""
    low_x, high_x, low_y, high_y = _range(all_series)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + _share(x, low_x, high_x) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - _share(y, low_y, high_y) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for power in range(math.ceil(math.log10(low_y)), math.floor(math.log10(high_y)) + 1):
        _, at = place(low_x, 10.0**power)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    for x in all_series[0].x:
        at, _ = place(x, low_y)
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">tokens before it</text>'
    )
    for colour, series in zip(COLOURS, all_series, strict=False):
        points = [place(x, y) for x, y in zip(series.x, series.y, strict=True)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
        label = f"{escape(series.name)}: n^{exponent(series):.2f}"
        parts.append(f'<text x="{points[-1][0] + 8:.1f}" y="{points[-1][1] + 4:.1f}" fill="{colour}">{label}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _range(all_series: Sequence[Series]) -> tuple[float, float, float, float]:
    xs = [x for s in all_series for x in s.x]
    ys = [y for s in all_series for y in s.y]
    return min(xs), max(xs), min(ys), max(ys)


def _share(value: float, low: float, high: float) -> float:
    return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
