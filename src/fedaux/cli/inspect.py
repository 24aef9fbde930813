"""Commands that inspect: reports, methods, privacy costs, audits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedaux.cli.arguments import Overrides, Plugins, Recipe, load, load_plugins


def report(
    directory: Annotated[
        Path, typer.Argument(help="A run directory, or a folder of them.", metavar="DIR")
    ],
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures", help="Also write the figures here, as PNG, SVG and PDF.", metavar="DIR"
        ),
    ] = None,
    tables: Annotated[
        Path | None,
        typer.Option(
            "--tables", help="Also write the tables here, as CSV, LaTeX, Markdown.", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Write report.html for a run, finished or not, or for a folder of runs such as a sweep."""
    from fedaux.report import write_figures, write_report, write_tables

    files = [write_report(directory)]
    files += [] if figures is None else write_figures(directory, figures)
    files += [] if tables is None else write_tables(directory, tables)
    for file in files:
        typer.echo(file)


def methods(plugins: Plugins = None) -> None:
    """List the methods and what distinguishes them."""
    load_plugins(plugins)
    from fedaux.core.algorithms import METHODS, asks_of
    from fedaux.report.tables import Table, TerminalTable

    headers = ("method", "start", "objectives", "distills", "releases", "remembers")
    lines = [
        (
            name,
            "h0" if asks.pretrained else "random",
            ", ".join(asks.objectives) or "–",
            "yes" if asks.distills else "–",
            ", ".join(section.mechanism for section in asks.all_releases) or "–",
            "yes" if asks.remembers else "–",
        )
        for name, asks in ((name, asks_of(name)) for name in METHODS)
    ]
    Console().print(TerminalTable(Table(headers, lines, "l" * len(headers))))


def recipes() -> None:
    """List the recipes that ship with fedaux."""
    from fedaux.recipes import shipped_recipes
    from fedaux.report.tables import Table, TerminalTable

    rows = [(name, about) for name, (_, about) in shipped_recipes().items()]
    Console().print(TerminalTable(Table(("recipe", "about"), rows, "ll")))


def privacy(recipe: Recipe = "demo", overrides: Overrides = None, plugins: Plugins = None) -> None:
    """Compute each client's privacy cost (ε, δ) and noise level, before anything runs."""
    experiment = load(recipe, overrides or [], plugins=plugins)
    from fedaux.running.dry_run import sampled
    from fedaux.running.preflight import check_data
    from fedaux.running.privacy_plan import privacy_plan
    from fedaux.running.run import split_for

    with sampled(experiment) as (inputs, _):
        labelled, auxiliary = inputs.data, inputs.auxiliary
    check_data(experiment, labelled, auxiliary)
    sizes = [len(part) for part in split_for(experiment, labelled, experiment.seeds[0])]
    num_negatives = round(experiment.auxiliary.negatives_fraction * len(auxiliary))
    plan = privacy_plan(
        experiment,
        sizes,
        input_shape=labelled.input_shape,
        num_negatives=num_negatives,
        num_classes=len(labelled.classes),
    )
    for part in plan.render():
        Console().print(part, highlight=False, soft_wrap=isinstance(part, str))


def audit(
    mechanism: Annotated[
        str,
        typer.Option(
            "--mechanism", help="A certainty mechanism, or `published` for the paper's claim."
        ),
    ] = "mean",
    epsilon: Annotated[float, typer.Option("--epsilon", help="The claimed ε.")] = 0.1,
    delta: Annotated[float, typer.Option("--delta", help="The claimed δ.")] = 1e-5,
    trials: Annotated[
        int, typer.Option("--trials", help="Noisy releases for the distinguishing attack.", min=1)
    ] = 4_000_000,
    releases: Annotated[
        int,
        typer.Option("--releases", help="Real releases per shape of data, to test their noise."),
    ] = 700,
    node: Annotated[
        bool,
        typer.Option(
            "--node", help="Also audit the answers and the ledger of a node of a federation."
        ),
    ] = False,
    seed: Annotated[
        int,
        typer.Option("--seed", help="Seed of the attack; secure noise is not seeded.", min=0),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plugins: Plugins = None,
) -> None:
    """Audit a mechanism: search worst-case neighbours, test the noise, attack the release."""
    if not epsilon > 0:
        raise ValueError(f"--epsilon {epsilon}: should be greater than 0")
    if not 0 < delta < 1:
        raise ValueError(f"--delta {delta}: should lie between 0 and 1")
    load_plugins(plugins)
    from fedaux.federation.audit import audit_node
    from fedaux.privacy import audit as attacks

    with Console(stderr=True).status("") as status:
        found = attacks.audit(
            mechanism,
            epsilon=epsilon,
            delta=delta,
            trials=trials,
            seed=seed,
            releases=releases,
            node=audit_node if node else None,
            callback=status.update,
        )
    if as_json:
        typer.echo(json.dumps(attacks.to_json(found), indent=1))
        return
    typer.echo(attacks.verdict(found))
