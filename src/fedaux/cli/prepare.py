"""Commands that prepare a run: the split, h0, encoders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedaux.cli.arguments import Overrides, Plugins, Recipe, load
from fedaux.files import refuse_unwritable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def data(
    recipe: Recipe = "demo",
    overrides: Overrides = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(
            "--alpha",
            help="Concentration of one panel. May be repeated.",
            show_default="the recipe's, 0.1, 1, 100",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", help="The figure (.png, .svg or .pdf).", metavar="FILE"),
    ] = Path("split.png"),
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", help="The seed of the split.", show_default="the recipe's first", min=0
        ),
    ] = None,
    plugins: Plugins = None,
) -> None:
    """Show how a recipe splits its labelled data: a client-by-class table and a figure."""
    experiment = load(recipe, overrides or [], plugins=plugins)
    alphas = sorted(set(alpha or [experiment.split.alpha, 0.1, 1.0, 100.0]))
    if wrong := [value for value in alphas if not value > 0]:
        raise ValueError(f"--alpha {wrong[0]}: should be greater than 0")
    if out.suffix not in {".png", ".svg", ".pdf"}:
        raise ValueError(f"--out {out}: should end in .png, .svg or .pdf")
    from fedaux.core.compute import compute_for
    from fedaux.data import load_private
    from fedaux.encoders import extractor_of
    from fedaux.report import data_figures, svg
    from fedaux.running import display
    from fedaux.running.preflight import check
    from fedaux.running.run import prepare_device, split_table

    check(experiment)
    compute = compute_for(experiment.engine, prepare_device(experiment))
    labelled = load_private(experiment, converter=extractor_of(experiment, compute))
    chosen = experiment.seeds[0] if seed is None else seed
    table = split_table(experiment, labelled, chosen)
    console = Console()
    silos = labelled.clients is not None
    how = "not split" if silos else f"alpha = {experiment.split.alpha:g}, seed {chosen}"
    names = experiment.data.client_names
    console.print(display.split_table(table, labelled.classes, how=how, names=names))
    typer.echo(display.classes_line(table, labelled.classes))
    empty = [client for client, row in enumerate(table) if row.sum() == 0]
    if empty:
        shown = ", ".join(names[one] if names else str(one) for one in empty[:10]) + (
            ", ..." if len(empty) > 10 else ""
        )
        typer.echo(f"{len(empty)} of {len(table)} clients are empty and take no part: {shown}")
    panels: list[tuple[str, NDArray[np.int64]]] = [("clients", table)] if silos else []
    for value in [] if silos else alphas:
        split = experiment.split.model_copy(update={"alpha": value})
        drawn = split_table(experiment.model_copy(update={"split": split}), labelled, chosen)
        panels.append((f"α = {value:g}", drawn))
    svg.save(data_figures.split_bubbles(panels, labelled.classes), out)
    typer.echo(f"Figure: {out}")


def pretrain(
    recipe: Recipe = "demo",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="File for h0, for pretraining.checkpoint; its card is written next to it.",
            metavar="FILE",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="The seed of h0.", show_default="the recipe's first", min=0),
    ] = None,
    probing: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Measure h0 on the recipe's labelled data, if any.",
        ),
    ] = True,
    overrides: Overrides = None,
    plugins: Plugins = None,
) -> None:
    """Pretrain every prototype of a recipe on its public data, and measure the features.

    Labelled data is used for the measurement only; without any, leave out the table `data` or add
    --set data.source=none. The h0 is the same.

    The result is saved in a store that all runs share (~/.cache/fedaux, or FEDAUX_CACHE), where
    `fedaux run` with the same recipe and seed finds it. The same command continues after an
    interruption.
    """
    experiment = load(recipe, overrides or [], plugins=plugins, unlabelled=True)
    if out is not None and out.suffix != ".safetensors":
        raise ValueError(f"--out {out}: should end in .safetensors")
    from fedaux.running import pretraining as command

    for file in () if out is None else (out, out.with_suffix(".json")):
        refuse_unwritable(file, key="--out")

    console = Console()
    chosen = experiment.seeds[0] if seed is None else seed
    shared = command.shared_store()
    display = command.PretrainDisplay(console)
    try:
        with display:
            outcomes = command.pretrain_prototypes(
                experiment, seed=chosen, display=display, probing=probing, shared=shared
            )
    except KeyboardInterrupt as stop:
        line = command.stopped_line(stop, prototype=display.name, shared=shared)
        typer.echo(f"\n{line}")
        raise typer.Exit(130) from None
    console.print(command.outcome_table(outcomes, name=experiment.name, seed=chosen))
    if probing and not experiment.data.given:
        typer.echo(command.unmeasured_line(outcomes))
    if out is not None:
        try:
            command.write_outcomes(out, outcomes)
        except OSError as error:
            raise command.write_error(error, out, outcomes, shared=shared) from error
        typer.echo(f"h0: {out}, its card: {out.with_suffix('.json')}")


def encoder(
    source: Annotated[
        str,
        typer.Argument(
            help="hf:OWNER/NAME, hf:FOLDER, timm:NAME, a folder or a file.",
            metavar="NAME_OR_FOLDER",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write one safetensors file, for nodes.", metavar="FILE"),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Show what an encoder is, what its inputs become, and how fast it is here."""
    from fedaux.config import Engine
    from fedaux.core.compute import choose_device, compute_for
    from fedaux.encoders.extraction import described, encoder_named

    if out is not None:
        refuse_unwritable(out, key="--out")
    found = encoder_named(source)
    compute = compute_for(Engine(device=device), choose_device(device))
    for name, value in described(found, compute):
        typer.echo(f"{name:<14}{value}")
    if out is not None:
        found.save(out)
        typer.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
