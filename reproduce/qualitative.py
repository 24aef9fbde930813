"""Operations, communication and privacy of methods (the paper's qualitative comparison), from a
run.

Bytes come from the metrics, privacy from the ledger, operations from the clients that answered and
the examples they hold; multiplications and additions of a forward pass are counted by torch, and a
training step counts as three passes.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode

from fedaux.config import Experiment
from fedaux.core.algorithms import asks_of
from fedaux.data import load_both
from fedaux.files import read_json
from fedaux.models import MODELS
from fedaux.privacy.ledger import UPDATE
from fedaux.report.tables import Table
from fedaux.running.run import run as run_experiment
from fedaux.running.run_directory import frozen_file
from reproduce import datasets, published
from reproduce.document import Context, Document, Items

TRAINING_PASSES = 3
"""A training step costs about a forward pass and twice as much backward."""
PRINTED = ("ResNet-8 in MB", "negatives' features in MB")


def run(context: Context) -> Document:
    """Run every method of the experiment under OUT/run, and count its costs."""
    experiment, path = context.experiment, context.out / "run"
    if experiment.mode != "full":
        raise ValueError(
            f"mode = {experiment.mode!r}: qualitative counts the operations of whole networks; "
            "should be 'full'"
        )
    run_experiment(experiment, out=path, resume=True, progress=False)
    shape = tuple(load_both(experiment)[1].shape)
    first = path / "cells" / f"{experiment.method[0]}-seed{experiment.seeds[0]}"
    numbers: dict[str, Any] = {
        "rounds": experiment.rounds,
        "clients": experiment.split.num_clients,
        "model": experiment.prototypes[0].model,
        "model_bytes": stored_bytes(first / read_json(first / "state.json")["checkpoint"])[
            "weights"
        ],
        "columns": [
            column
            for method in experiment.method
            for column in count(experiment, method, path, shape=shape)
        ],
        "printed": {
            key: float(published.tables()["claims"][f"qualitative, {key}"]["value"])
            for key in PRINTED
        },
    }
    text = (
        f"{datasets.describe(experiment)} Counted in a run of {experiment.rounds} rounds with "
        f"{experiment.split.num_clients} clients and {numbers['model']}; operations are "
        "multiplications and additions of forward passes, a training step counted as three."
    )
    return Document(
        "what methods compute, send and reveal",
        numbers,
        [text, column_table(numbers["columns"]), *remarks(numbers)],
    )


def count(
    experiment: Experiment, method: str, path: Path, *, shape: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Return what a method did before the first round, if anything, and in a round, on average.

    `shape` is that of the public images [N, C, H, W].
    """
    seed, asks = experiment.seeds[0], asks_of(method, experiment)
    cell = path / "cells" / f"{method}-seed{seed}"
    header = read_json(cell / "state.json")
    table = read_json(path / "split.json")["tables"][str(seed)]
    sizes = [sum(held) for held in table]
    public = shape[0]
    negatives = round(experiment.auxiliary.negatives_fraction * public)
    distill = public - negatives
    whole, features = forward_flops(experiment, shape=shape[1:], num_classes=len(table[0]))
    columns = []
    if asks.releases:
        entries = [entry for entry in header["ledger"] if entry["purpose"] != UPDATE]
        views = (
            0
            if experiment.pretraining.checkpoint is not None
            else experiment.pretraining.epochs * 2 * public
        )
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
                **{
                    key: header["preparation"][key] / max(1, len(entries))
                    for key in ("bytes_up", "bytes_down")
                },
                "sent": stored_bytes(cell / header["prepared"])
                | {
                    "extractor": sum(
                        stored_bytes(frozen_file(path, digest)).total()
                        for digest in header["frozen"].values()
                    )
                },
                "negatives": negatives,
                **{
                    key: entries[0][key] if entries else None
                    for key in ("epsilon", "delta", "mechanism")
                },
                "assumes": "public data",
            }
        )
    rounds = header["rows"]
    answered = [entry["clients_answered"] for entry in rounds]
    local, distillation = experiment.local, experiment.distillation
    rehearses = "rehearsal" in (*asks.objectives, *local.objectives)
    public_rows = experiment.rehearsal.batch_size if rehearses else 0  # in every step
    trained = local.epochs * statistics.fmean(
        sum(
            sizes[client] + public_rows * math.ceil(sizes[client] / local.batch_size)
            for client in clients
        )
        for clients in answered
    )
    participants = statistics.fmean(map(len, answered))
    distilled = asks.distills
    seen = (
        distillation.steps * distillation.batch_size
        if distillation.steps
        else distillation.epochs * distill
    )
    columns.append(
        {
            "method": method,
            "phase": "a round",
            "clients": {"examples trained": trained, "flops": TRAINING_PASSES * whole * trained},
            "server": {
                "models averaged": participants,
                "predictions of teachers": participants * distill if distilled else 0,
                "distillation examples": seen if distilled else 0,
                "flops": whole * (distill * participants + TRAINING_PASSES * seen)
                if distilled
                else 0,
            },
            "participants": participants,
            **{
                key: statistics.fmean(entry[key] for entry in rounds) / participants
                for key in ("bytes_up", "bytes_down")
            },
            "updates_protected": experiment.local.privacy is not None,
            "assumes": "public data" if distilled or asks.pretrained else "nothing",
        }
    )
    return columns


