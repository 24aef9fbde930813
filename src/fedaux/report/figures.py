"""Figures of a run, drawn for light and dark pages and for eyes that confuse red and green."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import EllipseCollection
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedaux.report.record import Array, Point, curve_points
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
OTHER_STYLES = (("#E69F00", "P"), ("#CC79A7", "X"), ("#56B4E9", "<"), ("#009E73", ">"), ("#0072B2", "p"))
DASHES = ("-", (0, (4, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))
BLUE = "#2A86C8"  # between the palette's two blues: seen on white and on black

# Clear where the value is 0, so that the page shows through, and solid where it is largest.
FADE = ListedColormap([(*to_rgb(BLUE), (step / 255) ** 0.65) for step in range(256)])


class Style(NamedTuple):
    """How the line of one method is drawn."""

    colour: str
    marker: str
    dashes: Any


def method_styles(methods: Iterable[str]) -> dict[str, Style]:
    """A colour, marker and line for each method: its own where possible, never the same for two.

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
    """A colour, marker and line for each setting of one method, in their order."""
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
def learning_curves(rows: Iterable[Mapping[str, Any]]) -> Figure:
    """Accuracy over the rounds: a line a method (mean over seeds), a band from the worst to the best seed."""
    return labelled_lines(curve_points(rows), xlabel="communication round")


@matplotlib.rc_context(STYLE)
def labelled_lines(
    curves: Mapping[str, Sequence[Point]],
    *,
    xlabel: str,
    ticks: Mapping[int, str] | None = None,
    styles: Mapping[str, Style] | None = None,
) -> Figure:
    """Lines with bands, each with its name and last value at its end; ``ticks`` name the places of the x axis.

    Without ``styles``, the names are those of methods.
    """
    figure, height = _figure(WIDTH, 290)
    labels = {
        name: f"{shorten(name, length=24)}{':' if ' ' in name else ''} {100 * points[-1].mean:.1f}"
        for name, points in curves.items()
    }
    left, right = 46, 26 + 5.9 * max(map(len, labels.values()), default=0)
    axes = figure.add_axes((left / WIDTH, 0.15, 1 - (left + right) / WIDTH, 0.82))
    styles = styles or method_styles(curves)
    for name, points in curves.items():
        draw_line(axes, points, styles[name], heavy=name == "fedaux")
    axes.set_xlabel(xlabel)
    axes.set_ylabel("test accuracy, %")
    last = max((points[-1].round for points in curves.values()), default=1)
    first = min((points[0].round for points in curves.values()), default=1)
    margin = 0.03 * (last - first) or 0.5
    axes.set_xlim(first - margin, last + margin)
    if ticks is not None:
        axes.set_xticks(list(ticks), list(ticks.values()))
    elif first == last:
        axes.set_xticks([first])
    _label_curves(axes, curves, labels, styles, height=0.82 * height)
    return figure


