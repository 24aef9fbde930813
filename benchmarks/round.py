"""One federated round of fedaux's engine against a plain PyTorch loop, on the same data and in one run.

    python benchmarks/round.py                  the paper's Table 1 setting on a GPU, the demo's size without one
    python benchmarks/round.py --device cpu     the demo's size

Both play the same rounds: same clients, same batches in the same order. That they end a round with the same weights in
single precision is checked first, and stands in the JSON as max_difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from limits import full_single_precision, machine_of, operations_of_image, peak_operations
from numpy.typing import NDArray
from peers import PEERS, PeerTask, refuse_missing
from plain import PlainFederation, can_play, wait
from showing import check_plot, draw_round, print_round
from torch import Tensor

from fedaux import seeding
from fedaux.clients import Weights
from fedaux.compute import compute_for
from fedaux.config import Experiment
from fedaux.data import LabelledData
from fedaux.engines.simulate import SimulatedClients
from fedaux.execute import Silent, Work, choose_device, split_for
from fedaux.methods import METHODS
from fedaux.models import MODELS
from fedaux.preparation import prepare
from fedaux.rounds import Federation, clients_a_round, select
from fedaux.runs import RunDirectory
from fedaux.task import State, build_models

CLASSES = 10
NEGATIVES_FRACTION = 0.2
PROTOTYPE = "model"
PEER_WARMUP = 2
"""Other simulators start processes and evaluate in their first rounds."""
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
        "distill": 2400,
        "test": 360,
        "rounds": 9,
        "warmup": 1,
        "threads": 1,  # images this small gain little from a second one, and lose much where others work as well
    },
}

Seconds = dict[str, float]
"""By phase, and `all`."""
Player = Callable[[int], tuple[Weights, Seconds]]
"""Plays the round of that number after its own last one; returns the server's weights and the seconds."""


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
    negligible_weight: float = 0.0
    seed: int = 0


def experiment_of(settings: Settings, *, device: torch.device) -> Experiment:
    """Return the experiment; on a CPU with the demo's settings of training, elsewhere with the defaults."""
    demo = tomllib.loads(DEMO.read_text(encoding="utf-8")) if device.type == "cpu" else {}
    options = demo["prototypes"][0]["options"] if demo and settings.model == demo["prototypes"][0]["model"] else {}
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
        distillation={**demo.get("distillation", {}), "negligible_weight": settings.negligible_weight},
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
        images(size), labels(size), images(settings.test), labels(settings.test), tuple(map(str, range(CLASSES)))
    )
    return data, images(round(settings.distill / (1 - NEGATIVES_FRACTION)))


@dataclass(frozen=True)
class Fast:
    """fedaux's engine, prepared; and what the plain loop takes from it."""

    federation: Federation
    state: State
    parts: Sequence[NDArray[np.int64]]
    precision: str
    chosen: Callable[[int], list[int]]
    """The clients of a round."""
    certainty_weights: Callable[[Sequence[int]], Tensor]
    seconds: float
    """What preparation took, certainty releases included."""


def fast_federation(
    experiment: Experiment,
    data: LabelledData,
    auxiliary: Tensor,
    *,
    parts: Sequence[NDArray[np.int64]] | None = None,
) -> Fast:
    """Prepare fedaux's engine on data in memory, split by fedaux's own split where no parts are given."""
    began = time.perf_counter()
    seed = experiment.seeds[0]
    own_parts = split_for(experiment, data, seed) if parts is None else parts
    with (
        TemporaryDirectory() as folder,
        RunDirectory.open(Path(folder) / "run", experiment, resume=False) as directory,
    ):
        compute = compute_for(experiment.engine, data.images.device)
        work = Work(experiment, directory, data, auxiliary, Silent(), compute)
        task = work.task(experiment.method[0], seed)
        clients = SimulatedClients(task, data.images, data.labels, own_parts)
        state, preparation = prepare(task, clients, extractor=work.extractor(task), watcher=Silent())
    federation = Federation(task, preparation, clients, watcher=Silent())

    def chosen(number: int) -> list[int]:
        generator = seeding.generator(seed, "selection", round=number)
        return select(clients.present(), count=clients_a_round(experiment), generator=generator)

    def certainty_weights(ids: Sequence[int]) -> Tensor:
        return torch.softmax(federation.scorer.log_scores(state.certificates, ids), dim=0).float()

    wait(task.device)
    precision = "bf16" if compute.precision is torch.bfloat16 else "fp32"
    return Fast(federation, state, own_parts, precision, chosen, certainty_weights, time.perf_counter() - began)


def fast_player(fast: Fast) -> Player:
    """Play rounds with fedaux's engine."""
    state = fast.state

    def play(number: int) -> tuple[Weights, Seconds]:
        nonlocal state
        assert state.round + 1 == number, "rounds are played in order"
        device = fast.federation.task.device
        wait(device)
        began = time.perf_counter()
        state, row = fast.federation.play_round(state)
        wait(device)
        return dict(state.weights[PROTOTYPE]), {**row["seconds"], "all": time.perf_counter() - began}

    return play