def forward_flops(
    experiment: Experiment, *, shape: tuple[int, ...], num_classes: int
) -> tuple[int, int]:
    """Return the operations of one example's forward pass: through the whole model, and through
    its features."""
    prototype = experiment.prototypes[0]
    model = MODELS[prototype.model](shape, num_classes, **prototype.options).eval()
    batch = torch.zeros(2, *shape)
    counted = []
    for part in (model, model.features):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            part(batch)
        counted.append(counter.get_total_flops() // len(batch))
    return counted[0], counted[1]


def stored_bytes(file: Path) -> Counter[str]:
    """Return the bytes of the tensors in a file, by the first part of their names."""
    sizes: Counter[str] = Counter()
    with safe_open(str(file), framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a mapping
            tensor = tensors.get_tensor(key)
            sizes[key.split("/", 1)[0]] += tensor.numel() * tensor.element_size()
    return sizes


def column_table(columns: list[dict[str, Any]]) -> Table:
    """Return one row per topic, and one column per method and phase."""
    described = [
        _preparation(column) if column["phase"] == "preparation" else _round(column)
        for column in columns
    ]
    topics = (
        "operations, clients",
        "operations, server",
        "client → server",
        "server → client",
        "privacy",
        "assumes",
    )
    sent = [
        [
            f"{megabytes(column[key])} per client, {column['participants']:.0f} clients"
            for column in columns
        ]
        for key in ("bytes_up", "bytes_down")
    ]
    clients, server, privacy = zip(*described, strict=True)
    rows = [clients, server, *sent, privacy, [column["assumes"] for column in columns]]
    headers = ["", *(f"{column['method']}, {column['phase']}" for column in columns)]
    return Table(headers, [[topic, *row] for topic, row in zip(topics, rows, strict=True)])


def _preparation(column: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the operations of clients and server before the first round, and the privacy of
    what is sent."""
    clients, server = column["clients"], column["server"]
    loss = "∞" if column["epsilon"] == "inf" else f"{column['epsilon']:g}"
    return (
        f"features of {clients['features of own examples']:,} examples, a mean each; "
        f"{flops(clients['flops'])}",
        f"pretraining on {server['pretraining views']:,} views, {server['examples scored']:,} "
        f"examples scored; {flops(server['flops'])}",
        f"scores: ({loss}, {column['delta']:g}), once",
    )


def _round(column: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the operations of clients and server in a round, and the privacy of their messages."""
    clients, server = column["clients"], column["server"]
    work = f"average of {server['models averaged']:.0f} models"
    if server["distillation examples"]:
        work += (
            f", {server['predictions of teachers']:,.0f} predictions, distillation on "
            f"{server['distillation examples']:,} examples; {flops(server['flops'])}"
        )
    return (
        f"training on {clients['examples trained']:,.0f} examples; {flops(clients['flops'])}",
        work,
        "updates: protected" if column["updates_protected"] else "updates: not protected",
    )


def remarks(numbers: Mapping[str, Any]) -> list[Items]:
    """Return the paper's two figures beside ours, if a method scores."""
    scored = [column for column in numbers["columns"] if column["phase"] == "preparation"]
    if not scored:
        return []
    sent, model = scored[0]["sent"], numbers["model_bytes"]
    resnet8, features = (numbers["printed"][key] for key in PRINTED)
    return [
        Items(
            [
                f"The model has {megabytes(model)}; the paper counts {resnet8} MB for ResNet-8.",
                f"Instead of the features of its {scored[0]['negatives']:,} negatives the server "
                f"sends a summary of them, {megabytes(sent['public'])}, beside h0, "
                f"{megabytes(sent['extractor'])}. The paper sends features, {features} MB for "
                "12,000 negatives of 512 numbers.",
                f"Preparation sends a client {100 * scored[0]['bytes_down'] / model:.0f} % of a "
                "model, once. The paper counts less than a model for h0, plus the negatives.",
            ]
        )
    ]


def flops(number: float) -> str:
    """Return a number of operations with a unit."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1e6:.1f} MFLOP"


def megabytes(size: float) -> str:
    """Return a number of bytes with a unit."""
    return (
        f"{size / 1e6:.2f} MB"
        if size >= 1e5
        else f"{size / 1e3:.1f} kB"
        if size >= 1e3
        else f"{size:.0f} bytes"
    )
