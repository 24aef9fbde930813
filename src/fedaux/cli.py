"""The command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedaux import __version__
from fedaux.config import ConfigError, Experiment
from fedaux.federate.commands import app as federate
from fedaux.mistakes import inspect
from fedaux.reading import find_recipe, read_recipe

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedaux.sweep.grid import Cell

PUT_RIGHT = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""What is wrong with a file that a user named; a full disk, say, is no mistake of theirs."""

app = typer.Typer(
    help="Federated learning with unlabeled auxiliary data: FedAUX and the methods it is compared with.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(federate, name="federate")

Recipe = Annotated[
    str, typer.Argument(help="A TOML file, or the name of a recipe that ships with fedaux.", metavar="RECIPE")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting: --set local.epochs=5. May be repeated.", metavar="KEY=VALUE"),
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        help="A Python file with own methods, teachers, models, sources or mechanisms. May be repeated. "
        "It is code that runs with your rights: use only files you trust.",
        metavar="FILE",
    ),
]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"fedaux {__version__}")
        raise typer.Exit


@app.command()
def run(
    recipe: Recipe = "demo",
    out: Annotated[
        Path | None, typer.Option("--out", help="The run directory.", show_default="runs/NAME", metavar="DIR")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run or a sweep where it stopped.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard's event files: output.tensorboard=true.")
    ] = False,
    overrides: Overrides = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="Seeds 0 to N-1, instead of the recipe's.", metavar="N", min=1)
    ] = None,
    apart: Annotated[
        str | None,
        typer.Option("--apart", help="Make each method, or each seed, a run of its own.", metavar="method,seeds"),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option("--devices", help="Sweeps: where cells run side by side.", metavar="cuda:0,cuda:1"),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", help="Sweeps: how many cells at a time.", show_default="one a device", min=1),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="Sweeps: run cells on a Ray cluster's machines.", metavar="HOST:PORT|auto"),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", help="Sweeps: begin no cell that would end later.", metavar="SECONDS"),
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
    from fedaux import display, execute

    console = Console()
    directory = Path(out or experiment.output.directory or Path("runs") / experiment.name)
    done = _rounds_done(directory) if resume else 0
    try:
        with display.Display(experiment, console, done=done) as watcher:
            result = execute.run(experiment, out=directory, resume=resume, watcher=watcher)
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
        console.print(f"Curves: tensorboard --logdir {directory / 'tensorboard'}", highlight=False, soft_wrap=True)


def _cells(recipe: str, overrides: list[str], *, apart: str | None, plugins: list[Path] | None) -> list[Cell] | None:
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
        raise ConfigError(_hinted(problems), origin=str(path))
    return cells


def _sweeping(
    *, devices: str | None, jobs: int | None, cluster: str | None, time_limit: float | None
) -> dict[str, Any]:
    """Return where and how long cells run, as `fedaux.sweep.sweep` takes it."""
    listed = [device.strip() for device in (devices or "").split(",") if device.strip()]
    return {"devices": listed, "jobs": jobs, "cluster": cluster, "time_limit": time_limit}


def _run_sweep(cells: list[Cell], *, out: Path | None, resume: bool, chosen: dict[str, Any]) -> None:
    from fedaux.report.records import group, read_records
    from fedaux.sweep.display import Display, result_table
    from fedaux.sweep.runner import sweep

    console = Console()
    experiment = cells[0].experiment
    directory = Path(out or experiment.output.directory or Path("runs") / experiment.name)
    try:
        with Display(console) as watcher:
            outcome = sweep(cells, directory, name=experiment.name, resume=resume, watcher=watcher, **chosen)
    except KeyboardInterrupt:
        console.print(
            f"\nStopped. Finished rounds are safe; continue with the same command and --resume ({directory})."
        )
        raise typer.Exit(130) from None
    console.print(result_table(experiment.name, group(read_records(directory))))
    for name, reason in outcome.failed.items():
        console.print(f"Failed: {name}: {reason}", highlight=False, soft_wrap=True, markup=False)
    if outcome.waiting:
        console.print(f"Not begun for the time limit: {len(outcome.waiting)} cells, continue with --resume")
    console.print(f"Report: {directory / 'report.html'}", highlight=False, soft_wrap=True)
    if not outcome.complete:
        raise typer.Exit(3)


@app.command()
def data(
    recipe: Recipe = "demo",
    overrides: Overrides = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(
            "--alpha", help="Concentration of a panel; may be repeated.", show_default="the recipe's, 0.1, 1, 100"
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Where the picture goes (.png, .svg or .pdf).", metavar="FILE")
    ] = Path("split.png"),
    seed: Annotated[
        int | None, typer.Option("--seed", help="The seed of the split.", show_default="the recipe's first")
    ] = None,
    plugins: Plugins = None,
) -> None:
    """Show how a recipe spreads its labelled data: a client-by-class table and the bubble picture."""
    experiment = load(recipe, overrides or [], plugins=plugins)
    alphas = sorted(set(alpha or [experiment.split.alpha, 0.1, 1.0, 100.0]))
    if wrong := [value for value in alphas if not value > 0]:
        raise ValueError(f"--alpha {wrong[0]}: should be greater than 0")
    if seed is not None and seed < 0:
        raise ValueError(f"--seed {seed}: should be at least 0")
    if out.suffix not in {".png", ".svg", ".pdf"}:
        raise ValueError(f"--out {out}: should end in .png, .svg or .pdf")
    from fedaux import checks, display, execute
    from fedaux.data import load_private
    from fedaux.report import figures, svg

    checks.check(experiment)
    labelled = load_private(experiment)
    chosen = experiment.seeds[0] if seed is None else seed
    table = execute.split_table(experiment, labelled, chosen)
    console = Console()
    silos = labelled.clients is not None
    how = "as they are" if silos else f"alpha = {experiment.split.alpha:g}, seed {chosen}"
    console.print(display.split_table(table, labelled.classes, how=how))
    empty = [client for client, row in enumerate(table) if row.sum() == 0]
    if empty:
        shown = ", ".join(map(str, empty[:10])) + (", ..." if len(empty) > 10 else "")
        console.print(
            f"{len(empty)} of {len(table)} clients are empty and take no part: {shown}",
            highlight=False,
            soft_wrap=True,
        )
    panels: list[tuple[str, NDArray[np.int64]]] = [("clients", table)] if silos else []
    for value in [] if silos else alphas:  # what is not split has no other splits to show
        split = experiment.split.model_copy(update={"alpha": value})
        drawn = execute.split_table(experiment.model_copy(update={"split": split}), labelled, chosen)
        panels.append((f"α = {value:g}", drawn))
    svg.save(figures.split_bubbles(panels, labelled.classes), out)
    console.print(f"Picture: {out}", highlight=False, soft_wrap=True)


@app.command()
def pretrain(
    recipe: Recipe = "demo",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where h0 goes, for pretraining.checkpoint; its card beside it.", metavar="FILE"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="The seed of h0.", show_default="the recipe's first")
    ] = None,
    probing: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Whether h0 is measured on the recipe's labelled data.")
    ] = True,
    half: Annotated[
        bool, typer.Option("--half", help="Write h0 in half precision: half the bytes, to carry it elsewhere.")
    ] = False,
    overrides: Overrides = None,
    plugins: Plugins = None,
) -> None:
    """Pretrain every prototype of a recipe on its public data, and measure how good the features are.

    The result is kept in a store that all runs share (~/.cache/fedaux, or FEDAUX_CACHE), so `fedaux run` of the same
    recipe and seed takes it from there; what is interrupted goes on when the same command is given again.
    """
    experiment = load(recipe, overrides or [], plugins=plugins)
    if seed is not None and seed < 0:
        raise ValueError(f"--seed {seed}: should be at least 0")
    if out is not None and out.suffix != ".safetensors":
        raise ValueError(f"--out {out}: should end in .safetensors")
    from fedaux.pretrain import command

    console = Console()
    chosen = experiment.seeds[0] if seed is None else seed
    try:
        with command.Watch(console) as watch:
            outcomes = command.pretrain_prototypes(
                experiment, seed=chosen, watch=watch, probing=probing, shared=command.shared_store()
            )
    except KeyboardInterrupt:
        console.print("\nStopped. The same command goes on from what was last saved.")
        raise typer.Exit(130) from None
    console.print(command.outcome_table(outcomes, name=experiment.name, seed=chosen))
    if out is not None:
        command.write_outcomes(out, outcomes, half=half)
        console.print(f"h0: {out}, its card: {out.with_suffix('.json')}", highlight=False, soft_wrap=True)


