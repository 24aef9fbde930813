"""What a study found, in plain words: how far it is from the paper's figures, and whether the order is the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedaux.reproduce.running import CENTRAL

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
    said += _leads(rows)
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


def _leads(rows: Sequence[Row]) -> list[str]:
    """Say who is best in each place, in the paper and here."""
    ahead, same, other, places = [], 0, [], 0
    for place, group in _by_place(rows):
        if len(group) < 2:
            continue
        places += 1
        best = max(group, key=lambda row: row["best"]["mean"])
        if best["method"] == OUR_METHOD:
            second = max((row for row in group if row is not best), key=lambda row: row["best"]["mean"])
            ahead.append((best["best"]["mean"] - second["best"]["mean"], second["method"], place))
        printed = [row for row in group if row["published"] is not None]
        if len(printed) == len(group):
            winner = max(printed, key=lambda row: row["published"]["mean"])
            behind = best["best"]["mean"] - winner["best"]["mean"]
            if behind <= CLOSE:
                same += 1
            else:
                other.append(f"{place}: {winner['method']} is {behind:.1f} points behind {best['method']}")
    said = []
    if places:
        line = f"{OUR_METHOD} is best in {len(ahead)} of {places} columns"
        if ahead:
            widest, second, place = max(ahead)
            line += f", by up to {widest:.1f} points ({place}, over {second})"
        said.append(line + ".")
    if same or other:
        line = f"The paper's best method is best here too, or within {CLOSE:g} point of it, in {same} of "
        said.append(f"{line}{same + len(other)} columns" + (f"; not in {'; '.join(other)}." if other else "."))
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
