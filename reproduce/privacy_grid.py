"""Accuracy against privacy (the paper's Privacy Analysis): a run for every setting of a grid and
every seed.

Mechanisms also run at an epsilon that leaves hardly any noise, and the federation without scores
(equal weights), as ceiling and floor. An interrupted grid resumes, and complete runs are kept when
settings or seeds are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fedaux.config import Certainty, Experiment
from fedaux.core.algorithms import METHODS, asks_of
from fedaux.privacy.mechanisms import MECHANISMS
from fedaux.report.figures import DASHES
from fedaux.report.svg import STYLE
from fedaux.report.tables import Table
from reproduce import datasets, published
from reproduce.comparison import CLOSE
from reproduce.document import (
    COLOURS,
    MARKERS,
    Context,
    Document,
    Drawing,
    Items,
    epsilon_text,
    seeds_text,
    spread,
    spread_text,
    unfinished,
)
from reproduce.planning import run_points
from reproduce.study_figures import GREY, new_figure, tidy

Row = Mapping[str, Any]
Grids = Mapping[str, Mapping[str, Sequence[float]]]
"""For each mechanism, the values of its settings to combine."""
GRIDS: Grids = {
    "mean": {
        "epsilon": (0.1, 0.5, 2.0),
        "delta": (1e-6, 1e-4),
        "sharpness": (Certainty().sharpness, 1.0),
    },
    "paper": {
        "epsilon": (0.1, 0.5, 2.0),
        "delta": (1e-6, 1e-4),
        "regularisation": (0.01, Certainty().regularisation),
    },
}
PAPER_EPSILONS = {"epsilon": (0.01, 0.04, 0.1, 0.5, 1.0), "delta": (1e-6, 1e-4)}
PAPER_GRIDS: Grids = {
    "mean": PAPER_EPSILONS,
    "paper": PAPER_EPSILONS | {"regularisation": (0.01, 0.1)},
    "released-code": PAPER_EPSILONS | {"regularisation": (0.01, 0.1)},
}
"""For the paper's setting; it names lambda = 0.01 and 0.1, epsilon = 0.04 and 0.1, delta = 1e-6,
and no others."""
ALMOST_NO_NOISE = 1e6
"""The epsilon of the ceiling, at which the noise of every mechanism is negligible."""
NO_SCORES = "feddf+p"
PUBLISHED = {
    "no noise": {"epsilon": ALMOST_NO_NOISE},
    "ε = 0.04, δ = 1e-6": {"epsilon": 0.04, "delta": 1e-6},
}
"""The two points of the figure that the paper states as numbers, both at lambda = 0.01."""
WHOLE = ("components",)
"""Settings that are whole numbers."""


def run(context: Context, *, grids: Grids | None = None, method: str = "fedaux") -> Document:
    """Run every setting of the grids that is not finished yet under OUT/cells, and draw accuracy
    over epsilon.

    Failed and missing runs are named. Raises ConfigError if OUT holds the runs of another
    experiment.
    """
    base = context.experiment
    if grids is None:
        grids = PAPER_GRIDS if context.version == "paper" else GRIDS
    if method not in METHODS or not asks_of(method).releases:
        raise ValueError(f"--with method={method}: should be a method with scores, such as fedaux")
    asked = [
        asks_of(method, base.model_copy(update={"certainty": section})).releases[0].mechanism
        for section in (
            base.certainty.model_copy(update={"mechanism": own}) for own in ("mean", "paper")
        )
    ]
    fixed = asked[0] if asked[0] == asked[1] else None
    if fixed is not None and set(grids) != {fixed}:
        raise ValueError(
            f"--with method={method}: its mechanism is always {fixed}; --with grids should have "
            "that one alone"
        )
    listed = list(settings_of(base, grids))
    points = {
        run_name(chosen, seed): {"method": [method if chosen else NO_SCORES], "seeds": [seed]}
        | {f"certainty.{key}": value for key, value in chosen.items()}
        for seed in base.seeds
        for chosen in listed
    }
    records, missing = run_points(context, points, name="privacy")
    rows = []
    for chosen in listed:
        names = [run_name(chosen, seed) for seed in base.seeds]
        finished = [records[name] for name in names if name in records]
        rows.append(
            {
                "cells": names,
                "settings": chosen,
                "last": spread(record["accuracy"] for record in finished),
                "best": spread(record["accuracy_max"] for record in finished),
            }
        )
    numbers = {
        "base": base.to_dict(),
        "version": context.version,
        "data": datasets.describe(base),
        "method": method,
        "rounds": base.rounds,
        "seeds": list(base.seeds),
        "rows": rows,
        "unfinished": missing,
    }
    return describe(numbers)


def settings_of(base: Experiment, grids: Grids) -> Iterator[dict[str, Any]]:
    """Yield the settings of every run: without scores, then each mechanism's ceiling and grid."""
    unknown = sorted(set(grids) - set(MECHANISMS))
    if unknown:
        raise ValueError(
            f"grids: no mechanism {', '.join(unknown)}; there are {', '.join(MECHANISMS)}"
        )
    yield {}
    for mechanism, axes in grids.items():
        others = {key: values for key, values in axes.items() if key not in ("epsilon", "delta")}
        epsilons = axes.get("epsilon", [base.certainty.epsilon])
        deltas = axes.get("delta", [base.certainty.delta])
        for values in product(*others.values()):
            fixed = {"mechanism": mechanism} | {
                key: int(value) if key in WHOLE else value
                for key, value in zip(others, values, strict=True)
            }
            yield fixed | {"epsilon": ALMOST_NO_NOISE, "delta": deltas[0]}
            for delta, epsilon in product(deltas, epsilons):
                yield fixed | {"epsilon": epsilon, "delta": delta}


