"""What a round costs on this machine, beside the plain loop: the table of `make benchmark`.

    python benchmarks/table.py
    python benchmarks/table.py --only demo --rounds 3

Seconds are the least of several rounds; the encoder's are for 64 images of 224 px. Memory is
the most that the work holds beyond what it starts with. Table 1 needs a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encoders import DEVIATION, MEAN, NETWORKS, plain, product
from limits import peak_memory
from PIL import Image
from players import Player, fast_federation, fast_player, plain_player
from setting import DEFAULTS, Settings, add_engine_arguments, device_of, experiment_of, random_data

from fedaux.encoders import Encoder, Images

IMAGES = 64
Costs = tuple[float, int, float]
"""Seconds and bytes of fedaux, seconds of the plain loop."""


def settings_of(name: str, **changes: Any) -> Settings:
    """Return one of the benchmarks' settings with changes."""
    given = DEFAULTS[name] | changes
    fields = Settings.__dataclass_fields__
    return Settings(**{key: value for key, value in given.items() if key in fields})


def round_costs(settings: Settings, *, device: torch.device, rounds: int) -> Costs:
    """Return what a round costs; the first one warms up."""
    data, auxiliary = random_data(settings, device=device)
    parts = None
    if settings.clients > 100:  # a split by class would take longer than the rounds
        parts = np.array_split(np.arange(len(data.labels)), settings.clients)
    experiment = experiment_of(settings, device=device)
    fast = fast_federation(experiment, data, auxiliary, parts=parts)
    players: list[Player] = [fast_player(fast), plain_player(fast, data, precision=fast.precision)]
    seconds: list[list[float]] = [[], []]
    for number in range(1, rounds + 2):
        for play, own in zip(players, seconds, strict=True):
            own.append(play(number)[1]["all"])
    held = peak_memory(lambda: players[0](rounds + 2), device=device)
    return min(seconds[0][1:]), held, min(seconds[1][1:])


def encoder_costs(*, device: torch.device, rounds: int) -> Costs:
    """Return what the features of images take."""
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / f"{number:03d}.jpg" for number in range(IMAGES)]
        for file in files:
            Image.fromarray(draw.integers(0, 256, (300, 300, 3), dtype=np.uint8)).save(file)
        inputs = Images(224, 224, MEAN, DEVIATION, shorter=256, interpolation="bicubic")
        encoder = Encoder(NETWORKS["vit-s"]().eval(), inputs, "vit-s")
        own = product(encoder, Path(place), files, device=device)["of a folder"]
        other = plain(encoder, files, device=device, batch=32)
        own(), other()
        speeds = [max(once() for _ in range(rounds)) for once in (own, other)]
        held = peak_memory(own, device=device)
    return IMAGES / speeds[0], held, IMAGES / speeds[1]


def main() -> None:
    """Print a row as soon as it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    parser.add_argument("--only", help="one row: demo, table, encoder or many")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    device = device_of(given)
    if device.type == "cpu":
        torch.set_num_threads(given.threads or 1)
    engine = {"compile": given.compile, "clients_at_once": given.clients_at_once}
    engine["precision"] = given.precision
    demo = settings_of("cpu", **engine)
    many = replace(demo, clients=10_000, participants=100, examples=32)
    paper = settings_of("cuda", **engine)
    rounds = given.rounds
    rows: dict[str, tuple[str, Callable[[], Costs]]] = {
        "demo": ("the demo", lambda: round_costs(demo, device=device, rounds=rounds)),
        "table": ("Table 1", lambda: round_costs(paper, device=device, rounds=rounds)),
        "encoder": (f"ViT-S, {IMAGES} images", lambda: encoder_costs(device=device, rounds=rounds)),
        "many": (
            "100 of 10,000 clients",
            lambda: round_costs(many, device=device, rounds=rounds),
        ),
    }
    print(f"{'':24}{'seconds':>10}{'MB':>9}{'plain loop':>12}{'ratio':>8}")
    for name, (title, measure) in rows.items():
        if given.only not in (None, name) or (name == "table" and device.type == "cpu"):
            continue
        seconds, held, slow = measure()
        ratio = f"{slow / seconds:.1f}"
        print(f"{title:24}{seconds:>10.3f}{held / 1e6:>9.1f}{slow:>12.3f}{ratio:>8}", flush=True)


if __name__ == "__main__":
    main()
