"""Figures of runs, for light and dark pages, in colours that colour-blind readers can tell apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from zlib import crc32

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import EllipseCollection
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from fedaux.report.run import Array, Point
from fedaux.report.svg import SMOOTH, STYLE

WIDTH = 400  # points: text of 10 points stays readable when the page of a phone shrinks it to 340 pixels

# Okabe and Ito's palette; a method keeps its colour and marker in every figure.
METHOD_STYLES = {
    "fedavg": ("#009E73", "s"),
    "fedprox": ("#56B4E9", "D"),
    "feddf": ("#0072B2", "v"),
    "fedbe": ("#CC79A7", "^"),
    "fedaux": ("#D55E00", "o"),
}
OTHER_STYLES = (
    ("#E69F00", "P"),
    ("#CC79A7", "X"),
    ("#56B4E9", "<"),
    ("#009E73", ">"),
    ("#0072B2", "p"),
)
DASHES = ("-", (0, (4, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))
BLUE = "#2A86C8"  # between the palette's two blues: seen on white and on black

# Clear where the value is 0, so that the page shows through, and solid where it is largest.
FADE = ListedColormap([(*to_rgb(BLUE), (step / 255) ** 0.65) for step in range(256)])
# Never solid, so that the numbers written on it can be read on light and dark pages.
TINT = ListedColormap([(*to_rgb(BLUE), 0.04 + 0.5 * step / 255) for step in range(256)])
PLAIN_SIZE, MOST_SIZES = 6.0, 5  # of marks; more sizes cannot be told apart


class Style(NamedTuple):
    """How the line of one method is drawn."""

    colour: str
    marker: str
    dashes: Any


class Mark(NamedTuple):
    """A method at one setting: its cost, its accuracy, and the deviation over seeds (0 for one seed)."""

    method: str
    cost: float
    accuracy: float
    spread: float
    line: str
    """Marks of one line are joined: they differ in their cost alone."""
    setting: str = ""
    """The other settings; the size of a mark tells them apart."""


def method_styles(methods: Iterable[str]) -> dict[str, Style]:
    """Return a colour, marker and line for each method: its own if possible, never the same for two.

    Methods that start from pretrained features are drawn solid, the others dashed.
    """
    styles: dict[str, Style] = {}
    for method in sorted(methods):
        base = method.partition("+")[0]
        preferred = METHOD_STYLES.get(base, OTHER_STYLES[crc32(base.encode()) % len(OTHER_STYLES)])
        first = 0 if "+" in method or base not in METHOD_STYLES or base == "fedaux" else 1
        looks = [preferred, *(look for look in OTHER_STYLES if look != preferred)]
        dashes = [*DASHES[first:], *DASHES[:first]]
        choices = [Style(colour, marker, dash) for colour, marker in looks for dash in dashes]
        free = (style for style in choices if style not in styles.values())
        styles[method] = next(free, choices[0])
    return styles


def setting_styles(settings: Sequence[str]) -> dict[str, Style]:
    """Return a colour, marker and line for each setting of one method, in their order."""
    looks = [("#D55E00", "o"), *OTHER_STYLES]
    return {
        setting: Style(*looks[place % len(looks)], DASHES[place // len(looks) % len(DASHES)])
        for place, setting in enumerate(settings)
    }


def spread_labels(heights: Sequence[float], *, gap: float) -> list[float]:
    """Move label positions in [0, 1] as little as needed so that neighbours are ``gap`` apart, order kept."""
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


def class_shares(table: npt.ArrayLike) -> Array:
    """Share of each class that each client holds [clients, classes]; columns sum to 1, or to 0 if unheld."""
    counts = np.asarray(table, dtype=np.float64)
    return np.asarray(counts / np.maximum(counts.sum(axis=0, keepdims=True), 1))


def order_clients(table: npt.ArrayLike) -> list[int]:
    """Row numbers of a table [clients, classes] sorted by each client's main class, purest first."""
    counts = np.asarray(table, dtype=np.float64)
    purity = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    main = np.where(counts.sum(axis=1) > 0, counts.argmax(axis=1), counts.shape[1])
    return [int(index) for index in np.lexsort((-purity, main))]


