"""`fedaux reproduce`: runs a study or experiment by name, and lists them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from fedaux.config import Experiment
from fedaux.config_errors import nearest
from fedaux.recipes import find_recipe, keys_of, load_experiment, parse_value
from fedaux.report.tables import Table
from fedaux.running.run import out_of_memory
from fedaux.sweep import cells_of
from reproduce import datasets
from reproduce.document import Context, Outcome, Version, write
from reproduce.experiments import EXPERIMENTS, Reproduction
from reproduce.planning import (
    Request,
    check_available,
    locate_all,
    plan,
    public_settings,
    read_base,
    refuse_data,
    without_paths,
)
from reproduce.studies import STUDIES
from reproduce.study import RECIPES, quick_base
from reproduce.study_page import run_study, scope

SHARED_RUNS = {"curves": "architectures"}
"""Studies that share the runs, and the folder, of another."""


def default_folder(name: str, *, quick: bool) -> Path:
    """Return the default folder of an experiment."""
    return Path("runs") / (SHARED_RUNS.get(name, name) + ("-quick" if quick else ""))


def listing() -> Table:
    """Return all experiments: name, what it shows, its data and the time of its quick version."""
    return Table(["name", "shows", "data", "--quick, 2 cores"], list(_listed()))


def _listed() -> Iterator[list[str]]:
    for name, study in STUDIES.items():
        try:
            check_available(study)
            missing = ""
        except ValueError:
            missing = "; not in this version"
        grid = study.grid
        blocks, columns = ([value.label for value in axis.values] for axis in grid.axes())
        run = scope(
            {"methods": read_base(grid.path(), ())["method"], "blocks": blocks, "columns": columns}
        )
        yield [
            name,
            f"{study.shows} ({run}){missing}",
            datasets.titles(grid.data_sets()),
            study.quick_time,
        ]
    for name, entry in EXPERIMENTS.items():
        yield [
            name,
            entry.shows,
            datasets.titles(entry.data) or "comes with the package",
            entry.quick_time,
        ]


def size_line(name: str, request: Request) -> str:
    """Return the number of runs and rounds of a study, on the available data."""
    if name not in STUDIES:
        raise ValueError(
            f"--list {name}: not a table of runs; without a name, --list names all experiments"
        )
    cells = plan(STUDIES[name], request).cells
    return f"{name}: {len(cells)} runs, {sum(cell.rounds for cell in cells):,} rounds"


def reproduce(
    name: str, request: Request, *, recipe: str | None = None, options: Sequence[str] = ()
) -> Outcome:
    """Run a study or experiment by name. Raises ValueError for mistakes, before anything runs."""
    names = [*STUDIES, *EXPERIMENTS]
    if name not in names:
        raise ValueError(
            f"{name}: no such experiment{nearest(name, names) or '; see fedaux reproduce --list'}"
        )
    if name in STUDIES:
        if recipe is not None or options:
            raise ValueError(
                f"--recipe and --with: {name} has its own recipe; --set, --only and --also change "
                "it"
            )
        return run_study(STUDIES[name], request)
    if request.only or request.also:
        raise ValueError(f"--only and --also: {name} is not a table of runs")
    entry = EXPERIMENTS[name]
    for option in () if entry.sweeps else ("devices", "jobs", "time_limit"):
        if request.sweeping.get(option):
            raise ValueError(f"--{option.replace('_', '-')}: {name} is not a grid of runs")
    arguments = read_options(name, entry, options)
    if not entry.data:
        if (
            recipe is not None
            or request.overrides
            or request.data_root is not None
            or request.seeds is not None
        ):
            raise ValueError(
                f"--recipe, --set, --data-root and --seeds: {name} is not based on a recipe"
            )
        return write(entry.run(**arguments), request.out, name)
    base, notes = base_of(name, entry, request, recipe)
    chosen = [f"--seeds {request.seeds}"] if request.seeds is not None else []
    chosen += [f"--set {one}" for one in request.overrides if "seeds" in keys_of(one)]
    if entry.one_seed and chosen and len(base.seeds) > 1:
        raise ValueError(
            f"{chosen[0]}: {name} uses one seed; choose it with --set 'seeds=[{base.seeds[-1]}]'"
        )
    known = signature(entry.run).parameters
    alphas = arguments.get("alphas", known["alphas"].default if "alphas" in known else ())
    if base.data.clients and len(alphas) > 1:
        raise ValueError(
            "--with alphas: data.clients states what each client holds, so alpha has no effect and "
            "one value is enough, such as --with alphas=[1.0]"
        )
    version: Version = (
        "own" if recipe else "quick" if request.quick or request.data_root is None else "paper"
    )
    context = Context(request.out, base, version, request.sweeping)
    try:
        document = entry.run(context, **arguments)
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(out_of_memory(base, name)) from error
    changed = [f"changed: `{override}`" for override in request.overrides]
    return write(document, request.out, name, version=version, notes=[*notes, *changed])


def read_options(name: str, entry: Reproduction, options: Sequence[str]) -> dict[str, Any]:
    """Read --with KEY=VALUE as options of an experiment's `run`."""
    known = {
        key: p.default
        for key, p in signature(entry.run).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }
    arguments: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if key not in known:
            raise ValueError(
                f"--with {key}: {name} has no such option; it has {', '.join(known) or 'none'}"
            )
        value, default = parse_value(text), known[key]
        kind = (
            (int, float)
            if isinstance(default, int | float)
            else list
            if isinstance(default, tuple)
            else object
        )
        if not equals or not isinstance(value, kind):
            raise ValueError(
                f"--with {option}: should be a value like that of --with {key}={default}"
            )
        arguments[key] = value
    return arguments


def base_of(
    name: str, entry: Reproduction, request: Request, recipe: str | None
) -> tuple[Experiment, list[str]]:
    """Return the base of an experiment, and which data sets replace others.

    It is a given recipe, the paper's recipe on --data-root, or the quick one, with --set and
    --seeds applied.
    """
    overrides = [*request.overrides]
    for override in overrides:
        for key in keys_of(override):
            if key in entry.varies:
                raise ValueError(
                    f"--set {override}: {name} varies {key}; choose values with --with "
                    f"{entry.varies[key]}=..."
                )
            if key in entry.unused or key.split(".")[0] in entry.unused:
                raise ValueError(f"--set {override}: {name} does not use {key}")
    if recipe is not None and (request.quick or request.data_root is not None):
        raise ValueError(f"--recipe {recipe}: states the data itself, without --data-root, --quick")
    if request.quick and request.data_root is not None:
        raise ValueError(f"--data-root {request.data_root}: --quick has embedded data")
    if request.seeds is not None:
        overrides.append(f"seeds={list(range(request.seeds))}")
    if request.auxiliary is not None and (request.data_root is None or len(entry.data) < 2):
        raise ValueError(
            f"--aux {request.auxiliary}: it replaces public data below --data-root, in experiments "
            "that read some"
        )
    if recipe is not None:
        return load_experiment(find_recipe(recipe), overrides=overrides), []
    if request.quick or request.data_root is None:
        return quick_base(name, overrides), []
    found, notes = locate_all(entry.data, request, replaced=entry.data[-1])  # the public data
    raw = read_base(RECIPES / f"{name}.toml", overrides)
    private, *public = (found[key] for key in entry.data)
    unread = datasets.Found("noise", "noise", None)  # a valid experiment needs public data
    settings = private.settings("data") | public_settings(public[0] if public else unread, raw)
    refuse_data(settings, overrides)
    (cell,) = cells_of(without_paths(raw), [settings])
    return cell.experiment, notes