@app.command()
def tokenise(
    recipe: Recipe,
    out: Annotated[Path, typer.Option("--out", help="The folder for the two files.", metavar="DIR")] = Path("tokens"),
    overrides: Overrides = None,
    plugins: Plugins = None,
) -> None:
    """Write a recipe's texts as token ids, with their tokenizer inside: to be read with the source `tensors`."""
    experiment = load(recipe, overrides or [], plugins=plugins)
    if experiment.text is None:
        raise ValueError(f"{recipe}: has no table [text]; images need no tokens")
    from fedaux.data import load_both
    from fedaux.data.tokens import save_tokens

    data, public = load_both(experiment)
    for path in save_tokens(out, data, public):
        typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="A run directory, or a folder of them.", metavar="DIR")],
) -> None:
    """Write report.html of a run anew, finished or not; of a folder of runs, such as a sweep, one page about all."""
    from fedaux.report import write_report

    typer.echo(write_report(directory))


@app.command()
def methods(
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    plugins: Plugins = None,
) -> None:
    """List the methods and what distinguishes them."""
    load_plugins(plugins)
    from fedaux.methods import METHODS

    if as_json:
        typer.echo(json.dumps([asdict(method) for method in METHODS.values()], indent=1))
        return
    from rich.table import Table

    table = Table()
    for column in ("method", "start", "proximal", "teacher", "scores", "memory of"):
        table.add_column(column, no_wrap=True)
    for method in METHODS.values():
        flags = ["yes" if flag else "–" for flag in (method.proximal, method.scores)]
        remembers = ", ".join(method.memory) or "–"
        table.add_row(method.name, method.start, flags[0], method.teacher or "–", flags[1], remembers)
    Console().print(table)


