"""What methods do, send and reveal (the paper's qualitative comparison), from what a run really did.

Bytes come from the metrics, privacy from the ledger, operations from the clients that answered and the examples they
hold; multiplications and additions of a forward pass are counted by torch, and a training pass is taken as three.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode

from fedaux.config import Experiment
from fedaux.core.methods import METHODS
from fedaux.data import load_both
from fedaux.files import read_json
from fedaux.models import MODELS
from fedaux.paper import places, published
from fedaux.paper.study import quick_base
from fedaux.paper.writing import TITLES, Outcome, Version, markdown_table, write
from fedaux.privacy.ledger import SCORES
from fedaux.running.run import run as run_experiment

TRAINING_PASSES = 3
"""A training step costs about a forward pass and twice as much backward."""
LINES = ("operations, clients", "operations, server", "client → server", "server → client", "privacy", "assumes")


def run(
    out: Path | str, *, base: Experiment | None = None, version: Version = "own", notes: Sequence[str] = ()
) -> Outcome:
    """Run every method of the base for its rounds under OUT/run, and count. Without ``base``, the embedded demo."""
    experiment, version = (quick_base("qualitative"), "quick") if base is None else (base, version)
    out = Path(out)
    run_experiment(experiment, out=out / "run", resume=True)
    shape = tuple(load_both(experiment)[1].shape)
    columns = [column for method in experiment.method for column in count(experiment, method, out / "run", shape=shape)]
    numbers = {
        "version": version,
        "data": places.told(experiment),
        "rounds": experiment.rounds,
        "clients": experiment.split.num_clients,
        "model": experiment.prototypes[0].model,
        "model_bytes": model_bytes(out / "run", experiment),
        "columns": columns,
        "printed": {
            key: float(published.tables()["claims"][f"qualitative, {key}"]["value"])
            for key in ("ResNet-8 in MB", "negatives' features in MB")
        },
    }
    return write(out, "qualitative", numbers=numbers, markdown=describe(numbers), figures={}, notes=notes)


def count(experiment: Experiment, method: str, path: Path, *, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return what a method did before the first round, where that is anything, and in a round, on average.

    `shape` is that of the public images [N, C, H, W].
    """
    seed = experiment.seeds[0]
    cell = path / "cells" / f"{method}-seed{seed}"
    header = read_json(cell / "state.json")
    row = METHODS[method]
    table = read_json(path / "split.json")["tables"][str(seed)]
    sizes = [sum(held) for held in table]
    public = shape[0]
    negatives = round(experiment.auxiliary.negatives_fraction * public)
    distill = public - negatives
    whole, features = forward_flops(experiment, shape=shape[1:], num_classes=len(table[0]))
    rounds = header["rows"]
    answered = [entry["clients_answered"] for entry in rounds]
    trained = statistics.fmean(sum(sizes[client] for client in clients) for clients in answered)
    participants = statistics.fmean(map(len, answered))
    columns = []
    if row.scores:
        entries = [entry for entry in header["ledger"] if entry["purpose"] == SCORES]
        given = experiment.pretraining.checkpoint is not None
        views = 0 if given else experiment.pretraining.epochs * 2 * public
        sent = prepared_bytes(cell / header["prepared"])
        columns.append(
            {
                "method": method,
                "phase": "preparation",
                "clients": {"features of own examples": sum(sizes), "flops": features * sum(sizes)},
                "server": {
                    "pretraining views": views,
                    "examples scored": distill,
                    "flops": features * (TRAINING_PASSES * views + public),
                },
                "participants": len(entries),
                "bytes_up": header["preparation"]["bytes_up"] / max(1, len(entries)),
                "bytes_down": header["preparation"]["bytes_down"] / max(1, len(entries)),
                "sent": sent,
                "negatives": negatives,
                "epsilon": entries[0]["epsilon"] if entries else None,
                "delta": entries[0]["delta"] if entries else None,
                "mechanism": entries[0]["mechanism"] if entries else None,
            }
        )
    distilled = row.teacher is not None
    columns.append(
        {
            "method": method,
            "phase": "a round",
            "clients": {"examples trained": trained, "flops": TRAINING_PASSES * whole * trained},
            "server": {
                "models averaged": participants,
                "predictions of teachers": participants * distill if distilled else 0,
                "distillation examples": distill * experiment.distillation.epochs if distilled else 0,
                "flops": whole * distill * (participants + TRAINING_PASSES * experiment.distillation.epochs)
                if distilled
                else 0,
            },
            "participants": participants,
            "bytes_up": statistics.fmean(entry["bytes_up"] for entry in rounds) / participants,
            "bytes_down": statistics.fmean(entry["bytes_down"] for entry in rounds) / participants,
            "updates_protected": experiment.local.privacy is not None,
            "assumes": "public data" if distilled or row.start == "pretrained" else "nothing",
        }
    )
    return columns


