"""The figures of studies: published beside measured accuracy, over heterogeneity, over the
rounds, over settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedaux.core.algorithms import asks_of
from fedaux.report.figures import BLUE, FADE, Style, method_styles, shorten
from fedaux.report.svg import INK, STYLE
from fedaux.report.tables import Table
from reproduce.document import Drawing
from reproduce.planning import CENTRAL

Numbers = Mapping[str, Any]
GREY = "#777777"
ORANGE = "#D55E00"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sized in points."""
    figure = Figure(figsize=(width / 72, height / 72))
    figure.set_layout_engine("constrained")
    return figure


def tidy(axes: Axes, *, grid: Any = "y") -> None:
    """Leave light grid lines, and no frame at the top and right."""
    axes.grid(axis=grid)
    axes.spines[["top", "right"]].set_visible(False)


def _panels(
    blocks: Sequence[str],
    columns: Sequence[str],
    *,
    across: int,
    panel: tuple[float, float],
    margin: tuple[float, float],
    **shared: Any,
) -> tuple[Figure, dict[tuple[str, str], Axes]]:
    """Return a figure with one panel per block and column; each block starts a new line."""
    across = min(across, len(columns))
    starts = range(0, len(columns), across)
    lines = len(blocks) * len(starts)
    figure = new_figure(margin[0] + panel[0] * across, margin[1] + panel[1] * lines)
    grid = figure.subplots(lines, across, squeeze=False, **shared)
    places = [(block, columns[start : start + across]) for block in blocks for start in starts]
    panels: dict[tuple[str, str], Axes] = {}
    for line, (block, some) in zip(grid, places, strict=True):
        for axes in line[len(some) :]:
            axes.set_visible(False)
        panels |= {(block, column): axes for axes, column in zip(line, some, strict=False)}
    return figure, panels


def _legend(figure: Figure, handles: Mapping[str, Any], *, columns: int) -> None:
    look: Any = {"loc": "outside upper center", "frameon": False, "fontsize": 9.5}
    figure.legend(list(handles.values()), list(handles), ncols=columns, **look)


def _edges(axes: Axes) -> tuple[bool, bool]:
    """Return whether a panel is in the first column, and in the last line, of its figure."""
    place = axes.get_subplotspec()
    return (place.is_first_col(), place.is_last_row()) if place else (True, True)


def _mark(marker: str, colour: str, *, hollow: bool = False) -> Line2D:
    return Line2D(
        [],
        [],
        linestyle="none",
        marker=marker,
        color=colour,
        fillstyle="none" if hollow else "full",
    )


def _line_style(style: Style, *, heavy: bool) -> dict[str, Any]:
    width = 2.2 if heavy else 1.6
    return {
        "color": style.colour,
        "marker": style.marker,
        "linestyle": style.dashes,
        "markersize": 4.5,
        "linewidth": width,
    }


def _shows_published(numbers: Numbers) -> bool:
    return not numbers["quick"] and any(row["published"] for row in numbers["rows"])


@matplotlib.rc_context(STYLE)
def dots(numbers: Numbers) -> Figure:
    """Draw one panel per block and column: for each method the published figure, the best and
    the last round."""
    methods, several = numbers["methods"], numbers["rounds"] > 1
    size = (150, 34 + 17 * len(methods))
    figure, panels = _panels(
        numbers["blocks"],
        numbers["columns"],
        across=4,
        panel=size,
        margin=(110, 34),
        sharey=True,
        sharex="row",
    )
    handles = {"best round": _mark("o", BLUE)} | (
        {"last round": _mark("|", BLUE)} if several else {}
    )
    if printed := _shows_published(numbers):
        handles["published"] = _mark("D", ORANGE, hollow=True)
    for (block, column), axes in panels.items():
        for row in numbers["rows"]:
            if (row["block"], row["column"]) != (block, column) or row["method"] not in methods:
                continue
            height = methods.index(row["method"])
            if printed and row["published"]:
                axes.plot(
                    row["published"]["mean"],
                    height,
                    "D",
                    color=ORANGE,
                    fillstyle="none",
                    markersize=6,
                )
            if best := row["best"]:
                deviation = best["deviation"] or None
                axes.errorbar(
                    best["mean"], height, xerr=deviation, fmt="o", color=BLUE, markersize=4.5
                )
                if several:
                    axes.plot(row["last"]["mean"], height, "|", color=BLUE, markersize=8)
        axes.set_title(f"{block}, {column}", fontsize=9.5)
        axes.set_yticks(range(len(methods)), methods)
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        tidy(axes, grid="x")
        axes.set_xlabel("test accuracy, %" if _edges(axes)[1] else "")
    _legend(figure, handles, columns=3)
    return figure


