"""Commands for what comes before a run: the split, h0, token ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedaux.cli.arguments import Overrides, Plugins, Recipe, load

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
            help="Concentration of a panel; may be repeated.",
            show_default="the recipe's, 0.1, 1, 100",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", help="Where the picture goes (.png, .svg or .pdf).", metavar="FILE"),
    ] = Path("split.png"),
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="The seed of the split.", show_default="the recipe's first"),
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
    from fedaux.data import load_private
    from fedaux.report import figures, svg
    from fedaux.running import display
    from fedaux.running import preflight as checks
    from fedaux.running import run as execute

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
        drawn = execute.split_table(
            experiment.model_copy(update={"split": split}), labelled, chosen
        )
        panels.append((f"α = {value:g}", drawn))
    svg.save(figures.split_bubbles(panels, labelled.classes), out)
    console.print(f"Picture: {out}", highlight=False, soft_wrap=True)


def pretrain(
    recipe: Recipe = "demo",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Where h0 goes, for pretraining.checkpoint; its card beside it.",
            metavar="FILE",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="The seed of h0.", show_default="the recipe's first"),
    ] = None,
    probing: Annotated[
        bool,
        typer.Option(
            "--probe/--no-probe",
            help="Whether h0 is measured on the recipe's labelled data, if it has any.",
        ),
    ] = True,
    half: Annotated[
        bool,
        typer.Option(
            "--half", help="Write h0 in half precision: half the bytes, to carry it elsewhere."
        ),
    ] = False,
    overrides: Overrides = None,
    plugins: Plugins = None,
) -> None:
    """Pretrain every prototype of a recipe on its public data, and measure how good the features are.

    Labelled data are for measuring alone: who has none leaves the table `data` out, or adds --set data.source=none, and
    gets the same h0.

    The result is kept in a store that all runs share (~/.cache/fedaux, or FEDAUX_CACHE), so `fedaux run` of the same
    recipe and seed takes it from there; what is interrupted goes on when the same command is given again.
    """
    experiment = load(recipe, overrides or [], plugins=plugins, unlabelled=True)
    if seed is not None and seed < 0:
        raise ValueError(f"--seed {seed}: should be at least 0")
    if out is not None and out.suffix != ".safetensors":
        raise ValueError(f"--out {out}: should end in .safetensors")
    from fedaux.files import refuse_unwritable
    from fedaux.running import pretraining as command

    for file in () if out is None else (out, out.with_suffix(".json")):
        refuse_unwritable(file, key="--out")

    console = Console()
    chosen = experiment.seeds[0] if seed is None else seed
    shared = command.shared_store()
    watch = command.Watch(console)
    try:
        with watch:
            outcomes = command.pretrain_prototypes(
                experiment, seed=chosen, watch=watch, probing=probing, shared=shared
            )
    except KeyboardInterrupt as stop:
        line = command.stopped_line(stop, prototype=watch.name, shared=shared)
        console.print(f"\n{line}", highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None
    console.print(command.outcome_table(outcomes, name=experiment.name, seed=chosen))
    if probing and not experiment.data.given:
        console.print(command.unmeasured_line(outcomes), highlight=False, soft_wrap=True)
    if out is not None:
        try:
            command.write_outcomes(out, outcomes, half=half)
        except OSError as error:
            raise command.unwritten(error, out, outcomes, shared=shared) from error
        console.print(
            f"h0: {out}, its card: {out.with_suffix('.json')}", highlight=False, soft_wrap=True
        )


def tokenise(
    recipe: Recipe,
    out: Annotated[
        Path, typer.Option("--out", help="The folder for the two files.", metavar="DIR")
    ] = Path("tokens"),
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
