"""One federated round of fedaux's engine against a plain PyTorch loop, on the same data and in one
run.

    python benchmarks/round.py                  the paper's Table 1 setting on a GPU, the demo's size without one
    python benchmarks/round.py --device cpu     the demo's size

Both play the same rounds: same clients, same batches in the same order. That they end a round with
the same weights in single precision is checked first, and stands in the JSON as max_difference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from limits import machine_of, operations_of_image, peak_operations
from peers import PEERS, PeerTask, refuse_missing
from players import (
    Fast,
    Player,
    Seconds,
    differences,
    fast_federation,
    fast_player,
    plain_player,
    scoring_seconds,
)
from setting import (
    CLASSES,
    DEFAULTS,
    PROTOTYPE,
    Settings,
    add_engine_arguments,
    device_of,
    experiment_of,
    image_shape,
    random_data,
)
from showing import check_plot, draw_round, print_round

from fedaux.config import Experiment
from fedaux.core.algorithms import METHODS
from fedaux.core.compute import has_bf16
from fedaux.core.server import clients_per_round
from fedaux.core.task import build_models
from fedaux.data import LabelledData
from fedaux.files import save_json
from fedaux.models import MODELS

PEER_WARMUP = 2
"""Other simulators start processes and evaluate in their first rounds."""


def measure(
    players: Mapping[str, Player], *, warmup: int, rounds: int
) -> Iterator[dict[str, list[Seconds]]]:
    """Play all rounds with every variant, each time another one first.

    Yields the seconds so far after each round that counts, so that a run that is cut off has said
    what it knew.
    """
    names = list(players)
    seconds: dict[str, list[Seconds]] = {name: [] for name in names}
    for number in range(1, warmup + rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(players[name](number)[1])
            print(
                f"round {number}: {name} {seconds[name][-1]['all']:.3f} s",
                file=sys.stderr,
                flush=True,
            )
        if number > warmup:
            yield seconds


def images_of_round(fast: Fast, experiment: Experiment, number: int) -> dict[str, int]:
    """Return how many images each phase of a round looks at, counting every look."""
    task, chosen = fast.server.task, fast.chosen(number)
    images = {
        "train": experiment.local.epochs * sum(len(fast.parts[client]) for client in chosen),
        "evaluate": len(task.test_images),
    }
    if task.asks.distills:
        images["teach"] = len(chosen) * len(task.distill_set)
        images["distill"] = experiment.distillation.epochs * len(task.distill_set)
    return images


def result_of(
    fast: Fast,
    experiment: Experiment,
    seconds: Mapping[str, Sequence[Seconds]],
    *,
    warmup: int,
    precisions: Mapping[str, str],
    operations: Mapping[str, float],
    peaks: Mapping[str, float],
    scoring: float | None,
) -> dict[str, Any]:
    """Return medians over the rounds after the warm-up: seconds, ratios, images a second, share of
    the limit."""
    images = [
        images_of_round(fast, experiment, warmup + 1 + index)
        for index in range(len(seconds["fast"]) - warmup)
    ]
    medians: dict[str, Seconds] = {}
    rates: dict[str, dict[str, float]] = {}
    fractions: dict[str, dict[str, float]] = {}
    for name, every in seconds.items():
        rounds = list(zip(images, every[warmup:], strict=True))
        peak = peaks[precisions[name]]
        phases = {phase for _, row in rounds for phase in row}
        medians[name] = {
            phase: median(row.get(phase, 0.0) for _, row in rounds) for phase in sorted(phases)
        }
        rates[name] = {
            phase: median(count[phase] / row[phase] for count, row in rounds)
            for phase in images[0]
            if phase in phases
        }
        fractions[name] = {
            phase: rate * operations[phase] / peak for phase, rate in rates[name].items()
        }
        fractions[name]["all"] = median(
            sum(number * operations[phase] for phase, number in count.items()) / row["all"] / peak
            for count, row in rounds
        )
    ratios = {
        name: {
            phase: value / medians["fast"][phase]
            for phase, value in row.items()
            if medians["fast"].get(phase)
        }
        for name, row in medians.items()
        if name != "fast"
    }
    return {
        "ratio": ratios["plain_fp32"]["all"],
        "ratio_bf16": ratios["plain_bf16"]["all"] if "plain_bf16" in ratios else None,
        "ratio_by_phase": ratios,
        "seconds": medians,
        "warmup_seconds": {
            name: [row["all"] for row in every[:warmup]] for name, every in seconds.items()
        },
        "preparation_seconds": fast.seconds,
        "scoring_seconds": scoring,
        "images_per_second": rates,
        "operations_per_image": operations,
        "fraction_of_limit": fractions,
        "peak_tflops": {precision: peak / 1e12 for precision, peak in peaks.items()},
    }


def write(result: Mapping[str, Any], path: Path | None) -> None:
    """Write the result as JSON, where that was asked for; a file of earlier rounds is there until
    then."""
    if path is not None:
        save_json(path, result)


def profile(play: Player, number: int, *, device: torch.device) -> str:
    """Return torch's table of where one fast round spends its time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profiler(activities=kinds) as found:
        play(number)
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return str(found.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60))