def run_name(settings: Mapping[str, Any], seed: int) -> str:
    """Return the name of a run's directory."""
    own = [f"{key}{value:g}" for key, value in settings.items() if key != "mechanism"]
    return "-".join([settings.get("mechanism", "without-scores"), *own, f"seed{seed}"]).replace(
        "+", ""
    )


def describe(numbers: Mapping[str, Any]) -> Document:
    """Return the page, with a table for each mechanism: a row per delta and own setting, a
    column per epsilon."""
    rows = numbers["rows"]
    text = (
        f"{numbers['data']} Test accuracy in %, last round / maximum of {numbers['rounds']} "
        f"rounds, {seeds_text(numbers['seeds'])}. Without scores ({NO_SCORES}): "
        f"{_accuracy_text(rows[0])}. `released-code` is not private: ε is what its authors claim."
    )
    tables = [
        Table(
            [mechanism, *map(_epsilon_name, epsilons)],
            [
                [name, *("" if row is None else _accuracy_text(row) for row in line)]
                for name, line in lines.items()
            ],
        )
        for mechanism, epsilons, lines in by_mechanism(rows)
    ]
    parts: list[str | Items | Table] = [
        Items(findings(numbers)),
        text,
        *tables,
        *unfinished(numbers["unfinished"]),
    ]
    return Document(
        f"accuracy over (ε, δ), {numbers['method']}", numbers, parts, {"privacy": drawn(rows)}
    )


def findings(numbers: Mapping[str, Any]) -> list[str]:
    """Return sentences: what is missing, and how far the paper's figures are from ours at the
    same settings."""
    rows = numbers["rows"]
    finished = sum(row["last"] is not None for row in rows)
    found = []
    if finished < len(rows):
        found.append(f"{finished} of {len(rows)} settings are finished; the others are left out.")
    mode = numbers["base"]["mode"]
    if mode != "full":
        return [
            *found,
            f"Here mode = {mode!r}; the paper's figures are of whole networks, so they are not "
            "shown.",
        ]
    claims = published.tables()["claims"]
    printed = {noise: float(claims[f"privacy, λ = 0.01, {noise}"]["value"]) for noise in PUBLISHED}
    if numbers["version"] != "paper":
        values = " and ".join(f"{value:g} at {noise}" for noise, value in printed.items())
        setting = "10 rounds, 40 clients, ResNet-8, CIFAR-10, STL-10, λ = 0.01"
        return [
            *found,
            f"The paper states {values} ({setting}). Data and settings differ here: do not "
            "compare.",
        ]
    for row, (noise, value) in product(rows, printed.items()):
        settings = row["settings"]
        wanted = PUBLISHED[noise] | {"regularisation": 0.01}
        if (
            row["best"]
            and settings
            and all(settings.get(key) == value_ for key, value_ in wanted.items())
        ):
            best = 100 * row["best"]["mean"]
            gap = f"{abs(best - value):.1f} points {'below' if best < value else 'above'}"
            close = f"within {CLOSE:g} point" if abs(best - value) <= CLOSE else gap
            found.append(
                f"`{settings['mechanism']}`, λ = 0.01, {noise}: maximum {best:.1f}, the paper "
                f"states {value:g}: {close}."
            )
    return found or ["No finished run has the settings of the paper's figures."]


