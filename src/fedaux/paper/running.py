"""From a study to its runs and back: the cells of its grid, and what they measured beside what the paper prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedaux.config import ConfigError, Local
from fedaux.paper import embedded, places, published
from fedaux.paper.study import Choice, Grid, Study, Value, chosen_methods, concerning, narrowed
from fedaux.paper.writing import spread
from fedaux.recipes import find_recipe, merged, read_recipe
from fedaux.report.run import curve_points, read_run
from fedaux.sweep import Cell, cells_of, read_records, sweep
from fedaux.sweep import Outcome as SweepOutcome

CENTRAL = "centralised"
"""What training in one place is called among the methods; it is FedAVG from h0 with one client that holds all."""
TUNED = "μ of FedPROX is the paper's for the nearer of α = 0.01 and 100 (`--set local.proximal=MU` for another)"


@dataclass(frozen=True)
class Request:
    """What was asked of an experiment on the command line."""

    out: Path
    quick: bool = False
    data_root: Path | None = None
    seeds: int | None = None
    auxiliary: str | None = None
    """The data set that takes STL-10's place."""
    only: Sequence[str] = ()
    also: Sequence[str] = ()
    overrides: Sequence[str] = ()
    sweeping: Mapping[str, Any] | None = None
    """Further arguments of `fedaux.sweep.sweep`: devices, jobs, cluster, time limit, watcher."""

    @property
    def cells(self) -> Path:
        """The folder of the runs."""
        return self.out / "cells"


@dataclass(frozen=True)
class Place:
    """Where in a study's tables a run belongs."""

    block: str
    column: str
    method: str
    settings: Mapping[str, Any]
    """The settings in which it differs from its recipe, as far as the method looks at them."""


@dataclass(frozen=True)
class Plan:
    """The runs of a study, where each belongs, and what is to be said about them."""

    cells: list[Cell]
    places: dict[str, Place]
    notes: tuple[str, ...]
    grid: Grid
    methods: tuple[str, ...]
    comparable: bool = True
    """Whether the paper's figures are about the same: heads alone are another experiment than whole networks."""


def plan(study: Study, request: Request) -> Plan:
    """Return the runs that were asked for. Raises ValueError for missing data and mistakes, before anything runs."""
    check_available(study)
    choice = narrowed(study.quick if request.quick else study.grid, request.only)
    grid = choice.grid
    raw = read_base(grid.path(), request.overrides)
    data, notes = find_data(grid, request, raw)
    methods = chosen_methods(raw["method"], choice, request.also)
    refuse_axes(grid, request.overrides)
    refuse_twins(grid, data)
    seeds = raw.get("seeds", [0]) if request.seeds is None else list(range(request.seeds))
    if not seeds:
        raise ValueError(f"--seeds {request.seeds}: should be at least 1")
    listed: dict[str, dict[str, Any]] = {}
    where: dict[str, Place] = {}
    seen: dict[str, str] = {}
    stated = "proximal" in raw.get("local", {})  # with --set
    mus: dict[tuple[str, float], list[float]] = {}
    for block, column, method, changes in _points(study, choice, methods):
        settings = concerning("fedavg+p" if method == CENTRAL else method, changes)
        tuned = {} if stated else _tuned(method, settings)
        settings |= tuned
        for mu in tuned.values():
            mus.setdefault((method, mu), []).append(settings["split.alpha"])
        chosen = settings | data[grid.data_of(block, column)]
        for seed in seeds:
            point = {"method": ["fedavg+p" if method == CENTRAL else method], "seeds": [seed]} | chosen
            name = _name(grid, block, column, method, seed, tuned)
            # Settings that a method does not look at make no new run: FedAVG has no distillation to tune.
            if seen.setdefault(json.dumps(point, sort_keys=True), name) == name:
                listed[name] = point
                where[name] = Place(block.label, "" if method == CENTRAL else column.label, method, settings)
    if mus:
        said = [f"{method} {mu:g} at α = {_listed(alphas)}" for (method, mu), alphas in mus.items()]
        notes.append(f"{TUNED}: {'; '.join(said)}")
    raw, points = _without_constants(without_places(raw), list(listed.values()))
    cells = [replace(cell, name=name) for cell, name in zip(cells_of(raw, points), listed, strict=True)]
    printed_mode, mode = (table.get("mode", "full") for table in (read_base(grid.path(), ()), raw))
    if mode != printed_mode:
        notes = [*notes, f"the paper's figures are of mode = {printed_mode!r}, so they are not shown beside these"]
    return Plan(cells, where, tuple(notes), grid, tuple(methods), comparable=mode == printed_mode)