def time_peer(
    name: str,
    fast: Fast,
    experiment: Experiment,
    data: LabelledData,
    *,
    rounds: int,
    own: float,
) -> dict[str, Any]:
    """Return what a round of FedAVG takes in another simulator on the same clients, against our own
    seconds."""
    prototype = experiment.prototypes[0]
    task = PeerTask(
        model=prototype.model,
        options=dict(prototype.options),
        weights=dict(fast.state.models[PROTOTYPE]),
        images=data.images,
        labels=data.labels,
        parts=[torch.from_numpy(part).to(data.images.device) for part in fast.parts if len(part)],
        num_classes=CLASSES,
        local=experiment.local,
        seed=experiment.seeds[0],
        participants=clients_per_round(experiment),
        rounds=PEER_WARMUP + rounds,
        precision=fast.precision,
    )
    every = PEERS[name].time(task)
    seconds = median(every[PEER_WARMUP:])
    return {
        "version": PEERS[name].version(),
        "seconds": seconds,
        "ratio": seconds / own,
        "every_round": every,
    }


def arguments_of(words: Sequence[str] | None) -> tuple[argparse.Namespace, torch.device]:
    """Read the command line; the default is the paper's setting on a GPU and the demo's on a
    CPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser)
    parser.add_argument("--method", choices=list(METHODS), default="fedaux")
    parser.add_argument("--model", choices=list(MODELS))
    parser.add_argument("--image", type=image_shape, metavar="CxHxW", help="shape of an image")
    for name, meaning in {
        "clients": "population",
        "participants": "clients a round",
        "examples": "examples of a client, on average",
        "distill": "distill images; the negatives are a quarter of that",
        "test": "test images",
        "rounds": "rounds that are timed",
        "warmup": "rounds before those",
    }.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    parser.add_argument("--alpha", type=float, default=0.01, help="of the Dirichlet split")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether weights are compared first",
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where one fast round spends its time"
    )
    parser.add_argument(
        "--peer",
        action="append",
        choices=list(PEERS),
        default=[],
        help="time this simulator as well",
    )
    arguments = parser.parse_args(words)
    device = device_of(arguments)
    for name, value in DEFAULTS[device.type].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if not (
        0 < arguments.participants <= arguments.clients
        and arguments.rounds > 0
        and arguments.warmup >= 0
    ):
        parser.error("need 0 < participants <= clients, at least one round and no negative warm-up")
    return arguments, device


def main(words: Sequence[str] | None = None) -> None:
    """Check, measure, print, write."""
    arguments, device = arguments_of(words)
    refuse_missing(arguments.peer)
    check_plot(arguments.plot)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    settings = Settings(
        **{name: getattr(arguments, name) for name in Settings.__dataclass_fields__}
    )
    experiment = experiment_of(settings, device=device)
    data, auxiliary = random_data(settings, device=device)
    fast = fast_federation(experiment, data, auxiliary)
    found = (
        differences(settings, fast, data, auxiliary)
        if arguments.check
        else {"max_difference": None}
    )
    plain = ["fp32", "bf16"]
    if not has_bf16(device):
        plain.remove("bf16")
        print("bf16 is left out: this device has none", file=sys.stderr)
    precisions = {f"plain_{precision}": precision for precision in plain} | {"fast": fast.precision}
    players = {
        f"plain_{precision}": plain_player(fast, data, precision=precision) for precision in plain
    } | {"fast": fast_player(fast)}
    peaks = {
        kind: peak_operations(device, precision=kind) for kind in sorted(set(precisions.values()))
    }
    task = fast.server.task
    operations = operations_of_image(build_models(task)[PROTOTYPE], task.distill_set[:64])
    scoring = scoring_seconds(fast)
    result: dict[str, Any] = {}
    for seconds in measure(players, warmup=arguments.warmup, rounds=arguments.rounds):
        result = result_of(
            fast,
            experiment,
            seconds,
            warmup=arguments.warmup,
            precisions=precisions,
            operations=operations,
            peaks=peaks,
            scoring=scoring,
        )
        result |= found
        result["settings"] = {
            **asdict(settings),
            "rounds": len(seconds["fast"]) - arguments.warmup,
            "warmup": arguments.warmup,
            "fast_precision": fast.precision,
            "engine": experiment.engine.model_dump(),
            "order": "each round another variant first",
        }
        result["machine"] = machine_of(device)
        result["peers"] = {}
        write(result, arguments.json)
    if arguments.profile:
        print(profile(players["fast"], arguments.warmup + arguments.rounds + 1, device=device))
    own = result["seconds"]["fast"]["train"] + result["seconds"]["fast"]["average"]
    result["peers"] = {
        name: time_peer(name, fast, experiment, data, rounds=arguments.rounds, own=own)
        for name in arguments.peer
    }
    print_round(result)
    write(result, arguments.json)
    if arguments.plot:
        draw_round(result, arguments.plot)


if __name__ == "__main__":
    main()
