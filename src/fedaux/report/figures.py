"""Figures of runs: learning curves, heat maps, accuracy against cost. Colour-blind safe."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from zlib import crc32

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from fedaux.report.run import Array, Point
from fedaux.report.svg import STYLE

WIDTH = 400  # points: 10-point text stays readable on a phone, at 340 pixels

# Okabe and Ito's palette; a method keeps its colour and marker in every figure.
METHOD_STYLES = {
    "fedavg": ("#009E73", "s"),
    "fedprox": ("#56B4E9", "D"),
    "feddf": ("#0072B2", "v"),
    "fedbe": ("#CC79A7", "^"),
    "fedaux": ("#D55E00", "o"),
    "fedaux2": ("#E69F00", "P"),
    "private-head": ("#8A63B8", "h"),
}
OTHER_STYLES = (
    ("#E69F00", "P"),
    ("#CC79A7", "X"),
    ("#56B4E9", "<"),
    ("#009E73", ">"),
    ("#0072B2", "p"),
    ("#D55E00", "d"),
    ("#7F7F7F", "*"),
    ("#8C564B", "H"),
    ("#8A63B8", "8"),
    ("#999933", "X"),
)
DASHES = ("-", (0, (4, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))
BLUE = "#2A86C8"  # between the palette's two blues: visible on white and on black

# Transparent at 0, opaque at the largest value.
FADE = ListedColormap([(*to_rgb(BLUE), (step / 255) ** 0.65) for step in range(256)])
# Never opaque, so that text on it is readable on light and dark pages.
TINT = ListedColormap([(*to_rgb(BLUE), 0.04 + 0.5 * step / 255) for step in range(256)])


class Style(NamedTuple):
    """The style of a method's line."""

    colour: str
    marker: str
    dashes: Any


class Mark(NamedTuple):
    """A method at one setting: cost, accuracy, and standard deviation over seeds (0 for one
    seed)."""

    method: str
    cost: float
    accuracy: float
    spread: float
    line: str
    """Marks of one line are connected: they differ only in their cost."""


def method_styles(methods: Collection[str]) -> dict[str, Style]:
    """Return a different look for each method; with and without `+p` it has the same colour, which
    no other has while there are any left.

    Methods that start from pretrained features are drawn solid, the others dashed.
    """
    families: dict[str, tuple[str, str]] = {}
    bases = {method.partition("+")[0] for method in methods}
    for base in sorted(bases, key=lambda base: (base not in METHOD_STYLES, base)):
        preferred = METHOD_STYLES.get(base, OTHER_STYLES[crc32(base.encode()) % len(OTHER_STYLES)])
        taken = {colour for colour, _ in families.values()}
        free = (look for look in (preferred, *OTHER_STYLES) if look[0] not in taken)
        families[base] = next(free, preferred)
    styles: dict[str, Style] = {}
    for method in sorted(methods):
        base = method.partition("+")[0]
        solid = "+" in method or base not in METHOD_STYLES or base.startswith(("fedaux", "private"))
        first = 0 if solid else 1
        dashes = [*DASHES[first:], *DASHES[:first]]
        looks = [families[base], *(look for look in OTHER_STYLES if look != families[base])]
        choices = [Style(colour, marker, dash) for colour, marker in looks for dash in dashes]
        styles[method] = next((one for one in choices if one not in styles.values()), choices[0])
    return styles


