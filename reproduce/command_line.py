"""The options of `fedaux reproduce NAME` and `python -m reproduce NAME`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedaux.cli.arguments import (
    Devices,
    Jobs,
    Overrides,
    Plugins,
    Seeds,
    TimeLimit,
    load_plugins,
)
from fedaux.cli.help import tidy
from fedaux.cli.run import interruptible, sweep_options

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="A table, figure or analysis; see --list.")
    ] = None,
    data_root: Annotated[
        Path | None,
        typer.Option(
            "--data-root", help="Folder that contains the datasets: DIR/cifar10 ...", metavar="DIR"
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version on embedded data, in minutes.")
    ] = False,
    seeds: Seeds = None,
    auxiliary: Annotated[
        str | None,
        typer.Option(
            "--aux",
            help="A dataset that replaces STL-10; in `robustness`, Tiny-ImageNet.",
            metavar="tinyimagenet32",
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
            help="An additional method, such as fedaux+m. May be repeated.",
            metavar="METHOD",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Directory for runs, tables and figures.",
            show_default="runs/NAME",
            metavar="DIR",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", help="The recipe, for experiments that take one.", metavar="RECIPE"
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
    devices: Devices = None,
    jobs: Jobs = None,
    time_limit: TimeLimit = None,
    show_list: Annotated[
        bool,
        typer.Option("--list", help="List the experiments and their data; with NAME, its runs."),
    ] = False,
    plugins: Plugins = None,
) -> None:
    """Reproduce a table, figure or analysis of the paper, with the published numbers for
    comparison.

    The same command continues after an interruption; finished runs are not repeated. The exit
    status is 3 if some runs failed or were not started.
    """
    from fedaux.report.tables import TerminalTable
    from fedaux.sweep.display import ProgressDisplay
    from reproduce import command
    from reproduce.planning import Request

    console = Console()
    if name is None:
        console.print(TerminalTable(command.listing()))
        return
    load_plugins(plugins)
    folder = out or command.default_folder(name, quick=quick)
    with (
        interruptible(console, f"the same command continues ({folder})"),
        ProgressDisplay(console) as callback,
    ):
        sweeping = sweep_options(devices, jobs=jobs, time_limit=time_limit)
        request = Request(
            folder,
            quick=quick,
            data_root=data_root,
            seeds=seeds,
            auxiliary=auxiliary,
            only=only or [],
            also=also or [],
            overrides=overrides or [],
            sweeping={**sweeping, "callback": callback},
        )
        if show_list:
            console.print(command.size_line(name, request), highlight=False, soft_wrap=True)
            return
        outcome = command.reproduce(name, request, recipe=recipe, options=options or [])
    console.print(outcome.markdown, highlight=False, markup=False, soft_wrap=True)
    for path in outcome.files:
        console.print(str(path), highlight=False, soft_wrap=True)
    if outcome.numbers.get("unfinished"):
        raise typer.Exit(3)


tidy(app)
