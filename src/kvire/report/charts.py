"""Charts as SVG, drawn with matplotlib: text stays text, and colours suit light and dark pages.

Axes and labels take the colour of the text around them (`currentColor`); series colours are
mid-tones.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvire.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours without black and yellow: told apart by colour-blind readers, and on white
# as on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P")
INK = "#717a83"  # axes and text; replaced by currentColor inside a page
WIDTH_IN, HEIGHT_IN = 7.2, 3.9
PAPER = "#ffffff"


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one colour of bars.

    x: numbers for lines; bars have `categories` instead.
    y: the values; None leaves a gap.
    low, high: ends of the interval of each value, or empty.
    """

    label: str
    y: Sequence[float | None]
    x: Sequence[float] = ()
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True)
class Labels:
    """Texts of a chart.

    title: also for screen readers.
    description: the chart's content, in a sentence.
    x, y: with units.
    """

    title: str
    description: str
    x: str
    y: str


def lines(
    series: Sequence[Series],
    labels: Labels,
    *,
    log_x: bool = False,
    log_y: bool = False,
    levels: Sequence[tuple[str, float]] = (),
) -> str:
    """An SVG element: y over x, intervals as bands.

    levels: (label, y) of dashed lines across, such as a limit.
    """
    return _svg(draw_lines(series, labels, log_x=log_x, log_y=log_y, levels=levels), labels)


def bars(
    categories: Sequence[str], series: Sequence[Series], labels: Labels, *, log_y: bool = False, stacked: bool = False
) -> str:
    """An SVG element: a group of bars for each category, with whiskers for intervals,
    or stacked.
    """
    return _svg(draw_bars(categories, series, labels, log_y=log_y, stacked=stacked), labels)


def save(figure: "Figure", labels: Labels, path: Path) -> None:
    """Write a figure of draw_lines or draw_bars as `.svg` or `.png`. Raises ConfigError."""
    if picture_kind(path) == ".png":
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=160, facecolor=PAPER)
        data = buffer.getvalue()
    else:
        style = "<style>svg{color:#333}@media(prefers-color-scheme:dark){svg{color:#ccc}}</style>"
        data = _svg(figure, labels, style).encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name a file in a folder that exists") from error


def picture_kind(path: Path) -> str:
    """`.svg` or `.png`. Raises ConfigError for another ending: ask before long work."""
    kind = path.suffix.lower()
    if kind not in {".svg", ".png"}:
        raise ConfigError(f"a picture is a .svg or a .png file, got {path.name}")
    return kind


def draw_lines(
    series: Sequence[Series],
    labels: Labels,
    *,
    log_x: bool = False,
    log_y: bool = False,
    levels: Sequence[tuple[str, float]] = (),
) -> "Figure":
    """The matplotlib figure behind `lines`, for `save`."""
    with _figure(labels) as (figure, axes):
        for i, (one, colour, marker) in enumerate(zip(series, _cycle(COLOURS), _cycle(MARKERS), strict=False)):
            axes.plot(
                one.x,
                _gaps(one.y),
                label=_plain(one.label),
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.8,
                linestyle="-" if i < len(COLOURS) else "-.",
            )
            if one.low and one.high:
                axes.fill_between(one.x, _gaps(one.low), _gaps(one.high), color=colour, alpha=0.18, linewidth=0)
        for (label, y), colour in zip(levels, _cycle(tuple(reversed(COLOURS))), strict=False):
            axes.axhline(y, color=colour, linestyle="--", linewidth=1.2, label=_plain(label))
        axes.set_xscale("log" if log_x else "linear")
        axes.set_yscale("log" if log_y else "linear")
        _legend(figure, len(series) + len(levels))
    return figure


def draw_bars(
    categories: Sequence[str], series: Sequence[Series], labels: Labels, *, log_y: bool = False, stacked: bool = False
) -> "Figure":
    """The matplotlib figure behind `bars`, for `save`."""
    with _figure(labels) as (figure, axes):
        width = 0.7 if stacked else 0.8 / max(1, len(series))
        floor = [0.0] * len(categories)
        for i, (one, colour) in enumerate(zip(series, _cycle(COLOURS), strict=False)):
            assert len(one.y) == len(categories)
            heights = [value or 0.0 for value in one.y]
            places = [at if stacked else at + (i - (len(series) - 1) / 2) * width for at in range(len(categories))]
            axes.bar(
                places, heights, width * 0.94, label=_plain(one.label), color=colour, bottom=floor if stacked else None
            )
            _whiskers(axes, places, one)
            floor = [below + height for below, height in zip(floor, heights, strict=True)]
        axes.set_xticks(range(len(categories)), [_plain(one) for one in categories])
        axes.set_yscale("log" if log_y else "linear")
        axes.margins(y=0.08)
        _legend(figure, len(series))
    return figure


def _whiskers(axes: "Axes", places: Sequence[float], one: Series) -> None:
    for place, value, low, high in zip(places, one.y, one.low, one.high, strict=False):
        if value is not None and low is not None and high is not None:
            ends = [[max(0.0, value - low)], [max(0.0, high - value)]]
            axes.errorbar([place], [value], yerr=ends, fmt="none", ecolor=INK, elinewidth=1.2, capsize=3)


@contextmanager
def _figure(labels: Labels) -> "Iterator[tuple[Figure, Axes]]":
    """A separate figure in our style, on a transparent ground, without pyplot's global state."""
    from matplotlib import rc_context  # noqa: PLC0415  (half a second that pages without charts need not spend)
    from matplotlib.figure import Figure  # noqa: PLC0415

    inked: Any = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    with rc_context(dict.fromkeys(inked, INK) | {"font.size": 10.5}):
        figure = Figure((WIDTH_IN, HEIGHT_IN), layout="constrained", facecolor="none")
        axes = figure.add_subplot(facecolor="none")
        axes.set_title(_plain(labels.title), loc="left", fontsize=11.5)
        axes.set_xlabel(_plain(labels.x))
        axes.set_ylabel(_plain(labels.y))
        axes.grid(axis="y", alpha=0.25, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        yield figure, axes


def _svg(figure: "Figure", labels: Labels, style: str = "") -> str:
    """The element alone, with a name and a description for screen readers."""
    from matplotlib import rc_context  # noqa: PLC0415

    out = StringIO()
    # The salt makes ids the same in every run, and different from those of another chart in the
    # page.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": labels.title + labels.description}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", svg, flags=re.DOTALL)  # their styles would reach the page's
    svg = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", svg).replace(INK, "currentColor")
    opening, _, rest = svg.partition(">")
    about = f"<title>{escape(labels.title)}</title><desc>{escape(labels.description)}</desc>"
    return f'{opening} role="img" aria-label="{escape(labels.title)}">{about}{style}{rest}'


def _legend(figure: "Figure", entries: int) -> None:
    if entries > 1:
        figure.legend(loc="outside lower center", ncols=min(entries, 3), frameon=False, fontsize=9.5)  # off the data


def _plain(text: str) -> str:
    """The escaped text.

    matplotlib reads dollars as mathematics and hides labels that begin with an underscore.
    """
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _cycle(values: Sequence[str]) -> Iterator[str]:
    while True:
        yield from values
