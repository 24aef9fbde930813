"""The runs of a study, their data, and their results beside the paper's figures."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedaux.config import ConfigError, Local
from fedaux.recipes import find_recipe, keys_of, read_recipe
from fedaux.report.run import curve_points, read_run
from fedaux.sweep import Cell, Outcome, cells_of, read_records, sweep
from reproduce import datasets, embedded, published
from reproduce.document import Context, spread
from reproduce.study import Grid, Study, Value, chosen_methods, narrowed, relevant

CENTRAL = "centralised"
"""The name of centralised training among the methods: FedAVG from h0 with one client that holds
all data."""
ALONE = {"split.num_clients": 1, "split.alpha": 100.0, "participation_rate": 1.0}
TUNED = (
    "μ of FedPROX is the paper's for the nearer of α = 0.01 and 100 "
    "(`--set local.proximal=MU` for another)"
)


@dataclass(frozen=True)
class Request:
    """The options of the command line."""

    out: Path
    quick: bool = False
    data_root: Path | None = None
    seeds: int | None = None
    auxiliary: str | None = None
    """The data set that replaces STL-10."""
    only: Sequence[str] = ()
    also: Sequence[str] = ()
    overrides: Sequence[str] = ()
    sweeping: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `fedaux.sweep.sweep`: devices, jobs, time limit, callback."""

    @property
    def cells(self) -> Path:
        """The folder of the runs."""
        return self.out / "cells"


@dataclass(frozen=True)
class Place:
    """The place of a run in a study's tables."""

    block: str
    column: str
    method: str
    settings: Mapping[str, Any]
    """The settings that differ from the recipe and that the method reads."""


@dataclass(frozen=True)
class Plan:
    """The runs of a study, and the place of each."""

    cells: list[Cell]
    places: dict[str, Place]
    notes: tuple[str, ...]
    grid: Grid
    methods: tuple[str, ...]
    comparable: bool = True
    """Whether the paper's figures are of the same mode: whole networks, or heads alone."""


def plan(study: Study, request: Request) -> Plan:
    """Return the requested runs. Raises ValueError for missing data and mistakes, before
    anything runs."""
    check_available(study)
    grid, only = narrowed(study.quick if request.quick else study.grid, request.only)
    raw = read_base(grid.path(), ["output.models=false", *request.overrides])
    data, notes = find_data(grid, request, raw)
    methods = chosen_methods(raw["method"], only, request.also)
    _refuse_axes(grid, request.overrides)
    refuse_data(
        {key for settings in data.values() for key in settings},
        request.overrides,
        sized=not request.quick,
    )
    _refuse_same_columns(grid, data)
    seeds = raw.get("seeds", [0]) if request.seeds is None else list(range(request.seeds))
    if not seeds:
        raise ValueError(f"--seeds {request.seeds}: should be at least 1")
    points: dict[str, dict[str, Any]] = {}
    places: dict[str, Place] = {}
    seen: dict[str, str] = {}
    mus: dict[tuple[str, float], set[float]] = {}
    listed = [
        (block, column, method, column.changes)
        for block, column in grid.points()
        for method in methods
    ]
    if study.central and only is None:
        last = grid.columns.values[-1]
        listed += [(block, last, CENTRAL, ALONE) for block in grid.blocks.values if block.central]
    for block, column, method, changes in listed:
        trained = "fedavg+p" if method == CENTRAL else method
        settings = relevant(trained, {**block.changes, **changes})
        tuned = {} if "proximal" in raw.get("local", {}) else _tuned(method, settings)
        settings |= tuned
        for mu in tuned.values():
            mus.setdefault((method, mu), set()).add(settings["split.alpha"])
        for seed in seeds:
            point = (
                {"method": [trained], "seeds": [seed]}
                | settings
                | data[grid.data_of(block, column)]
            )
            name = _name(grid, block, column, method, seed, tuned)
            # Settings that a method ignores do not make a new run: FedAVG has no distillation.
            if seen.setdefault(json.dumps(point, sort_keys=True), name) == name:
                points[name] = point
                places[name] = Place(
                    block.label, "" if method == CENTRAL else column.label, method, settings
                )
    if mus:
        stated = [
            f"{name} {mu:g} at α = {', '.join(f'{a:g}' for a in sorted(at))}"
            for (name, mu), at in mus.items()
        ]
        notes.append(f"{TUNED}: {'; '.join(stated)}")
    values = list(points.values())
    varied = {
        key
        for point in values
        for key in point
        if any(other.get(key) != point[key] for other in values)
    }
    cells = [
        replace(
            cell,
            name=name,
            settings={
                key: cell.settings[key] for key in point if key in varied | {"method", "seeds"}
            },
        )
        for cell, (name, point) in zip(
            cells_of(without_paths(raw), values), points.items(), strict=True
        )
    ]
    printed_mode, mode = (table.get("mode", "full") for table in (read_base(grid.path(), ()), raw))
    if mode != printed_mode:
        notes.append(
            f"the paper's figures are of mode = {printed_mode!r}, so they are not shown beside "
            "these"
        )
    return Plan(cells, places, tuple(notes), grid, tuple(methods), comparable=mode == printed_mode)


