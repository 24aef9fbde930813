"""Commands that say what there is, what it costs and what came out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedaux.cli.arguments import Overrides, Plugins, Recipe, load, load_plugins


def report(
    directory: Annotated[
        Path, typer.Argument(help="A run directory, or a folder of them.", metavar="DIR")
    ],
) -> None:
    """Write report.html of a run anew, finished or not; of a folder of runs, such as a sweep, one page about all."""
    from fedaux.report import write_report

    typer.echo(write_report(directory))


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    plugins: Plugins = None,
) -> None:
    """List the methods and what distinguishes them."""
    load_plugins(plugins)
    from fedaux.core.methods import METHODS

    if as_json:
        typer.echo(json.dumps([asdict(method) for method in METHODS.values()], indent=1))
        return
    from fedaux.report.tables import Table, to_terminal

    rows = []
    for method in METHODS.values():
        proximal, scores = ("yes" if flag else "–" for flag in (method.proximal, method.scores))
        rows.append(
            (
                method.name,
                method.start,
                proximal,
                method.teacher or "–",
                scores,
                ", ".join(method.memory) or "–",
            )
        )
    headers = ("method", "start", "proximal", "teacher", "scores", "memory of")
    Console().print(to_terminal(Table(headers, rows, "l" * len(headers))))


def privacy(recipe: Recipe = "demo", overrides: Overrides = None, plugins: Plugins = None) -> None:
    """Say what each client will spend, before anything runs, and whether the noise leaves any signal."""
    experiment = load(recipe, overrides or [], plugins=plugins)
    from fedaux.data import load_both
    from fedaux.running import run as execute
    from fedaux.running.preflight import check_data
    from fedaux.running.privacy_plan import privacy_plan

    labelled, auxiliary = load_both(experiment)
    check_data(experiment, labelled, auxiliary)
    sizes = [len(part) for part in execute.split_for(experiment, labelled, experiment.seeds[0])]
    num_negatives = round(experiment.auxiliary.negatives_fraction * len(auxiliary))
    plan = privacy_plan(
        experiment, sizes, input_shape=labelled.input_shape, num_negatives=num_negatives
    )
    console = Console()
    for part in plan.render():
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


def audit(
    mechanism: Annotated[
        str,
        typer.Option(
            "--mechanism", help="A certainty mechanism, or `published`: the paper's claim."
        ),
    ] = "mean",
    epsilon: Annotated[float, typer.Option("--epsilon", help="The claim to attack.")] = 0.1,
    delta: Annotated[float, typer.Option("--delta", help="The claim to attack.")] = 1e-5,
    trials: Annotated[
        int, typer.Option("--trials", help="Noisy releases of the distinguishing attack.")
    ] = 4_000_000,
    releases: Annotated[
        int,
        typer.Option(
            "--releases", help="Real releases at each shape of data, to test their noise."
        ),
    ] = 700,
    node: Annotated[
        bool,
        typer.Option(
            "--node", help="Also audit the answers and the ledger of a node of a federation."
        ),
    ] = False,
    seed: Annotated[
        int,
        typer.Option("--seed", help="The same seed gives the same attack, but for secure noise."),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    plugins: Plugins = None,
) -> None:
    """Attack a mechanism: search the worst neighbours, test the noise, try to tell the two data sets apart."""
    if not epsilon > 0:
        raise ValueError(f"--epsilon {epsilon}: should be greater than 0")
    if not 0 < delta < 1:
        raise ValueError(f"--delta {delta}: should lie between 0 and 1")
    if trials < 1 or seed < 0:
        raise ValueError(f"--trials {trials} --seed {seed}: should be at least 1 and 0")
    load_plugins(plugins)
    from fedaux.federation.audit import audit_node
    from fedaux.privacy import audit as attacks

    found = attacks.audit(
        mechanism,
        epsilon=epsilon,
        delta=delta,
        trials=trials,
        seed=seed,
        releases=releases,
        node=audit_node if node else None,
    )
    if as_json:
        typer.echo(json.dumps(attacks.to_json(found), indent=1))
        return
    typer.echo(attacks.verdict(found))
