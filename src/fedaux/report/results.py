"""Results of one run or of a folder of runs: records, means over seeds, and the swept settings."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedaux.core.algorithms import METHODS, asks_of
from fedaux.formatting import (
    as_number,
    decimal,
    mean_and_deviation,
    megabytes,
    over_seeds,
    privacy_budget,
    setting_text,
)
from fedaux.recipes import flatten
from fedaux.report.run import REQUIRED, Point, Row, Run, curve_points, methods_of, read_run
from fedaux.report.tables import Table, bold_row
from fedaux.report.verdict import level

NOT_SETTINGS = ("name", "method", "seeds")
"""Keys that are not swept settings: records have method and seed themselves."""
NOT_SECTIONS = ("output.", "engine.")
MEASURES = ("accuracy", "accuracy_max")
LEVEL = " †"
"""Marks results that are level with the best."""
FIELDS = (
    *("cell", "method", "seed", "complete", "rounds_done", *MEASURES, "epsilon", "delta"),
    *("bytes_up", "bytes_down", "seconds", "key", "seeds_done"),
    *(f"{measure}_{what}" for measure in MEASURES for what in ("mean", "std")),
)
"""The fields of a record or a row besides the swept keys."""
SYMBOLS = {
    "split.alpha": "α",
    "split.num_clients": "clients",
    "participation_rate": "C",
    "certainty.epsilon": "ε",
    "certainty.delta": "δ",
}
"""The paper's symbols for settings; others are named by the last word of their key."""


@dataclass(frozen=True)
class Runs:
    """One run or several."""

    name: str
    runs: Mapping[str, Run]
    """By the name of their directory; runs that have not started are left out."""
    folder: bool = False
    """Whether they were read from a folder of runs, each with its own page."""
    keys: tuple[str, ...] = ()
    """The keys in which they differ, besides method and seeds."""
    tuned: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    """Other keys in which they differ, and the values of each method: `tuned_keys`."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The values of the keys, for each run."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why runs failed, by name."""
    waiting: tuple[str, ...] = ()
    """Runs that have not started."""

    @property
    def only(self) -> Run | None:
        """The run, if it is the only one, also of the planned ones."""
        return next(iter(self.runs.values())) if len(self.planned) == len(self.runs) == 1 else None

    @property
    def planned(self) -> list[str]:
        """The names of all runs, also of failed runs and runs that have not started."""
        return list(dict.fromkeys([*self.runs, *self.failed, *self.waiting]))

    @property
    def updates_protected(self) -> bool:
        """Whether (epsilon, delta) covers the model updates of some run, too."""
        return any(run.updates_protected for run in self.runs.values())

    @property
    def test_examples(self) -> int | None:
        """The number of test examples, the least of all runs; None if it is not known."""
        tests = [run.notes.get("test", {}).get("examples") for run in self.runs.values()]
        return min((size for size in tests if size), default=None)

    @cached_property
    def records(self) -> list[Row]:
        """One record per run, method and seed, in the order of the runs."""
        return [
            record
            for name, run in self.runs.items()
            for record in _records(name, run, self.settings.get(name, {}))
        ]

    @cached_property
    def rows(self) -> list[Row]:
        """One row per evaluated method and setting (:func:`group`), best last round first."""
        return [
            dict(row) for row in ranked(group(self.records)) if row["accuracy_mean"] is not None
        ]

    @cached_property
    def level(self) -> set[str]:
        """The keys of rows that are level with the best of their setting, without its own."""
        found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        for record in self.records:
            if record["accuracy"] is not None and not is_bound(record["method"]):
                key, setting = group_key(record), self.setting(record)
                found[setting][key][record["seed"]] = record["accuracy"]
        return {key for one in found.values() for key in level(one, self.test_examples)}

    @cached_property
    def short(self) -> dict[str, str]:
        """A symbol or the last word of each key, or the whole key if these are ambiguous."""
        ends = [SYMBOLS.get(key, key.rpartition(".")[2]) for key in self.keys]
        return {
            key: end if ends.count(end) == 1 else key
            for key, end in zip(self.keys, ends, strict=True)
        }

    @cached_property
    def values(self) -> dict[str, list[Any]]:
        """The values of each key: sorted numbers, then words in order of appearance."""
        return {key: _ordered(row[key] for row in self.rows) for key in self.keys}

    @cached_property
    def several_seeds(self) -> bool:
        """Whether there is a deviation over seeds."""
        return any(row["seeds_done"] > 1 for row in self.rows)

    @cached_property
    def ranks(self) -> dict[str, float]:
        """The mean rank of each method: :func:`mean_ranks`."""
        return mean_ranks(self.rows, self.setting)

    @cached_property
    def methods(self) -> list[str]:
        """Methods by their mean rank, otherwise by their best accuracy."""
        return sorted(
            dict.fromkeys(row["method"] for row in self.rows),
            key=lambda name: self.ranks.get(name, math.inf),
        )

    def setting(self, row: Mapping[str, Any]) -> str:
        """Return the values of the swept keys of a row, as "α = 0.1, C = 0.4"."""
        return ", ".join(f"{self.short[key]} = {setting_text(row[key])}" for key in self.keys)

    def settings_in_order(self) -> list[str]:
        """Return the different settings of the rows, in the order of the keys' values."""
        places = {
            key: {setting_text(value): place for place, value in enumerate(self.values[key])}
            for key in self.keys
        }
        found = {
            self.setting(row): tuple(places[key][setting_text(row[key])] for key in self.keys)
            for row in self.rows
        }
        return sorted(found, key=found.__getitem__)

    def find(self, method: str, setting: str) -> Row | None:
        """Return the row of a method at a setting."""
        return next(
            (row for row in self.rows if row["method"] == method and self.setting(row) == setting),
            None,
        )

    def curves(self) -> dict[str, dict[str, list[Point]]]:
        """Return the learning curve of each method at each setting, over the seeds of all runs
        that have it."""
        rounds: dict[str, list[Row]] = defaultdict(list)
        for name, run in self.runs.items():
            rounds[self.setting(self.settings.get(name, {}))].extend(run.metrics)
        found = {setting: curve_points(rounds[setting]) for setting in self.settings_in_order()}
        return {
            setting: {method: curves[method] for method in self.methods if method in curves}
            for setting, curves in found.items()
        }


