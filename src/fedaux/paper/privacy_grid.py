"""Accuracy against the price of privacy (the paper's Privacy Analysis): a run for every cell of a grid.

Each cell and seed is a run directory of its own, so a grid that was interrupted continues where it stopped, and what is
complete is not run again when cells or seeds are added. Mechanisms are also run at an epsilon that leaves hardly any
noise, and the federation without scores (equal weights), so that there is a ceiling and a floor to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedaux.config import Certainty, Experiment
from fedaux.paper import places, published
from fedaux.paper.comparison import CLOSE
from fedaux.paper.page import Drawing
from fedaux.paper.running import without_result
from fedaux.paper.study import quick_base
from fedaux.paper.writing import (
    COLOURS,
    MARKERS,
    TITLES,
    Outcome,
    Version,
    markdown_table,
    spread,
    unfinished_section,
    write,
)
from fedaux.privacy.mechanisms import MECHANISMS
from fedaux.report.figures import DASHES
from fedaux.report.svg import STYLE
from fedaux.sweep import cells_of, read_records, sweep

Grid = Mapping[str, Mapping[str, Sequence[float]]]
"""For each mechanism, the values of its settings to combine."""
GRIDS: Grid = {
    "mean": {"epsilon": (0.1, 0.5, 2.0), "delta": (1e-6, 1e-4), "sharpness": (Certainty().sharpness, 1.0)},
    "paper": {"epsilon": (0.1, 0.5, 2.0), "delta": (1e-6, 1e-4), "regularisation": (0.01, Certainty().regularisation)},
}
PAPER_GRIDS: Grid = {
    "mean": {"epsilon": (0.01, 0.04, 0.1, 0.5, 1.0), "delta": (1e-6, 1e-4)},
    **{
        mechanism: {"epsilon": (0.01, 0.04, 0.1, 0.5, 1.0), "delta": (1e-6, 1e-4), "regularisation": (0.01, 0.1)}
        for mechanism in ("paper", "release")
    },
}
"""For the paper's own setting; it names lambda = 0.01 and 0.1, epsilon = 0.04 and 0.1, delta = 1e-6, and no others."""
ALMOST_NO_NOISE = 1e6
"""The epsilon of the ceiling: every mechanism that takes one has noise too small to matter there."""
NO_SCORES = "feddf+p"
PRINTED = ("no noise", "ε = 0.04, δ = 1e-6")
"""The two points of the figure that the paper gives as numbers."""
PRINTED_REGULARISATION = 0.01
PRINTED_AT = ((ALMOST_NO_NOISE, None), (0.04, 1e-6))
"""Epsilon and delta of these."""
WHOLE = ("components",)
"""Settings that are whole numbers."""
SYMBOLS = {"regularisation": "λ"}
"""Settings that the paper has a letter for."""
PANEL = 220
"""Points that a mechanism has across: three of them fit a page."""