@matplotlib.rc_context(STYLE)
def lines(numbers: Numbers) -> Figure:
    """Draw one panel per block: the best round of each method over the columns, and the
    published figures."""
    blocks, columns = numbers["blocks"], numbers["columns"]
    size = (max(390 / len(blocks), 250), 300)
    figure, panels = _panels(
        [""], blocks, across=len(blocks), panel=size, margin=(30, 0), sharey=True
    )
    styles = method_styles(numbers["methods"])
    handles: dict[str, Any] = {}
    for (_, block), axes in panels.items():
        rows = [row for row in numbers["rows"] if row["block"] == block]
        for method, style in styles.items():
            line = [(columns.index(row["column"]), row) for row in rows if row["method"] == method]
            known = [
                (place, row["best"]["mean"], row["best"]["deviation"] or 0)
                for place, row in line
                if row["best"]
            ]
            if known:
                x, y, error = zip(*sorted(known), strict=True)
                look = _line_style(style, heavy=method == "fedaux")
                handles[method] = axes.errorbar(x, y, yerr=error if any(error) else None, **look)
            paper = [(place, row["published"]["mean"]) for place, row in line if row["published"]]
            if paper and not numbers["quick"]:
                x, y = zip(*paper, strict=True)
                axes.plot(x, y, style.marker, color=style.colour, fillstyle="none", markersize=8)
                handles["published"] = _mark("o", GREY, hollow=True)
        for row in rows:
            if row["method"] == CENTRAL and row["best"]:
                level = axes.axhline(row["best"]["mean"], color=INK, linestyle="--", linewidth=1)
                handles["centralised training"] = level
        axes.set_title(block)
        axes.set_xticks(range(len(columns)), [column.removeprefix("α = ") for column in columns])
        axes.set_xlabel("α" if all(column.startswith("α") for column in columns) else "")
        tidy(axes)
    figure.axes[0].set_ylabel("test accuracy in the best round, %")
    _legend(figure, handles, columns=4)
    return figure


