"""Draw docs/images/*.svg from the measurements in notes/: `python docs/make_figures.py`."""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

NOTES = Path(__file__).parents[1] / "notes"
IMAGES = Path(__file__).parent / "images"
COLOURS = {
    "fedaux2": "#7c2d12",
    "fedaux": "#c2410c",
    "fedaux+m": "#7c2d12",
    "fedavg": "#64748b",
    "fedavg+p": "#2563eb",
    "feddf": "#a3a3a3",
    "feddf+p": "#0d9488",
    "fedprox+p": "#7c3aed",
    "fedbe+p": "#65a30d",
}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedaux",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "axes.axisbelow": True,
}


def axes(*, width: float = 7.0, height: float = 3.6) -> tuple[Figure, Axes]:
    """Return an empty figure of the common size."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def demo(lines: list[dict[str, Any]]) -> Figure:
    """Test accuracy of the demo by round: mean over seeds, and one standard deviation as a band."""
    runs: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        runs[line["method"]][line["round"]].append(100 * line["accuracy"])
    figure, plot = axes()
    ends: dict[str, float] = {}
    for method, by_round in runs.items():
        rounds, colour = sorted(by_round), COLOURS[method.partition("@")[0]]
        mean = np.array([np.mean(by_round[number]) for number in rounds])
        deviation = np.array([np.std(by_round[number], ddof=1) for number in rounds])
        plot.fill_between(
            rounds,
            mean - deviation,
            mean + deviation,
            color=colour,
            alpha=0.12,
            linewidth=0,
        )
        style = "o--" if "@" in method else "o-"
        plot.plot(rounds, mean, style, color=colour, label=method, linewidth=2, markersize=4)
        ends[method] = float(mean[-1])
    height = 100.0
    for method, end in sorted(ends.items(), key=lambda one: -one[1]):
        height = min(end, height - 6)  # names do not overlap
        colour = COLOURS[method.partition("@")[0]]
        plot.text(rounds[-1] + 0.08, height, method, color=colour, va="center", weight="bold")
    plot.set(
        xlabel="round", ylabel="test accuracy, %", xticks=rounds, xlim=(0.9, 6.4), ylim=(0, 100)
    )
    return figure


def methods(table: dict[str, list[float]]) -> Figure:
    """Last round, maximum over rounds, and the paper's maximum for each method, as bars."""
    figure, plot = axes()
    places = np.arange(len(table))
    labels = ["last round", "maximum over rounds", "the paper: maximum of 100 rounds"]
    for column, (label, colour) in enumerate(
        zip(labels, ["#c2410c", "#fdba74", "#cbd5e1"], strict=True)
    ):
        heights = [row[column] if column < len(row) else np.nan for row in table.values()]
        bars = plot.bar(
            places + (column - 1) * 0.27, heights, width=0.25, color=colour, label=label
        )
        shown = [f"{height:.0f}" if np.isfinite(height) else "" for height in heights]
        plot.bar_label(bars, labels=shown, fontsize=8, padding=1)
    plot.set(ylabel="test accuracy, %", xticks=places, xticklabels=list(table), ylim=(0, 85))
    plot.grid(axis="x", visible=False)
    plot.legend(frameon=False, loc="upper left")
    return figure


def participation(table: dict[str, list[list[float]]]) -> Figure:
    """Last round against the share of clients in a round, with the deviation over seeds."""
    figure, plot = axes()
    for method, points in table.items():
        mean, deviation = np.array(points).T
        plot.errorbar(
            [0.2, 0.4, 0.8],
            mean,
            deviation,
            fmt="o-",
            color=COLOURS[method],
            label=method,
            capsize=3,
            linewidth=2,
        )
    plot.set(
        xlabel="share of the clients in each round, C",
        ylabel="test accuracy, %",
        xticks=[0.2, 0.4, 0.8],
    )
    plot.set(ylim=(0, 70))
    plot.legend(frameon=False, ncols=5, loc="lower center", fontsize=9)
    return figure