def read_runs(directory: Path) -> Runs:
    """Read a run directory, a sweep, or any folder of run directories, finished or not.

    Raises ValueError naming the problem.
    """
    directory = Path(directory)
    present, sweep = _children(directory), directory / "sweep.json"
    if any((directory / name).is_file() for name in REQUIRED) or not (present or sweep.is_file()):
        run = read_run(directory)
        return Runs(run.name, {directory.resolve().name: run})
    if not sweep.is_file():
        runs = {child.name: read_run(child) for child in present}
        keys, settings = differences({name: run.config for name, run in runs.items()})
        return _compared(
            Runs(directory.resolve().name, runs, True, keys, settings=settings), planned=settings
        )
    plan, there = _read_plan(sweep), {child.name for child in present}
    given = {str(cell["name"]): cell["settings"] for cell in plan["cells"]}
    runs = {name: read_run(directory / name) for name in given if name in there}
    keys = tuple(key for key in map(str, plan["keys"]) if key not in NOT_SETTINGS)
    settings = {
        name: {key: given[name].get(key, _value(run.config, key)) for key in keys}
        for name, run in runs.items()
    }
    failed = {
        str(cell["name"]): str(cell["failed"]) for cell in plan["cells"] if cell.get("failed")
    }
    waiting = tuple(name for name in given if name not in there and name not in failed)
    found = Runs(
        str(plan["name"]), runs, True, keys, settings=settings, failed=failed, waiting=waiting
    )
    return _compared(found, planned=given | settings)


def _compared(found: Runs, *, planned: Mapping[str, Mapping[str, Any]]) -> Runs:
    """Move the keys that are tuned per method out of the settings; `planned` includes missing
    runs."""
    all_methods = list(
        dict.fromkeys(method for run in found.runs.values() for method in methods_of(run.config))
    )
    cells = [
        (method, values)
        for cell, values in planned.items()
        for method in (
            methods_of(found.runs[cell].config if cell in found.runs else values) or all_methods
        )
    ]
    tuned = tuned_keys(found.keys, cells)
    kept = tuple(key for key in found.keys if key not in tuned)
    settings = {cell: {key: values[key] for key in kept} for cell, values in found.settings.items()}
    return replace(found, keys=kept, tuned=tuned, settings=settings)


