"""Who holds what at several values of alpha (the paper's illustration of the Dirichlet split)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedaux.config import Experiment
from fedaux.data import load_labelled
from fedaux.paper import places
from fedaux.paper.page import Drawing
from fedaux.paper.study import quick_base
from fedaux.paper.writing import TITLES, Outcome, Version, markdown_table, write
from fedaux.report.figures import split_bubbles
from fedaux.running import preflight as checks
from fedaux.running.run import split_table

ALPHAS = (0.01, 0.1, 1.0, 100.0)


def run(
    out: Path | str,
    *,
    base: Experiment | None = None,
    alphas: Sequence[float] = ALPHAS,
    version: Version = "own",
    notes: Sequence[str] = (),
) -> Outcome:
    """Draw the split of the labelled data over the clients for each alpha; the first seed counts.

    Without ``base``, the embedded digits at 20 clients.
    """
    experiment, version = (quick_base("split"), "quick") if base is None else (base, version)
    checks.check(experiment)
    data = load_labelled(experiment.data)
    seed = experiment.seeds[0]
    tables = []
    for alpha in alphas:
        changed = experiment.split.model_copy(update={"alpha": alpha})
        tables.append(split_table(experiment.model_copy(update={"split": changed}), data, seed))
    rows = [{"alpha": alpha, **describe_split(table)} for alpha, table in zip(alphas, tables, strict=True)]
    numbers = {
        "version": version,
        "data": places.told(experiment).partition(";")[0] + ".",
        "seed": seed,
        "classes": list(data.classes),
        "rows": rows,
        "tables": {f"{alpha:g}": table.tolist() for alpha, table in zip(alphas, tables, strict=True)},
    }
    panels = [(f"α = {alpha:g}", table) for alpha, table in zip(alphas, tables, strict=True)]
    caption = "Who holds what: a column a client, a row a class; the area of a bubble is the number of examples."
    held = [
        [f"{alpha:g}", client, name, int(count)]
        for alpha, table in zip(alphas, tables, strict=True)
        for client, row in enumerate(table)
        for name, count in zip(data.classes, row, strict=True)
    ]
    header = ("alpha", "client", "class", "examples")
    figure = Drawing(split_bubbles(panels, data.classes), caption, header, held)
    return write(
        Path(out), "split", numbers=numbers, markdown=describe(numbers), figures={"split": figure}, notes=notes
    )


def describe_split(table: np.ndarray) -> dict[str, Any]:
    """Return how one-sided a split [clients, classes] is: of the clients that hold anything, means over clients."""
    held = table[table.sum(axis=1) > 0]
    shares = held / held.sum(axis=1, keepdims=True)
    return {
        "clients": len(table),
        "empty_clients": int(len(table) - len(held)),
        "share_of_main_class": float(shares.max(axis=1).mean()),
        "classes_held": float((held > 0).sum(axis=1).mean()),
        "least_examples": int(table.sum(axis=1).min()),
        "most_examples": int(table.sum(axis=1).max()),
    }


def describe(numbers: Mapping[str, Any]) -> str:
    """Return the text."""
    rows = [
        [
            f"{row['alpha']:g}",
            f"{100 * row['share_of_main_class']:.1f} %",
            f"{row['classes_held']:.1f}",
            f"{row['least_examples']} to {row['most_examples']}",
        ]
        for row in numbers["rows"]
    ]
    header = ["α", "share of a client's main class", "classes held", "examples a client"]
    return (
        f"# split{TITLES[numbers['version']]}: {numbers['rows'][0]['clients']} clients, {len(numbers['classes'])} "
        f"classes, α = {', '.join(row[0] for row in rows)}\n\n{numbers['data']} Means over clients, seed "
        f"{numbers['seed']}.\n\n" + markdown_table(header, rows)
    )
