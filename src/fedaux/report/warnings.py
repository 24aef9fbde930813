"""Warnings for the reader of a run's results; each line names its method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from fedaux.formatting import plural
from fedaux.report.public_weight import concentration_warnings
from fedaux.report.results import Runs
from fedaux.report.run import Run

LEAST_PUBLIC_SHARE = 0.3
"""Public examples that tell less of their class than this share of what test examples tell: with
digits, letters have 0.4 to 0.5, noise and patches of photographs 0.1 to 0.2 (alpha = 0.01)."""
LEAST_INFORMATION = 0.1
"""Of models with less information about test examples, public data are not judged."""
MOST_WARNINGS = 12
"""Warnings of a folder of runs that are listed; each run's page has its own."""


def all_warnings(runs: Runs) -> list[str]:
    """Return the warnings of all runs, each once with the runs it is about."""
    found: dict[str, list[str]] = {}
    for name, run in runs.runs.items():
        for line in warnings_of(run):
            found.setdefault(line, []).append(name)
    if runs.only:
        return list(found)
    lines = []
    for line, names in found.items():
        others = f" and {plural(len(names) - 1, 'other run')}" if len(names) > 1 else ""
        lines.append(line if len(names) == len(runs.runs) else f"{names[0]}{others}: {line}")
    rest = len(lines) - MOST_WARNINGS
    return (
        lines if rest <= 0 else [*lines[:MOST_WARNINGS], f"{rest} more, on the pages of the runs"]
    )


def warnings_of(run: Run) -> list[str]:
    """Return the warnings of one run, in the order in which their causes act."""
    return [
        *run.noise_warnings,
        *_dropped(run),
        *concentration_warnings(run.metrics, run.split.get("classes") or [], run.names),
        *_unfit(run),
        *_at_chance(run),
    ]


def _dropped(run: Run) -> Iterator[str]:
    """Yield a line for each method with unusable answers, and with rounds that changed nothing."""
    for method, (rounds, _) in run.progress.items():
        own = [row for row in run.metrics if row["method"] == method]
        reasons = [reason for row in own for reason in row["clients_dropped"].values()]
        if reasons:
            asked = sum(len(row["clients_asked"]) for row in own)
            yield f"{method}: {len(reasons)} of {asked} answers were dropped, first: {reasons[0]}"
        if kept := sum(bool(row.get("model_kept")) for row in own):
            yield f"{method}: {kept} of {rounds} rounds had no usable update and changed nothing"


def _unfit(run: Run) -> Iterator[str]:
    """Yield a line for each method that distills and whose model sees much in test examples and
    little in public ones, and for each of its seeds without distillation."""
    for method in run.progress:
        rows = [row for row in run.metrics if row["method"] == method]
        taught = {row["seed"] for row in rows if "public_weight_by_class" in row}
        own = []
        for row in rows:
            if row.get("information") and row["seed"] in taught:
                own.append(row["information"])
            elif row.get("information") and not row.get("model_kept"):
                yield (
                    f"{method}, seed {row['seed']}: nothing was distilled, since the first soft "
                    "labels told too little of the class (Methods, Derivation of fedaux2)"
                )
        if not own:
            continue
        public, test = (fmean(one[of] for one in own) for of in ("public", "test"))
        if test >= LEAST_INFORMATION and public < LEAST_PUBLIC_SHARE * test:
            yield (
                f"{method}: the public data are unlike the private ones: its predictions tell "
                f"{100 * public:.0f} % of the class of a public example, and {100 * test:.0f} % "
                "of that of a test example; distillation may cost more than it brings"
            )


def _at_chance(run: Run) -> Iterator[str]:
    """Yield a line for each method that is no better than the most frequent test class by more than
    two standard errors."""
    if (test := run.notes.get("test")) is None:
        return
    share = test["largest_class"]
    chance = share + 2 * math.sqrt(share * (1 - share) / test["examples"])
    rows: list[Mapping[str, Any]] = run.summary.get("rows", [])
    for row in rows:
        if row["accuracy_mean"] is not None and row["accuracy_mean"] <= chance:
            yield (
                f"{row['method']}: at chance, {100 * row['accuracy_mean']:.1f} % in the last round "
                f"where the most frequent class has {100 * share:.1f} % of the test examples; see "
                "the page Tuning"
            )