def read_records(directory: Path | str) -> list[dict[str, Any]]:
    """Return the records of a sweep, or of any folder of runs, finished or not.

    cell, method, seed, the swept keys with their values, complete, rounds_done, accuracy (last
    evaluated round), accuracy_max (over rounds), epsilon and delta (worst client of the run; None
    where nothing was released), bytes_up, bytes_down and seconds (a seed with its preparation, the
    seconds without shared h0 and features; mean over the run's seeds).
    """
    return read_runs(Path(directory)).records


def group(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each method and setting: mean and standard deviation over seeds (n - 1; 0
    for one seed).

    accuracy_mean, accuracy_std, accuracy_max_mean, accuracy_max_std, seeds_done; the largest
    epsilon, with its delta; means of bytes and seconds. `key` tells rows apart.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(group_key(record), []).append(record)
    return [{"key": key} | _row(members) for key, members in groups.items()]


def group_key(record: Mapping[str, Any]) -> str:
    """Return a key for the records of one method and setting."""
    return json.dumps(
        {"method": record["method"]} | settings_of(record), sort_keys=True, default=str
    )


def settings_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the swept keys of a record with their values."""
    return {key: value for key, value in record.items() if key not in FIELDS}


def differences(
    configs: Mapping[str, Mapping[str, Any]],
) -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    """Return the keys, except method and seeds, in which configurations differ, and their
    values."""
    flat = {name: flatten(config) for name, config in configs.items()}
    keys = dict.fromkeys(key for table in flat.values() for key in table)
    differing = tuple(
        key
        for key in keys
        if key not in NOT_SETTINGS
        and not key.startswith(NOT_SECTIONS)
        and len({json.dumps(table.get(key), default=str) for table in flat.values()}) > 1
    )
    return differing, {
        name: {key: table.get(key) for key in differing} for name, table in flat.items()
    }


def tuned_keys(
    keys: Sequence[str], cells: Sequence[tuple[str, Mapping[str, Any]]]
) -> dict[str, dict[str, list[Any]]]:
    """Return the keys that are tuned per method, rather than swept, with the values of each method.

    `cells` are methods with their settings. A key is tuned if some methods ignore it and have a
    single value, and if the other keys determine it for all others: such as mu of FedPROX, one per
    alpha.
    """
    tuned: dict[str, dict[str, list[Any]]] = {}
    for key in keys:
        idle: set[str] = set()
        values: dict[str, dict[str, Any]] = {}
        chosen: dict[tuple[str, str], set[str]] = {}
        for method, settings in cells:
            if key not in settings:
                continue
            text = json.dumps(settings[key], default=str)
            if method in METHODS and asks_of(method).ignores(key):
                idle.add(text)
                continue
            rest = [settings.get(other) for other in keys if other != key and other not in tuned]
            chosen.setdefault((method, json.dumps(rest, default=str)), set()).add(text)
            values.setdefault(method, {})[text] = settings[key]
        if len(idle) == 1 and all(len(texts) == 1 for texts in chosen.values()):
            tuned[key] = {method: list(own.values()) for method, own in values.items()}
    return tuned


def ranked(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return rows with the best last round first, those without accuracy last."""
    return sorted(rows, key=lambda row: -as_number(row["accuracy_mean"], missing=-1))


def results_table(
    rows: Sequence[Mapping[str, Any]],
    *,
    caption: str,
    names: Mapping[str, str] | None = None,
    without: str = "",
    best: bool = True,
    level: Collection[str] = (),
) -> Table:
    """Return accuracy and cost of rows of :func:`group`, or of a summary.

    `names` are the headers of the swept keys, `without` is that of a column to leave out; rows with
    a key in `level` are marked.
    """
    names = names or {}
    columns: dict[str, Callable[[Mapping[str, Any]], object]] = {
        "last round": lambda row: spread(row) + LEVEL * (row.get("key") in level),
        "best round": lambda row: spread(row, "accuracy_max"),
        "seeds": lambda row: row["seeds_done"],
        "(ε, δ)": lambda row: privacy_budget(row["epsilon"], row["delta"]),
        "MB up": lambda row: megabytes(row["bytes_up"]),
        "MB down": lambda row: megabytes(row["bytes_down"]),
        "seconds": lambda row: decimal(row["seconds"]),
    }
    columns.pop(without, None)
    headers = ("method", *names.values(), *columns)
    lines = [
        (
            row["method"],
            *(setting_text(row[key]) for key in names),
            *(write(row) for write in columns.values()),
        )
        for row in rows
    ]
    means = [
        -2.0 if is_bound(row["method"]) else as_number(row["accuracy_mean"], missing=-1)
        for row in rows
    ]
    bold = bold_row(means.index(max(means)), headers) if best and len(rows) > 1 else set()
    align = "l" * (1 + len(names)) + "r" * len(columns)
    return Table(headers, lines, align, caption, bold, keys=1 + len(names))


def is_bound(method: str) -> bool:
    """Return whether a method is a bound: training alone, or on pooled data."""
    return method in METHODS and asks_of(method).is_bound


def spread(row: Mapping[str, Any], measure: str = "accuracy") -> str:
    """Return mean ± standard deviation over seeds in percent, the mean alone for one seed."""
    return mean_and_deviation(
        row[f"{measure}_mean"], row[f"{measure}_std"] if row["seeds_done"] > 1 else None
    )


def mean_ranks(rows: Sequence[Row], setting: Callable[[Row], str]) -> dict[str, float]:
    """Return the mean rank of each method over the settings in which all methods were measured."""
    methods = {row["method"] for row in rows}
    by_setting: dict[str, dict[str, float]] = {}
    for row in rows:
        by_setting.setdefault(setting(row), {})[row["method"]] = row["accuracy_mean"]
    whole = [found for found in by_setting.values() if found.keys() == methods]
    if not whole:
        return {}

    def rank(found: Mapping[str, float], method: str) -> float:
        above = sum(value > found[method] for value in found.values())
        level = sum(value == found[method] for value in found.values())
        return above + (level + 1) / 2

    return {method: sum(rank(found, method) for found in whole) / len(whole) for method in methods}


def _ordered(values: Iterable[Any]) -> list[Any]:
    """Return unique values: sorted numbers, then words in order of appearance."""
    unique = list({setting_text(value): value for value in values}.values())
    numbers = [
        value for value in unique if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return [*sorted(numbers), *(value for value in unique if value not in numbers)]


def _children(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(
        child for child in directory.iterdir() if all((child / name).is_file() for name in REQUIRED)
    )


def _read_plan(file: Path) -> dict[str, Any]:
    try:
        plan: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(plan["keys"], list) or not all(
            isinstance(cell["settings"], dict) for cell in plan["cells"]
        ):
            raise TypeError("keys should be a list, the settings of each cell a table")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not describe a sweep: {error!r}") from error
    return plan


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key in a nested table, or None."""
    place: Any = config
    for part in key.split("."):
        try:
            place = place[int(part)] if isinstance(place, list) else place.get(part)
        except (AttributeError, IndexError, ValueError):
            return None
    return place


def _records(name: str, run: Run, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    summaries = {str(row["method"]): row for row in run.summary.get("rows", [])}
    rounds: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in run.metrics:
        rounds[str(row["method"]), int(row["seed"])].append(row)
    planned = int(run.config.get("rounds", 0))
    records = []
    for (method, seed), rows in rounds.items():
        rows.sort(key=lambda row: int(row["round"]))
        measured = [float(row["accuracy"]) for row in rows if row.get("accuracy") is not None]
        summary = summaries.get(method, {})
        epsilon = summary.get("epsilon")
        records.append(
            {"cell": name, "method": method, "seed": seed}
            | dict(settings)
            | {
                "complete": len(rows) >= planned,
                "rounds_done": len(rows),
                "accuracy": measured[-1] if measured else None,
                "accuracy_max": max(measured) if measured else None,
                "epsilon": None if epsilon is None else as_number(epsilon),
            }
            | {key: summary.get(key) for key in ("delta", "bytes_up", "bytes_down", "seconds")}
        )
    return records


def _row(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"method": members[0]["method"]} | settings_of(members[0])
    for measure in MEASURES:
        values = [member[measure] for member in members if member[measure] is not None]
        row[f"{measure}_mean"], row[f"{measure}_std"] = over_seeds(values)
    spent = [
        (member["epsilon"], member["delta"]) for member in members if member["epsilon"] is not None
    ]
    row["epsilon"], row["delta"] = max(spent, default=(None, None))
    for cost in ("bytes_up", "bytes_down", "seconds"):
        known = [member[cost] for member in members if member[cost] is not None]
        row[cost] = over_seeds(known)[0]
    row["seeds_done"] = sum(member["accuracy"] is not None for member in members)
    row["complete"] = all(member["complete"] for member in members)
    return row