def plain_player(fast: Fast, experiment: Experiment, data: LabelledData, *, precision: str) -> Player:
    """Play the same rounds with the plain loop, in torch's usual layout; certainty weights cost it nothing."""
    task = fast.federation.task
    federation = PlainFederation(
        model=build_models(task)[PROTOTYPE].to(memory_format=torch.contiguous_format),  # type: ignore[call-overload]
        prototype=PROTOTYPE,
        method=METHODS[experiment.method[0]],
        seed=experiment.seeds[0],
        local=experiment.local,
        distillation=experiment.distillation,
        batch_size=experiment.evaluation.batch_size or 1024,
        images=data.images,
        labels=data.labels,
        parts=[torch.from_numpy(part).to(task.device) for part in fast.parts],
        distill_images=task.distill_images.contiguous(),
        test_images=task.test_images.contiguous(),
        test_labels=task.test_labels,
        certainty_weights=fast.certainty_weights,
        precision=precision,
    )
    weights = dict(fast.state.weights[PROTOTYPE])

    def play(number: int) -> tuple[Weights, Seconds]:
        nonlocal weights
        weights, seconds = federation.play_round(weights, number=number, chosen=fast.chosen(number))
        return weights, {**seconds, "all": sum(seconds.values())}

    return play


def differences(settings: Settings, fast: Fast, data: LabelledData, auxiliary: Tensor) -> dict[str, float]:
    """Return how far the weights after the first round are apart in single precision, without TF32 or shortcuts.

    max_difference is the largest of any weight; relative_difference is the norm of all differences over the norm of
    what the round changed.
    """
    exact = replace(settings, precision="fp32", negligible_weight=0.0)
    experiment = experiment_of(exact, device=data.images.device)
    on_gpu = data.images.device.type == "cuda"
    with full_single_precision():
        if on_gpu or fast.precision != "fp32" or settings.negligible_weight > 0:  # graphs of a GPU keep their precision
            fast = fast_federation(experiment, data, auxiliary)
        expected, _ = plain_player(fast, experiment, data, precision="fp32")(1)
        found, _ = fast_player(fast)(1)
    before = fast.state.weights[PROTOTYPE]
    names = [name for name, tensor in before.items() if tensor.is_floating_point()]
    apart = torch.cat([(expected[name] - found[name]).double().flatten() for name in names])
    moved = torch.cat([(expected[name] - before[name]).double().flatten() for name in names])
    return {"max_difference": float(apart.abs().max()), "relative_difference": float(apart.norm() / moved.norm())}


