"""Commands for trained models: export and predictions."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedaux.cli.arguments import Plugins, load_plugins
from fedaux.files import refuse_unwritable, replacing

if TYPE_CHECKING:
    from fedaux.predict.inputs import Inputs

RunOrModel = Annotated[
    Path,
    typer.Argument(help="A run directory, or the file of a model.", metavar="RUN_OR_MODEL"),
]
Method = Annotated[str | None, typer.Option("--method", help="The method, if the run has several.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The seed, if the run has several.")]
Prototype = Annotated[
    str | None, typer.Option("--prototype", help="The prototype, if the run has several.")
]


EncoderPlace = Annotated[
    str | None,
    typer.Option(
        "--encoder",
        help="Where the model's encoder is, if it is not in the file: a folder, hf: or a file.",
        show_default="where training found it",
        metavar="PLACE",
    ),
]


def export(
    model: RunOrModel,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The file to write.",
            show_default="its name in the run, here",
            metavar="FILE",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="safetensors or onnx (extra onnx).",
            show_default="by the ending of --out: .safetensors, .onnx",
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Write the model's encoder into the file, too.")
    ] = False,
    encoder: EncoderPlace = None,
    method: Method = None,
    seed: Seed = None,
    prototype: Prototype = None,
    plugins: Plugins = None,
) -> None:
    """Write a trained model to a file that stands alone.

    A safetensors file is for `fedaux predict` and `fedaux.load`. ONNX maps pixels (uint8, batch x
    channels x height x width) or token ids (int64, batch x tokens) to probabilities, in programs
    that do not have fedaux.
    """
    load_plugins(plugins)
    from fedaux.formatting import privacy_budget
    from fedaux.predict.export import SUFFIXES, format_of
    from fedaux.predict.export import export as write
    from fedaux.predict.files import describe, find_model, read_card

    file = find_model(model, method=method, seed=seed, prototype=prototype)
    format = format_of(out, format)
    out = out or Path(file.stem + SUFFIXES.get(format, ""))
    refuse_unwritable(out, key="--out")
    write(file, out, format=format, whole=whole, encoder=encoder)
    card = read_card(file)
    privacy = card["privacy"]
    budget = privacy_budget(privacy["epsilon"], privacy["delta"])
    spent = "" if privacy["epsilon"] is None else f"; (ε, δ) = {budget}"
    typer.echo(f"{out}: {describe(card)}{spent}")
    typer.echo(f"Not protected: {privacy['not_protected']}")


def predict(
    model: RunOrModel,
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Images, text files, folders of them, or tables (CSV, JSON Lines, Parquet).",
            metavar="PATH...",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The table to write.", metavar="FILE")] = Path(
        "predictions.csv"
    ),
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            help="Column of the tables that has the image or text. May be repeated for texts.",
            show_default="as in training, or by its name",
        ),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option("--encoding", help="Of text files, CSV and JSON Lines, such as latin-1."),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out what cannot be read, and count it.")
    ] = False,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    encoder: EncoderPlace = None,
    method: Method = None,
    seed: Seed = None,
    prototype: Prototype = None,
    plugins: Plugins = None,
) -> None:
    """Predict the classes of images or texts with a trained model.

    The table has one row per input: path, row (in a table), class, its probability, and the
    probability of every class.
    """
    load_plugins(plugins)
    from fedaux.predict.files import describe
    from fedaux.predict.inputs import Inputs
    from fedaux.predict.trained_model import load

    refuse_unwritable(out, key="--out")
    chosen = load(
        model, method=method, seed=seed, prototype=prototype, device=device, encoder=encoder
    )
    bad: dict[str, str] | None = {} if skip_bad else None
    inputs = Inputs(paths, chosen, columns=column or (), encoding=encoding)
    count = _write(inputs, chosen.classes, out, bad=bad)
    typer.echo(f"{out}: {count} predictions by {describe(chosen.card)}")
    if bad:
        where, why = next(iter(bad.items()))
        typer.echo(f"Skipped {len(bad)}, first: {where}: {why}", err=True)


def _write(inputs: Inputs, classes: Sequence[str], out: Path, *, bad: dict[str, str] | None) -> int:
    """Write the table batch by batch; return the number of its rows."""
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    from fedaux.formatting import cell
    from fedaux.running.display import live_bar

    count = 0
    with (
        replacing(out) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as stream,
        live_bar(Console(stderr=True), MofNCompleteColumn(), TimeRemainingColumn()) as bar,
    ):
        table = csv.writer(stream)
        names = [f"p_{name}" for name in classes]
        shown_classes = [cell(name) for name in classes]
        table.writerow(["path", "row", "class", "probability", *names])
        shown = bar.add_task("predict", total=inputs.size)
        for items, probabilities in inputs.predicted(bad=bad):
            for item, own in zip(items, probabilities.tolist(), strict=True):
                top, row = max(own), "" if item.row is None else item.row
                numbers = [f"{number:.6g}" for number in (top, *own)]
                place, best = cell(item.path), shown_classes[own.index(top)]
                table.writerow([place, row, best, *numbers])
            count += len(items)
            bar.update(shown, completed=count + len(bad or ()))
    return count