def setting_styles(settings: Sequence[str]) -> dict[str, Style]:
    """Return a colour, marker and line for each setting of one method, in their order."""
    looks = [("#D55E00", "o"), *OTHER_STYLES]
    return {
        setting: Style(*looks[place % len(looks)], DASHES[place // len(looks) % len(DASHES)])
        for place, setting in enumerate(settings)
    }


def spread_labels(heights: Sequence[float], *, gap: float) -> list[float]:
    """Move label positions in [0, 1] so that neighbours are ``gap`` apart, in the same order."""
    order = sorted(range(len(heights)), key=lambda index: -heights[index])
    placed = [heights[index] for index in order]
    for index in range(1, len(placed)):
        placed[index] = min(placed[index], placed[index - 1] - gap)
    if placed and placed[-1] < 0:
        placed[-1] = 0.0
        for index in range(len(placed) - 2, -1, -1):
            placed[index] = max(placed[index], placed[index + 1] + gap)
    result = [0.0] * len(heights)
    for index, height in zip(order, placed, strict=True):
        result[index] = height
    return result


def shorten(name: object, *, length: int = 14) -> str:
    """Return a label that fits beside an axis."""
    text = str(name)
    return text if len(text) <= length else text[: length - 1] + "…"


@matplotlib.rc_context(STYLE)
def labelled_lines(
    curves: Mapping[str, Sequence[Point]], *, styles: Mapping[str, Style] | None = None
) -> Figure:
    """Draw learning curves with bands, each labelled with its name and last value.

    Without ``styles``, the names are names of methods.
    """
    figure, height = new_figure(WIDTH, 290), 290
    labels = {
        name: f"{shorten(name, length=24)}{':' if ' ' in name else ''} {100 * points[-1].mean:.1f}"
        for name, points in curves.items()
    }
    left, right = 46, 26 + 5.9 * max(map(len, labels.values()), default=0)
    axes = figure.add_axes((left / WIDTH, 0.15, 1 - (left + right) / WIDTH, 0.82))
    styles = styles or method_styles(curves)
    best = _best(curves)
    for name, points in curves.items():
        draw_line(axes, points, styles[name], heavy=name == best)
    axes.set_xlabel("communication round")
    axes.set_ylabel("test accuracy, %")
    last = max((points[-1].round for points in curves.values()), default=1)
    first = min((points[0].round for points in curves.values()), default=1)
    margin = 0.03 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)
    if first == last:
        axes.set_xticks([first])
    _label_curves(axes, curves, labels, styles, 12.5 / (0.82 * height))
    return figure


def _best(curves: Mapping[str, Sequence[Point]]) -> str | None:
    """Return the name of the curve that ends highest; None if there is nothing to compare."""
    if len(curves) < 2:
        return None
    return max(curves, key=lambda name: curves[name][-1].mean)


def draw_line(axes: Axes, points: Sequence[Point], style: Style, *, heavy: bool = False) -> None:
    """Draw one line with its band, in percent."""
    places = [point.round for point in points]
    means, lows, highs = (
        100 * np.array([getattr(point, name) for point in points])
        for name in ("mean", "low", "high")
    )
    axes.fill_between(places, lows, highs, color=style.colour, alpha=0.16, linewidth=0)
    (line,) = axes.plot(
        places, means, color=style.colour, linestyle=style.dashes, linewidth=2.2 if heavy else 1.6
    )
    line.set(marker=style.marker, markersize=4.5, markevery=max(1, len(places) // 10))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    _accuracy_axis(axes)


def _accuracy_axis(axes: Axes) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.grid(axis="y")
    axes.spines[["top", "right"]].set_visible(False)


def _label_curves(
    axes: Axes,
    curves: Mapping[str, Sequence[Point]],
    labels: Mapping[str, str],
    styles: Mapping[str, Style],
    gap: float,
) -> None:
    """Write each method's name and last value beside the end of its line, the best in bold."""
    low, high = axes.get_ylim()
    best = _best(curves)
    ends = [100 * points[-1].mean for points in curves.values()]
    placed = spread_labels([(value - low) / (high - low) for value in ends], gap=gap)
    for (method, points), value, position in zip(curves.items(), ends, placed, strict=True):
        leader = {
            "arrowstyle": "-",
            "color": styles[method].colour,
            "linewidth": 0.9,
            "relpos": (0, 0.5),
        }
        axes.annotate(
            labels[method],
            xy=(points[-1].round, value),
            xytext=(1.05, position),
            textcoords="axes fraction",
            va="center",
            fontsize=9.5,
            fontweight="bold" if method == best else "normal",
            annotation_clip=False,
            arrowprops=leader | {"shrinkA": 2, "shrinkB": 4},
        )


@matplotlib.rc_context(STYLE)
def curve_panels(panels: Sequence[tuple[str, Mapping[str, Sequence[Point]]]]) -> Figure:
    """Draw learning curves, one panel per setting, all in one scale, with one legend."""
    styles = _styles(method for _, curves in panels for method in curves)
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(WIDTH, 160 * lines + 24 + _legend_height(styles), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    for place, (axes, (title, curves)) in enumerate(zip(grid.flat, panels, strict=False)):
        best = _best(curves)
        for method, points in curves.items():
            draw_line(axes, points, styles[method], heavy=method == best)
        axes.set_title(shorten(title, length=34), fontsize=9.5)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))
        if place + columns >= len(panels):
            axes.set_xlabel("communication round")
            axes.tick_params(labelbottom=True)
        if place % columns == 0:
            axes.set_ylabel("accuracy, %")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, styles)
    return figure


@matplotlib.rc_context(STYLE)
def heat_maps(
    panels: Sequence[tuple[str, Array]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    labels: tuple[str, str],
) -> Figure:
    """Draw accuracy [rows, columns] over two settings, one panel per method, in one scale; NaN
    is drawn as a dash."""
    across = min(2, len(panels)) if len(columns) <= 5 else 1
    lines = -(-len(panels) // across)
    cell = float(np.clip((WIDTH - 60) / across / max(len(columns), 1) * 0.62, 20, 34))
    figure = new_figure(WIDTH, lines * (cell * len(rows) + 26) + 40, layout="constrained")
    grid = list(figure.subplots(lines, across, squeeze=False, sharex=True, sharey=True).flat)
    known = [value for _, panel in panels for value in panel[np.isfinite(panel)]]
    low, high = min(known, default=0.0), max(known, default=1.0)
    for place, (axes, (title, panel)) in enumerate(zip(grid, panels, strict=False)):
        axes.imshow(panel, cmap=TINT, vmin=low, vmax=high if high > low else low + 1, aspect="auto")
        axes.set_title(shorten(title, length=30))
        axes.set_xticks(range(len(columns)), [shorten(name, length=10) for name in columns])
        axes.set_yticks(range(len(rows)), list(map(shorten, rows)))
        axes.tick_params(length=0, labelbottom=place + across >= len(panels))
        axes.spines[:].set_visible(False)
        best = np.nanmax(panel) if np.isfinite(panel).any() else math.nan
        for (row, column), value in np.ndenumerate(panel):
            text = "–" if math.isnan(value) else f"{100 * value:.1f}"
            weight = "bold" if value == best else "normal"
            axes.annotate(
                text, (column, row), ha="center", va="center", fontsize=9.5, fontweight=weight
            )
    for axes in grid[len(panels) :]:
        axes.remove()
    figure.supylabel(labels[0], fontsize=10.5)
    figure.supxlabel(labels[1], fontsize=10.5)
    return figure


@matplotlib.rc_context(STYLE)
def against_values(marks: Sequence[Mark], *, xlabel: str, names: Mapping[float, str]) -> Figure:
    """Draw accuracy against costs at equal distances, methods side by side.

    ``names`` are the costs in order with their labels.
    """
    figure, axes, styles = _scatter(marks, xlabel=xlabel)
    places = {cost: place for place, cost in enumerate(names)}
    here = {
        cost: [name for name in styles if any((name, cost) == mark[:2] for mark in marks)]
        for cost in names
    }

    def place_of(mark: Mark) -> float:
        own = here[mark.cost]
        beside = own.index(mark.method) - (len(own) - 1) / 2
        return places[mark.cost] + min(0.06, 0.4 / len(own)) * beside

    for line in dict.fromkeys(mark.line for mark in marks):
        joined = sorted(
            (mark for mark in marks if mark.line == line), key=lambda mark: places[mark.cost]
        )
        join = len({mark.cost for mark in joined}) > 1
        where = list(map(place_of, joined))
        _draw_marks(axes, where, joined, styles[joined[0].method], join=join)
    step = max(1, -(-len(names) // 8))
    axes.set_xticks(range(0, len(names), step), list(names.values())[::step])
    axes.set_xlim(-0.5, len(names) - 0.5)
    return figure


@matplotlib.rc_context(STYLE)
def against_bytes(marks: Sequence[Mark]) -> Figure:
    """Draw accuracy against megabytes per run; the dotted line joins the :func:`frontier`."""
    figure, axes, styles = _scatter(marks, xlabel="megabytes sent per run, up and down")
    costs = [mark.cost for mark in marks]
    if min(costs) > 0 and max(costs) / min(costs) > 8:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}")
    )
    best = frontier(marks)
    (stairs,) = axes.step(
        [mark.cost for mark in best], [100 * mark.accuracy for mark in best], where="post"
    )
    stairs.set(color="#777777", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    for mark in marks:
        _draw_marks(axes, [mark.cost], [mark], styles[mark.method], join=False)
    return figure


def frontier(marks: Sequence[Mark]) -> list[Mark]:
    """Return the marks that no other beats in both cost and accuracy, cheapest first."""
    kept: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: (mark.cost, -mark.accuracy)):
        if not kept or mark.accuracy > kept[-1].accuracy:
            kept.append(mark)
    return kept


def _scatter(marks: Sequence[Mark], *, xlabel: str) -> tuple[Figure, Axes, dict[str, Style]]:
    """Return a figure with axes and a legend, and the styles of methods."""
    styles = _styles(mark.method for mark in marks)
    figure = new_figure(WIDTH, 270 + _legend_height(styles), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel("test accuracy, %")
    _accuracy_axis(axes)
    _legend(figure, styles, lines=False)
    return figure, axes, styles


def _draw_marks(
    axes: Axes,
    where: Sequence[float],
    marks: Sequence[Mark],
    style: Style,
    *,
    join: bool,
) -> None:
    spreads = [100 * mark.spread for mark in marks]
    axes.errorbar(
        where,
        [100 * mark.accuracy for mark in marks],
        yerr=spreads if any(spreads) else None,
        linestyle=style.dashes if join else "none",
        linewidth=1.2,
        elinewidth=0.9,
        capsize=2,
        **_look(style, 6.0),
    )


def _look(style: Style, size: float, *, filled: bool = False) -> dict[str, Any]:
    """Return colour and marker; markers of dashed lines are hollow unless ``filled``."""
    face = style.colour if filled or style.dashes == "-" else "none"
    return {
        "color": style.colour,
        "marker": style.marker,
        "markersize": size,
        "markerfacecolor": face,
    }


def _styles(methods: Iterable[str]) -> dict[str, Style]:
    """Return the styles of methods, in the given order."""
    listed = list(dict.fromkeys(methods))
    styles = method_styles(listed)
    return {method: styles[method] for method in listed}


def _legend_columns(names: Iterable[str]) -> int:
    longest = max((len(shorten(name, length=22)) for name in names), default=1)
    return max(1, int(WIDTH / (42 + 5.8 * longest)))


def _legend_height(names: Mapping[str, object]) -> float:
    return 16.0 * -(-len(names) // _legend_columns(names))


def _legend(figure: Figure, styles: Mapping[str, Style], *, lines: bool = True) -> None:
    """Add a legend of methods above the axes."""
    handles = []
    for name, style in styles.items():
        look = _look(style, 5.5, filled=lines)
        line: Any = style.dashes if lines else "none"
        handles.append(Line2D([], [], linestyle=line, label=shorten(name, length=22), **look))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=_legend_columns(styles),
        frameon=False,
        fontsize=9.5,
    )


def new_figure(
    width: float, height: float, *, layout: Literal["constrained"] | None = None
) -> Figure:
    """Return an empty figure of a size in points."""
    return Figure(figsize=(width / 72, height / 72), layout=layout)