def check_available(study: Study) -> None:
    """Raise ValueError if a study needs a recipe that this version of the package does not have."""
    if study.needs_recipe is not None:
        try:
            find_recipe(study.needs_recipe)
        except ValueError:
            raise ValueError(
                f"{study.name}: not available, because this version of fedaux cannot read texts "
                f"(it has no recipe {study.needs_recipe})"
            ) from None


def read_base(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Read the recipe that all runs share, with --set applied."""
    raw, problems = read_recipe(path, overrides=overrides)
    if problems:
        raise ConfigError(problems, origin=str(path))
    return raw


def without_paths(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe without the paths of its data."""
    sections = {
        name: {key: value for key, value in raw[name].items() if key != "path"}
        for name in ("data", "auxiliary")
        if name in raw
    }
    return {**raw, **sections}


def find_data(
    grid: Grid, request: Request, raw: Mapping[str, Any]
) -> tuple[dict[tuple[str, str], dict[str, Any]], list[str]]:
    """Return the settings that read each pair of data sets of a grid, and which sets replace
    others."""
    pairs = list(dict.fromkeys(grid.data_of(block, column) for block, column in grid.points()))
    texts = any(
        datasets.DATA_SETS[name].text
        for pair in pairs
        for name in pair
        if name in datasets.DATA_SETS
    )
    if request.quick and not texts:
        if request.data_root is not None:
            raise ValueError(f"--data-root {request.data_root}: --quick has embedded data")
        if request.auxiliary is not None:
            raise ValueError(f"--aux {request.auxiliary}: quick versions have other public data")
        folder = request.out / "data"
        return {
            (data, public): embedded.settings(data, "data", folder)
            | embedded.settings(public, "auxiliary", folder)
            for data, public in pairs
        }, []
    names = [name for pair in pairs for name in pair]
    if request.auxiliary is not None and "stl10" not in names:
        raise ValueError(f"--aux {request.auxiliary}: it replaces STL-10, which nothing here reads")
    try:
        found, notes = locate_all(names, request)
    except datasets.Missing as error:
        raise ValueError(f"{error}{_what_is_left(grid, request)}") from None
    return {
        pair: found[pair[0]].settings("data") | public_settings(found[pair[1]], raw)
        for pair in pairs
    }, notes


def public_settings(found: datasets.Found, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that read public data; generated data have the recipe's size, if it
    states one."""
    settings = found.settings("auxiliary")
    size = (raw.get("auxiliary") or {}).get("size")
    return (
        settings
        if size is None or "auxiliary.size" not in settings
        else settings | {"auxiliary.size": size}
    )


def locate_all(
    names: Sequence[str], request: Request, *, replaced: str = "stl10"
) -> tuple[dict[str, datasets.Found], list[str]]:
    """Find data sets below --data-root, with --aux in place of one of them; return them and which
    replace others."""
    replacement = request.auxiliary or replaced
    if replacement not in datasets.DATA_SETS:
        raise ValueError(f"--aux {replacement}: should be one of {', '.join(datasets.DATA_SETS)}")
    wanted = {name: replacement if name == replaced else name for name in names}
    located = datasets.locate(request.data_root, wanted.values())
    found = {name: located[other] for name, other in wanted.items()}
    return found, datasets.replacements(found)


def _what_is_left(grid: Grid, request: Request) -> str:
    """Return the columns, or else the blocks, whose data are available."""
    for axis in (grid.columns, grid.blocks):
        there = []
        for value in axis.values:
            one = replace(axis, values=(value,))
            part = replace(grid, columns=one) if axis is grid.columns else replace(grid, blocks=one)
            try:
                locate_all(part.data_sets(), request)
                there.append(value.key)
            except datasets.Missing:
                continue
        if there:
            return f"\nThe available data suffice for --only '{axis.name}=[{','.join(there)}]'"
    return ""


def refuse_data(located: Collection[str], overrides: Sequence[str], *, sized: bool = True) -> None:
    """Raise ValueError if --set names a setting that reads the located data; `sized`: generated
    data may have another size (`public_settings`)."""
    refused = {f"{name}.{key}" for name in ("data", "auxiliary") for key in ("source", "path")}
    refused |= set(located) - ({"auxiliary.size"} if sized else set())
    for override in overrides:
        if keys_of(override) & refused:
            raise ValueError(
                f"--set {override}: --data-root, or --quick, chooses the data; --aux NAME takes "
                "other public data below --data-root"
            )


def _refuse_axes(grid: Grid, overrides: Sequence[str]) -> None:
    """Raise ValueError if --set would change what the study varies."""
    varied = {
        key: axis.name for axis in grid.axes() for value in axis.values for key in value.changes
    }
    for override in overrides:
        for key in keys_of(override):
            if key in varied:
                raise ValueError(
                    f"--set {override}: the study varies {key}; choose values with --only "
                    f"{varied[key]}=..."
                )
            if key in ("method", "seeds"):
                option = "--only method=... or --also ..." if key == "method" else "--seeds N"
                raise ValueError(f"--set {override}: should be {option}")


def _refuse_same_columns(grid: Grid, data: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    """Raise ValueError if two columns would be the same runs, as when --aux names what another
    column reads."""
    block = grid.blocks.values[0]
    seen: dict[str, str] = {}
    for column in grid.columns.values:
        settings = json.dumps(
            {**column.changes, **data[grid.data_of(block, column)]}, sort_keys=True
        )
        if (first := seen.setdefault(settings, column.key)) != column.key:
            raise ValueError(
                f"--only {grid.columns.name}=...: {first} and {column.key} read the same data; "
                "choose one of them"
            )


def _tuned(method: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the setting that the paper tunes for each method and alpha, unless the study varies
    it."""
    if "local.proximal" in settings or "split.alpha" not in settings:
        return {}
    mu = published.tuned_proximal(method, settings["split.alpha"])
    return {} if mu is None else {"local.proximal": mu}


def _name(
    grid: Grid, block: Value, column: Value, method: str, seed: int, tuned: Mapping[str, float]
) -> str:
    """Return the name of a run's folder, with mu if it is not the default."""
    parts = [] if grid.blocks.name == "table" else [f"{grid.blocks.name}={block.key}"]
    if method != CENTRAL:
        read = relevant(method, column.changes)
        whole = read == dict(column.changes)
        parts += (
            [f"{grid.columns.name}={column.key}"]
            if whole
            else [f"{key}={value:g}" for key, value in read.items()]
        )
    mu = [f"mu={mu:g}" for mu in tuned.values() if mu != Local().proximal]
    return ",".join([*parts, f"method={method}", *mu, f"seed={seed}"])


def without_result(outcome: Outcome) -> list[str]:
    """Return a line for each run that failed or was not started."""
    failed = [f"{cell}: {reason}" for cell, reason in outcome.failed.items()]
    return failed + [f"{cell}: not started" for cell in outcome.waiting]


def complete_records(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the records of the complete runs in a folder, by name."""
    return {record["cell"]: record for record in read_records(folder) if record["complete"]}


def run_points(
    context: Context, points: Mapping[str, Mapping[str, Any]], *, name: str
) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """Run the experiment with the changes of each named point, if that run is not finished yet.

    Returns the records of all complete runs under OUT/cells by name, and a line for each run
    without a result.
    """
    table = context.experiment.to_dict() | {"output": {"models": False}}  # nobody reads them
    cells = cells_of(table, points.values())
    named = [replace(cell, name=own) for cell, own in zip(cells, points, strict=True)]
    folder = context.out / "cells"
    outcome = sweep(named, folder, name=name, resume=True, **context.sweeping)
    return complete_records(folder), without_result(outcome)


def measure(study: Study, prepared: Plan, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each method in each place: published and measured, best and last round,
    in %."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for name, place in prepared.places.items():
        key = place.block, place.column, place.method, json.dumps(place.settings, sort_keys=True)
        groups.setdefault(key, []).append(name)
    records = complete_records(folder)
    rows = []
    for (block, column, method, settings), names in groups.items():
        printed = (
            published.printed(study.name, block, column, method) if prepared.comparable else None
        )
        finished = [name for name in names if name in records]
        row: dict[str, Any] = {
            "block": block,
            "column": column,
            "method": method,
            "settings": json.loads(settings),
            "published": None
            if printed is None
            else {"text": printed.spaced, "mean": printed.mean},
            "runs": len(names),
            "finished": len(finished),
            "best": spread(100 * records[name]["accuracy_max"] for name in finished),
            "last": spread(100 * records[name]["accuracy"] for name in finished),
        }
        if study.figure == "curves":
            row["curve"] = _curve(folder / name for name in finished)
        rows.append(row)
    return rows


def _curve(runs: Iterable[Path]) -> list[list[float]]:
    """Return [round, mean, least, largest accuracy in %] over the seeds of a method."""
    curves = curve_points(line for run in runs for line in read_run(run).metrics)
    return [
        [point.round, 100 * point.mean, 100 * point.low, 100 * point.high]
        for points in curves.values()
        for point in points
    ]
