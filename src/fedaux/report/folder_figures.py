"""Figures of several runs side by side, in the manner of those of one run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from fedaux.report.figures import BLUE, WIDTH, Style, draw_line, method_styles, shorten
from fedaux.report.record import Array, Point
from fedaux.report.svg import STYLE

MOST_SIZES = 5
"""Settings that sizes can tell apart."""
# Never solid, so that the numbers written on it can be read on light and dark pages.
TINT = ListedColormap([(*to_rgb(BLUE), 0.04 + 0.5 * step / 255) for step in range(256)])


class Mark(NamedTuple):
    """A method at one setting: what it cost, what it reached, and the spread over seeds (0 where there is none)."""

    method: str
    cost: float
    accuracy: float
    spread: float
    line: str
    """Marks of one line are joined: what differs between them is the cost."""
    setting: str = ""
    """The settings besides what makes the cost, for people; the size of a mark tells them apart."""


@matplotlib.rc_context(STYLE)
def curve_panels(panels: Sequence[tuple[str, Mapping[str, Sequence[Point]]]]) -> Figure:
    """Learning curves, a panel a setting, all in one scale, with one legend."""
    methods = list(dict.fromkeys(method for _, curves in panels for method in curves))
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    legend = _legend_height(methods)
    height = legend + 160 * lines + 24
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    styles = _styles(methods)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    figure.subplots_adjust(
        left=44 / WIDTH,
        right=1 - 6 / WIDTH,
        top=1 - (legend + 18) / height,
        bottom=40 / height,
        wspace=0.08,
        hspace=0.3,
    )
    for place, (axes, (title, curves)) in enumerate(zip(grid.flat, panels, strict=False)):
        for method, points in curves.items():
            draw_line(axes, points, styles[method], heavy=method == "fedaux")
        axes.set_title(shorten(title, length=34), fontsize=9.5)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 5, 10]))
        if place + columns >= len(panels):
            axes.set_xlabel("communication round")
            axes.tick_params(labelbottom=True)
        if place % columns == 0:
            axes.set_ylabel("accuracy, %")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    _legend(figure, styles, height=height)
    return figure


@matplotlib.rc_context(STYLE)
def heat_maps(
    panels: Sequence[tuple[str, Array]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    labels: tuple[str, str],
) -> Figure:
    """Accuracy [rows, columns] over two settings, a panel a method, in one scale; NaN where nothing was measured."""
    across = min(2, len(panels)) if len(columns) <= 5 else 1
    lines = -(-len(panels) // across)
    left = 30 + 5.8 * max((len(shorten(name)) for name in rows), default=1)
    wide = (WIDTH - left - 8 - 14 * (across - 1)) / across
    cell = float(np.clip(wide / max(len(columns), 1) * 0.62, 20, 34))
    tall = cell * len(rows)
    height = lines * (tall + 22) + 40
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    values = np.stack([panel for _, panel in panels])
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    for place, (title, panel) in enumerate(panels):
        line, column = divmod(place, across)
        x, y = left + column * (wide + 14), height - (line + 1) * (tall + 22)
        axes = figure.add_axes((x / WIDTH, y / height, wide / WIDTH, tall / height))
        axes.imshow(
            panel, cmap=TINT, vmin=low, vmax=high if high > low else low + 1, aspect="auto", interpolation="none"
        )
        axes.set_title(shorten(title, length=30))
        last = place + across >= len(panels)
        axes.set_xticks(range(len(columns)), [shorten(name, length=10) for name in columns] if last else [])
        axes.set_yticks(range(len(rows)), [shorten(name) for name in rows] if column == 0 else [])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if last:
            axes.set_xlabel(labels[1])
        best = np.nanmax(panel) if np.isfinite(panel).any() else math.nan
        for (row, place_), value in np.ndenumerate(panel):
            text = "–" if math.isnan(value) else f"{100 * value:.1f}"
            weight = "bold" if value == best else "normal"
            axes.annotate(text, (place_, row), ha="center", va="center", fontsize=9.5, fontweight=weight)
    middle = (height + 40 - 22) / 2 / height
    figure.text(10 / WIDTH, middle, labels[0], rotation=90, ha="center", va="center", fontsize=10.5)
    return figure


@matplotlib.rc_context(STYLE)
def against_privacy(marks: Sequence[Mark], *, settings: Sequence[str] = ()) -> Figure:
    """Accuracy against epsilon: the places of the x axis are the values there are, nothing released first, ∞ last.

    A cost of NaN stands for nothing released. Methods stand side by side at a place. ``settings`` are those of the
    marks, in order.
    """
    finite = sorted({mark.cost for mark in marks if not math.isnan(mark.cost)})
    places = {cost: index for index, cost in enumerate(finite, start=1)}
    names = {index: "∞" if math.isinf(cost) else f"{cost:.3g}" for cost, index in places.items()}
    if any(math.isnan(mark.cost) for mark in marks):
        names = {0: "nothing\nreleased"} | names
    sizes = mark_sizes(settings)
    figure, axes, styles = _scatter(marks, xlabel="ε of the worst client", below=50, sizes=sizes)
    methods = list(styles)
    beside = {method: 0.5 * ((index + 0.5) / len(methods) - 0.5) for index, method in enumerate(methods)}
    for line in dict.fromkeys(mark.line for mark in marks):
        joined = sorted((mark for mark in marks if mark.line == line), key=lambda mark: places.get(mark.cost, 0))
        where = [places.get(mark.cost, 0) + beside[mark.method] for mark in joined]
        size = sizes.get(joined[0].setting, PLAIN_SIZE)
        _draw_marks(axes, where, joined, styles[joined[0].method], join=len(set(where)) > 1, size=size)
    step = max(1, -(-len(names) // 8))
    axes.set_xticks(list(names)[::step], list(names.values())[::step])
    axes.set_xlim(min(names) - 0.5, max(names) + 0.5)
    return figure


@matplotlib.rc_context(STYLE)
def against_bytes(marks: Sequence[Mark], *, settings: Sequence[str] = ()) -> Figure:
    """Accuracy against the megabytes of a run; the stairs join what nothing else beats in both.

    ``settings`` are those of the marks, in order.
    """
    sizes = mark_sizes(settings)
    figure, axes, styles = _scatter(marks, xlabel="megabytes up and down, a run", below=40, sizes=sizes)
    costs = [mark.cost for mark in marks]
    if min(costs) > 0 and max(costs) / min(costs) > 8:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"))
    best = frontier(marks)
    axes.step(
        [mark.cost for mark in best],
        [100 * mark.accuracy for mark in best],
        where="post",
        color="#777777",
        linewidth=1,
        linestyle=(0, (2, 2)),
        zorder=1,
    )
    for mark in marks:
        size = sizes.get(mark.setting, PLAIN_SIZE)
        _draw_marks(axes, [mark.cost], [mark], styles[mark.method], join=False, size=size)
    return figure


def frontier(marks: Sequence[Mark]) -> list[Mark]:
    """The marks than which none is both cheaper and better, cheapest first."""
    kept: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: (mark.cost, -mark.accuracy)):
        if not kept or mark.accuracy > kept[-1].accuracy:
            kept.append(mark)
    return kept


PLAIN_SIZE = 6.0


def mark_sizes(settings: Sequence[str]) -> dict[str, float]:
    """The size of a mark by its setting; none where there is one setting, or more than sizes can tell apart."""
    if not 2 <= len(settings) <= MOST_SIZES:
        return {}
    return {setting: float(size) for setting, size in zip(settings, np.linspace(4, 11, len(settings)), strict=True)}


def _scatter(
    marks: Sequence[Mark], *, xlabel: str, below: float, sizes: Mapping[str, float]
) -> tuple[Figure, Axes, dict[str, Style]]:
    styles = _styles(list(dict.fromkeys(mark.method for mark in marks)))
    legend = _legend_height(list(styles)) + (16 * len(_legend_rows(list(sizes))) if sizes else 0)
    height = legend + 230 + below
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    axes = figure.add_axes((46 / WIDTH, below / height, 1 - 56 / WIDTH, 226 / height))
    axes.set_xlabel(xlabel)
    axes.set_ylabel("test accuracy, %")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.grid(axis="y")
    axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, styles, height=height, lines=False)
    grey = {setting: Style("#777777", "o", "-") for setting in sizes}
    _legend(figure, grey, height=height + 4 - _legend_height(list(styles)), lines=False, whole=height, sizes=sizes)
    return figure, axes, styles


def _draw_marks(
    axes: Axes, where: Sequence[float], marks: Sequence[Mark], style: Style, *, join: bool, size: float
) -> None:
    axes.errorbar(
        where,
        [100 * mark.accuracy for mark in marks],
        yerr=[100 * mark.spread for mark in marks] if any(mark.spread for mark in marks) else None,
        color=style.colour,
        marker=style.marker,
        markersize=size,
        zorder=2 + 1 / size,  # small marks lie on large ones
        markerfacecolor=style.colour if _solid(style) else "none",
        linestyle=style.dashes if join else "none",
        linewidth=1.2,
        elinewidth=0.9,
        capsize=2,
    )


def _styles(methods: Sequence[str]) -> dict[str, Style]:
    """The looks of methods, in the order in which they are given."""
    styles = method_styles(methods)
    return {method: styles[method] for method in methods}


def _solid(style: Style) -> bool:
    return bool(style.dashes == "-")


def _legend_rows(methods: Sequence[str]) -> list[list[str]]:
    """Methods in lines as long as the figure is wide."""
    rows: list[list[str]] = [[]]
    used = 0.0
    for method in methods:
        wide = _legend_width(method)
        if rows[-1] and used + wide > WIDTH - 44:
            rows.append([])
            used = 0.0
        rows[-1].append(method)
        used += wide
    return rows


def _legend_width(method: str) -> float:
    return 40 + 6.0 * len(shorten(method, length=22))


def _legend_height(methods: Sequence[str]) -> float:
    return 16.0 * len(_legend_rows(methods)) + 4


def _legend(
    figure: Figure,
    styles: Mapping[str, Style],
    *,
    height: float,
    lines: bool = True,
    whole: float | None = None,
    sizes: Mapping[str, float] | None = None,
) -> None:
    """Names beside their looks, down from a height, in as many lines as they need; ``whole`` is the figure's height."""
    whole = whole or height
    for row, names in enumerate(_legend_rows(list(styles))):
        x, y = 44.0, height - 16 * row - 10
        for name in names:
            style = styles[name]
            look: dict[str, Any] = {
                "color": style.colour,
                "marker": style.marker,
                "markersize": (sizes or {}).get(name, 5.5),
                "linestyle": style.dashes if lines else "none",
                "markerfacecolor": style.colour if lines or _solid(style) else "none",
            }
            ends = [x / WIDTH, (x + 11) / WIDTH, (x + 22) / WIDTH] if lines else [(x + 14) / WIDTH]
            figure.add_artist(Line2D(ends, [y / whole] * len(ends), markevery=[len(ends) // 2], **look))
            figure.text((x + 27) / WIDTH, y / whole, shorten(name, length=22), va="center", fontsize=9.5)
            x += _legend_width(name)