def measure(players: Mapping[str, Player], *, warmup: int, rounds: int) -> dict[str, list[Seconds]]:
    """Play all rounds with every variant, each time another one first; return the seconds of every round."""
    names = list(players)
    seconds: dict[str, list[Seconds]] = {name: [] for name in names}
    for number in range(1, warmup + rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(players[name](number)[1])
            # As it goes, so that a run that is cut off has said what it knew.
            print(f"round {number}: {name} {seconds[name][-1]['all']:.3f} s", file=sys.stderr, flush=True)
    return seconds


def images_of_round(fast: Fast, experiment: Experiment, number: int) -> dict[str, int]:
    """Return how many images each phase of a round looks at, counting every look."""
    task, chosen = fast.federation.task, fast.chosen(number)
    images = {
        "train": experiment.local.epochs * sum(len(fast.parts[client]) for client in chosen),
        "evaluate": len(task.test_images),
    }
    if task.method.teacher is not None:
        images["teach"] = len(chosen) * len(task.distill_images)
        images["distill"] = experiment.distillation.epochs * len(task.distill_images)
    return images


def result_of(
    fast: Fast,
    experiment: Experiment,
    seconds: Mapping[str, Sequence[Seconds]],
    *,
    warmup: int,
    precisions: Mapping[str, str],
) -> dict[str, Any]:
    """Return medians over the rounds after the warm-up: seconds, ratios, images a second, share of the limit."""
    task = fast.federation.task
    operations = operations_of_image(build_models(task)[PROTOTYPE], task.distill_images[:64])
    peaks = {
        precision: peak_operations(task.device, precision=precision) for precision in sorted(set(precisions.values()))
    }
    images = [images_of_round(fast, experiment, warmup + 1 + index) for index in range(len(seconds["fast"]) - warmup)]
    medians: dict[str, Seconds] = {}
    rates: dict[str, dict[str, float]] = {}
    fractions: dict[str, dict[str, float]] = {}
    for name, every in seconds.items():
        rounds = list(zip(images, every[warmup:], strict=True))
        peak = peaks[precisions[name]]
        phases = {phase for _, row in rounds for phase in row}
        medians[name] = {phase: median(row.get(phase, 0.0) for _, row in rounds) for phase in sorted(phases)}
        rates[name] = {
            phase: median(count[phase] / row[phase] for count, row in rounds) for phase in images[0] if phase in phases
        }
        fractions[name] = {phase: rate * operations[phase] / peak for phase, rate in rates[name].items()}
        fractions[name]["all"] = median(
            sum(number * operations[phase] for phase, number in count.items()) / row["all"] / peak
            for count, row in rounds
        )
    ratios = {
        name: {phase: value / medians["fast"][phase] for phase, value in row.items() if medians["fast"].get(phase)}
        for name, row in medians.items()
        if name != "fast"
    }
    return {
        "ratio": ratios["plain_fp32"]["all"],
        "ratio_bf16": ratios["plain_bf16"]["all"],
        "ratio_by_phase": ratios,
        "seconds": medians,
        "warmup_seconds": {name: [row["all"] for row in every[:warmup]] for name, every in seconds.items()},
        "preparation_seconds": fast.seconds,
        "images_per_second": rates,
        "operations_per_image": operations,
        "fraction_of_limit": fractions,
        "peak_tflops": {precision: peak / 1e12 for precision, peak in peaks.items()},
    }


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
    """Return what a round of FedAVG takes in another simulator on the same clients, against our own seconds."""
    prototype = experiment.prototypes[0]
    task = PeerTask(
        model=prototype.model,
        options=dict(prototype.options),
        weights=dict(fast.state.weights[PROTOTYPE]),
        images=data.images,
        labels=data.labels,
        parts=[torch.from_numpy(part).to(data.images.device) for part in fast.parts if len(part)],
        num_classes=CLASSES,
        local=experiment.local,
        seed=experiment.seeds[0],
        participants=clients_a_round(experiment),
        rounds=PEER_WARMUP + rounds,
        precision=fast.precision,
    )
    every = PEERS[name].time(task)
    seconds = median(every[PEER_WARMUP:])
    return {"version": PEERS[name].version(), "seconds": seconds, "ratio": seconds / own, "every_round": every}


def image_shape(text: str) -> tuple[int, int, int]:
    """Read CxHxW."""
    channels, height, width = (int(part) for part in text.split("x"))
    return channels, height, width


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what both benchmarks take about the machine."""
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto", help="of fedaux's engine")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="whether fedaux's engine compiles")
    parser.add_argument("--clients-at-once", type=int, help="clients that fedaux's engine trains together")
    parser.add_argument("--negligible-weight", type=float, default=0.0, help="below which clients are not asked")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result for machines")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result (.png, .svg or .pdf)")


def device_of(arguments: argparse.Namespace) -> torch.device:
    """Return the device of the command line; end where it is not there."""
    try:
        return choose_device(arguments.device)
    except ValueError as error:
        raise SystemExit(f"--device {arguments.device}: {error}") from None


def arguments_of(words: Sequence[str] | None) -> tuple[argparse.Namespace, torch.device]:
    """Read the command line; what is not given is the paper's setting on a GPU and the demo's on a CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    parser.add_argument("--method", choices=[name for name, row in METHODS.items() if can_play(row)], default="fedaux")
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
        "--check", action=argparse.BooleanOptionalAction, default=True, help="whether weights are compared first"
    )
    parser.add_argument("--profile", action="store_true", help="print where one fast round spends its time")
    parser.add_argument("--peer", action="append", choices=list(PEERS), default=[], help="time this simulator as well")
    arguments = parser.parse_args(words)
    device = device_of(arguments)
    for name, value in DEFAULTS[device.type].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if not (0 < arguments.participants <= arguments.clients and arguments.rounds > 0 and arguments.warmup >= 0):
        parser.error("need 0 < participants <= clients, at least one round and no negative warm-up")
    return arguments, device


def main(words: Sequence[str] | None = None) -> None:
    """Check, measure, print, write."""
    arguments, device = arguments_of(words)
    refuse_missing(arguments.peer)
    check_plot(arguments.plot)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    settings = Settings(**{name: getattr(arguments, name) for name in Settings.__dataclass_fields__})
    experiment = experiment_of(settings, device=device)
    data, auxiliary = random_data(settings, device=device)
    fast = fast_federation(experiment, data, auxiliary)
    found = differences(settings, fast, data, auxiliary) if arguments.check else {"max_difference": None}
    players = {
        "plain_fp32": plain_player(fast, experiment, data, precision="fp32"),
        "plain_bf16": plain_player(fast, experiment, data, precision="bf16"),
        "fast": fast_player(fast),
    }
    seconds = measure(players, warmup=arguments.warmup, rounds=arguments.rounds)
    result = result_of(
        fast,
        experiment,
        seconds,
        warmup=arguments.warmup,
        precisions={"plain_fp32": "fp32", "plain_bf16": "bf16", "fast": fast.precision},
    )
    result |= found
    result["settings"] = {
        **asdict(settings),
        "rounds": arguments.rounds,
        "warmup": arguments.warmup,
        "fast_precision": fast.precision,
        "engine": experiment.engine.model_dump(),
        "order": "each round another variant first",
    }
    result["machine"] = machine_of(device)
    if arguments.profile:
        print(profile(players["fast"], arguments.warmup + arguments.rounds + 1, device=device))
    own = result["seconds"]["fast"]["train"] + result["seconds"]["fast"]["average"]
    result["peers"] = {
        name: time_peer(name, fast, experiment, data, rounds=arguments.rounds, own=own) for name in arguments.peer
    }
    print_round(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if arguments.plot:
        draw_round(result, arguments.plot)


if __name__ == "__main__":
    main()
