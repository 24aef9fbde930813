"""A folder of runs as one table: a record for every run, method and seed, and their means over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedaux.core.methods import METHODS
from fedaux.recipes import flatten
from fedaux.report.record import REQUIRED, Run, as_number, read_run

NOT_SETTINGS = ("name", "method", "seeds")
"""Keys in which runs may differ without being other settings: records say method and seed themselves."""
NOT_SECTIONS = ("output.", "engine.")
MEASURES = ("accuracy", "accuracy_max")


@dataclass(frozen=True)
class Folder:
    """Several runs side by side."""

    name: str
    keys: tuple[str, ...]
    """The keys in which they differ, besides method and seeds."""
    tuned: Mapping[str, Mapping[str, Sequence[Any]]]
    """Others in which they differ, and the values of each method: `tuned_keys`."""
    runs: Mapping[str, Run]
    """By the name of their directory; those that have not begun are missing."""
    settings: Mapping[str, Mapping[str, Any]]
    """What each run has for the keys."""
    failed: Mapping[str, str]
    """Why cells failed, by name."""
    waiting: tuple[str, ...]
    """Cells that have not begun."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """One record for every run, method and seed, in the order of the runs."""
        return [record for name, run in self.runs.items() for record in _records(name, run, self.settings[name])]

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Runs that have begun and are not complete."""
        return tuple(name for name, run in self.runs.items() if not run.complete)


def is_folder(directory: Path) -> bool:
    """Whether a directory is a sweep or holds run directories, rather than a run."""
    directory = Path(directory)
    if any((directory / name).is_file() for name in REQUIRED):
        return False
    return (directory / "sweep.json").is_file() or bool(_children(directory))


def read_folder(directory: Path) -> Folder:
    """Read a sweep, or any folder whose children are run directories. Raises ValueError naming what is wrong."""
    directory = Path(directory)
    plan = _read_plan(directory)
    present = _children(directory)
    if plan is None:
        if not present:
            raise ValueError(f"{directory} holds no run directories, and is none itself")
        runs = {child.name: read_run(child) for child in present}
        keys, settings = differences({name: run.config for name, run in runs.items()})
        return _folder(directory.resolve().name, keys, runs, settings, planned=settings, failed={}, waiting=())
    there = {child.name for child in present}
    names = [str(cell["name"]) for cell in plan["cells"]]
    runs = {name: read_run(directory / name) for name in names if name in there}
    keys = tuple(key for key in map(str, plan["keys"]) if key not in NOT_SETTINGS)
    given = {str(cell["name"]): cell["settings"] for cell in plan["cells"]}
    settings = {
        name: {key: given[name].get(key, _value(run.config, key)) for key in keys} for name, run in runs.items()
    }
    failed = {str(cell["name"]): str(cell["failed"]) for cell in plan["cells"] if cell.get("failed")}
    waiting = tuple(name for name in names if name not in there and name not in failed)
    return _folder(str(plan["name"]), keys, runs, settings, planned=given | settings, failed=failed, waiting=waiting)


def _folder(
    name: str,
    keys: tuple[str, ...],
    runs: Mapping[str, Run],
    settings: Mapping[str, Mapping[str, Any]],
    *,
    planned: Mapping[str, Mapping[str, Any]],
    failed: Mapping[str, str],
    waiting: tuple[str, ...],
) -> Folder:
    """Return the folder without the keys that are tuned for methods; `planned` has the cells without a run, too."""
    all_methods = list(dict.fromkeys(method for run in runs.values() for method in _methods(run.config)))
    cells = [
        (method, values)
        for cell, values in planned.items()
        for method in (_methods(runs[cell].config if cell in runs else values) or all_methods)
    ]
    tuned = tuned_keys(keys, cells)
    kept = tuple(key for key in keys if key not in tuned)
    settings = {cell: {key: values[key] for key in kept} for cell, values in settings.items()}
    return Folder(name, kept, tuned, runs, settings, failed, waiting)


def _methods(values: Mapping[str, Any]) -> list[str]:
    found = values.get("method", [])
    return [str(method) for method in found] if isinstance(found, list) else [str(found)]


def read_records(directory: Path | str) -> list[dict[str, Any]]:
    """Return the records of a sweep, or of any folder of runs, finished or not.

    cell, method, seed, the swept keys with their values, complete, rounds_done, accuracy (last evaluated round),
    accuracy_max (over rounds), epsilon and delta (worst client of the run; None where nothing was released), bytes_up,
    bytes_down and seconds (a seed with its preparation, mean over the run's seeds).
    """
    return read_folder(Path(directory)).records


