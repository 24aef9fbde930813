"""The experiment that the benchmarks time: the paper's Table 1 setting on a GPU, the demo's size on
a CPU."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import Experiment
from fedaux.core.compute import choose_device
from fedaux.data import LabelledData

CLASSES = 10
NEGATIVES_FRACTION = 0.2
PROTOTYPE = "model"
DEMO = Path(__file__).parents[1] / "recipes" / "demo.toml"
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {  # the paper's Table 1
        "model": "resnet8",
        "image": (3, 32, 32),
        "clients": 20,
        "participants": 8,
        "examples": 2500,
        "distill": 80_000,
        "test": 10_000,
        "rounds": 5,
        "warmup": 2,
    },
    "cpu": {  # the demo: digits and letters
        "model": "cnn",
        "image": (1, 8, 8),
        "clients": 10,
        "participants": 10,
        "examples": 144,
        "distill": 1200,
        "test": 360,
        "rounds": 9,
        "warmup": 1,
        "threads": 2,
    },
}


@dataclass(frozen=True)
class Settings:
    """The experiment that is timed."""

    model: str
    image: tuple[int, int, int]
    clients: int
    participants: int
    examples: int
    """Of a client, on average."""
    distill: int
    test: int
    method: str = "fedaux"
    alpha: float = 0.01
    precision: str = "auto"
    compile: bool | None = None
    clients_at_once: int | None = None
    seed: int = 0


def experiment_of(settings: Settings, *, device: torch.device) -> Experiment:
    """Return the experiment; on a CPU with the demo's settings of training, elsewhere with the
    defaults."""
    demo = tomllib.loads(DEMO.read_text(encoding="utf-8")) if device.type == "cpu" else {}
    options = (
        demo["prototypes"][0]["options"]
        if demo and settings.model == demo["prototypes"][0]["model"]
        else {}
    )
    return Experiment(
        name="benchmark",
        method=settings.method,
        seeds=[settings.seed],
        rounds=1_000_000,  # never the last one
        participation_rate=settings.participants / settings.clients,
        auxiliary={"negatives_fraction": NEGATIVES_FRACTION},
        split={"num_clients": settings.clients, "alpha": settings.alpha},
        prototypes=[{"name": PROTOTYPE, "model": settings.model, "options": options}],
        pretraining={"kind": "none"},
        certainty=demo.get("certainty", {}),
        local=demo.get("local", {}),
        distillation=demo.get("distillation", {}),
        engine={
            "device": str(device),
            "precision": settings.precision,
            "compile": settings.compile,
            "clients_at_once": settings.clients_at_once,
        },
    )


def random_data(settings: Settings, *, device: torch.device) -> tuple[LabelledData, Tensor]:
    """Return labelled data and auxiliary images of random pixels, every class equally often."""
    pixels = seeding.torch_generator(settings.seed, "benchmark pixels", device=device)
    order = seeding.generator(settings.seed, "benchmark labels")

    def images(count: int) -> Tensor:
        shape = (count, *settings.image)
        return torch.randint(256, shape, dtype=torch.uint8, device=device, generator=pixels)

    def labels(count: int) -> Tensor:
        return torch.from_numpy(order.permutation(np.arange(count) % CLASSES)).to(device)

    size = settings.clients * settings.examples
    data = LabelledData(
        images(size),
        labels(size),
        images(settings.test),
        labels(settings.test),
        tuple(map(str, range(CLASSES))),
    )
    return data, images(round(settings.distill / (1 - NEGATIVES_FRACTION)))


def image_shape(text: str) -> tuple[int, int, int]:
    """Read CxHxW."""
    channels, height, width = (int(part) for part in text.split("x"))
    return channels, height, width


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what both benchmarks take about the machine."""
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")
    parser.add_argument(
        "--precision", choices=["auto", "fp32", "bf16"], default="auto", help="of fedaux's engine"
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="whether fedaux's engine compiles"
    )
    parser.add_argument(
        "--clients-at-once", type=int, help="clients that fedaux's engine trains together"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result for machines")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the result (.png, .svg or .pdf)"
    )


def device_of(arguments: argparse.Namespace) -> torch.device:
    """Return the device of the command line; end where it is not there."""
    try:
        return choose_device(arguments.device)
    except ValueError as error:
        raise SystemExit(f"--device {arguments.device}: {error}") from None
