"""Commands that run experiments: one run, a sweep, or the paper's experiments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedaux.cli.arguments import (
    Devices,
    Jobs,
    Overrides,
    Plugins,
    Recipe,
    Seeds,
    TimeLimit,
    hinted,
    load,
    load_plugins,
)
from fedaux.config import ConfigError
from fedaux.recipes import find_recipe, read_recipe

if TYPE_CHECKING:
    from fedaux.sweep.grid import Cell


def run(
    recipe: Recipe = "demo",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory.", show_default="runs/NAME", metavar="DIR"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an interrupted run or sweep, or extend it: --resume --set rounds=20.",
        ),
    ] = False,
    overrides: Overrides = None,
    seeds: Seeds = None,
    devices: Devices = None,
    jobs: Jobs = None,
    time_limit: TimeLimit = None,
    commands: Annotated[
        bool,
        typer.Option(
            "--commands", help="Print a command for each run of a sweep, for a scheduler."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Play one round, and print what the whole run would take."),
    ] = False,
    plugins: Plugins = None,
) -> None:
    """Run every method and seed of a recipe; by default the demo.

    Writes a run directory with configuration, metrics, privacy ledger, checkpoints, summary and
    report. An interrupted run continues with --resume and gives the same numbers.

    If a setting is a list, as in --set split.alpha=[0.01,0.1], every combination is a separate run
    in the directory, and the report compares them. --devices, --jobs, --commands and --time-limit
    are for such sweeps. The exit status is 3 if some runs failed or were not started.
    """
    overrides = [
        *(overrides or []),
        *([f"seeds={list(range(seeds))}"] if seeds else []),
    ]
    if (cells := _cells(recipe, overrides, plugins=plugins)) is not None:
        from fedaux.core import ranks

        if ranks.size() > 1 or dry_run:
            raise ValueError(
                "torchrun and --dry-run are for a single run, and this is a sweep; use --devices"
            )
        if commands:
            from fedaux.running.run import run_path
            from fedaux.sweep.runner import commands as commands_of

            name = cells[0].experiment.name
            place = run_path(cells[0].experiment, out)
            for line in commands_of(cells, place, name=name, resume=resume):
                typer.echo(line)
            return
        options = sweep_options(devices, jobs=jobs, time_limit=time_limit)
        _run_sweep(cells, out=out, resume=resume, options=options)
        return
    if devices or jobs or commands or time_limit:
        raise ValueError(
            "--devices, --jobs, --commands and --time-limit are for sweeps, and this recipe is a "
            "single run; give a setting a list, or a list of lists, as in --set seeds=[[0],[1]]. "
            "The device of a single run is --set engine.device=..."
        )
    experiment = load(recipe, overrides, plugins=plugins)
    if dry_run:
        from fedaux.running.dry_run import measured

        for line in measured(experiment):
            typer.echo(line)
        return
    from fedaux.core import ranks
    from fedaux.running import display
    from fedaux.running.run import run as run_experiment
    from fedaux.running.run import run_path
    from fedaux.sweep.display import ProgressDisplay
    from fedaux.sweep.runner import rounds_done

    console = Console(quiet=ranks.rank() > 0)
    directory = run_path(experiment, out)
    done = rounds_done(directory) if resume else 0
    if resume and not (directory / "config.toml").exists():
        console.print(f"{directory}: no run to continue; a new one starts", soft_wrap=True)
    with (
        interruptible(console, f"continue with the same command and --resume ({directory})"),
        ProgressDisplay(console, experiment=experiment, done=done) as callback,
    ):
        result = run_experiment(
            experiment, out=directory, resume=resume, callback=callback, progress=False
        )
    if ranks.rank():
        return
    console.print(display.result_table(result.summary))
    if (compared := display.verdict_table(directory)) is not None:
        console.print(compared)
    models = directory / "models"
    lines = [
        *display.h0_lines(directory, experiment.pretraining.checkpoint),
        *display.warning_lines(directory),
        *display.privacy_lines(directory),
        f"Report: {directory / 'report.html'}",
    ]
    if models.is_dir():
        several = len(experiment.method) * len(experiment.seeds) > 1
        best = display.best_method(result.summary)
        which = f" --method {best} --seed {experiment.seeds[0]}" if several else ""
        which += "".join(f" --plugin {plugin}" for plugin in plugins or ())
        lines.append(f"Models: {models}, for `fedaux predict {directory} PATH{which}`")
    for line in lines:
        typer.echo(line)


def tune(
    recipe: Recipe = "demo",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Directory.", show_default="runs/NAME-tune", metavar="DIR"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a search.")] = False,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", help="Rounds of the search.", show_default="the recipe's", min=1),
    ] = None,
    overrides: Overrides = None,
    seeds: Seeds = None,
    plugins: Plugins = None,
) -> None:
    """Find each method's best optimizer on validation examples.

    A fifth of the training examples is held out; test data are not used. Tried are Adam at 0.1,
    0.3, 1 and 3 times the recipe's learning rate, and SGD at 0.03, 0.1 and 0.3. DIR/tuned.toml is
    a recipe for `fedaux run` with each method as it was, and with its best optimizer.
    """
    overrides = [*(overrides or []), *([f"seeds={list(range(seeds))}"] if seeds else [])]
    experiment = load(recipe, overrides, plugins=plugins)
    from fedaux.report.tables import TerminalTable
    from fedaux.running.run import run_path
    from fedaux.sweep.display import ProgressDisplay
    from fedaux.sweep.tuning import RECIPE, search_of, tune

    console = Console()
    search = search_of(experiment, rounds=rounds)
    directory = run_path(search, out)
    with (
        interruptible(console, f"continue with the same command and --resume ({directory})"),
        ProgressDisplay(console, experiment=search) as callback,
    ):
        table = tune(experiment, search, out=directory, resume=resume, callback=callback)
    console.print(TerminalTable(table))
    typer.echo(f"Run it: fedaux run {directory / RECIPE}")


@contextmanager
def interruptible(console: Console, how: str) -> Iterator[None]:
    """Turn Ctrl-C into a line and exit status 130."""
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"\nStopped. Finished rounds are saved; {how}.")
        raise typer.Exit(130) from None


def _cells(recipe: str, overrides: list[str], *, plugins: list[Path] | None) -> list[Cell] | None:
    """Return the cells of a sweep, or None if a recipe is a single run."""
    from fedaux.sweep.grid import axes_of, expand

    path = find_recipe(recipe)
    raw, problems = read_recipe(path, overrides=overrides)
    if not any(axes_of(raw)):
        return None
    load_plugins(plugins)
    try:
        cells = expand(raw)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(hinted(problems), origin=str(path))
    return cells


def _run_sweep(
    cells: list[Cell], *, out: Path | None, resume: bool, options: dict[str, Any]
) -> None:
    from fedaux.report.results import group, read_records
    from fedaux.running import display
    from fedaux.running.run import run_path
    from fedaux.sweep.display import ProgressDisplay, sweep_table
    from fedaux.sweep.runner import sweep

    console = Console()
    name, directory = cells[0].experiment.name, run_path(cells[0].experiment, out)
    with (
        interruptible(console, f"continue with the same command and --resume ({directory})"),
        ProgressDisplay(console) as callback,
    ):
        outcome = sweep(cells, directory, name=name, resume=resume, callback=callback, **options)
    console.print(sweep_table(name, group(read_records(directory))))
    for line in display.warning_lines(directory):
        typer.echo(line)
    for cell, reason in outcome.failed.items():
        typer.echo(f"Failed: {cell}: {reason}")
    if outcome.waiting:
        count = len(outcome.waiting)
        typer.echo(f"Not started because of the time limit: {count} cells, continue with --resume")
    typer.echo(f"Report: {directory / 'report.html'}")
    if not outcome.complete:
        raise typer.Exit(3)


def reproduce(context: typer.Context) -> None:
    """Reproduce a table, figure or analysis of the paper: `reproduce/` of the source checkout."""
    sys.path.append(str(Path(__file__).parents[3]))  # the checkout, where fedaux lies in one
    try:
        from reproduce.command_line import app
    except ModuleNotFoundError as error:
        if error.name not in ("reproduce", "reproduce.command_line"):
            raise
        raise ValueError(
            "fedaux reproduce: since version 0.3 the paper's experiments are in the source "
            "checkout and not in the package; type python -m reproduce NAME there"
        ) from None
    app(context.args, prog_name="fedaux reproduce")


def sweep_options(
    devices: str | None, *, jobs: int | None, time_limit: float | None
) -> dict[str, Any]:
    """Return the arguments of `fedaux.sweep.sweep`."""
    named = [part.strip() for part in (devices or "").split(",") if part.strip()]
    return {"devices": named, "jobs": jobs, "time_limit": time_limit}