def run(
    out: Path | str,
    *,
    base: Experiment | None = None,
    grids: Grid = GRIDS,
    method: str = "fedaux",
    version: Version = "own",
    notes: Sequence[str] = (),
    sweeping: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run every cell of the grids that is not finished yet under OUT/cells, and draw accuracy over epsilon.

    Without ``base``, the quick version: the embedded demo with one seed and 3 rounds. ``sweeping`` are further
    arguments of `fedaux.sweep.sweep`. Cells that failed or were not started are named. Raises ConfigError where OUT
    holds the cells of another base.
    """
    base, version = (quick_base("privacy"), "quick") if base is None else (base, version)
    out = Path(out)
    settings = list(cells(base, grids))
    table = {key: value for key, value in base.to_dict().items() if key != "output"}
    # A run a seed, so that more seeds add to what is there.
    points = {
        run_name(chosen, seed): _point(chosen, method=method) | {"seeds": [seed]}
        for seed in base.seeds
        for chosen in settings
    }
    listed = cells_of(table, list(points.values()))
    named = [replace(cell, name=name) for cell, name in zip(listed, points, strict=True)]
    unfinished = without_result(sweep(named, out / "cells", name="privacy", resume=True, **(sweeping or {})))
    records = {record["cell"]: record for record in read_records(out / "cells") if record["complete"]}
    rows = []
    for chosen in settings:
        names = [run_name(chosen, seed) for seed in base.seeds]
        last, best = (
            spread(records[name][key] for name in names if name in records) for key in ("accuracy", "accuracy_max")
        )
        rows.append(
            {
                "cells": names,
                "settings": dict(chosen),
                "accuracy": None if last is None else last["mean"],
                "accuracy_std": None if last is None else last["deviation"],
                "accuracy_max": None if best is None else best["mean"],
                "accuracy_max_std": None if best is None else best["deviation"],
            }
        )
    numbers = {
        "base": base.to_dict(),
        "version": version,
        "data": places.told(base),
        "method": method,
        "rounds": base.rounds,
        "seeds": list(base.seeds),
        "rows": rows,
        "unfinished": unfinished,
    }
    return write(
        out, "privacy", numbers=numbers, markdown=describe(numbers), figures={"privacy": drawn(rows)}, notes=notes
    )


def cells(base: Experiment, grids: Grid) -> Iterator[dict[str, Any]]:
    """Yield the settings of every cell: without scores, then each mechanism's ceiling and grid."""
    unknown = sorted(set(grids) - set(MECHANISMS))
    if unknown:
        raise ValueError(f"grids: no mechanism {', '.join(unknown)}; there are {', '.join(MECHANISMS)}")
    yield {}
    for mechanism, axes in grids.items():
        others = {key: values for key, values in axes.items() if key not in ("epsilon", "delta")}
        for values in product(*others.values()):
            fixed = {"mechanism": mechanism} | {
                key: int(value) if key in WHOLE else value for key, value in zip(others, values, strict=True)
            }
            for delta in axes.get("delta", [base.certainty.delta])[:1]:
                yield fixed | {"epsilon": ALMOST_NO_NOISE, "delta": delta}
            for delta in axes.get("delta", [base.certainty.delta]):
                for epsilon in axes.get("epsilon", [base.certainty.epsilon]):
                    yield fixed | {"epsilon": epsilon, "delta": delta}


def run_name(settings: Mapping[str, Any], seed: int) -> str:
    """Return the name of the directory of a cell's run."""
    own = [f"{key}{value:g}" for key, value in settings.items() if key != "mechanism"]
    return "-".join([settings.get("mechanism", "without-scores"), *own, f"seed{seed}"]).replace("+", "")


def _point(settings: Mapping[str, Any], *, method: str) -> dict[str, Any]:
    """Return what a cell changes in the base: the method, and the settings of its mechanism."""
    changes = {f"certainty.{key}": value for key, value in settings.items()}
    return {"method": [method if settings else NO_SCORES]} | changes


def describe(numbers: Mapping[str, Any]) -> str:
    """Return the tables: a row for delta and the mechanism's own settings, a column for epsilon."""
    floor, *others = numbers["rows"]
    over = "mean ± standard deviation over seeds" if len(numbers["seeds"]) > 1 else "seed"
    said = [
        f"# privacy{TITLES[numbers['version']]}: accuracy over (ε, δ), {numbers['method']}",
        "",
        *(f"- {finding}" for finding in findings(numbers)),
        "",
        f"{numbers['data']} Test accuracy in %, last round / maximum of {numbers['rounds']} rounds, {over} "
        f"{', '.join(map(str, numbers['seeds']))}. Without scores ({NO_SCORES}): {_shown(floor)}. `release` is not "
        "private: ε is what its authors claim.",
        "",
    ]
    text = "\n".join(said)
    for mechanism in dict.fromkeys(row["settings"]["mechanism"] for row in others):
        listed = [row for row in others if row["settings"]["mechanism"] == mechanism]
        lines = [
            [_line_name(own, delta), *(_shown(row) if row else "" for row in line)]
            for (own, delta), line in _lines(listed).items()
        ]
        text += "\n" + markdown_table([mechanism, *map(_epsilon_name, _epsilons(listed))], lines)
    return text + unfinished_section(numbers["unfinished"])


def findings(numbers: Mapping[str, Any]) -> list[str]:
    """Return sentences: what is missing, and how far the paper's figures are from those of the same settings."""
    rows = numbers["rows"]
    missing = sum(row["accuracy"] is None for row in rows)
    said = [f"{len(rows) - missing} of {len(rows)} cells are finished; the others are left out."] if missing else []
    printed = {noise: float(published.tables()["claims"][f"privacy, λ = 0.01, {noise}"]["value"]) for noise in PRINTED}
    without, private = printed.values()
    paper = f"The paper prints {without:g} without noise and {private:g} at {PRINTED[1]}"
    if numbers["base"]["mode"] != "full":
        mode = numbers["base"]["mode"]
        return [*said, f"Here mode = {mode!r}; the paper's figures are of whole networks, so they are not shown."]
    if numbers["version"] != "paper":
        setting = "10 rounds, 40 clients, ResNet-8, CIFAR-10, STL-10, λ = 0.01"
        return [*said, f"{paper} ({setting}); these are other data and settings, which cannot be held against that."]
    for mechanism in ("paper", "release"):
        at = [row for row in rows if row["settings"].get("mechanism") == mechanism and row["accuracy"] is not None]
        for (epsilon, delta), (noise, figure) in zip(PRINTED_AT, printed.items(), strict=True):
            for row in at:
                chosen = row["settings"]
                same = chosen["epsilon"] == epsilon and (epsilon == ALMOST_NO_NOISE or chosen["delta"] == delta)
                if same and chosen.get("regularisation") == PRINTED_REGULARISATION:
                    reached = 100 * row["accuracy_max"]
                    said.append(f"`{mechanism}`, λ = 0.01, {noise}: {apart(reached, figure)}.")
    return said or [f"{paper}; no cell has these settings, or it is not finished."]


def apart(measured: float, printed: float) -> str:
    """Say how far the maximum over the rounds is from a printed figure."""
    gap = measured - printed
    word = (
        "as printed, within 1 point"
        if abs(gap) <= CLOSE
        else f"{abs(gap):.1f} points {'below' if gap < 0 else 'above'}"
    )
    return f"maximum {measured:.1f}, the paper prints {printed:g}: {word}"


def _shown(row: Mapping[str, Any]) -> str:
    """Return last round / maximum of a cell in %, with deviations where there are seeds."""
    if row["accuracy"] is None:
        return "–"
    parts = [
        f"{100 * row[key]:.1f}" + ("" if row[f"{key}_std"] is None else f" ± {100 * row[f'{key}_std']:.1f}")
        for key in ("accuracy", "accuracy_max")
    ]
    return " / ".join(parts)


def _epsilons(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return sorted({row["settings"]["epsilon"] for row in rows})


def _lines(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, float], list[Mapping[str, Any] | None]]:
    """Return a mechanism's rows at every epsilon, by its own settings and delta.

    Without noise delta means nothing: the lines of all deltas end in the one ceiling.
    """
    at = {(_own_settings(row), row["settings"]["delta"], row["settings"]["epsilon"]): row for row in rows}
    ceilings = {(own, epsilon): row for (own, _, epsilon), row in at.items() if epsilon == ALMOST_NO_NOISE}
    return {
        (own, delta): [at.get((own, delta, epsilon), ceilings.get((own, epsilon))) for epsilon in _epsilons(rows)]
        for own, delta, _ in at
    }


def _own_settings(row: Mapping[str, Any]) -> str:
    """Return what a row's mechanism was set to, besides epsilon and delta."""
    own = {key: value for key, value in row["settings"].items() if key not in ("mechanism", "epsilon", "delta")}
    return ", ".join(f"{SYMBOLS.get(key, key)} {value:g}" for key, value in own.items())


def _line_name(own: str, delta: float) -> str:
    """Return a mechanism's own settings with delta as people write it: 1e-4, not 0.0001 or 1e-04."""
    digits, _, power = f"{delta:e}".partition("e")
    return ", ".join(filter(None, (own, f"δ = {float(digits):g}e{int(power)}")))


def _epsilon_name(epsilon: float) -> str:
    return "hardly any noise" if epsilon == ALMOST_NO_NOISE else f"ε = {epsilon:g}"


def drawn(rows: Sequence[Mapping[str, Any]]) -> Drawing:
    """Draw the figure, with its caption and numbers."""
    caption = (
        "Test accuracy in the last round over ε, a panel a mechanism, a colour for its own settings, a dash for δ; "
        f"dotted: without scores ({NO_SCORES})."
    )
    keys = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    measured = ("accuracy", "accuracy_std", "accuracy_max", "accuracy_max_std")
    lines = [
        [
            row["cells"][0].rpartition("-seed")[0],
            *(row["settings"].get(key, "") for key in keys),
            *map(row.get, measured),
        ]
        for row in rows
    ]
    return Drawing(draw(rows), caption, ("cell", *keys, *measured), lines)


@matplotlib.rc_context(STYLE)
def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a panel a mechanism: accuracy over epsilon, a colour for its own settings, a dash for delta."""
    floor, *others = rows
    mechanisms = list(dict.fromkeys(row["settings"]["mechanism"] for row in others))
    figure = Figure(figsize=((40 + PANEL * max(1, len(mechanisms))) / 72, 300 / 72))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, max(1, len(mechanisms)), squeeze=False, sharey=True)[0]
    for axes, mechanism in zip(panels, mechanisms, strict=False):
        listed = [row for row in others if row["settings"]["mechanism"] == mechanism]
        own = list(dict.fromkeys(map(_own_settings, listed)))
        deltas = list(dict.fromkeys(row["settings"]["delta"] for row in listed))
        for (setting, delta), line in _lines(listed).items():
            look, dash = own.index(setting), deltas.index(delta)
            known = [(place, row) for place, row in enumerate(line) if row and row["accuracy"] is not None]
            if not known:
                continue
            errors = [100 * (row["accuracy_std"] or 0.0) for _, row in known]
            axes.errorbar(
                [place for place, _ in known],
                [100 * row["accuracy"] for _, row in known],
                yerr=errors if any(errors) else None,
                color=COLOURS[look % len(COLOURS)],
                marker=MARKERS[look % len(MARKERS)],
                markersize=4.5,
                linewidth=1.6,
                elinewidth=1,
                linestyle=DASHES[dash % len(DASHES)],
                label=_line_name(setting, delta),
            )
        if floor["accuracy"] is not None:
            _draw_floor(axes, 100 * floor["accuracy"])
        names = [_epsilon_name(epsilon).removeprefix("ε = ").replace(" ", "\n") for epsilon in _epsilons(listed)]
        axes.set_xticks(range(len(names)), names)
        axes.set_title(mechanism)
        axes.set_xlabel("ε")
        axes.grid(axis="y")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8.5, handlelength=3.2)
    panels[0].set_ylabel("test accuracy in the last round, %")
    panels[0].set_ylim(0, 100)
    return figure


def _draw_floor(axes: Axes, accuracy: float) -> None:
    axes.axhline(accuracy, color="#777777", linewidth=1.2, linestyle=":")
    axes.annotate(
        "without scores",
        (0.99, accuracy),
        (0, -11),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
