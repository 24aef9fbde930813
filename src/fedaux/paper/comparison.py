"""What a study found, in plain words: how far it is from the paper's figures, and whether the order is the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedaux.paper import published
from fedaux.paper.running import CENTRAL

Row = Mapping[str, Any]
CLOSE = 1.0
"""Points within which two accuracies are called the same."""
OUR_METHOD = "fedaux"


def findings(numbers: Mapping[str, Any]) -> list[str]:
    """Return sentences, the most important first."""
    rows = [row for row in numbers["rows"] if row["best"] is not None and row["method"] != CENTRAL]
    if not rows:
        return ["Nothing is measured yet."]
    said = _progress(numbers["rows"])
    said += _leads(rows, numbers["study"])
    if numbers["quick"]:
        said.append(
            "These are other data, networks and settings than the paper's, so figures cannot be held against its "
            "own; who is ahead of whom can."
        )
    else:
        said += _differences([row for row in rows if row["published"] is not None])
    return said


def _progress(rows: Sequence[Row]) -> list[str]:
    runs, finished = (sum(row[key] for row in rows) for key in ("runs", "finished"))
    return [] if runs == finished else [f"{finished} of {runs} runs are finished; the others are left out."]


def _leads(rows: Sequence[Row], study: str) -> list[str]:
    """Say who is best in each place, and whether that is who is best in the paper."""
    groups = [(place, group) for place, group in _by_place(rows) if len(group) > 1]
    return [*_who(groups), *_order(groups, study)]


def _who(groups: Sequence[tuple[str, list[Row]]]) -> list[str]:
    """Say where our method is best, by the places where it has a result; who is best where it has none at all."""
    ahead, winners = [], []
    compared = [(place, group) for place, group in groups if any(row["method"] == OUR_METHOD for row in group)]
    for place, group in compared or groups:
        best, second = sorted(group, key=lambda row: -row["best"]["mean"])[:2]
        winners.append(best["method"])
        if best["method"] == OUR_METHOD:
            ahead.append((best["best"]["mean"] - second["best"]["mean"], second["method"], place))
    if not groups:
        return []
    if not compared:
        counts = [f"{method} in {winners.count(method)}" for method in dict.fromkeys(winners)]
        return [f"{OUR_METHOD} has no result here; best are {', '.join(counts)} of {len(groups)} columns."]
    line = f"{OUR_METHOD} is best in {len(ahead)} of {len(compared)} columns"
    if len(compared) < len(groups):
        line += " where it has a result"
    if ahead:
        widest, runner_up, place = max(ahead)
        line += f", by up to {widest:.1f} points ({place}, over {runner_up})"
    return [line + "."]


def _order(groups: Sequence[tuple[str, list[Row]]], study: str) -> list[str]:
    """Say in how many places the method that the paper prints as best is best here, of those with a printed figure."""
    found: dict[bool, tuple[list[str], list[str]]] = {True: ([], []), False: ([], [])}
    absent: list[str] = []
    for place, group in groups:
        printed = [row for row in group if row["published"] is not None]
        if len(printed) < 2:
            continue
        winner = max(printed, key=lambda row: row["published"]["mean"])
        best = max(printed, key=lambda row: row["best"]["mean"])
        everyone = published.ranking(study, winner["block"], winner["column"])
        first = max(everyone, key=everyone.__getitem__, default=winner["method"])
        whole = first in [row["method"] for row in printed]
        absent += [] if whole else [first]
        same, other = found[whole]
        behind = best["best"]["mean"] - winner["best"]["mean"]
        if behind <= CLOSE:
            same.append(place)
        else:
            other.append(f"{place}: {winner['method']} is {behind:.1f} points behind {best['method']}")
    said = []
    for whole, (same, other) in found.items():
        if not same and not other:
            continue
        start = "The paper's best method"
        if not whole:
            start = f"The paper's best ({', '.join(dict.fromkeys(absent))}) has no result here; its best of the others"
        line = f"{start} is best here too, or within {CLOSE:g} point of it, in {len(same)} of "
        said.append(f"{line}{len(same) + len(other)} columns" + (f"; not in {'; '.join(other)}." if other else "."))
    return said


def _differences(rows: Sequence[Row]) -> list[str]:
    """Say how far the best rounds are from the printed figures."""
    if not rows:
        return []
    gaps = sorted(((row["best"]["mean"] - row["published"]["mean"], index) for index, row in enumerate(rows)))
    close = sum(abs(gap) <= CLOSE for gap, _ in gaps)
    said = [
        f"{close} of {len(rows)} figures lie within {CLOSE:g} point of the printed ones, "
        f"{sum(gap < -CLOSE for gap, _ in gaps)} below and {sum(gap > CLOSE for gap, _ in gaps)} above."
    ]
    for (gap, index), word in ((gaps[0], "below"), (gaps[-1], "above")):
        if abs(gap) > CLOSE and (gap < 0) == (word == "below"):
            row = rows[index]
            said.append(
                f"Furthest {word}: {row['method']}, {place_name(row)}, {row['best']['mean']:.1f} against "
                f"{row['published']['text']}, {abs(gap):.1f} points."
            )
    return said


def place_name(row: Row) -> str:
    """Return block and column of a row in words."""
    return ", ".join(part for part in (row["block"], row["column"]) if part)


def _by_place(rows: Sequence[Row]) -> Iterable[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(place_name(row), []).append(row)
    return groups.items()