def shorten(name: object, *, length: int = 14) -> str:
    """A label that fits beside an axis."""
    text = str(name)
    return text if len(text) <= length else text[: length - 1] + "…"


@matplotlib.rc_context(STYLE)
def labelled_lines(
    curves: Mapping[str, Sequence[Point]], *, styles: Mapping[str, Style] | None = None
) -> Figure:
    """Draw learning curves with bands, each with its name and last value at its end.

    Without ``styles``, the names are those of methods.
    """
    figure, height = _figure(WIDTH, 290), 290
    labels = {
        name: f"{shorten(name, length=24)}{':' if ' ' in name else ''} {100 * points[-1].mean:.1f}"
        for name, points in curves.items()
    }
    left, right = 46, 26 + 5.9 * max(map(len, labels.values()), default=0)
    axes = figure.add_axes((left / WIDTH, 0.15, 1 - (left + right) / WIDTH, 0.82))
    styles = styles or method_styles(curves)
    for name, points in curves.items():
        draw_line(axes, points, styles[name], heavy=name == "fedaux")
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


def draw_line(axes: Axes, points: Sequence[Point], style: Style, *, heavy: bool = False) -> None:
    """Draw one line with its band, in percent, on axes with a light grid."""
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
    """Write each method's name and last value beside the end of its line."""
    low, high = axes.get_ylim()
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
            fontweight="bold" if method == "fedaux" else "normal",
            annotation_clip=False,
            arrowprops=leader | {"shrinkA": 2, "shrinkB": 4},
        )