def group(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each method and setting: mean and standard deviation over seeds (n - 1; 0 for one seed).

    accuracy_mean, accuracy_std, accuracy_max_mean, accuracy_max_std, seeds_done; the largest epsilon, with its
    delta; means of bytes and seconds. `key` tells rows apart.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(group_key(record), []).append(record)
    return [{"key": key} | _row(members) for key, members in groups.items()]


def group_key(record: Mapping[str, Any]) -> str:
    """Return what the records of one method and setting have in common, as text."""
    return json.dumps({"method": record["method"]} | settings_of(record), sort_keys=True, default=str)


def settings_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the swept keys of a record with their values."""
    return {key: value for key, value in record.items() if key not in FIELDS}


def differences(configs: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    """Return the keys in which configurations differ, and what each has for them; method and seeds aside."""
    flat = {name: flatten(config) for name, config in configs.items()}
    keys = dict.fromkeys(key for table in flat.values() for key in table)
    differing = tuple(
        key
        for key in keys
        if key not in NOT_SETTINGS
        and not key.startswith(NOT_SECTIONS)
        and len({json.dumps(table.get(key), default=str) for table in flat.values()}) > 1
    )
    return differing, {name: {key: table.get(key) for key in differing} for name, table in flat.items()}


def tuned_keys(keys: Sequence[str], cells: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, dict[str, list[Any]]]:
    """Return the keys that are tuned for methods, rather than swept over, and the values of each such method.

    `cells` are methods with what they have for the keys. A key is tuned where some methods do not look at it and never
    differ in it, and where for each of the others it follows from the other keys: as mu of FedPROX, one for each alpha.
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
            if method in METHODS and not METHODS[method].looks_at(key):
                idle.add(text)
                continue
            rest = [settings.get(other) for other in keys if other != key and other not in tuned]
            chosen.setdefault((method, json.dumps(rest, default=str)), set()).add(text)
            values.setdefault(method, {})[text] = settings[key]
        if len(idle) == 1 and all(len(texts) == 1 for texts in chosen.values()):
            tuned[key] = {method: list(own.values()) for method, own in values.items()}
    return tuned


FIELDS = (
    *("cell", "method", "seed", "complete", "rounds_done", *MEASURES, "epsilon", "delta"),
    *("bytes_up", "bytes_down", "seconds", "key", "seeds_done"),
    *(f"{measure}_{what}" for measure in MEASURES for what in ("mean", "std")),
)
"""What a record or a row holds besides the swept keys."""


def _children(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(child for child in directory.iterdir() if all((child / name).is_file() for name in REQUIRED))


def _read_plan(directory: Path) -> dict[str, Any] | None:
    file = directory / "sweep.json"
    if not file.is_file():
        return None
    try:
        plan: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(plan["keys"], list) or not all(isinstance(cell["settings"], dict) for cell in plan["cells"]):
            raise TypeError("keys should be a list, the settings of each cell a table")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not describe a sweep: {error!r}") from error
    return plan


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Return what a nested table holds under a dotted key, None where it holds nothing."""
    place: Any = config
    for part in key.split("."):
        try:
            place = place[int(part)] if isinstance(place, list) else place.get(part)
        except (AttributeError, IndexError, ValueError):
            return None
    return place


def _records(name: str, run: Run, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    summaries = {str(row["method"]): row for row in run.summary.get("rows", [])}
    rounds: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in run.metrics:
        rounds.setdefault((str(row["method"]), int(row["seed"])), []).append(row)
    planned = int(run.config.get("rounds", 0))
    records = []
    for (method, seed), rows in rounds.items():
        measured = [
            float(row["accuracy"])
            for row in sorted(rows, key=lambda row: int(row["round"]))
            if row.get("accuracy") is not None
        ]
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
                "delta": summary.get("delta"),
                "bytes_up": summary.get("bytes_up"),
                "bytes_down": summary.get("bytes_down"),
                "seconds": summary.get("seconds"),
            }
        )
    return records


def _row(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"method": members[0]["method"]} | settings_of(members[0])
    for measure in MEASURES:
        values = [member[measure] for member in members if member[measure] is not None]
        row[f"{measure}_mean"] = statistics.fmean(values) if values else None
        row[f"{measure}_std"] = (statistics.stdev(values) if len(values) > 1 else 0.0) if values else None
    spent = [(member["epsilon"], member["delta"]) for member in members if member["epsilon"] is not None]
    row["epsilon"], row["delta"] = max(spent, default=(None, None))
    for cost in ("bytes_up", "bytes_down", "seconds"):
        known = [member[cost] for member in members if member[cost] is not None]
        row[cost] = statistics.fmean(known) if known else None
    row["seeds_done"] = sum(member["accuracy"] is not None for member in members)
    row["complete"] = all(member["complete"] for member in members)
    return row
