"""Self-supervised pretraining: seconds an epoch of each way to compute it, and the probe of h0
against time.

    python benchmarks/pretrain.py --device cuda                     100,000 images 32x32, ResNet-8, batch 512
    python benchmarks/pretrain.py --device cuda --recipe cifar10    besides, probes on the recipe's labelled data
    python benchmarks/pretrain.py --device cpu                      the demo's size

Images of the timings are random, for time does not depend on them. Settings are to be compared by
the probe on held-out training images; the one on test images is for the report. Every result is
printed, and written to --json, as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from limits import machine_of, operations_of_image, peak_operations, wait

from fedaux import seeding
from fedaux.config import Experiment, Pretraining
from fedaux.core.compute import CLIENTS_AT_ONCE, Compute, choose_device, compute_for, has_bf16
from fedaux.core.weights import snapshot
from fedaux.data import LabelledData, load_both
from fedaux.fast import best_backend
from fedaux.files import save_json
from fedaux.models import MODELS, SplitModel
from fedaux.pretrain.training import Training
from fedaux.recipes import find_recipe, load_experiment
from fedaux.running.pretraining import probe_h0

HELD_OUT = 0.1
"""Share of the training examples by which settings are compared."""


@dataclass(frozen=True)
class Settings:
    """The timed work."""

    model: str
    image: tuple[int, int, int]
    images: int
    batch_size: int
    epochs: int


DEFAULTS = {
    "cuda": Settings("resnet8", (3, 32, 32), 100_000, 512, 3),
    "cpu": Settings("cnn", (1, 8, 8), 3000, 200, 3),
}


@dataclass(frozen=True)
class Way:
    """How an epoch is computed."""

    precision: torch.dtype
    compile: bool = False
    capture: bool = False


WAYS = {
    "captured-compiled-bf16": Way(torch.bfloat16, compile=True, capture=True),
    "captured-bf16": Way(torch.bfloat16, capture=True),
    "compiled-bf16": Way(torch.bfloat16, compile=True),
    "bf16": Way(torch.bfloat16),
    "captured-fp32": Way(torch.float32, capture=True),
    "fp32": Way(torch.float32),
}
"""The default on a GPU first: a run that is cut short has measured what matters."""

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "cosine": {"schedule": "cosine", "warmup_epochs": 5, "projection_batch_norm": True},
    "cosine-sharp": {
        "schedule": "cosine",
        "warmup_epochs": 5,
        "projection_batch_norm": True,
        "temperature": 0.2,
    },
    "cosine-sharper": {
        "schedule": "cosine",
        "warmup_epochs": 5,
        "projection_batch_norm": True,
        "temperature": 0.1,
    },
}
"""What a recipe's pretraining is changed to, for the probes."""


def build(
    name: str,
    image: tuple[int, int, int],
    options: dict[str, Any],
    *,
    compute: Compute,
    part: str = "benchmark",
) -> SplitModel:
    """Return a model with initial weights on the device."""
    with seeding.initialisation(0, part=part):
        model = MODELS[name](image, 10, **options)
    return best_backend(compute).place(model)