def privacy(table: dict[str, list[float]]) -> Figure:
    """Last round against epsilon for each way of weighting."""
    figure, plot = axes()
    styles = [("#c2410c", "o-"), ("#2563eb", "s-"), ("#737373", "^--"), ("#0d9488", ":")]
    for (name, values), (colour, style) in zip(table.items(), styles, strict=True):
        plot.plot(range(6), values, style, color=colour, label=name, linewidth=2)
    plot.set(xlabel="ε, at δ = 1e-6", ylabel="test accuracy, %", ylim=(0, 70))
    plot.set(xticks=range(6), xticklabels=["0.01", "0.04", "0.1", "0.5", "1", "hardly any noise"])
    plot.legend(frameon=False, ncols=2, loc="upper left", fontsize=9)
    return figure


def encoder_privacy(table: dict[str, list[float]]) -> Figure:
    """Accuracy over epsilon of the private head, beside training without protection."""
    figure, plot = axes(height=3.0)
    plot.plot(table["epsilon"], table["private-head"], "o-", color=COLOURS["fedaux2"], linewidth=2)
    for name in ("scaffold+p", "fedavg+p"):
        plot.axhline(table[name][0], color=COLOURS.get(name, "#65a30d"), linestyle="--")
        plot.text(8, table[name][0] + 0.3, f"{name}, unprotected", ha="right", va="bottom")
    plot.text(8, table["private-head"][-1] - 0.4, "private-head", ha="right", va="top")
    over_epsilon(plot, lowest=70)
    return figure


def hospitals(table: dict[str, list[Any]]) -> Figure:
    """Accuracy over the epsilon of a release at hospitals, beside methods without one."""
    figure, plot = axes(height=3.4)
    notes = {
        "fedaux2": ("fedaux2: release at ε, updates unprotected", COLOURS["fedaux2"], 6),
        "private-head": ("private-head: nothing but the release", "#c2410c", 17),
    }
    for name, (note, colour, below) in notes.items():
        mean, deviation = np.array(table[name]).T
        plot.errorbar(
            table["epsilon"], mean, deviation, fmt="o-", color=colour, capsize=3, linewidth=2
        )
        plot.text(8, mean[-1] - below, note, color=colour, ha="right", va="center")
    lines = {"all data in one place; AFL": 2.6, "feddyn+p, without a release": -4.2}
    for name, above in lines.items():
        level = table[name.partition(";")[0].partition(",")[0]][0]
        plot.axhline(level, color="#64748b", linestyle="--", linewidth=1)
        plot.text(0.05, level + above, name, va="center", color="#475569")
    over_epsilon(plot, lowest=15)
    return figure


def over_epsilon(plot: Axes, *, lowest: float) -> None:
    """Name the axes of a figure of accuracy over epsilon."""
    ticks = [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0]
    labels = [f"{one:g}" for one in ticks]
    plot.set(xscale="log", xticks=ticks, xticklabels=labels, ylim=(lowest, 93))
    plot.minorticks_off()
    plot.set(xlabel="ε, at δ = 1e-5", ylabel="test accuracy, %")


def draw() -> None:
    """Write every figure."""
    with mpl.rc_context(STYLE):
        lines = (NOTES / "demo-metrics.jsonl").read_text(encoding="utf-8").splitlines()
        tables = tomllib.loads((NOTES / "figures.toml").read_text(encoding="utf-8"))
        figures = {
            "demo": demo([json.loads(line) for line in lines]),
            "results-methods": methods(tables["methods"]),
            "results-participation": participation(tables["participation"]),
            "results-privacy": privacy(tables["privacy"]),
            "encoder-privacy": encoder_privacy(tables["encoder"]),
            "hospitals-privacy": hospitals(tables["hospitals"]),
        }
        for name, figure in figures.items():
            figure.savefig(IMAGES / f"{name}.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    draw()