@matplotlib.rc_context(STYLE)
def curves(numbers: Numbers) -> Figure:
    """Draw one panel per block and column: accuracy over the rounds, with a band from the worst
    to the best seed."""
    blocks, columns = numbers["blocks"], numbers["columns"]
    figure, panels = _panels(
        blocks, columns, across=3, panel=(215, 165), margin=(40, 46), sharex=True, sharey="row"
    )
    styles = method_styles(numbers["methods"])
    handles: dict[str, Any] = {}
    for (block, column), axes in panels.items():
        for row in numbers["rows"]:
            if (row["block"], row["column"]) == (block, column) and row.get("curve"):
                method = row["method"]
                rounds, mean, low, high = np.array(row["curve"]).T
                look = _line_style(styles[method], heavy=method == "fedaux")
                axes.fill_between(rounds, low, high, color=look["color"], alpha=0.16, linewidth=0)
                (handles[method],) = axes.plot(
                    rounds, mean, markevery=max(1, len(rounds) // 8), **look
                )
        axes.set_title(f"{block}, {column}" if len(blocks) > 1 else column)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        first, last = _edges(axes)
        axes.set_xlabel("communication round" if last else "")
        axes.set_ylabel("test accuracy, %" if first else "")
        tidy(axes)
    for block in blocks:  # one scale per block, however many lines it has
        own = [axes for (name, _), axes in panels.items() if name == block]
        limits = [limit for axes in own for limit in axes.get_ylim()]
        for axes in own:
            axes.set_ylim(min(limits), max(limits))
    _legend(figure, handles, columns=5)
    return figure


@matplotlib.rc_context(STYLE)
def heat(numbers: Numbers) -> Figure:
    """Draw one panel per method and block: accuracy over the local rate and the other setting of
    the method."""
    figure, panels = _panels(
        numbers["blocks"], numbers["methods"], across=4, panel=(150, 132), margin=(70, 20)
    )
    for (block, method), axes in panels.items():
        rows = [
            row
            for row in numbers["rows"]
            if (row["block"], row["method"]) == (block, method) and row["best"]
        ]
        other, label = other_setting(method)
        local = sorted({row["settings"]["local.learning_rate"] for row in rows}, reverse=True)
        across = sorted({row["settings"].get(other, 0.0) for row in rows}, reverse=True)
        picture = np.full((max(1, len(local)), max(1, len(across))), np.nan)
        for row in rows:
            settings = row["settings"]
            place = (
                local.index(settings["local.learning_rate"]),
                across.index(settings.get(other, 0.0)),
            )
            picture[place] = row["best"]["mean"]
        axes.imshow(picture, cmap=FADE, vmin=0, vmax=100, aspect="auto")
        for (up, right), value in np.ndenumerate(picture):
            if np.isfinite(value):
                axes.text(right, up, f"{value:.0f}", ha="center", va="center", fontsize=8.5)
        first, _ = _edges(axes)
        axes.set_title(shorten(method), fontsize=9.5)
        axes.set_yticks(range(len(local)), [f"{rate:g}" if first else "" for rate in local])
        axes.set_xticks(
            range(len(across)), [f"{value:g}" if other else "" for value in across], fontsize=8
        )
        axes.set_xlabel(label, fontsize=9)
        axes.set_ylabel(f"{block}\nlocal rate" if first else "")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure


def other_setting(method: str) -> tuple[str, str]:
    """Return the setting besides the local learning rate that the paper tunes for a method, and
    its label."""
    asks = asks_of(method)
    if asks.distills:
        return "distillation.learning_rate", "distillation"
    return ("local.proximal", "μ") if "proximal" in asks.objectives else ("", "")


FIGURES = {"dots": dots, "lines": lines, "curves": curves, "heat": heat}
CAPTIONS = {
    "dots": "Test accuracy of each method{deviation}: best round{last}{published}.",
    "lines": "Test accuracy in the best round of each method{deviation}{published}.",
    "curves": "Test accuracy over the rounds{band}.",
    "heat": "Test accuracy in the best round, in %, over the tuned settings of each method.",
}


def drawn(kind: str, numbers: Numbers) -> Drawing:
    """Draw a figure of a study, with its caption and numbers."""
    seeds, seed = numbers["seeds"], f", seed {numbers['seeds'][0]}"
    caption = CAPTIONS[kind].format(
        published=", and the published figure" if _shows_published(numbers) else "",
        last=", last round" if numbers["rounds"] > 1 else "",
        deviation=" with its standard deviation over seeds" if len(seeds) > 1 else seed,
        band=", means over seeds, bands from the worst to the best seed"
        if len(seeds) > 1
        else seed,
    )
    return Drawing(FIGURES[kind](numbers), caption, figure_table(kind, numbers))


def figure_table(kind: str, numbers: Numbers) -> Table:
    """Return the numbers that a figure shows, in %."""
    place = ("block", "column", "method")
    rows = numbers["rows"]
    if kind == "curves":
        points = [
            [row[key] for key in place] + point for row in rows for point in row.get("curve", [])
        ]
        return Table((*place, "round", "mean", "least", "largest"), points)
    settings = (
        list(dict.fromkeys(key for row in rows for key in row["settings"]))
        if kind == "heat"
        else []
    )
    shown = [(key, part) for key in ("best", "last") for part in ("mean", "deviation")] + [
        ("published", "mean")
    ]

    def value(row: Mapping[str, Any], key: str, part: str) -> Any:
        hidden = (
            row[key] is None or row[key][part] is None or (key == "published" and numbers["quick"])
        )
        return "" if hidden else row[key][part]

    header = (
        "best round",
        "deviation of best round",
        "last round",
        "deviation of last round",
        "published",
    )
    return Table(
        (*place, *settings, *header),
        [
            [
                *(row[key] for key in place),
                *(row["settings"].get(key, "") for key in settings),
                *(value(row, *each) for each in shown),
            ]
            for row in rows
        ],
    )