@app.command()
def privacy(recipe: Recipe = "demo", overrides: Overrides = None, plugins: Plugins = None) -> None:
    """Say what each client will spend, before anything runs, and whether the noise leaves any signal."""
    experiment = load(recipe, overrides or [], plugins=plugins)
    from fedaux import execute
    from fedaux.checks import check_data
    from fedaux.data import load_both
    from fedaux.plan import privacy_plan

    labelled, auxiliary = load_both(experiment)
    check_data(experiment, labelled, auxiliary)
    sizes = [len(part) for part in execute.split_for(experiment, labelled, experiment.seeds[0])]
    num_negatives = round(experiment.auxiliary.negatives_fraction * len(auxiliary))
    plan = privacy_plan(experiment, sizes, input_shape=labelled.input_shape, num_negatives=num_negatives)
    console = Console()
    for part in plan.render():
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


@app.command()
def audit(
    mechanism: Annotated[
        str, typer.Option("--mechanism", help="A certainty mechanism, or `published`: the paper's claim.")
    ] = "mean",
    epsilon: Annotated[float, typer.Option("--epsilon", help="The claim to attack.")] = 0.1,
    delta: Annotated[float, typer.Option("--delta", help="The claim to attack.")] = 1e-5,
    trials: Annotated[int, typer.Option("--trials", help="Noisy releases of the distinguishing attack.")] = 4_000_000,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same attack.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    plugins: Plugins = None,
) -> None:
    """Attack a mechanism: search the worst neighbour, then try to tell the two data sets apart."""
    if not epsilon > 0:
        raise ValueError(f"--epsilon {epsilon}: should be greater than 0")
    if not 0 < delta < 1:
        raise ValueError(f"--delta {delta}: should lie between 0 and 1")
    if trials < 1 or seed < 0:
        raise ValueError(f"--trials {trials} --seed {seed}: should be at least 1 and 0")
    load_plugins(plugins)
    from fedaux import audit as attacks

    found = attacks.audit(mechanism, epsilon=epsilon, delta=delta, trials=trials, seed=seed)
    if as_json:
        typer.echo(json.dumps(attacks.to_json(found), indent=1))
        return
    typer.echo(attacks.verdict(found))


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="A table, figure or analysis; --list names them.")] = None,
    data_root: Annotated[
        Path | None,
        typer.Option("--data-root", help="The folder below which the data sets lie: DIR/cifar10 ...", metavar="DIR"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small version on embedded data, in minutes.")] = False,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="Seeds 0 to N-1, instead of the paper's.", metavar="N", min=1)
    ] = None,
    auxiliary: Annotated[
        str | None, typer.Option("--aux", help="A data set that takes STL-10's place.", metavar="tinyimagenet32")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="A part: --only alpha=0.01 --only method=[fedaux,feddf].", metavar="KEY=VALUE"),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", help="A method to run besides, such as fedaux+m. May be repeated.", metavar="METHOD"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where runs, tables and figures go.", show_default="runs/NAME", metavar="DIR"),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="The experiment to base it on, for those that take one.", metavar="RECIPE"),
    ] = None,
    overrides: Overrides = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--with", help="An option of the experiment: --with alphas=[0.01,1].", metavar="KEY=VALUE"),
    ] = None,
    devices: Annotated[
        str | None, typer.Option("--devices", help="Where runs go side by side.", metavar="cuda:0,cuda:1")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="How many runs at a time.", show_default="one a device", min=1)
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="Run on the machines of a Ray cluster.", metavar="HOST:PORT|auto"),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", help="Begin no run that would end later.", metavar="SECONDS"),
    ] = None,
    show_list: Annotated[
        bool,
        typer.Option("--list", help="Name the experiments, their data and their time; with NAME, what it would run."),
    ] = False,
    plugins: Plugins = None,
) -> None:
    """Reproduce a table, figure or analysis of the paper: tables and figures with its figures beside yours.

    What is finished is not run again, and what was interrupted goes on when the same command is given again. The exit
    status is 3 where some runs failed or were not begun.
    """
    from fedaux.reproduce import command
    from fedaux.reproduce.running import Request
    from fedaux.sweep.display import Display

    console = Console()
    if name is None:
        for line in command.listing_table():
            console.print(line)
        return
    load_plugins(plugins)
    with Display(console) as watcher:
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
            sweeping={**chosen, "watcher": watcher},
        )
        if show_list:
            console.print(command.part_line(name, request), highlight=False, soft_wrap=True)
            return
        try:
            outcome = command.reproduce(name, request, recipe=recipe, options=options or [])
        except KeyboardInterrupt:
            console.print(f"\nStopped. Finished rounds are safe; the same command goes on ({request.out}).")
            raise typer.Exit(130) from None
    console.print(outcome.markdown, highlight=False, markup=False, soft_wrap=True)
    for path in outcome.files:
        console.print(str(path), highlight=False, soft_wrap=True)
    if outcome.numbers.get("unfinished"):
        raise typer.Exit(3)


