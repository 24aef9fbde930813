"""Where a method falls behind: its accuracy beside that of its peers over heterogeneity, privacy,
participation and the clients' sizes.

A run for every setting, method and seed. Settings that a method does not read make no new run. An
interrupted grid resumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from fedaux.core.algorithms import asks_of
from fedaux.report.tables import Table
from reproduce import datasets
from reproduce.document import Context, Document, Items, seeds_text, spread, unfinished
from reproduce.planning import run_points

METHOD, RELATIVE = "fedaux2", "fedcounts"
"""The method that is compared, and one that is not among its peers."""
TOLERATED = 1.0
"""Points behind the best peer."""
KEYS = {
    "α": "split.alpha",
    "C": "participation_rate",
    "examples": "data.size",
    "ε": "certainty.epsilon",
}
RATES = (0.4, 1.0)


def run(
    context: Context,
    *,
    alphas: Sequence[float] = (0.01, 0.1, 1.0, 100.0),
    epsilons: Sequence[float] = (0.1, 0.5, 1.0),
    rates: Sequence[float] = RATES,
    sizes: Sequence[int] = (),
) -> Document:
    """Run every setting that is not finished yet under OUT/cells, and compare METHOD with the best
    of the other methods. `sizes` are numbers of training examples of all clients together; the
    default is the recipe's."""
    base = context.experiment
    axes: dict[str, Sequence[float | int | None]] = {
        "α": alphas,
        "C": rates,
        "examples": sizes or (base.data.size,),
        "ε": epsilons,
    }
    points: dict[str, dict[str, Any]] = {}
    for setting, method, seed in product(settings_of(axes), base.method, base.seeds):
        changes = {KEYS[key]: value for key, value in read_by(method, setting).items()}
        points[name_of(setting, method, seed)] = {"method": [method], "seeds": [seed]} | changes
    records, missing = run_points(context, points, name="robustness")
    rows = []
    for setting in settings_of(axes):
        named = {
            method: [name_of(setting, method, seed) for seed in base.seeds]
            for method in base.method
        }
        last = {
            method: spread(100 * records[name]["accuracy"] for name in names if name in records)
            for method, names in named.items()
        }
        rows.append({"settings": setting, "last": last})
    numbers = {
        "base": base.to_dict(),
        "data": datasets.describe(base),
        "mode": base.mode,
        "rounds": base.rounds,
        "seeds": list(base.seeds),
        "methods": list(base.method),
        "rows": rows,
        "unfinished": missing,
    }
    return describe(numbers)


def settings_of(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the axes' values."""
    for values in product(*axes.values()):
        yield {key: value for key, value in zip(axes, values, strict=True) if value is not None}


def read_by(method: str, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a setting that a method reads: budgets are for releases, and rounds
    without training ask nobody."""
    ignored = {"ε"} if not asks_of(method).all_releases else set[str]()
    if not asks_of(method).trains:
        ignored.add("C")
    return {key: value for key, value in setting.items() if key not in ignored}


def name_of(setting: Mapping[str, Any], method: str, seed: int) -> str:
    """Return the name of a run's folder."""
    parts = [f"{KEYS[key]}={value:g}" for key, value in read_by(method, setting).items()]
    return ",".join([f"method={method}", *parts, f"seed={seed}"])


def behind(row: Mapping[str, Any]) -> float | None:
    """Return how many points METHOD is behind its best peer; negative: ahead."""
    ours = (METHOD, RELATIVE)
    others = [one["mean"] for name, one in row["last"].items() if one and name not in ours]
    own = row["last"].get(METHOD)
    return max(others) - own["mean"] if own and others else None


def describe(numbers: Mapping[str, Any]) -> Document:
    """Return the page: a row per setting, a column per method, and how far METHOD is behind."""
    rows, methods = numbers["rows"], numbers["methods"]
    keys = list(rows[0]["settings"])
    lines = []
    for row in rows:
        gap = behind(row)
        accuracies = [
            "" if row["last"][name] is None else f"{row['last'][name]['mean']:.1f}"
            for name in methods
        ]
        lines.append(
            [
                *(f"{row['settings'][key]:g}" for key in keys),
                *accuracies,
                "" if gap is None else f"{-gap:+.1f}",
            ]
        )
    text = (
        f"{numbers['data']} mode = {numbers['mode']}, {numbers['rounds']} rounds, test accuracy of "
        f"the last round in %, {seeds_text(numbers['seeds'])}. Last column: {METHOD} less the best "
        f"of the other methods, {RELATIVE} excepted."
    )
    return Document(
        f"{METHOD} beside its peers over settings",
        numbers,
        [
            Items(findings(rows)),
            text,
            Table([*keys, *methods, "ahead"], lines),
            *unfinished(numbers["unfinished"]),
        ],
    )


def findings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return sentences: how often METHOD is ahead, behind by more than is tolerated, and where it
    is worst."""
    gaps = [(gap, row["settings"]) for row in rows if (gap := behind(row)) is not None]
    if not gaps:
        return [f"No setting has both {METHOD} and a peer."]
    worst, where = max(gaps, key=lambda pair: pair[0])
    lost = sum(gap > TOLERATED for gap, _ in gaps)
    ahead = sum(gap < 0 for gap, _ in gaps)
    at = ", ".join(f"{key} = {value:g}" for key, value in where.items())
    return [
        f"{METHOD} is ahead in {ahead} of {len(gaps)} settings, and more than {TOLERATED:g} point "
        f"behind in {lost}.",
        f"Its worst setting, at {at}: {worst:.1f} points behind."
        if worst > 0
        else f"It is ahead everywhere, by {-worst:.1f} points at least ({at}).",
    ]