@matplotlib.rc_context(STYLE)
def curve_panels(panels: Sequence[tuple[str, Mapping[str, Sequence[Point]]]]) -> Figure:
    """Draw learning curves, one panel per setting, all in one scale, with one legend."""
    styles = _styles(method for _, curves in panels for method in curves)
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = _figure(WIDTH, 160 * lines + 24 + _legend_height(styles), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
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
    """Draw accuracy [rows, columns] over two settings, one panel per method, in one scale; NaN is drawn as a dash."""
    across = min(2, len(panels)) if len(columns) <= 5 else 1
    lines = -(-len(panels) // across)
    cell = float(np.clip((WIDTH - 60) / across / max(len(columns), 1) * 0.62, 20, 34))
    figure = _figure(WIDTH, lines * (cell * len(rows) + 26) + 40, layout="constrained")
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
def against_values(
    marks: Sequence[Mark], *, xlabel: str, names: Mapping[float, str], settings: Sequence[str] = ()
) -> Figure:
    """Draw accuracy against costs at equal distances, named and in order by ``names``, methods side by side.

    ``settings`` are those of the marks, in order.
    """
    figure, axes, styles, sizes = _scatter(marks, xlabel=xlabel, settings=settings)
    places = {cost: place for place, cost in enumerate(names)}
    beside = {
        method: 0.5 * ((place + 0.5) / len(styles) - 0.5) for place, method in enumerate(styles)
    }
    for line in dict.fromkeys(mark.line for mark in marks):
        joined = sorted(
            (mark for mark in marks if mark.line == line), key=lambda mark: places[mark.cost]
        )
        where = [places[mark.cost] + beside[mark.method] for mark in joined]
        _draw_marks(axes, where, joined, styles[joined[0].method], sizes, join=len(set(where)) > 1)
    step = max(1, -(-len(names) // 8))
    axes.set_xticks(range(0, len(names), step), list(names.values())[::step])
    axes.set_xlim(-0.5, len(names) - 0.5)
    return figure


@matplotlib.rc_context(STYLE)
def against_bytes(marks: Sequence[Mark], *, settings: Sequence[str] = ()) -> Figure:
    """Draw accuracy against megabytes per run; the dotted line joins the :func:`frontier`."""
    figure, axes, styles, sizes = _scatter(
        marks, xlabel="megabytes sent per run, up and down", settings=settings
    )
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
        _draw_marks(axes, [mark.cost], [mark], styles[mark.method], sizes, join=False)
    return figure


def frontier(marks: Sequence[Mark]) -> list[Mark]:
    """Return the marks than which none is both cheaper and better, cheapest first."""
    kept: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: (mark.cost, -mark.accuracy)):
        if not kept or mark.accuracy > kept[-1].accuracy:
            kept.append(mark)
    return kept


def mark_sizes(settings: Sequence[str]) -> dict[str, float]:
    """Return the size of a mark by its setting; empty for one setting, or more than sizes can tell apart."""
    if not 2 <= len(settings) <= MOST_SIZES:
        return {}
    return {
        setting: float(size)
        for setting, size in zip(settings, np.linspace(4, 11, len(settings)), strict=True)
    }


def _scatter(
    marks: Sequence[Mark], *, xlabel: str, settings: Sequence[str]
) -> tuple[Figure, Axes, dict[str, Style], dict[str, float]]:
    """Return a figure with axes and legends, the looks of the methods and the sizes of the settings."""
    styles, sizes = _styles(mark.method for mark in marks), mark_sizes(settings)
    figure = _figure(
        WIDTH, 270 + _legend_height(styles) + _legend_height(sizes), layout="constrained"
    )
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel("test accuracy, %")
    _accuracy_axis(axes)
    _legend(figure, styles, lines=False)
    if sizes:
        _legend(figure, dict.fromkeys(sizes, Style("#777777", "o", "-")), lines=False, sizes=sizes)
    return figure, axes, styles, sizes


def _draw_marks(
    axes: Axes,
    where: Sequence[float],
    marks: Sequence[Mark],
    style: Style,
    sizes: Mapping[str, float],
    *,
    join: bool,
) -> None:
    spreads = [100 * mark.spread for mark in marks]
    size = sizes.get(marks[0].setting, PLAIN_SIZE)
    axes.errorbar(
        where,
        [100 * mark.accuracy for mark in marks],
        yerr=spreads if any(spreads) else None,
        zorder=2 + 1 / size,  # small marks lie on large ones
        linestyle=style.dashes if join else "none",
        linewidth=1.2,
        elinewidth=0.9,
        capsize=2,
        **_look(style, size),
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
    """Return the looks of methods, in the order in which they are given."""
    listed = list(dict.fromkeys(methods))
    styles = method_styles(listed)
    return {method: styles[method] for method in listed}


def _legend_columns(names: Iterable[str]) -> int:
    longest = max((len(shorten(name, length=22)) for name in names), default=1)
    return max(1, int(WIDTH / (42 + 5.8 * longest)))


def _legend_height(names: Mapping[str, object]) -> float:
    return 16.0 * -(-len(names) // _legend_columns(names))


def _legend(
    figure: Figure,
    styles: Mapping[str, Style],
    *,
    lines: bool = True,
    sizes: Mapping[str, float] | None = None,
) -> None:
    """Put names beside their looks: methods above the axes, and below them the settings that ``sizes`` stand for."""
    handles = []
    for name, style in styles.items():
        look = _look(style, (sizes or {}).get(name, 5.5), filled=lines)
        line: Any = style.dashes if lines else "none"
        handles.append(Line2D([], [], linestyle=line, label=shorten(name, length=22), **look))
    where: Any = "outside lower left" if sizes else "outside upper left"
    figure.legend(
        handles=handles, loc=where, ncols=_legend_columns(styles), frameon=False, fontsize=9.5
    )


@matplotlib.rc_context(STYLE)
def split_bubbles(panels: Sequence[tuple[str, npt.ArrayLike]], classes: Sequence[object]) -> Figure:
    """Draw splits, one panel each: x = client, y = class, area of a bubble = number of examples.

    Each panel is a title and a table [clients, classes] of counts; all share one scale. Counts below a fiftieth
    of the largest are drawn at that size, to be seen.
    """
    if not panels:
        raise ValueError("no panel to draw: give at least one (title, table)")
    tables = [np.asarray(table, dtype=np.float64) for _, table in panels]
    widest = max(table.shape[0] for table in tables)
    columns = min(len(panels), max(1, 40 // max(widest, 1)))
    lines = -(-len(panels) // columns)
    left = 22 + 5.4 * max((len(shorten(name)) for name in classes), default=1)
    cell = float(np.clip((WIDTH - left) / columns / max(widest, 1), 9.5, 24))
    width = max(200, left + columns * (cell * widest + 12))
    titled = any(title for title, _ in panels)
    height = lines * (cell * len(classes) + (22 if titled else 4)) + 40
    figure = _figure(width, height, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    largest = max((table.max() for table in tables if table.size), default=1) or 1
    for axes, (title, _), table in zip(grid.flat, panels, tables, strict=False):
        clients, labels = np.nonzero(table)
        diameters = np.maximum(
            0.94 * np.sqrt(table[clients, labels] / largest), 0.14
        )  # one is still seen
        places, flat = np.column_stack([clients, labels]), np.zeros_like(diameters)
        bubbles = EllipseCollection(
            diameters, diameters, flat, units="x", offsets=places, offset_transform=axes.transData
        )
        bubbles.set(facecolor=BLUE, edgecolor="none")
        axes.add_collection(bubbles)
        axes.set_xlim(-0.6, widest - 0.4)
        axes.set_ylim(-0.6, len(classes) - 0.4)
        axes.set_aspect("equal")
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=11, integer=True, steps=[1, 2, 5, 10]))
        _name_ticks(axes, "y", classes, room=cell)
        axes.set_axisbelow(True)
        axes.grid(True)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel("client", fontsize=10.5)
    figure.supylabel("class", fontsize=10.5)
    return figure


@matplotlib.rc_context(STYLE)
def score_matrix(
    weights_by_class: npt.ArrayLike,
    table: npt.ArrayLike,
    classes: Sequence[object],
    clients: Sequence[object],
) -> Figure:
    """Draw what each client holds beside the weight of its scores on test examples of each class.

    Both [clients, classes], with columns that sum to 1, in one scale.
    """
    weights = np.asarray(weights_by_class, dtype=np.float64)
    shares = class_shares(table)
    if (
        weights.shape != shares.shape
        or len(clients) != len(weights)
        or len(classes) != weights.shape[1]
    ):
        raise ValueError(
            f"weights {weights.shape}, table {shares.shape}, {len(clients)} clients and {len(classes)} "
            "classes do not fit together: weights and table must both be [clients, classes]"
        )
    order = order_clients(table)
    names, rows = [shorten(name) for name in classes], [shorten(clients[index]) for index in order]
    row = float(np.clip(260 / max(len(order), 1), 7, 20))
    column = max(4.0, (WIDTH - 60) / 2 / max(len(names), 1))
    steep = 6 * max(map(len, names), default=1) > column - 2
    left = 24 + 6 * max(map(len, rows), default=1)
    below = 26 + (6 * max(map(len, names), default=1) if steep else 10)
    figure = _figure(
        left + 2 * column * len(names) + 22, row * len(order) + below + 66, layout="constrained"
    )
    grid = figure.subplot_mosaic(
        [["held", "weight"], ["scale", "."]], height_ratios=[row * max(len(order), 1), 9]
    )
    largest = max(float(weights.max(initial=0)), float(shares.max(initial=0))) or 1.0
    panels = {
        "held": (shares, "share of the class held"),
        "weight": (weights, "weight on its test examples"),
    }
    for key, (values, title) in panels.items():
        axes = grid[key]
        axes.imshow(
            values[order], cmap=FADE, vmin=0, vmax=largest, aspect="auto", interpolation="none"
        )
        axes.set_title(title)
        axes.set_xlabel("class")
        _name_ticks(axes, "x", names, room=column, rotation=90 if steep else 0)
        _name_ticks(axes, "y", rows if key == "held" else [], room=row)
        axes.tick_params(length=0)
        axes.spines[:].set_alpha(0.5)
    grid["held"].set_ylabel("client")
    scale = grid["scale"]
    ramp = np.linspace(0, 1, 256)[None]
    scale.imshow(ramp, cmap=FADE, aspect="auto", interpolation="none", extent=(0, largest, 0, 1))
    scale.set_yticks([])
    scale.xaxis.set_major_locator(MaxNLocator(nbins=4))
    scale.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    scale.spines[:].set_alpha(0.5)
    label = scale.annotate(
        "share, weight", (largest, 0.5), (8, 0), textcoords="offset points", va="center", fontsize=9
    )
    label.set_in_layout(False)
    return figure


@matplotlib.rc_context(STYLE)
def top_images(
    images: npt.ArrayLike,
    *,
    table: npt.ArrayLike,
    classes: Sequence[object],
    clients: Sequence[object],
) -> Figure:
    """Draw the auxiliary images that each client scores highest, one row per client, named by its main class.

    images is uint8 [clients, M, C, H, W] with C = 1 or 3; table is [clients, classes].
    """
    pictures = np.asarray(images, dtype=np.uint8)
    counts = np.asarray(table)
    if pictures.ndim != 5 or pictures.shape[2] not in (1, 3) or len(pictures) != len(clients):
        raise ValueError(
            f"images of shape {pictures.shape} for {len(clients)} clients: "
            "they must be [clients, M, C, H, W] with C = 1 or 3"
        )
    order = order_clients(counts)
    mosaic = _mosaic(shrink_images(pictures[order], side=48))
    names = [_main_class(counts[index], classes, clients[index]) for index in order]
    left = 10 + 5.4 * max(map(len, names), default=1)
    across = max(1.0, min(28.0 * pictures.shape[1], WIDTH - left))
    width, height = left + across, across * mosaic.shape[0] / max(mosaic.shape[1], 1)
    total = max(height, 10) + 6
    figure = _figure(width, total)
    axes = figure.add_axes((left / width, 3 / total, across / width, 1 - 6 / total))
    axes.imshow(mosaic, interpolation="none", aspect="auto", gid=SMOOTH)
    pitch = mosaic.shape[0] / max(len(order), 1)
    axes.set_yticks([pitch * (index + 0.5) - 1 for index in range(len(order))], names)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def shrink_images(images: Array, *, side: int) -> Array:
    """Average blocks of pixels until neither side of the images [..., H, W] is above ``side``."""
    *lead, height, width = images.shape
    factor = max(1, -(-max(height, width) // side))
    rows, columns = height // factor, width // factor
    blocks = images[..., : rows * factor, : columns * factor].reshape(
        *lead, rows, factor, columns, factor
    )
    return np.asarray(blocks.mean(axis=(-3, -1)).round(), dtype=np.uint8)


def _figure(width: float, height: float, *, layout: Literal["constrained"] | None = None) -> Figure:
    """Return an empty figure of a size in points."""
    return Figure(figsize=(width / 72, height / 72), layout=layout)


def _name_ticks(
    axes: Axes, which: str, names: Sequence[object], *, room: float, rotation: float = 0
) -> None:
    """Name the positions 0, 1, ... of an axis, leaving names out where there is no room for all."""
    step = max(1, math.ceil(9.5 / room))
    ticks = range(0, len(names), step)
    labels = [shorten(names[index]) for index in ticks]
    if which == "x":
        axes.set_xticks(list(ticks), labels, rotation=rotation)
    else:
        axes.set_yticks(list(ticks), labels)


def _main_class(counts: Array, classes: Sequence[object], client: object) -> str:
    """A row's label: the client and the class it holds most of."""
    if counts.sum() == 0:
        return f"client {client}, no data"
    return f"client {client}, class {shorten(classes[int(counts.argmax())])}"


def _mosaic(images: Array) -> Array:
    """Images [rows, columns, C, H, W] as one picture [.., .., 4] with clear gaps of 2 pixels."""
    rows, columns, channels, height, width = images.shape
    mosaic = np.zeros((rows, height + 2, columns, width + 2, 4), dtype=np.uint8)
    colours = (
        np.broadcast_to(images, (rows, columns, 3, height, width)) if channels == 1 else images
    )
    mosaic[:, :height, :, :width, :3] = colours.transpose(0, 3, 1, 4, 2)
    mosaic[:, :height, :, :width, 3] = 255
    return mosaic.reshape(rows * (height + 2), columns * (width + 2), 4)