def draw_line(axes: Axes, points: Sequence[Point], style: Style, *, heavy: bool = False) -> None:
    """One line with its band, in percent, on axes with a light grid."""
    places = [point.round for point in points]
    axes.fill_between(
        places,
        [100 * point.low for point in points],
        [100 * point.high for point in points],
        color=style.colour,
        alpha=0.16,
        linewidth=0,
    )
    axes.plot(
        places,
        [100 * point.mean for point in points],
        color=style.colour,
        linestyle=style.dashes,
        linewidth=2.2 if heavy else 1.6,
        marker=style.marker,
        markersize=4.5,
        markevery=max(1, len(places) // 10),
    )
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.grid(axis="y")
    axes.spines[["top", "right"]].set_visible(False)


def _label_curves(
    axes: Axes,
    curves: Mapping[str, Sequence[Point]],
    labels: Mapping[str, str],
    styles: Mapping[str, Style],
    *,
    height: float,
) -> None:
    """Write each method's name and last value beside the end of its line."""
    low, high = axes.get_ylim()
    ends = [100 * points[-1].mean for points in curves.values()]
    placed = spread_labels([(value - low) / (high - low) for value in ends], gap=12.5 / height)
    for (method, points), value, position in zip(curves.items(), ends, placed, strict=True):
        axes.annotate(
            labels[method],
            xy=(points[-1].round, value),
            xytext=(1.05, position),
            textcoords="axes fraction",
            va="center",
            fontsize=9.5,
            fontweight="bold" if method == "fedaux" else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": styles[method].colour,
                "linewidth": 0.9,
                "shrinkA": 2,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )


@matplotlib.rc_context(STYLE)
def split_bubbles(panels: Sequence[tuple[str, npt.ArrayLike]], classes: Sequence[object]) -> Figure:
    """Who holds what: x = client, y = class, area of a bubble = number of examples; one panel a split.

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
    figure, _ = _figure(width, lines * (cell * len(classes) + (22 if titled else 4)) + 40)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    figure.set_layout_engine("constrained")
    largest = max((table.max() for table in tables if table.size), default=1) or 1
    for axes, (title, _), table in zip(grid.flat, panels, tables, strict=False):
        clients, labels = np.nonzero(table)
        diameters = np.maximum(0.94 * np.sqrt(table[clients, labels] / largest), 0.14)  # one is still seen
        bubbles = EllipseCollection(
            diameters,
            diameters,
            np.zeros_like(diameters),
            units="x",
            offsets=np.column_stack([clients, labels]),
            offset_transform=axes.transData,
            facecolor=BLUE,
            edgecolor="none",
        )
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
    """What each client holds beside the weight its scores earn it on test images of each class.

    Both [clients, classes], both with columns that sum to 1, in one scale: equal pictures mean that
    every image is taught by those who know its class.
    """
    weights = np.asarray(weights_by_class, dtype=np.float64)
    shares = class_shares(table)
    if weights.shape != shares.shape or len(clients) != len(weights) or len(classes) != weights.shape[1]:
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
    wide, high = column * len(names), row * len(order)
    width = left + 2 * wide + 22
    figure, height = _figure(width, 22 + high + below + 38)

    def place(x: float, y: float, across: float, up: float) -> Axes:
        return figure.add_axes((x / width, y / height, across / width, up / height))

    largest = max(float(weights.max(initial=0)), float(shares.max(initial=0))) or 1.0
    start = left + wide + 12
    panels = ((left, shares, "share of the class held"), (start, weights, "weight on its test examples"))
    for x, values, title in panels:
        axes = place(x, 38 + below, wide, high)
        axes.imshow(values[order], cmap=FADE, vmin=0, vmax=largest, aspect="auto", interpolation="none")
        axes.set_title(title)
        axes.set_xlabel("class")
        _name_ticks(axes, "x", names, room=column, rotation=90 if steep else 0)
        _name_ticks(axes, "y", rows if x == left else [], room=row)
        axes.tick_params(length=0)
        axes.spines[:].set_alpha(0.5)
        if x == left:
            axes.set_ylabel("client")
    scale = place(left, 20, wide, 9)
    ramp = np.linspace(0, 1, 256)[None]
    scale.imshow(ramp, cmap=FADE, aspect="auto", interpolation="none", extent=(0, largest, 0, 1))
    scale.set_yticks([])
    scale.xaxis.set_major_locator(MaxNLocator(nbins=4))
    scale.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    scale.spines[:].set_alpha(0.5)
    scale.annotate("share, weight", (largest, 0.5), (8, 0), textcoords="offset points", va="center", fontsize=9)
    return figure


@matplotlib.rc_context(STYLE)
def top_images(
    images: npt.ArrayLike, *, table: npt.ArrayLike, classes: Sequence[object], clients: Sequence[object]
) -> Figure:
    """The auxiliary images each client scores highest: a row a client, named by the class it holds most of.

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
    figure, total = _figure(width, max(height, 10) + 6)
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
    blocks = images[..., : rows * factor, : columns * factor].reshape(*lead, rows, factor, columns, factor)
    return np.asarray(blocks.mean(axis=(-3, -1)).round(), dtype=np.uint8)


def _figure(width: float, height: float) -> tuple[Figure, float]:
    """An empty figure of a size in points, and its height."""
    return Figure(figsize=(width / 72, height / 72)), height


def _name_ticks(axes: Axes, which: str, names: Sequence[object], *, room: float, rotation: float = 0) -> None:
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
    colours = np.broadcast_to(images, (rows, columns, 3, height, width)) if channels == 1 else images
    mosaic[:, :height, :, :width, :3] = colours.transpose(0, 3, 1, 4, 2)
    mosaic[:, :height, :, :width, 3] = 255
    return mosaic.reshape(rows * (height + 2), columns * (width + 2), 4)
