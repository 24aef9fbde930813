"""The data of each client at several values of alpha (the paper's figure of the Dirichlet
split)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedaux.data import load_labelled
from fedaux.report.data_figures import split_bubbles
from fedaux.report.tables import Table
from fedaux.running import preflight as checks
from fedaux.running.run import split_table
from reproduce import datasets
from reproduce.document import Context, Document, Drawing

ALPHAS = (0.01, 0.1, 1.0, 100.0)


def run(context: Context, *, alphas: Sequence[float] = ALPHAS) -> Document:
    """Draw the split of the labelled data over the clients for each alpha, with the first seed."""
    experiment = context.experiment
    checks.check(experiment)
    data = load_labelled(experiment.data)
    seed = experiment.seeds[0]
    tables: dict[str, np.ndarray] = {}
    for alpha in alphas:
        changed = experiment.split.model_copy(update={"alpha": alpha})
        tables[f"{alpha:g}"] = split_table(
            experiment.model_copy(update={"split": changed}), data, seed
        )
    rows = [
        {"alpha": alpha, **describe_split(table)}
        for alpha, table in zip(alphas, tables.values(), strict=True)
    ]
    numbers = {
        "seed": seed,
        "classes": list(data.classes),
        "rows": rows,
        "tables": {alpha: table.tolist() for alpha, table in tables.items()},
    }
    held = [
        [alpha, client, name, int(count)]
        for alpha, table in tables.items()
        for client, row in enumerate(table)
        for name, count in zip(data.classes, row, strict=True)
    ]
    lines = [
        [
            f"{row['alpha']:g}",
            f"{100 * row['share_of_main_class']:.1f} %",
            f"{row['classes_held']:.1f}",
            f"{row['least_examples']} to {row['most_examples']}",
        ]
        for row in rows
    ]
    private = datasets.describe(experiment).partition(";")[0]
    figure = Drawing(
        split_bubbles([(f"α = {alpha}", table) for alpha, table in tables.items()], data.classes),
        "One column per client, one row per class; the area of a bubble is the number of examples.",
        Table(("alpha", "client", "class", "examples"), held),
    )
    return Document(
        f"{rows[0]['clients']} clients, {len(data.classes)} classes, α = {', '.join(tables)}",
        numbers,
        [
            f"{private}. Means over clients, seed {seed}.",
            Table(
                ["α", "share of a client's main class", "classes held", "examples per client"],
                lines,
            ),
        ],
        {"split": figure},
    )


def describe_split(table: np.ndarray) -> dict[str, Any]:
    """Return how skewed a split [clients, classes] is, as means over the clients that hold
    anything."""
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
