"""`fedaux reproduce`: which experiment is meant, on which data, and the list of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from fedaux.config import Experiment
from fedaux.config_errors import nearest
from fedaux.paper import EXPERIMENTS, Outcome, Reproduction, places
from fedaux.paper.presenting import part, run_study
from fedaux.paper.running import (
    Request,
    check_available,
    locate_all,
    nested,
    plan,
    public_settings,
    read_base,
    without_places,
)
from fedaux.paper.studies import STUDIES
from fedaux.paper.study import RECIPES, quick_base
from fedaux.recipes import find_recipe, load_experiment, merged, parse_value
from fedaux.running.run import out_of_memory

AXES = ("blocks", "columns")
SHARED_RUNS = {"curves": "architectures"}
"""Studies whose runs are those of another, and lie in its folder."""
HIDDEN = {"out", "base", "version", "notes", "on_line", "sweeping"}
"""Arguments of experiments that are not options of theirs."""


def default_folder(name: str, *, quick: bool) -> Path:
    """Return where an experiment goes when no folder is given."""
    return Path("runs") / (SHARED_RUNS.get(name, name) + ("-quick" if quick else ""))


def listing() -> Iterator[tuple[str, str, str, str]]:
    """Yield name, what it shows, data and time of the quick version, for every experiment."""
    for name, study in STUDIES.items():
        try:
            check_available(study)
            missing = ""
        except ValueError:
            missing = "; not in this version"
        data = ", ".join(places.DATA_SETS[key].title for key in study.grid.data_sets())
        grid = study.grid
        labels = {
            axis: [value.label for value in values.values] for axis, values in zip(AXES, grid.axes(), strict=True)
        }
        shows = f"{study.shows} ({part({'methods': read_base(grid.path(), ())['method'], **labels})})"
        yield name, shows + missing, data, study.quick_time
    for name, entry in EXPERIMENTS.items():
        data = ", ".join(places.DATA_SETS[key].title for key in entry.data) or "comes with the package"
        yield name, entry.shows, data, entry.time


def part_line(name: str, request: Request) -> str:
    """Return how many runs and rounds a request for a study comes to, on the data that is there."""
    if name not in STUDIES:
        raise ValueError(f"--list {name}: not a table of runs; without a name, --list names all experiments")
    prepared = plan(STUDIES[name], request)
    rounds = sum(cell.rounds for cell in prepared.cells)
    return f"{name}: {len(prepared.cells)} runs, {rounds:,} rounds"


def listing_table() -> list[Any]:
    """Return the list for a terminal."""
    from rich.table import Table

    table = Table()
    for column in ("name", "shows", "data", "--quick, 2 cores"):
        table.add_column(column, no_wrap=column == "name")
    for row in listing():
        table.add_row(*row)
    return [table, "Times of quick versions were measured."]


def reproduce(name: str, request: Request, *, recipe: str | None = None, options: Sequence[str] = ()) -> Outcome:
    """Run an experiment by name. Raises ValueError for what cannot be run, before anything is."""
    names = [*STUDIES, *EXPERIMENTS]
    if name not in names:
        raise ValueError(f"{name}: no such experiment{nearest(name, names) or '; see fedaux reproduce --list'}")
    if name in STUDIES:
        if recipe is not None or options:
            raise ValueError(f"--recipe and --with: {name} has its own recipe; --set, --only and --also change it")
        return run_study(STUDIES[name], request)
    if request.only or request.also:
        raise ValueError(f"--only and --also: {name} is not a table of runs")
    entry = EXPERIMENTS[name]
    runs_cells = "sweeping" in signature(entry.run).parameters
    if (cluster := (request.sweeping or {}).get("cluster")) is not None and not runs_cells:
        raise ValueError(f"--cluster {cluster}: {name} is one run on this machine")
    arguments = read_options(name, entry, options)
    base, notes = base_of(name, entry, request, recipe)
    if base is not None:
        version = "own" if recipe else "quick" if request.quick or request.data_root is None else "paper"
        changed = [f"changed: `{override}`" for override in request.overrides]
        arguments |= {"base": base, "version": version, "notes": [*notes, *changed]}
        if version == "paper":
            arguments = dict(entry.options) | arguments
    if runs_cells:
        arguments["sweeping"] = request.sweeping
    try:
        return entry.run(request.out, **arguments)
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(out_of_memory(base or quick_base(name), name)) from error


def read_options(name: str, entry: Reproduction, options: Sequence[str]) -> dict[str, Any]:
    """Read --with KEY=VALUE as options of an experiment's `run`."""
    known = {key: p.default for key, p in signature(entry.run).parameters.items() if key not in HIDDEN}
    arguments: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if key not in known:
            raise ValueError(f"--with {key}: {name} has no such option; it has {', '.join(known) or 'none'}")
        value, default = parse_value(text), known[key]
        kind = (int, float) if isinstance(default, int | float) else list if isinstance(default, tuple) else object
        if not equals or not isinstance(value, kind):
            raise ValueError(f"--with {option}: should be a value like that of --with {key}={default}")
        arguments[key] = value
    return arguments


def base_of(
    name: str, entry: Reproduction, request: Request, recipe: str | None
) -> tuple[Experiment | None, list[str]]:
    """Return what an experiment is based on, and which data stand in for others.

    A recipe that was given, the paper's on --data-root, the quick one with changes, or none: then it takes its own.
    """
    asked = recipe is not None or request.overrides or request.data_root is not None or request.seeds is not None
    if not asked:
        return None, []
    if not entry.takes_base:
        raise ValueError(f"--recipe, --set, --data-root and --seeds: {name} is not based on a recipe")
    overrides = [*request.overrides]
    if request.seeds is not None:
        overrides.append(f"seeds={list(range(request.seeds))}")
    if recipe is not None or request.quick or request.data_root is None:
        if recipe is None:
            return quick_base(name, overrides), []
        return load_experiment(find_recipe(recipe), overrides=overrides), []
    found, notes = locate_all(entry.data, request)
    settings = found[entry.data[0]].settings("data")
    raw = read_base(RECIPES / f"{name}.toml", overrides)
    if len(entry.data) > 1:
        settings |= public_settings(found[entry.data[1]], raw)
    return Experiment(**merged(without_places(raw), nested(settings))), notes
