"""Accuracy against the price of privacy (the paper's Privacy Analysis): a run for every cell of a grid.

Each cell and seed is a run directory of its own, so a grid that was interrupted continues where it stopped, and what is
complete is not run again when cells or seeds are added. Mechanisms are also run at an epsilon that leaves hardly any
noise, and the federation without scores (equal weights), so that there is a ceiling and a floor to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fedaux.certainty import MECHANISMS
from fedaux.config import Certainty, Experiment
from fedaux.reading import load_experiment
from fedaux.report.figures import DASHES
from fedaux.report.svg import STYLE
from fedaux.reproduce import published
from fedaux.reproduce.writing import COLOURS, MARKERS, Outcome, markdown_table, spread, write
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
WHOLE = ("components",)
"""Settings that are whole numbers."""
SYMBOLS = {"regularisation": "λ"}
"""Settings that the paper has a letter for."""
PANEL = 220
"""Points that a mechanism has across: three of them fit a page."""


def demo(*, rounds: int | None = None, seeds: Sequence[int] = (0,)) -> Experiment:
    """Return the embedded demo with one method and few seeds: what the experiments here start from."""
    recipe = load_experiment(Path(str(files("fedaux").joinpath("recipes", "demo.toml"))))
    changes = {"method": ["fedaux"], "seeds": list(seeds), "rounds": rounds or recipe.rounds}
    return Experiment(**(recipe.to_dict() | changes))


def run(
    out: Path | str,
    *,
    base: Experiment | None = None,
    grids: Grid = GRIDS,
    method: str = "fedaux",
    notes: Sequence[str] = (),
    sweeping: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run every cell of the grids that is not finished yet under OUT/cells, and draw accuracy over epsilon.

    Without ``base``, the embedded demo with one seed and 3 rounds. ``sweeping`` are further arguments of
    `fedaux.sweep.sweep`. Raises ConfigError where OUT holds the cells of another base, ValueError where cells failed.
    """
    base = base or demo(rounds=3)
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
    outcome = sweep(named, out / "cells", name="privacy", resume=True, **(sweeping or {}))
    if not outcome.complete:
        reasons = [f"{name}: {reason}" for name, reason in outcome.failed.items()]
        left = len(outcome.failed) + len(outcome.waiting)
        raise ValueError(
            "\n".join([f"{left} of {len(named)} cells are not finished; the same command goes on", *reasons])
        )
    records = {record["cell"]: record for record in read_records(out / "cells")}
    rows = []
    for chosen in settings:
        names = [run_name(chosen, seed) for seed in base.seeds]
        last, best = (spread(records[name][key] for name in names) for key in ("accuracy", "accuracy_max"))
        assert last is not None, "every cell is finished"
        assert best is not None, "every cell is finished"
        rows.append(
            {
                "cells": names,
                "settings": dict(chosen),
                "accuracy": last["mean"],
                "accuracy_std": last["deviation"] or 0.0,
                "accuracy_max": best["mean"],
            }
        )
    numbers = {"base": base.to_dict(), "method": method, "rounds": base.rounds, "seeds": list(base.seeds), "rows": rows}
    figures = {"privacy": draw(rows)}
    return write(out, "privacy", numbers=numbers, markdown=describe(numbers), figures=figures, notes=notes)


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
    several = len(numbers["seeds"]) > 1
    seeds = ("means ± standard deviations of seeds " if several else "seed ") + ", ".join(map(str, numbers["seeds"]))
    text = (
        f"# privacy: accuracy over (ε, δ), {numbers['method']}\n\n"
        f"Test accuracy in %, {numbers['rounds']} rounds, {seeds}; last round / best round. Without scores "
        f"({NO_SCORES}): {_accuracy(floor, several=several)}. {_printed(numbers['base'])} `release` is not "
        "private: ε is what its authors claim.\n"
    )
    for mechanism in dict.fromkeys(row["settings"]["mechanism"] for row in others):
        listed = [row for row in others if row["settings"]["mechanism"] == mechanism]
        header = [mechanism, *map(_epsilon_name, _epsilons(listed))]
        lines = [
            [_line_name(own, delta), *(_accuracy(row, several=several) if row else "" for row in line)]
            for (own, delta), line in _lines(listed).items()
        ]
        text += "\n" + markdown_table(header, lines)
    return text


def _accuracy(row: Mapping[str, Any], *, several: bool) -> str:
    """Return the last round, with its deviation where there are several seeds, and the best round."""
    deviation = f" ± {100 * row['accuracy_std']:.1f}" if several else ""
    return f"{100 * row['accuracy']:.1f}{deviation} / {100 * row['accuracy_max']:.1f}"


def _printed(base: Mapping[str, Any]) -> str:
    """Say what the paper prints, or why it cannot be held against this."""
    if base["mode"] != "full":
        return f"Here mode = {base['mode']!r}; the paper's figures are of whole networks, so they are not shown."
    free, noisy = (published.tables()["claims"][f"privacy, λ = 0.01, {noise}"]["value"] for noise in PRINTED)
    return (
        f"The paper prints (10 rounds, 40 clients, ResNet-8, CIFAR-10, STL-10, λ = 0.01) {free} without noise and "
        f"{noisy} at {PRINTED[1]}."
    )


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
            known = [(place, row) for place, row in enumerate(line) if row]
            errors = [100 * row["accuracy_std"] for _, row in known]
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
        axes.axhline(100 * floor["accuracy"], color="#777777", linewidth=1.2, linestyle=":")
        axes.annotate(
            "without scores",
            (0.99, 100 * floor["accuracy"]),
            (0, -11),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=9,
        )
        names = [_epsilon_name(epsilon).removeprefix("ε = ").replace(" ", "\n") for epsilon in _epsilons(listed)]
        axes.set_xticks(range(len(names)), names)
        axes.set_title(mechanism)
        axes.set_xlabel("ε")
        axes.grid(axis="y")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8.5, handlelength=3.2)
    panels[0].set_ylabel("test accuracy in the last round, %")
    panels[0].set_ylim(0, 100)
    return figure
