"""What a round costs against the population, the clients a round and the distill set, all clients
of equal size.

    python benchmarks/scale.py                  ResNet-8 on a GPU, a small network without one
    python benchmarks/scale.py --device cpu     less than a minute

The points of a sweep take turns, so that a machine that slows down slows all of them. Population
should cost nothing: time and memory are to stay flat within 10 %. Memory is what a round holds at
most beyond what it starts with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from limits import machine_of, peak_memory
from players import fast_federation, fast_player
from setting import (
    NEGATIVES_FRACTION,
    Settings,
    add_engine_arguments,
    device_of,
    experiment_of,
    random_data,
)
from showing import check_plot, draw_scale

from fedaux.core.algorithms import METHODS
from fedaux.data import LabelledData

AIM = 0.1
"""How far from flat a round's cost against the population may be."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "model": "resnet8",
        "image": (3, 32, 32),
        "examples": 200,
        "distill": 10_000,
        "test": 1000,
    },
    "cpu": {"model": "cnn", "image": (1, 8, 8), "examples": 32, "distill": 600, "test": 60},
}
PARTICIPANTS = 8
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "clients": {"full": (10, 100, 1000, 10_000), "quick": (10, 100, 1000)},
    "participants": {"full": (1, 2, 4, 8, 16, 32), "quick": (1, 4, 16)},
    "distill": {"full": (1, 2, 4), "quick": (1, 4)},
}
"""Points of each sweep; sizes of the distill set are in units of the default."""


def sweep(
    name: str, points: Sequence[Settings], *, device: torch.device, warmup: int, rounds: int
) -> list[dict[str, Any]]:
    """Return the cost of a round at each point: `size` of what is varied, median `seconds`, and
    `bytes` at the peak."""
    largest = replace(
        points[0],
        clients=max(settings.clients for settings in points),
        distill=max(settings.distill for settings in points),
    )
    data, auxiliary = random_data(largest, device=device)
    players = [player(settings, data, auxiliary, device=device) for settings in points]
    seconds: list[list[float]] = [[] for _ in points]
    for number in range(1, warmup + rounds + 1):
        for turn in range(len(players)):
            index = (number + turn) % len(players)
            seconds[index].append(players[index](number)[1]["all"])
    last = warmup + rounds + 1
    return [
        {
            "size": getattr(settings, name),
            "seconds": median(seconds[index][warmup:]),
            "bytes": peak_memory(partial(players[index], last), device=device),
        }
        for index, settings in enumerate(points)
    ]


def player(
    settings: Settings, data: LabelledData, auxiliary: torch.Tensor, *, device: torch.device
) -> Callable[[int], Any]:
    """Return what plays rounds at one point, on the first clients and the first auxiliary images of
    the data."""
    parts = list(
        np.arange(settings.clients * settings.examples).reshape(settings.clients, settings.examples)
    )
    own = auxiliary[: round(settings.distill / (1 - NEGATIVES_FRACTION))]
    return fast_player(
        fast_federation(experiment_of(settings, device=device), data, own, parts=parts)
    )


def varied(settings: Settings, name: str, size: int) -> Settings:
    """Return settings with another population, number of participants or distill set."""
    changes: dict[str, Any] = {name: size}
    return replace(settings, **changes)


def deviation(values: Sequence[float]) -> float:
    """Return the largest relative distance from the median."""
    middle = median(values)
    return max(abs(value / middle - 1) for value in values)


def line_through(points: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Return intercept and slope of seconds against size, by least squares of the relative
    errors."""
    sizes, seconds = (np.array([point[key] for point in points]) for key in ("size", "seconds"))
    slope, intercept = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    return float(intercept), float(slope)


def print_sweep(name: str, result: Mapping[str, Any]) -> None:
    """Print the points of a sweep, and what they come to."""
    print(f"\n{name:>14}{'seconds':>11}{'MB':>9}")
    for point in result["points"]:
        print(f"{point['size']:>14,}{point['seconds']:>11.4f}{point['bytes'] / 1e6:>9.2f}")
    if name == "clients":
        print(
            f"largest deviation from the median: time {result['deviation_seconds']:.1%}, "
            f"memory {result['deviation_bytes']:.1%} (aim: {AIM:.0%})"
        )
    else:
        print(f"about {result['fixed_seconds']:.4f} s and {result['seconds_each']:.2g} s for each")


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    parser.add_argument("--method", choices=list(METHODS), default="fedaux")
    parser.add_argument("--sweep", action="append", choices=list(SIZES), help="only this one")
    parser.add_argument(
        "--quick", action="store_true", help="fewer and smaller points, fewer rounds"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds that are timed")
    parser.add_argument("--warmup", type=int, default=1, metavar="N", help="rounds before those")
    arguments = parser.parse_args(words)
    if arguments.rounds is None:
        arguments.rounds = 3 if arguments.quick else 7
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    """Carry out the sweeps, print, write."""
    arguments = arguments_of(words)
    check_plot(arguments.plot)
    device = device_of(arguments)
    if device.type == "cpu" or arguments.threads is not None:
        torch.set_num_threads(arguments.threads or 1)
    base = Settings(
        clients=max(SIZES["participants"]["full"]),
        participants=PARTICIPANTS,
        method=arguments.method,
        precision=arguments.precision,
        compile=arguments.compile,
        clients_at_once=arguments.clients_at_once,
        **DEFAULTS[device.type],
    )
    result: dict[str, Any] = {"settings": asdict(base), "machine": machine_of(device), "sweeps": {}}
    print(
        f"{base.method}, {base.model} on {'x'.join(map(str, base.image))}, {base.participants} "
        "clients a round with "
        f"{base.examples} examples each, {base.distill} distill images; "
        f"{result['machine']['device']}, "
        f"threads: {torch.get_num_threads()}; median of {arguments.rounds} rounds, "
        f"{2 * arguments.rounds} for clients"
    )
    for name in arguments.sweep or SIZES:
        unit = base.distill if name == "distill" else 1
        sizes = SIZES[name]["quick" if arguments.quick else "full"]
        settings = [varied(base, name, size * unit) for size in sizes]
        # Whether a line is flat to a tenth takes more rounds than which way it rises.
        rounds = arguments.rounds * (2 if name == "clients" else 1)
        points = sweep(name, settings, device=device, warmup=arguments.warmup, rounds=rounds)
        found: dict[str, Any] = {"points": points}
        if name == "clients":
            found["deviation_seconds"] = deviation([point["seconds"] for point in points])
            found["deviation_bytes"] = deviation([point["bytes"] for point in points])
        else:
            found["fixed_seconds"], found["seconds_each"] = line_through(points)
        result["sweeps"][name] = found
        print_sweep(name, found)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if arguments.plot:
        draw_scale(result, arguments.plot)


if __name__ == "__main__":
    main()