def time_way(way: Way, settings: Settings, *, device: torch.device) -> dict[str, float]:
    """Return the seconds of the first epoch, with all preparation, and of the median of those that
    follow."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = way.precision is not torch.float32
        torch.backends.cudnn.allow_tf32 = way.precision is not torch.float32
        torch.cuda.reset_peak_memory_stats(device)
    compute = Compute(
        device,
        way.precision,
        compile=way.compile,
        clients_at_once=CLIENTS_AT_ONCE if way.capture else 1,
    )
    model = build(settings.model, settings.image, {}, compute=compute)
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randint(
        0,
        256,
        (settings.images, *settings.image),
        dtype=torch.uint8,
        device=device,
        generator=generator,
    )
    training = Training(
        model.features,
        images,
        feature_width=model.feature_width,
        section=Pretraining(epochs=settings.epochs + 1, batch_size=settings.batch_size),
        generator=generator,
        compute=compute,
        key=settings.model,
    )
    seconds = []
    for _ in range(settings.epochs + 1):
        wait(device)
        began = time.perf_counter()
        training.epoch()
        wait(device)
        seconds.append(time.perf_counter() - began)
    typical = median(seconds[1:])
    return {
        "first_epoch": seconds[0],
        "epoch": typical,
        "images_per_second": settings.images / typical,
        "loss": training.losses[-1],
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
    }


def probe_against_time(
    experiment: Experiment,
    changes: dict[str, Any],
    *,
    epochs: int | None,
    every: int,
    device: torch.device,
) -> list[dict[str, float]]:
    """Train a recipe's first prototype on its public data and measure it now and then; print and
    return the points."""
    values = (
        experiment.pretraining.model_dump()
        | changes
        | ({} if epochs is None else {"epochs": epochs})
    )
    values["warmup_epochs"] = min(values["warmup_epochs"], values["epochs"] // 10)
    section = Pretraining(**values)
    compute = compute_for(experiment.engine, device, experiment.data)
    data, images = load_both(experiment)
    data, images = data.to(device), images.to(device)
    prototype, shape = experiment.prototypes[0], data.images.shape
    image = (shape[1], shape[2], shape[3])
    model = build(prototype.model, image, prototype.options, compute=compute, part=prototype.name)
    predictor = best_backend(compute).predictor(model.features)
    training = Training(
        model.features,
        images,
        feature_width=model.feature_width,
        section=section,
        generator=seeding.torch_generator(0, "pretraining", device=device, part=prototype.name),
        compute=compute,
        key=(prototype.model, tuple(sorted(prototype.options.items()))),
    )
    compared = held_out(data)
    points = []
    for epoch in range(section.epochs + 1):
        if epoch > 0:
            training.epoch()
        if epoch % every == 0 or epoch == section.epochs:
            held, found = (
                probe_h0(predictor, snapshot(model.features), seen, seed=0)
                for seen in (compared, data)
            )
            loss = training.losses[-1] if training.losses else float("nan")
            point = {
                "epoch": epoch,
                "seconds": training.seconds,
                "validation": held.linear,
                **asdict(found),
            }
            points.append(point)
            print(
                f"  epoch {epoch:4d}  {training.seconds:8.1f} s  loss {loss:7.3f}  held out "
                f"{100 * held.linear:5.1f} %"
                f"  test: linear probe {100 * found.linear:5.1f} %",
                flush=True,
            )
    return points


def held_out(data: LabelledData) -> LabelledData:
    """Return data whose test examples are a tenth of the training examples, which are no longer
    among these."""
    order = torch.from_numpy(seeding.generator(0, "probe").permutation(len(data.labels))).to(
        data.labels.device
    )
    held, rest = order[: round(HELD_OUT * len(order))], order[round(HELD_OUT * len(order)) :]
    return replace(
        data,
        images=data.images[rest],
        labels=data.labels[rest],
        test_images=data.images[held],
        test_labels=data.labels[held],
    )


def main(words: Sequence[str] | None = None) -> None:
    """Time every way, then probe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--way",
        action="append",
        choices=[*WAYS, "none"],
        help="may be repeated; all when not given",
    )
    parser.add_argument("--model", help="a row of MODELS")
    parser.add_argument("--images", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument(
        "--timed-epochs", type=int, dest="timed", help="epochs after the first, of which the median"
    )
    parser.add_argument("--recipe", help="whose data is probed; the demo's on a CPU when not given")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument(
        "--variant", action="append", choices=[*VARIANTS, "none"], help="may be repeated"
    )
    parser.add_argument(
        "--epochs", type=int, help="of the probed training; the recipe's when not given"
    )
    parser.add_argument("--every", type=int, default=10, help="epochs between two probes")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)

    device = choose_device(given.device)
    found = {
        "model": given.model,
        "images": given.images,
        "batch_size": given.batch_size,
        "epochs": given.timed,
    }
    chosen = replace(
        DEFAULTS[device.type], **{key: value for key, value in found.items() if value is not None}
    )
    result: dict[str, Any] = {
        "machine": machine_of(device),
        "settings": asdict(chosen),
        "ways": {},
        "probes": {},
    }
    print(json.dumps(result["machine"]), json.dumps(result["settings"]), sep="\n", flush=True)

    def keep() -> None:
        if given.json is not None:
            save_json(given.json, result)

    ways = [way for way in given.way or WAYS if way != "none"]
    if device.type == "cpu":
        ways = [name for name in ways if not WAYS[name].capture]  # there is nothing to capture
    half = [name for name in ways if WAYS[name].precision is torch.bfloat16]
    if half and not has_bf16(device):
        ways = [name for name in ways if name not in half]
        print(f"left out, since this device has no bf16: {', '.join(half)}", file=sys.stderr)
    if ways:
        one = build(chosen.model, chosen.image, {}, compute=Compute(device))
        sample = torch.zeros(8, *chosen.image, dtype=torch.uint8, device=device)
        operations = 2 * chosen.images * operations_of_image(one.features, sample)["train"]
        peak = peak_operations(device, precision="bf16" if device.type == "cuda" else "fp32")
        result["limit_seconds"] = operations / peak
        print(
            f"{operations:.3g} operations an epoch, {peak:.3g} a second at best: "
            f"{operations / peak:.3f} s",
            flush=True,
        )
    for name in ways:
        print(f"{name:<24} ...", end=" ", flush=True)
        try:
            measured = time_way(WAYS[name], chosen, device=device)
        except RuntimeError as error:  # one way that fails leaves the others
            result["ways"][name] = {"error": str(error)[:300]}
            print(f"failed: {str(error).splitlines()[0][:200]}", flush=True)
        else:
            result["ways"][name] = measured
            print(
                f"{measured['epoch']:8.3f} s an epoch  {measured['images_per_second']:10.0f} "
                "images/s"
                f"  first epoch {measured['first_epoch']:7.2f} s  loss {measured['loss']:.3f}"
                f"  {measured['peak_bytes'] / 1e9:.2f} GB",
                flush=True,
            )
        keep()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    recipe = given.recipe or ("demo" if device.type == "cpu" else None)
    if recipe is not None:
        experiment = load_experiment(find_recipe(recipe), overrides=given.overrides)
        for name in [name for name in given.variant or VARIANTS if name != "none"]:
            print(f"{name}: {VARIANTS[name] or 'as the recipe has it'}", flush=True)
            result["probes"][name] = probe_against_time(
                experiment, VARIANTS[name], epochs=given.epochs, every=given.every, device=device
            )
            keep()


if __name__ == "__main__":
    main()
