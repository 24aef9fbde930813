"""The figures of studies: published beside measured accuracy, over heterogeneity, over the rounds, over a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedaux.core.methods import METHODS
from fedaux.paper.page import Drawing
from fedaux.paper.running import CENTRAL
from fedaux.report.figures import BLUE, FADE, method_styles, shorten
from fedaux.report.svg import INK, STYLE

Numbers = Mapping[str, Any]
GREY = "#777777"
ORANGE = "#D55E00"


@matplotlib.rc_context(STYLE)
def dots(numbers: Numbers) -> Figure:
    """Draw a panel a place: for each method the printed figure, the best round with its deviation, the last round."""
    methods, blocks, columns = numbers["methods"], numbers["blocks"], numbers["columns"]
    shown = len(columns) if len(columns) <= 4 else 4
    lines = [(block, columns[start : start + shown]) for block in blocks for start in range(0, len(columns), shown)]
    figure = Figure(figsize=((110 + 150 * shown) / 72, (34 + len(lines) * (34 + 17 * len(methods))) / 72))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(lines), shown, squeeze=False, sharey=True, sharex="row")
    printed = not numbers["quick"] and any(row["published"] for row in numbers["rows"])
    for line, (block, some) in zip(panels, lines, strict=True):
        for axes, column in zip(line, [*some, *[None] * (shown - len(some))], strict=True):
            if column is None:
                axes.set_visible(False)
                continue
            axes.set_title(column if block == "CIFAR-100" else f"{block}, {column}", fontsize=9.5)
            for row in numbers["rows"]:
                if (row["block"], row["column"]) == (block, column) and row["method"] in methods:
                    _dots(axes, row, height=methods.index(row["method"]), printed=printed, last=numbers["rounds"] > 1)
            axes.set_yticks(range(len(methods)), methods)
            axes.set_ylim(len(methods) - 0.5, -0.5)
            axes.grid(axis="x")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
            axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("test accuracy, %")
    marks = [_mark("o", BLUE, "best round")] + ([] if numbers["rounds"] == 1 else [_mark("|", BLUE, "last round")])
    marks += [_mark("D", ORANGE, "published", hollow=True)] if printed else []
    figure.legend(handles=marks, loc="outside upper center", ncols=3, frameon=False, fontsize=9.5)
    return figure


def _dots(axes: Axes, row: Mapping[str, Any], *, height: float, printed: bool, last: bool) -> None:
    if printed and row["published"] is not None:
        axes.plot(row["published"]["mean"], height, "D", color=ORANGE, fillstyle="none", markersize=6)
    if row["best"] is not None:
        axes.errorbar(
            row["best"]["mean"], height, xerr=row["best"]["deviation"] or None, fmt="o", color=BLUE, markersize=4.5
        )
        if last:
            axes.plot(row["last"]["mean"], height, "|", color=BLUE, markersize=8)


def _mark(marker: str, colour: str, label: str, *, hollow: bool = False) -> Line2D:
    filled = "none" if hollow else "full"
    return Line2D([], [], linestyle="none", marker=marker, color=colour, fillstyle=filled, label=label)  # type: ignore[arg-type]


@matplotlib.rc_context(STYLE)
def lines(numbers: Numbers) -> Figure:
    """Draw a panel a block: the best round of each method over the columns, with what the paper prints."""
    blocks, columns = numbers["blocks"], numbers["columns"]
    figure = Figure(figsize=(max(420, 30 + 250 * len(blocks)) / 72, 300 / 72))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, len(blocks), squeeze=False, sharey=True)[0]
    styles = method_styles(numbers["methods"])
    handles: dict[str, Any] = {}
    for axes, block in zip(panels, blocks, strict=True):
        rows = [row for row in numbers["rows"] if row["block"] == block]
        for method in numbers["methods"]:
            look = styles[method]
            at = {row["column"]: row for row in rows if row["method"] == method}
            line = [(place, at[column]) for place, column in enumerate(columns) if column in at]
            known = [(place, row["best"]["mean"], row["best"]["deviation"] or 0) for place, row in line if row["best"]]
            if known:
                x, y, error = zip(*known, strict=True)
                handles[method] = axes.errorbar(
                    x,
                    y,
                    yerr=error if any(error) else None,
                    color=look.colour,
                    marker=look.marker,
                    linestyle=look.dashes,
                    markersize=5,
                    linewidth=2.2 if method == "fedaux" else 1.6,
                )
            paper = [(place, row["published"]["mean"]) for place, row in line if row["published"]]
            if paper and not numbers["quick"]:
                x, y = zip(*paper, strict=True)
                axes.plot(x, y, look.marker, color=look.colour, fillstyle="none", markersize=8)
                handles["published"] = _mark("o", GREY, "published", hollow=True)
        for row in rows:
            if row["method"] == CENTRAL and row["best"]:
                handles["all data in one place"] = axes.axhline(
                    row["best"]["mean"], color=INK, linestyle="--", linewidth=1
                )
        axes.set_title(block)
        axes.set_xticks(range(len(columns)), [column.removeprefix("α = ") for column in columns])
        axes.set_xlabel("α" if all(column.startswith("α") for column in columns) else "")
        axes.grid(axis="y")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("test accuracy in the best round, %")
    figure.legend(
        list(handles.values()), list(handles), loc="outside upper center", ncols=4, frameon=False, fontsize=9.5
    )
    return figure


@matplotlib.rc_context(STYLE)
def curves(numbers: Numbers) -> Figure:
    """Draw a panel a place: accuracy over the rounds, a line a method, a band from the worst to the best seed."""
    blocks, columns = numbers["blocks"], numbers["columns"]
    across = min(len(columns), 3)
    lines_of = [
        (block, columns[start : start + across]) for block in blocks for start in range(0, len(columns), across)
    ]
    figure = Figure(figsize=((40 + 215 * across) / 72, (46 + 165 * len(lines_of)) / 72))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(lines_of), across, squeeze=False, sharex=True, sharey="row")
    styles = method_styles(numbers["methods"])
    handles: dict[str, Any] = {}
    for line, (block, some) in zip(panels, lines_of, strict=True):
        for axes, column in zip(line, [*some, *[None] * (across - len(some))], strict=True):
            if column is None:
                axes.set_visible(False)
                continue
            for row in numbers["rows"]:
                if (row["block"], row["column"]) != (block, column) or not row.get("curve"):
                    continue
                rounds, mean, low, high = np.array(row["curve"]).T
                look = styles[row["method"]]
                axes.fill_between(rounds, low, high, color=look.colour, alpha=0.16, linewidth=0)
                (handles[row["method"]],) = axes.plot(
                    rounds,
                    mean,
                    color=look.colour,
                    linestyle=look.dashes,
                    marker=look.marker,
                    markersize=4,
                    markevery=max(1, len(rounds) // 8),
                    linewidth=2.2 if row["method"] == "fedaux" else 1.5,
                )
            axes.set_title(f"{block}, {column}" if len(blocks) > 1 else column)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
            axes.grid(axis="y")
            axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("communication round")
    for line in panels:
        line[0].set_ylabel("test accuracy, %")
    for block in blocks:  # what a block says about its columns should not depend on where its rows are broken
        own = [line[0] for line, (name, _) in zip(panels, lines_of, strict=True) if name == block]
        limits = [limit for axes in own for limit in axes.get_ylim()]
        for axes in own:
            axes.set_ylim(min(limits), max(limits))
    figure.legend(
        list(handles.values()), list(handles), loc="outside upper center", ncols=5, frameon=False, fontsize=9.5
    )
    return figure


@matplotlib.rc_context(STYLE)
def heat(numbers: Numbers) -> Figure:
    """Draw a panel a method and block: accuracy over the local rate and the other setting that the method has."""
    methods, blocks = numbers["methods"], numbers["blocks"]
    columns = min(MOST_ACROSS, len(methods))
    places = [
        (block, methods[first : first + columns]) for block in blocks for first in range(0, len(methods), columns)
    ]
    figure = Figure(figsize=((70 + 150 * columns) / 72, (20 + 132 * len(places)) / 72))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(places), columns, squeeze=False)
    for line, (block, listed) in zip(panels, places, strict=True):
        for axes in line[len(listed) :]:
            axes.set_visible(False)
        for axes, method in zip(line, listed, strict=False):
            rows = [row for row in numbers["rows"] if (row["block"], row["method"]) == (block, method) and row["best"]]
            other = other_setting(method)
            local = sorted({row["settings"]["local.learning_rate"] for row in rows}, reverse=True)
            across: Sequence[Any] = (
                sorted({row["settings"].get(other) for row in rows}, reverse=True) if other else [None]
            )
            picture = np.full((len(local), max(1, len(across))), np.nan)
            for row in rows:
                place = local.index(row["settings"]["local.learning_rate"])
                picture[place, across.index(row["settings"].get(other))] = row["best"]["mean"]
            axes.imshow(picture, cmap=FADE, vmin=0, vmax=100, aspect="auto")
            for (up, right), value in np.ndenumerate(picture):
                if np.isfinite(value):
                    axes.text(right, up, f"{value:.0f}", ha="center", va="center", fontsize=8.5)
            axes.set_title(shorten(method), fontsize=9.5)
            axes.set_yticks(range(len(local)), [f"{rate:g}" for rate in local] if axes is line[0] else [])
            axes.set_xticks(
                range(len(across)), [f"{value:g}" if value is not None else "" for value in across], fontsize=8
            )
            axes.set_xlabel(
                {"distillation.learning_rate": "distillation", "local.proximal": "μ", "": ""}[other], fontsize=9
            )
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        line[0].set_ylabel(f"{block}\nlocal rate")
    return figure


MOST_ACROSS = 4
"""Panels in a line of a heat map, so that its figures can be read."""


def other_setting(method: str) -> str:
    """Return the setting besides the local learning rate that the paper tunes for a method, if any."""
    row = METHODS[method]
    return "distillation.learning_rate" if row.teacher else "local.proximal" if row.proximal else ""


FIGURES = {"dots": dots, "lines": lines, "curves": curves, "heat": heat}
CAPTIONS = {
    "dots": "Test accuracy of each method: best round{deviation}{last}{printed}.",
    "lines": "Test accuracy in the best round of each method{deviation}{printed}.",
    "curves": "Test accuracy over the rounds{band}.",
    "heat": "Test accuracy in the best round, in %, over the settings that each method is tuned by.",
}


def drawn(kind: str, numbers: Numbers) -> Drawing:
    """Draw a figure of a study, with its caption and numbers."""
    printed = not numbers["quick"] and any(row["published"] for row in numbers["rows"])
    seeds = len(numbers["seeds"])
    caption = CAPTIONS[kind].format(
        printed=", and what the paper prints" if printed else "",
        last=", last round" if numbers["rounds"] > 1 else "",
        deviation=" with its standard deviation over seeds" if seeds > 1 else f", seed {numbers['seeds'][0]}",
        band=", means over seeds, bands from the worst to the best seed"
        if seeds > 1
        else f", seed {numbers['seeds'][0]}",
    )
    return Drawing(FIGURES[kind](numbers), caption, *figure_rows(kind, numbers))


def figure_rows(kind: str, numbers: Numbers) -> tuple[Sequence[str], list[list[Any]]]:
    """Return head and lines of the numbers that a figure shows, in %."""
    place = ("block", "column", "method")
    if kind == "curves":
        header = (*place, "round", "mean", "least", "largest")
        return header, [
            [row[key] for key in place] + point for row in numbers["rows"] for point in row.get("curve", [])
        ]
    settings = list(dict.fromkeys(key for row in numbers["rows"] for key in row["settings"])) if kind == "heat" else []
    rows = [
        [
            *(row[key] for key in place),
            *(row["settings"].get(key, "") for key in settings),
            *(_number(row["best"], key) for key in ("mean", "deviation")),
            *(_number(row["last"], key) for key in ("mean", "deviation")),
            "" if numbers["quick"] else _number(row["published"], "mean"),
        ]
        for row in numbers["rows"]
    ]
    figures = ("best round", "deviation of best round", "last round", "deviation of last round", "published")
    return (*place, *settings, *figures), rows


def _number(found: Mapping[str, Any] | None, key: str) -> Any:
    return "" if found is None or found[key] is None else found[key]
