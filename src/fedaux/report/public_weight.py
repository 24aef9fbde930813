"""How the weight on public data is spread over clients and classes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedaux.formatting import client_label


@dataclass(frozen=True)
class Spread:
    """The mean weight on public data in one method and seed, over rounds."""

    by_client: Mapping[int, float]
    """The weight of each client, over the rounds in which it taught."""
    by_class: Sequence[float]
    """The share of each class in the soft labels."""
    teachers: float
    """The number of clients that teach in a round."""


def spreads(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], Spread]:
    """Return the spread of each method and seed whose rounds have a teacher."""
    rounds: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("public_weight_by_class"):
            rounds[str(row["method"]), int(row["seed"])].append(row)
    found = {}
    for key, own in rounds.items():
        weights: dict[int, list[float]] = defaultdict(list)
        for row in own:
            for client, weight in row["public_weight_by_client"].items():
                weights[int(client)].append(float(weight))
        shares = (row["public_weight_by_class"] for row in own)
        by_class = [fmean(column) for column in zip(*shares, strict=True)]
        teachers = fmean(len(row["public_weight_by_client"]) for row in own)
        by_client = {client: fmean(weights[client]) for client in sorted(weights)}
        found[key] = Spread(by_client, by_class, teachers)
    return found


def most(count: float) -> float:
    """Return the weight above which one of several has most of it: half, more of two or three."""
    return min(0.9, max(0.5, 2 / count))


def concentration_warnings(
    rows: Iterable[Mapping[str, Any]], classes: Sequence[object], names: Sequence[str]
) -> list[str]:
    """Return a line for each method in which one client or one class has most of the weight.

    Of several seeds, the one with the largest weight is named.
    """
    found: dict[tuple[str, str], tuple[float, str]] = {}

    def compare(method: str, what: str, weight: float, line: str) -> None:
        found[method, what] = max(found.get((method, what), (0.0, "")), (weight, line))

    for (method, seed), spread in spreads(rows).items():
        where = f"{method}, seed {seed}"
        if spread.by_client and spread.teachers > 1:
            client, weight = max(spread.by_client.items(), key=lambda one: one[1])
            line = (
                f"{where}: {client_label(client, names)} has {_percent(weight)} of the weight on "
                "public data in the rounds it teaches (equal weights: "
                f"{_percent(1 / spread.teachers)}), so the other clients hardly teach"
            )
            if weight > most(spread.teachers):
                compare(method, "client", weight, line)
        label, weight = max(enumerate(spread.by_class), key=lambda one: one[1])
        line = (
            f"{where}: class {classes[label] if classes else label} has {_percent(weight)} of the "
            f"soft labels on public data (equal shares: {_percent(1 / len(spread.by_class))}), so "
            "the server learns little of the others"
        )
        if len(spread.by_class) > 1 and weight > most(len(spread.by_class)):
            compare(method, "class", weight, line)
    return [line for _, line in found.values()]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
