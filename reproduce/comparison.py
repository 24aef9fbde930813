"""Findings of a study in sentences: the best method here and in the paper, and the differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reproduce import published
from reproduce.planning import CENTRAL

Row = Mapping[str, Any]
CLOSE = 1.0
"""Points within which two accuracies count as equal."""
OUR_METHOD = "fedaux"


def findings(numbers: Mapping[str, Any]) -> list[str]:
    """Return sentences, the most important first."""
    rows = [row for row in numbers["rows"] if row["best"] is not None and row["method"] != CENTRAL]
    if not rows:
        return ["Nothing is measured yet."]
    runs, finished = (sum(row[key] for row in numbers["rows"]) for key in ("runs", "finished"))
    found = (
        []
        if runs == finished
        else [f"{finished} of {runs} runs are finished; the others are left out."]
    )
    columns: dict[str, list[Row]] = {}
    for row in rows:
        columns.setdefault(_place(row), []).append(row)
    several = {place: group for place, group in columns.items() if len(group) > 1}
    found += [*_leads(several), *_order(several, numbers["study"])]
    if numbers["quick"]:
        found.append(
            "Data, networks and settings differ from the paper's, so accuracies cannot be compared "
            "with its figures; the order of the methods can."
        )
    else:
        found += _differences([row for row in rows if row["published"] is not None])
    return found


def _leads(columns: Mapping[str, Sequence[Row]]) -> list[str]:
    """State where our method is best."""
    ahead, compared = [], 0
    for place, group in columns.items():
        if OUR_METHOD in [row["method"] for row in group]:
            compared += 1
            best, second = sorted(group, key=lambda row: -row["best"]["mean"])[:2]
            if best["method"] == OUR_METHOD:
                ahead.append(
                    (best["best"]["mean"] - second["best"]["mean"], second["method"], place)
                )
    if not compared:
        return []
    text = f"{OUR_METHOD} is best in {len(ahead)} of {compared} columns"
    if ahead:
        gap, second_best, place = max(ahead)
        text += f", by up to {gap:.1f} points ({place}, over {second_best})"
    return [f"{text}."]


def _order(columns: Mapping[str, Sequence[Row]], study: str) -> list[str]:
    """State in how many columns the paper's best method is also best here, where it has a
    result."""
    same, other = 0, []
    for place, group in columns.items():
        ranking = published.ranking(study, group[0]["block"], group[0]["column"])
        printed = {row["method"]: row for row in group if row["published"] is not None}
        leader = max(ranking, key=ranking.__getitem__, default="")
        if leader not in printed or len(printed) < 2:
            continue
        best = max(printed.values(), key=lambda row: row["best"]["mean"])
        behind = best["best"]["mean"] - printed[leader]["best"]["mean"]
        if behind <= CLOSE:
            same += 1
        else:
            other.append(f"{place}: {leader} is {behind:.1f} points behind {best['method']}")
    if not same and not other:
        return []
    text = (
        f"The paper's best method is best here too, or within {CLOSE:g} point of it, in {same} of "
    )
    return [
        f"{text}{same + len(other)} columns" + (f"; not in {'; '.join(other)}." if other else ".")
    ]


def _differences(rows: Sequence[Row]) -> list[str]:
    """State how far the best rounds are from the published figures."""
    if not rows:
        return []
    gaps = sorted(
        ((row["best"]["mean"] - row["published"]["mean"], index) for index, row in enumerate(rows))
    )
    below, above = sum(gap < -CLOSE for gap, _ in gaps), sum(gap > CLOSE for gap, _ in gaps)
    found = [
        f"{len(rows) - below - above} of {len(rows)} figures are within {CLOSE:g} point of the "
        f"published ones, {below} below and {above} above."
    ]
    for word, count, (gap, index) in (("below", below, gaps[0]), ("above", above, gaps[-1])):
        if count:
            row = rows[index]
            found.append(
                f"Furthest {word}: {row['method']}, {_place(row)}, {row['best']['mean']:.1f} "
                f"against {row['published']['text']}, {abs(gap):.1f} points."
            )
    return found


def _place(row: Row) -> str:
    return ", ".join(part for part in (row["block"], row["column"]) if part)