def by_mechanism(
    rows: Sequence[Row],
) -> Iterator[tuple[str, list[float], dict[str, list[Row | None]]]]:
    """Yield each mechanism with its epsilons and its lines, {name of own settings and delta: a row
    per epsilon}.

    Without noise delta does not matter: the lines of all deltas end in one ceiling.
    """
    for mechanism in dict.fromkeys(row["settings"]["mechanism"] for row in rows[1:]):
        listed = [row for row in rows[1:] if row["settings"]["mechanism"] == mechanism]
        epsilons = sorted({row["settings"]["epsilon"] for row in listed})
        at = {
            (_own(row), row["settings"]["delta"], row["settings"]["epsilon"]): row for row in listed
        }
        ceilings = {own: row for (own, _, epsilon), row in at.items() if epsilon == ALMOST_NO_NOISE}
        yield (
            mechanism,
            epsilons,
            {
                _line_name(own, delta): [
                    ceilings[own] if epsilon == ALMOST_NO_NOISE else at.get((own, delta, epsilon))
                    for epsilon in epsilons
                ]
                for own, delta, _ in at
            },
        )


def _own(row: Row) -> str:
    """Return the settings of a mechanism besides epsilon and delta."""
    own = {
        key: value
        for key, value in row["settings"].items()
        if key not in ("mechanism", "epsilon", "delta")
    }
    return ", ".join(
        f"{'λ' if key == 'regularisation' else key} {value:g}" for key, value in own.items()
    )


def _line_name(own: str, delta: float) -> str:
    """Return a mechanism's own settings and delta, the latter as 1e-4, not 0.0001 or 1e-04."""
    digits, _, power = f"{delta:e}".partition("e")
    return ", ".join(filter(None, (own, f"δ = {float(digits):g}e{int(power)}")))


def _epsilon_name(epsilon: float) -> str:
    return "almost no noise" if epsilon == ALMOST_NO_NOISE else epsilon_text(epsilon)


def _accuracy_text(row: Row) -> str:
    """Return last round / maximum of a setting in %."""
    return (
        "–"
        if row["last"] is None
        else " / ".join(spread_text(row[key], scale=100) for key in ("last", "best"))
    )


def drawn(rows: Sequence[Row]) -> Drawing:
    """Draw the figure, with its caption and numbers."""
    caption = (
        "Test accuracy in the last round over ε, a panel per mechanism, a colour for its own "
        f"settings, a dash for δ; dotted: without scores ({NO_SCORES})."
    )
    keys = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    shown = [(key, part) for key in ("last", "best") for part in ("mean", "deviation")]
    lines = [
        [
            row["cells"][0].rpartition("-seed")[0],
            *(row["settings"].get(key, "") for key in keys),
            *(row[key] and row[key][part] for key, part in shown),
        ]
        for row in rows
    ]
    headers = ("cell", *keys, "accuracy", "accuracy_std", "accuracy_max", "accuracy_max_std")
    return Drawing(draw(rows), caption, Table(headers, lines))


@matplotlib.rc_context(STYLE)
def draw(rows: Sequence[Row]) -> Figure:
    """Draw one panel per mechanism: accuracy over epsilon, a colour for its own settings, a dash
    for delta."""
    mechanisms = list(by_mechanism(rows))
    figure = new_figure(40 + 220 * max(1, len(mechanisms)), 300)
    panels = figure.subplots(1, max(1, len(mechanisms)), squeeze=False, sharey=True)[0]
    for axes, (mechanism, epsilons, lines) in zip(panels, mechanisms, strict=False):
        own, deltas = (
            list(dict.fromkeys(name.rpartition("δ = ")[side] for name in lines)) for side in (0, 2)
        )
        for name, line in lines.items():
            setting, _, delta = name.rpartition("δ = ")
            known = [(place, row["last"]) for place, row in enumerate(line) if row and row["last"]]
            errors = [100 * (last["deviation"] or 0.0) for _, last in known]
            look = own.index(setting)
            if known:
                axes.errorbar(
                    [place for place, _ in known],
                    [100 * last["mean"] for _, last in known],
                    yerr=errors if any(errors) else None,
                    color=COLOURS[look % len(COLOURS)],
                    marker=MARKERS[look % len(MARKERS)],
                    markersize=4.5,
                    linewidth=1.6,
                    elinewidth=1,
                    linestyle=DASHES[deltas.index(delta) % len(DASHES)],
                    label=name,
                )
        if floor := rows[0]["last"]:
            height = 100 * floor["mean"]
            axes.axhline(height, color=GREY, linewidth=1.2, linestyle=":")
            place: Any = {
                "xycoords": ("axes fraction", "data"),
                "textcoords": "offset points",
                "ha": "right",
            }
            axes.annotate("without scores", (0.99, height), (0, -11), fontsize=9, **place)
        names = [
            _epsilon_name(epsilon).removeprefix("ε = ").replace(" ", "\n") for epsilon in epsilons
        ]
        axes.set_xticks(range(len(names)), names)
        axes.set_title(mechanism)
        axes.set_xlabel("ε")
        tidy(axes)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8.5, handlelength=3.2)
    panels[0].set_ylabel("test accuracy in the last round, %")
    panels[0].set_ylim(0, 100)
    return figure
