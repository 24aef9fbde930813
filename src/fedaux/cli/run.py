"""Commands that run experiments: one, a sweep of them, or those of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedaux.cli.arguments import Overrides, Plugins, Recipe, hinted, load, load_plugins
from fedaux.config import ConfigError
from fedaux.recipes import find_recipe, read_recipe

if TYPE_CHECKING:
    from fedaux.sweep.grid import Cell


def run(
    recipe: Recipe = "demo",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The run directory.", show_default="runs/NAME", metavar="DIR"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run or a sweep where it stopped.")
    ] = False,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Also write TensorBoard's event files: output.tensorboard=true."
        ),
    ] = False,
    overrides: Overrides = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds", help="Seeds 0 to N-1, instead of the recipe's.", metavar="N", min=1
        ),
    ] = None,
    apart: Annotated[
        str | None,
        typer.Option(
            "--apart",
            help="Make each method, or each seed, a run of its own.",
            metavar="method,seeds",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", help="Sweeps: where cells run side by side.", metavar="cuda:0,cuda:1"
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", help="Sweeps: how many cells at a time.", show_default="one a device", min=1
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            help="Sweeps: run cells on a Ray cluster's machines.",
            metavar="HOST:PORT|auto",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit", help="Sweeps: begin no cell that would end later.", metavar="SECONDS"
        ),
    ] = None,
    plugins: Plugins = None,
) -> None:
    """Run every method and seed of a recipe; without one, the embedded demo.

    Leaves a run directory with configuration, metrics, privacy ledger, checkpoints, summary and report. A run that was
    interrupted, in whatever way, continues with --resume and ends with the same figures.

    Any setting may be a list, as in --set split.alpha=[0.01,0.1]: then every combination is a run of its own in the
    directory, and the report compares them. The exit status is 3 where some of them failed or were not begun.
    """
    overrides = [
        *(overrides or []),
        *([f"seeds={list(range(seeds))}"] if seeds else []),
        *(["output.tensorboard=true"] if tensorboard else []),
    ]
    if (cells := _cells(recipe, overrides, apart=apart, plugins=plugins)) is not None:
        chosen = _sweeping(devices=devices, jobs=jobs, cluster=cluster, time_limit=time_limit)
        _run_sweep(cells, out=out, resume=resume, chosen=chosen)
        return
    if devices or jobs or cluster or time_limit:
        raise ValueError(
            "--devices, --jobs, --cluster and --time-limit are for sweeps, and this recipe is a single run; give a "
            "setting a list, or --apart method,seeds. A single run's device is --set engine.device=..."
        )
    experiment = load(recipe, overrides, plugins=plugins)
    from fedaux.running import display
    from fedaux.running import run as execute

    console = Console()
    directory = Path(out or experiment.output.directory or Path("runs") / experiment.name)
    done = _rounds_done(directory) if resume else 0
    try:
        with display.Display(experiment, console, done=done) as callback:
            result = execute.run(experiment, out=directory, resume=resume, callback=callback)
    except KeyboardInterrupt:
        console.print(
            f"\nStopped. Finished rounds are safe; continue with the same command and --resume ({directory})."
        )
        raise typer.Exit(130) from None
    console.print(display.result_table(result.summary))
    h0 = display.h0_lines(directory, experiment.pretraining.checkpoint)
    for line in [*h0, *display.dropped_lines(directory), *display.privacy_lines(directory)]:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"Report: {directory / 'report.html'}", highlight=False, soft_wrap=True)
    if experiment.output.tensorboard:
        console.print(
            f"Curves: tensorboard --logdir {directory / 'tensorboard'}",
            highlight=False,
            soft_wrap=True,
        )


def _cells(
    recipe: str, overrides: list[str], *, apart: str | None, plugins: list[Path] | None
) -> list[Cell] | None:
    """Return the cells of a sweep, or None where a recipe is a single run."""
    from fedaux.sweep.grid import axes_of, expand

    path = find_recipe(recipe)
    raw, problems = read_recipe(path, overrides=overrides)
    if not any(axes_of(raw)) and apart is None:
        return None
    load_plugins(plugins)
    try:
        cells = expand(raw, apart=[key.strip() for key in (apart or "").split(",") if key.strip()])
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(hinted(problems), origin=str(path))
    return cells


def _run_sweep(
    cells: list[Cell], *, out: Path | None, resume: bool, chosen: dict[str, Any]
) -> None:
    from fedaux.report.results import group, read_records
    from fedaux.sweep.display import Display, result_table
    from fedaux.sweep.runner import sweep

    console = Console()
    experiment = cells[0].experiment
    directory = Path(out or experiment.output.directory or Path("runs") / experiment.name)
    try:
        with Display(console) as callback:
            outcome = sweep(
                cells, directory, name=experiment.name, resume=resume, callback=callback, **chosen
            )
    except KeyboardInterrupt:
        console.print(
            f"\nStopped. Finished rounds are safe; continue with the same command and --resume ({directory})."
        )
        raise typer.Exit(130) from None
    console.print(result_table(experiment.name, group(read_records(directory))))
    for name, reason in outcome.failed.items():
        console.print(f"Failed: {name}: {reason}", highlight=False, soft_wrap=True, markup=False)
    if outcome.waiting:
        console.print(
            f"Not begun for the time limit: {len(outcome.waiting)} cells, continue with --resume"
        )
    console.print(f"Report: {directory / 'report.html'}", highlight=False, soft_wrap=True)
    if not outcome.complete:
        raise typer.Exit(3)


def _rounds_done(directory: Path) -> int:
    from fedaux.sweep.runner import rounds_done

    return rounds_done(directory)


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="A table, figure or analysis; --list names them.")
    ] = None,
    data_root: Annotated[
        Path | None,
        typer.Option(
            "--data-root",
            help="The folder below which the data sets lie: DIR/cifar10 ...",
            metavar="DIR",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version on embedded data, in minutes.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", help="Seeds 0 to N-1, instead of the paper's.", metavar="N", min=1),
    ] = None,
    auxiliary: Annotated[
        str | None,
        typer.Option(
            "--aux", help="A data set that takes STL-10's place.", metavar="tinyimagenet32"
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            help="A part: --only alpha=0.01 --only method=[fedaux,feddf].",
            metavar="KEY=VALUE",
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            help="A method to run besides, such as fedaux+m. May be repeated.",
            metavar="METHOD",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Where runs, tables and figures go.",
            show_default="runs/NAME",
            metavar="DIR",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            help="The experiment to base it on, for those that take one.",
            metavar="RECIPE",
        ),
    ] = None,
    overrides: Overrides = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="An option of the experiment: --with alphas=[0.01,1].",
            metavar="KEY=VALUE",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option("--devices", help="Where runs go side by side.", metavar="cuda:0,cuda:1"),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", help="How many runs at a time.", show_default="one a device", min=1),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", help="Run on the machines of a Ray cluster.", metavar="HOST:PORT|auto"
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", help="Begin no run that would end later.", metavar="SECONDS"),
    ] = None,
    show_list: Annotated[
        bool,
        typer.Option(
            "--list", help="Name the experiments and their data; with NAME, count its runs."
        ),
    ] = False,
    plugins: Plugins = None,
) -> None:
    """Reproduce a table, figure or analysis of the paper: tables and figures with its figures beside yours.

    What is finished is not run again, and what was interrupted goes on when the same command is given again. The exit
    status is 3 where some runs failed or were not begun.
    """
    from rich.table import Table as RichTable

    from fedaux.paper import command
    from fedaux.paper.running import Request
    from fedaux.sweep.display import Display

    console = Console()
    if name is None:
        listed = command.listing()
        table = RichTable(*map(str, listed.headers))
        for row in listed.cells:
            table.add_row(*row)
        table.columns[0].no_wrap = True
        console.print(table)
        return
    load_plugins(plugins)
    with Display(console) as callback:
        chosen = _sweeping(devices=devices, jobs=jobs, cluster=cluster, time_limit=time_limit)
        request = Request(
            out or command.default_folder(name, quick=quick),
            quick=quick,
            data_root=data_root,
            seeds=seeds,
            auxiliary=auxiliary,
            only=only or [],
            also=also or [],
            overrides=overrides or [],
            sweeping={**chosen, "callback": callback},
        )
        if show_list:
            console.print(command.size_line(name, request), highlight=False, soft_wrap=True)
            return
        try:
            outcome = command.reproduce(name, request, recipe=recipe, options=options or [])
        except KeyboardInterrupt:
            console.print(
                f"\nStopped. Finished rounds are safe; the same command goes on ({request.out})."
            )
            raise typer.Exit(130) from None
    console.print(outcome.markdown, highlight=False, markup=False, soft_wrap=True)
    for path in outcome.files:
        console.print(str(path), highlight=False, soft_wrap=True)
    if outcome.numbers.get("unfinished"):
        raise typer.Exit(3)


def _sweeping(
    *, devices: str | None, jobs: int | None, cluster: str | None, time_limit: float | None
) -> dict[str, Any]:
    """Return where and how long cells run, as `fedaux.sweep.sweep` takes it."""
    listed = [device.strip() for device in (devices or "").split(",") if device.strip()]
    return {"devices": listed, "jobs": jobs, "cluster": cluster, "time_limit": time_limit}