def forward_flops(experiment: Experiment, *, shape: tuple[int, ...], num_classes: int) -> tuple[int, int]:
    """Return the operations of one example's forward pass: through the whole model, and through its features."""
    prototype = experiment.prototypes[0]
    model = MODELS[prototype.model](shape, num_classes, **prototype.options).eval()
    batch = torch.zeros(2, *shape)
    counted = []
    for part in (model, model.features):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            part(batch)
        counted.append(counter.get_total_flops() // len(batch))
    return counted[0], counted[1]


def prepared_bytes(file: Path) -> dict[str, int]:
    """Return the bytes of what scoring clients were sent: h0, and what the negatives come to."""
    sizes = {"extractor": 0, "public": 0}
    with safe_open(str(file), framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a mapping
            tensor = tensors.get_tensor(key)
            sizes[key.split("/", 1)[0]] += tensor.numel() * tensor.element_size()
    return sizes


def model_bytes(path: Path, experiment: Experiment) -> int:
    """Return the bytes of one whole model, from the last checkpoint."""
    cell = path / "cells" / f"{experiment.method[0]}-seed{experiment.seeds[0]}"
    size = 0
    with safe_open(str(cell / read_json(cell / "state.json")["checkpoint"]), framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a mapping
            if key.startswith("weights/"):
                tensor = tensors.get_tensor(key)
                size += tensor.numel() * tensor.element_size()
    return size


def _said(line: str, column: Mapping[str, Any]) -> str:
    before = column["phase"] == "preparation"
    if line == "operations, clients":
        work = column["clients"]
        if before:
            return f"features of {work['features of own examples']:,} examples, a mean each; {flops(work['flops'])}"
        return f"training on {work['examples trained']:,.0f} examples; {flops(work['flops'])}"
    if line == "operations, server":
        work = column["server"]
        if before:
            return (
                f"pretraining on {work['pretraining views']:,} views, {work['examples scored']:,} examples scored; "
                f"{flops(work['flops'])}"
            )
        said = f"average of {work['models averaged']:.0f} models"
        if work["distillation examples"]:
            said += (
                f", {work['predictions of teachers']:,.0f} predictions, distillation on "
                f"{work['distillation examples']:,} examples; {flops(work['flops'])}"
            )
        return said
    if line in ("client → server", "server → client"):
        size = column["bytes_up" if line == "client → server" else "bytes_down"]
        return f"{megabytes(size)} a client, {column['participants']:.0f} clients"
    if line == "privacy":
        if before:
            loss = "∞" if column["epsilon"] == "inf" else f"{column['epsilon']:g}"
            return f"scores: ({loss}, {column['delta']:g}), once"
        return "updates: protected" if column["updates_protected"] else "updates: not protected"
    return "public data" if before else str(column["assumes"])


def describe(numbers: Mapping[str, Any]) -> str:
    """Return the text, a line a topic and a column a method and phase, with the paper's two figures beside ours."""
    columns = numbers["columns"]
    heads = ["", *(f"{column['method']}, {column['phase']}" for column in columns)]
    grid = markdown_table(heads, [[name, *(_said(name, column) for column in columns)] for name in LINES])
    said = [
        f"# qualitative{TITLES[numbers['version']]}: what methods do, send and reveal",
        "",
        f"{numbers['data']} "
        f"Counted in a run of {numbers['rounds']} rounds with {numbers['clients']} clients and {numbers['model']}; "
        "operations are multiplications and additions of forward passes, a training pass counted as three.",
        "",
        grid,
    ]
    scored = next((column for column in numbers["columns"] if column["phase"] == "preparation"), None)
    printed = numbers["printed"]
    if scored is not None:
        sent = scored["sent"]
        said += [
            f"- The model has {megabytes(numbers['model_bytes'])}; the paper counts {printed['ResNet-8 in MB']} MB for "
            "ResNet-8.",
            f"- Instead of the features of its {scored['negatives']:,} negatives the server sends what they come to, "
            f"{megabytes(sent['public'])}, beside h0, {megabytes(sent['extractor'])}. The paper sends features, "
            f"{printed[FEATURES]} MB for 12,000 negatives of 512 numbers.",
            f"- Preparation sends a client {100 * scored['bytes_down'] / numbers['model_bytes']:.0f} % of a model, "
            "once. The paper counts less than a model for h0, and the negatives besides.",
        ]
    return "\n".join(said) + "\n"


FEATURES = "negatives' features in MB"


def flops(number: float) -> str:
    """Return a number of operations with a unit."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1e6:.1f} MFLOP"


def megabytes(size: float) -> str:
    """Return bytes as people write them."""
    return f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB" if size >= 1e3 else f"{size:.0f} bytes"
