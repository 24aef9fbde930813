"""Figures of the clients' data: the split, and the certainty scores of each client."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import EllipseCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedaux.report.figures import BLUE, FADE, TINT, WIDTH, new_figure, shorten
from fedaux.report.run import Array
from fedaux.report.svg import STYLE


def class_shares(table: npt.ArrayLike) -> Array:
    """Return the share of each class that each client holds [clients, classes]; columns sum to 1
    or 0."""
    counts = np.asarray(table, dtype=np.float64)
    return np.asarray(counts / np.maximum(counts.sum(axis=0, keepdims=True), 1))


def order_clients(table: npt.ArrayLike) -> list[int]:
    """Return the rows of a table [clients, classes] sorted by each client's main class, purest
    first."""
    counts = np.asarray(table, dtype=np.float64)
    purity = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    main = np.where(counts.sum(axis=1) > 0, counts.argmax(axis=1), counts.shape[1])
    return [int(index) for index in np.lexsort((-purity, main))]


@matplotlib.rc_context(STYLE)
def split_bubbles(
    panels: Sequence[tuple[str, npt.ArrayLike]],
    classes: Sequence[object],
    *,
    clients: Sequence[str] = (),
) -> Figure:
    """Draw splits, one panel each: x = client, y = class, area of a bubble = number of examples.

    Each panel is a title and a table [clients, classes] of counts; all share one scale. Small
    counts are drawn larger, to be visible. Clients are numbered if they have no names.
    """
    if not panels:
        raise ValueError("no panels: should be at least one (title, table)")
    tables = [np.asarray(table, dtype=np.float64) for _, table in panels]
    widest = max(table.shape[0] for table in tables)
    columns = min(len(panels), max(1, 40 // max(widest, 1)))
    lines = -(-len(panels) // columns)
    left = 22 + 5.4 * max((len(shorten(name)) for name in classes), default=1)
    cell = float(np.clip((WIDTH - left) / columns / max(widest, 1), 9.5, 24))
    width = max(200, left + columns * (cell * widest + 12))
    titled = any(title for title, _ in panels)
    height = lines * (cell * len(classes) + (22 if titled else 4)) + 40
    height += 5.4 * max((len(shorten(name)) for name in clients), default=0)
    figure = new_figure(width, height, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    largest = max((table.max() for table in tables if table.size), default=1) or 1
    for axes, (title, _), table in zip(grid.flat, panels, tables, strict=False):
        across, labels = np.nonzero(table)
        diameters = np.maximum(
            0.94 * np.sqrt(table[across, labels] / largest), 0.14
        )  # one example is still visible
        places, flat = np.column_stack([across, labels]), np.zeros_like(diameters)
        bubbles = EllipseCollection(
            diameters, diameters, flat, units="x", offsets=places, offset_transform=axes.transData
        )
        bubbles.set(facecolor=BLUE, edgecolor="none")
        axes.add_collection(bubbles)
        axes.set_xlim(-0.6, widest - 0.4)
        axes.set_ylim(-0.6, len(classes) - 0.4)
        axes.set_aspect("equal")
        axes.set_title(title)
        if clients:
            _name_ticks(axes, "x", clients, room=cell, rotation=90)
        else:
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
    """Draw the share of each class that a client holds beside the weight of its scores on that
    class.

    Both are [clients, classes], with columns that sum to 1, on one scale.
    """
    weights = np.asarray(weights_by_class, dtype=np.float64)
    shares = class_shares(table)
    if (
        weights.shape != shares.shape
        or len(clients) != len(weights)
        or len(classes) != weights.shape[1]
    ):
        raise ValueError(
            f"weights {weights.shape}, table {shares.shape}, {len(clients)} clients and "
            f"{len(classes)} classes do not match: weights and table should both be [clients, "
            "classes]"
        )
    order = order_clients(table)
    names, rows = [shorten(name) for name in classes], [shorten(clients[index]) for index in order]
    row = float(np.clip(260 / max(len(order), 1), 7, 20))
    column = max(4.0, (WIDTH - 60) / 2 / max(len(names), 1))
    steep = 6 * max(map(len, names), default=1) > column - 2
    left = 24 + 6 * max(map(len, rows), default=1)
    below = 26 + (6 * max(map(len, names), default=1) if steep else 10)
    figure = new_figure(
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
def confusion(shares: npt.ArrayLike, classes: Sequence[object]) -> Figure:
    """Draw the share of each class (row) that is predicted as each class (column); few classes
    have their shares printed in %."""
    values = np.asarray(shares, dtype=np.float64)
    names = [shorten(name) for name in classes]
    longest = max(map(len, names), default=1)
    left = 30 + 5.4 * longest
    cell = float(np.clip((WIDTH - left) / max(len(names), 1), 4, 30))
    steep = 6 * longest > cell - 2
    side = cell * len(names)
    figure = new_figure(
        left + side + 8, side + 34 + (5.4 * longest if steep else 10), layout="constrained"
    )
    axes = figure.subplots()
    axes.imshow(values, cmap=TINT, vmin=0, vmax=1, interpolation="none")
    for (row, column), value in np.ndenumerate(values) if cell >= 18 else ():
        if value >= 0.005:
            axes.annotate(
                f"{100 * value:.0f}", (column, row), ha="center", va="center", fontsize=8.5
            )
    _name_ticks(axes, "x", names, room=cell, rotation=90 if steep else 0)
    _name_ticks(axes, "y", names, room=cell)
    axes.set_xlabel("predicted")
    axes.set_ylabel("class")
    axes.tick_params(length=0)
    axes.spines[:].set_alpha(0.5)
    return figure


def _name_ticks(
    axes: Axes, which: str, names: Sequence[object], *, room: float, rotation: float = 0
) -> None:
    """Label the positions 0, 1, ... of an axis, omitting labels that do not fit."""
    step = max(1, math.ceil(9.5 / room))
    ticks = range(0, len(names), step)
    labels = [shorten(names[index]) for index in ticks]
    if which == "x":
        axes.set_xticks(list(ticks), labels, rotation=rotation)
    else:
        axes.set_yticks(list(ticks), labels)