def check_available(study: Study) -> None:
    """Raise ValueError where a study needs a recipe that this version of the package does not have."""
    if study.needs_recipe is not None:
        try:
            find_recipe(study.needs_recipe)
        except ValueError:
            raise ValueError(
                f"{study.name}: not available, because this version of fedaux cannot read texts (it has no recipe "
                f"{study.needs_recipe})"
            ) from None


def read_base(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Read the recipe that all runs share, with --set applied."""
    raw, problems = read_recipe(path, overrides=overrides)
    if problems:
        raise ConfigError(problems, origin=str(path))
    return raw


def refuse_axes(grid: Grid, overrides: Sequence[str]) -> None:
    """Raise ValueError where --set would change what the study varies."""
    varied = {key: axis.name for axis in grid.axes() for value in axis.values for key in value.changes}
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in varied:
            raise ValueError(f"--set {override}: the study varies {key}; choose values with --only {varied[key]}=...")
        if key in ("method", "seeds"):
            option = "--only method=... or --also ..." if key == "method" else "--seeds N"
            raise ValueError(f"--set {override}: should be {option}")


def refuse_twins(grid: Grid, data: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    """Raise ValueError where two columns would be the same runs, as when --aux names what another column reads."""
    block = grid.blocks.values[0]
    seen: dict[str, str] = {}
    for column in grid.columns.values:
        settings = json.dumps({**column.changes, **data[grid.data_of(block, column)]}, sort_keys=True)
        if (first := seen.setdefault(settings, column.key)) != column.key:
            raise ValueError(
                f"--only {grid.columns.name}=...: {first} and {column.key} read the same data; should be one of them"
            )


def find_data(
    grid: Grid, request: Request, raw: Mapping[str, Any]
) -> tuple[dict[tuple[str, str], dict[str, Any]], list[str]]:
    """Return the settings that read each pair of data sets of a grid, and what stands in for what."""
    pairs = list(dict.fromkeys(grid.data_of(block, column) for block, column in grid.points()))
    texts = any(places.DATA_SETS[name].text for pair in pairs for name in pair if name in places.DATA_SETS)
    if request.quick and not texts:
        folder = request.out / "data"
        if request.auxiliary is not None:
            raise ValueError(f"--aux {request.auxiliary}: quick versions have public data of their own")
        return {
            pair: embedded.settings(pair[0], "data", folder) | embedded.settings(pair[1], "auxiliary", folder)
            for pair in pairs
        }, []
    try:
        found, notes = locate_all([name for pair in pairs for name in pair], request)
    except places.Missing as error:
        raise ValueError(f"{error}{_what_is_left(grid, request)}") from None
    return {pair: found[pair[0]].settings("data") | public_settings(found[pair[1]], raw) for pair in pairs}, notes


def public_settings(found: places.Found, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that read public data; what is made has the size that the recipe or --set gives it."""
    settings = found.settings("auxiliary")
    size = (raw.get("auxiliary") or {}).get("size")
    return settings if size is None or "auxiliary.size" not in settings else settings | {"auxiliary.size": size}


def without_places(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe without the paths of its own data; what is found, or made, takes their place."""
    sections = {key: dict(raw[key]) for key in ("data", "auxiliary") if key in raw}
    for section in sections.values():
        section.pop("path", None)
    return {**raw, **sections}


def _what_is_left(grid: Grid, request: Request) -> str:
    """Say which columns, or else which blocks, could be run, where some could."""
    for axis, other in ((grid.columns, grid.blocks), (grid.blocks, grid.columns)):
        there = []
        for value in axis.values:
            pairs = [(one, value) if axis is grid.columns else (value, one) for one in other.values]
            try:
                locate_all([name for pair in pairs for name in grid.data_of(*pair)], request)
                there.append(value.key)
            except places.Missing:
                continue
        if there:
            return f"\nWhat is there is enough for --only '{axis.name}=[{','.join(there)}]'"
    return ""


def locate_all(names: Sequence[str], request: Request) -> tuple[dict[str, places.Found], list[str]]:
    """Find data sets below --data-root, with --aux in STL-10's place; say what stands in for what."""
    taken = request.auxiliary or "stl10"
    if taken not in places.DATA_SETS:
        raise ValueError(f"--aux {taken}: should be one of {', '.join(places.DATA_SETS)}")
    wanted = {name: taken if name == "stl10" else name for name in names}
    located = places.locate(request.data_root, wanted.values())
    found = {name: located[other] for name, other in wanted.items()}
    return found, places.exchanged(found)


def carry_out(prepared: Plan, request: Request, *, name: str) -> list[str]:
    """Run what is not finished yet; return a line for each run that failed or was not started."""
    return without_result(sweep(prepared.cells, request.cells, name=name, resume=True, **(request.sweeping or {})))


def without_result(outcome: SweepOutcome) -> list[str]:
    """Return a line for each run that failed or was not started."""
    failed = [f"{cell}: {reason}" for cell, reason in outcome.failed.items()]
    return failed + [f"{cell}: not started" for cell in outcome.waiting]


def measure(study: Study, prepared: Plan, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each method in each place of the tables: printed and measured, best and last round, in %."""
    groups: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = {}
    for cell in prepared.cells:
        place = prepared.places[cell.name]
        key = place.block, place.column, place.method, json.dumps(place.settings, sort_keys=True)
        groups.setdefault(key, []).append({"cell": cell.name})
    there = {
        record["cell"]: record
        for record in read_records(folder)
        if record["complete"] and record["cell"] in prepared.places
    }
    rows = []
    for (block, column, method, settings), cells in groups.items():
        printed = published.printed(study.name, block, column, method) if prepared.comparable else None
        names = [cell["cell"] for cell in cells if cell["cell"] in there]
        row: dict[str, Any] = {
            "block": block,
            "column": column,
            "method": method,
            "settings": json.loads(settings),
            "published": None if printed is None else {"text": printed.spaced, "mean": printed.mean},
            "runs": len(cells),
            "finished": len(names),
            "best": spread(100 * there[name]["accuracy_max"] for name in names),
            "last": spread(100 * there[name]["accuracy"] for name in names),
        }
        if study.figure == "curves":
            rounds = [line for name in names for line in read_run(folder / name).metrics]
            curves = curve_points(rounds)
            row["curve"] = [
                [point.round, 100 * point.mean, 100 * point.low, 100 * point.high]
                for points in curves.values()
                for point in points
            ]
        rows.append(row)
    return rows


def _points(study: Study, choice: Choice, methods: Sequence[str]) -> Iterable[tuple[Value, Value, str, dict[str, Any]]]:
    """Yield block, column, method and settings of every place, centralised training last."""
    for block, column in choice.grid.points():
        for method in methods:
            yield block, column, method, {**block.changes, **column.changes}
    if study.central and choice.methods is None:
        alone = {"split.num_clients": 1, "split.alpha": 100.0, "participation_rate": 1.0}
        for block in choice.grid.blocks.values:
            if block.central:
                yield block, choice.grid.columns.values[-1], CENTRAL, {**block.changes, **alone}


def _tuned(method: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the setting that the paper tunes for every method and alpha, unless the study varies it."""
    if "local.proximal" in settings or "split.alpha" not in settings:
        return {}
    mu = published.tuned_proximal(method, settings["split.alpha"])
    return {} if mu is None else {"local.proximal": mu}


def _listed(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:g}" for number in sorted(set(numbers)))


def _name(grid: Grid, block: Value, column: Value, method: str, seed: int, tuned: Mapping[str, float]) -> str:
    """Return the name of a run's folder: it depends on nothing else that is run.

    A mu other than the default is part of it, so that folders with runs at the default can be gone on with.
    """
    parts = [] if grid.blocks.name == "table" else [f"{grid.blocks.name}={block.key}"]
    if method != CENTRAL:
        looked_at = concerning(method, column.changes)
        every = looked_at == dict(column.changes)
        parts += [f"{grid.columns.name}={column.key}"] if every else [f"{k}={v:g}" for k, v in looked_at.items()]
    mu = [f"mu={mu:g}" for mu in tuned.values() if mu != Local().proximal]
    return ",".join([*parts, f"method={method}", *mu, f"seed={seed}"])


def _without_constants(
    raw: Mapping[str, Any], points: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Move settings that all points share into the recipe."""
    shared = {
        key: value
        for key, value in points[0].items()
        if "." in key and all(key in point and point[key] == value for point in points)
    }
    base = merged(raw, nested(shared))
    return base, [{key: value for key, value in point.items() if key not in shared} for point in points]


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"split": {"alpha": 0.01}} of {"split.alpha": 0.01}."""
    tables: dict[str, Any] = {}
    for key, value in settings.items():
        table: Any = value
        for part in reversed(key.split(".")):
            table = {part: table}
        tables = merged(tables, table)
    return tables
