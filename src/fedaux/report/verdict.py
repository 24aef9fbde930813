"""Which methods of a run differ by more than chance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from fedaux.report.tables import Table

LEAST_POINTS = 0.05
"""Differences that round to 0.0 points are ties, whatever the seeds say."""
ONE_SEED_POINTS = 1.0
"""With one seed there is no standard error; smaller differences are called ties."""
MOST_METHODS = 8
"""The most accurate methods that are compared."""

Accuracies = Mapping[str, Mapping[int, float]]
"""The accuracy of the last round, by method and seed."""


def last_accuracies(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the last measured accuracy of each method and seed in the rounds of a run."""
    found: dict[str, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: int(row["round"])):
        if row.get("accuracy") is not None:
            found.setdefault(str(row["method"]), {})[int(row["seed"])] = float(row["accuracy"])
    return found


def verdict(accuracies: Accuracies, *, test_examples: int | None = None) -> Table | None:
    """Return by how many points each method is above each less accurate one; None for one method.

    Methods are compared over the seeds that both have. A difference within its standard error, over
    seeds or over the test examples, is called a tie.
    """
    means = {name: fmean(own.values()) for name, own in accuracies.items() if own}
    names = sorted(means, key=lambda name: -means[name])[:MOST_METHODS]
    if len(names) < 2:
        return None
    rows, bold = [], set()
    for place, first in enumerate(names[:-1]):
        cells = [f"{first} {100 * means[first]:.1f}"]
        for column, second in enumerate(names[1:], start=1):
            found = (
                _difference(accuracies, first, second, test_examples) if column > place else None
            )
            cells.append("" if found is None else str(found))
            if found is not None and not found.is_tie:
                bold.add((place, column))
        rows.append(cells)
    headers = ["", *(f"{name} {100 * means[name]:.1f}" for name in names[1:])]
    caption = "Points by which a row is above a column, ± standard error over seeds"
    return Table(headers, rows, align="l" + "r" * (len(names) - 1), caption=caption, bold=bold)


def level(accuracies: Accuracies, test_examples: int | None = None) -> list[str]:
    """Return the methods whose difference from the most accurate one is a tie, best first."""
    names = sorted(accuracies, key=lambda name: -fmean(accuracies[name].values()))
    found = ((one, _difference(accuracies, names[0], one, test_examples)) for one in names[1:])
    return [one for one, difference in found if difference is not None and difference.is_tie]


@dataclass(frozen=True)
class _Difference:
    """First minus second method, in points, over the seeds that both have."""

    points: float
    error: float | None
    """Standard error over seeds; None for one seed."""
    sampling: float
    """Standard error over test examples. Both methods see the same ones; half of the variance of
    their errors is taken to be common."""

    @property
    def is_tie(self) -> bool:
        error = ONE_SEED_POINTS if self.error is None else self.error
        limit = max(error, LEAST_POINTS, self.sampling)
        return abs(self.points) < limit or math.isclose(abs(self.points), limit)

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {self.error:.1f}"
        return f"{self.points:+.1f}{error}{' (tie)' if self.is_tie else ''}"


def _difference(
    accuracies: Accuracies, first: str, second: str, test_examples: int | None
) -> _Difference | None:
    seeds = sorted(accuracies[first].keys() & accuracies[second].keys())
    if not seeds:
        return None
    ones, others = ([100 * accuracies[name][seed] for seed in seeds] for name in (first, second))
    pairs = [one - other for one, other in zip(ones, others, strict=True)]
    error = stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    variance = sum(mean * (100 - mean) for mean in (fmean(ones), fmean(others)))
    sampling = math.sqrt(variance / 2 / test_examples) if test_examples else 0.0
    return _Difference(fmean(pairs), error, sampling)