def load_plugins(plugins: list[Path] | None) -> None:
    """Run the files given with --plugin, so that their rows are known."""
    if plugins:
        from fedaux.plugins import load_plugin

        for plugin in plugins:
            load_plugin(plugin)


def load(recipe: str, overrides: list[str], *, plugins: list[Path] | None = None) -> Experiment:
    """Read a recipe by path or by the name of one that ships with the package; all problems are told at once."""
    load_plugins(plugins)
    path = find_recipe(recipe)
    raw, problems = read_recipe(path, overrides=overrides)
    fields, found = inspect(raw)
    from fedaux.checks import problems_of

    # Names that were wrong already stand at their defaults in `fields`, so nothing is told twice.
    problems += found + [line for line in problems_of(fields) if line not in found]
    if problems:
        raise ConfigError(_hinted(problems), origin=str(path))
    return Experiment(**raw)


def _hinted(problems: list[str]) -> list[str]:
    """Where no name is near, the row may be one of a file that was not given."""
    hint = "; given by a plugin? --plugin FILE"
    return [line + hint if ": not known; there are " in line else line for line in problems]


def _rounds_done(directory: Path) -> int:
    from fedaux.sweep.runner import rounds_done

    return rounds_done(directory)


def main() -> None:
    """Run the command line; what a user did wrong is told in plain words, without a traceback.

    The exit status is 2 for what the user can put right (settings, arguments, files), 1 for anything else that failed,
    3 for a sweep that is not complete, 130 after Ctrl-C: docs/run-directory.md.
    """
    # Threads that spin while they wait make small models many times slower on a machine that others use too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        typer.echo(f"error: {error.filename or 'file system'}: {error.strerror or error}", err=True)
        sys.exit(2 if isinstance(error, PUT_RIGHT) else 1)
