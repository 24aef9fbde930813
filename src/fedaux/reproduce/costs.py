"""How long a study takes on an NVIDIA H200, or with heads alone on one core: an estimate from measured rounds.

Measured (CIFAR-10, 80,000 distill images, bf16, compiled; docs/performance.md): ResNet-8, 8 of 20 clients with 2,500
examples each, a round of 1.32 s; ShuffleNet, 40 of 100 clients with 500 examples each, 9.5 s; MobileNetV2 likewise, 7.9
s. An epoch of SimCLR on 100,000 images: 1.20 s, 2.63 s and 2.83 s (docs/pretraining.md). The rest follows from numbers
of examples; other networks count as ResNet-8. Heads alone need no GPU, so their time is that of one core: about 2 s a
round (32 clients, 20,000 examples, 80,000 distill images: docs/results.md; its parts: docs/log.md) and, once, the
features of h0, 190 images a second in single precision and 480 in bf16 (docs/performance.md). Pretraining h0 on a CPU
has not been timed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedaux.config import Experiment
from fedaux.data.sources import count_auxiliary
from fedaux.methods import METHODS
from fedaux.reading import flatten, read_recipe
from fedaux.reproduce import places, published
from fedaux.reproduce.study import Grid, Study, concerning


@dataclass(frozen=True)
class Pace:
    """Seconds of what a round consists of."""

    training: float
    """An example."""
    teaching: float
    """An example and teacher."""
    distilling: float
    """An example and student."""
    overhead: float
    """Averages, evaluation."""


RESNET8 = Pace(training=0.17 / 20_000, teaching=0.66 / (8 * 80_000), distilling=0.47 / 80_000, overhead=0.02)
MOBILENETV2 = Pace(training=1.78 / 20_000, teaching=3.48 / (40 * 80_000), distilling=2.57 / 80_000, overhead=0.04)
SHUFFLENET = Pace(training=1.25 / 20_000, teaching=5.88 / (40 * 80_000), distilling=2.36 / 80_000, overhead=0.04)
NETWORKS = {"resnet8": RESNET8, "mobilenetv2": MOBILENETV2, "shufflenet": SHUFFLENET}
"""Whole networks on an H200."""
HEADS = Pace(training=0.2 / 20_000, teaching=1.2 / (32 * 80_000), distilling=0.5 / 80_000, overhead=0.0)
"""Heads alone, on one core."""
PRETRAINING = {"resnet8": 1.2 / 100_000, "mobilenetv2": 2.83 / 100_000, "shufflenet": 2.63 / 100_000}
"""Seconds an image and epoch, on an H200."""
FEATURES = {"fp32": 1 / 190, "bf16": 1 / 480}
"""Seconds an image on one core by precision: the features of h0, once for all runs that share it."""
EXAMPLES, TESTED = 50_000, 10_000
PUBLIC = {"stl10": 100_000, "cifar100": 60_000, "svhn": 73_257}


def estimate(study: Study) -> float | None:
    """Return the seconds of all runs of a study as in the paper, or None where nothing comparable was measured.

    With heads alone h0 is not counted, only its features are.
    """
    grid = study.grid
    named = (name for block, column in grid.points() for name in grid.data_of(block, column))
    if any(places.DATA_SETS[name].text for name in named):
        return None
    raw, _ = read_recipe(grid.path())
    recipe, linear = flatten(raw), is_linear(study)
    seen: set[str] = set()
    total = 0.0
    prepared: set[tuple[str, str]] = set()
    for block, column in grid.points():
        for method in raw["method"]:
            changes = concerning(method, {**block.changes, **column.changes})
            key = repr((method, sorted(changes.items(), key=lambda item: item[0]), grid.data_of(block, column)))
            if key in seen:
                continue
            seen.add(key)
            settings = recipe | changes
            public = _public(grid, {**block.changes, **column.changes}, grid.data_of(block, column)[1])
            total += len(raw.get("seeds", [0])) * settings["rounds"] * round_seconds(method, settings, public)
            models = [str(prototype["model"]) for prototype in settings["prototypes"]]
            for model in models if METHODS[method].start == "pretrained" else []:
                if (model, wanted := f"{public}") not in prepared:
                    prepared.add((model, wanted))
                    images = EXAMPLES + TESTED + public
                    h0 = FEATURES["fp32"] * images if linear else 100 * an_epoch(model) * public
                    total += len(raw.get("seeds", [0])) * h0
    return total


def estimate_runs(experiments: Iterable[Experiment]) -> float | None:
    """Return the seconds of runs whose data is at hand, or None where nothing comparable was measured.

    h0 is trained once for all runs that need the same, and not where a checkpoint is given. With heads alone it is not
    counted, but its features are, once.
    """
    total = 0.0
    sizes: dict[str, int | None] = {}
    prepared: set[str] = set()

    def once(seconds: float, *what: object) -> float:
        key = json.dumps(what)
        first = key not in prepared
        prepared.add(key)
        return seconds if first else 0.0

    for experiment in experiments:
        if experiment.text is not None:  # before anything is counted: texts have no images
            return None
        section = experiment.auxiliary
        key = section.model_dump_json()
        public = sizes[key] if key in sizes else sizes.setdefault(key, count_auxiliary(section))
        if public is None:
            return None
        settings = flatten(experiment.to_dict())
        examples = experiment.data.size or EXAMPLES
        pretraining = experiment.pretraining
        for method in experiment.method:
            seconds = experiment.rounds * round_seconds(method, settings, public, examples=examples)
            total += len(experiment.seeds) * seconds
            if METHODS[method].start != "pretrained":
                continue
            for prototype in experiment.prototypes:
                for seed in experiment.seeds:
                    trained = [key, pretraining.model_dump_json(), seed]
                    h0 = [prototype.model_dump_json(), pretraining.checkpoint or trained]
                    if experiment.mode == "linear":
                        an_image = FEATURES["bf16" if experiment.engine.precision == "bf16" else "fp32"]
                        held = examples + (experiment.data.test_size or TESTED)
                        total += once(an_image * held, h0, experiment.data.model_dump_json())
                        total += once(an_image * public, h0, key)
                    elif pretraining.checkpoint is None:
                        total += once(pretraining.epochs * an_epoch(prototype.model) * public, h0)
    return total


def is_linear(study: Study) -> bool:
    """Whether only heads are trained."""
    return bool(read_recipe(study.grid.path())[0].get("mode") == "linear")


def round_seconds(method: str, settings: Mapping[str, Any], public: int, *, examples: int = EXAMPLES) -> float:
    """Return the seconds of a round of a method with these settings and so many public and private examples."""
    row = METHODS[method]
    students = [
        HEADS if settings.get("mode") == "linear" else NETWORKS.get(str(prototype["model"]), RESNET8)
        for prototype in settings["prototypes"]
    ]
    clients = max(1, round(settings["participation_rate"] * settings["split.num_clients"]))
    trained = clients * examples / settings["split.num_clients"] * settings.get("local.epochs", 1)
    # Of every network as many clients as of any other.
    seconds = max(pace.overhead for pace in students) + trained * fmean(pace.training for pace in students)
    if row.teacher is not None:
        teachers = clients + (11 if row.teacher == "bayesian" else 0)
        taught = teachers * fmean(pace.teaching for pace in students)
        seconds += 0.8 * public * (taught + sum(pace.distilling for pace in students))
    return float(seconds)


def an_epoch(model: str) -> float:
    """Return the seconds an image of an epoch of SimCLR."""
    return PRETRAINING.get(model, PRETRAINING["resnet8"])


def _public(grid: Grid, changes: Mapping[str, Any], name: str) -> int:
    if subset := changes.get("auxiliary.wordnet"):
        return int(published.tables()["subsets"][subset][1])
    return PUBLIC[name]


def said_of(runs: Sequence[Experiment]) -> str:
    """Return in words how long runs of one mode, whose data is at hand, take, and where."""
    seconds = estimate_runs(runs)
    if seconds is None:
        return "their time has not been measured"
    (mode,) = {run.mode for run in runs}
    if mode == "full":
        return f"on an H200 {said(seconds)}, an estimate"
    given = all(run.pretraining.checkpoint is not None for run in runs)
    return f"{'' if given else 'h0, then '}on one core {said(seconds)}, an estimate"


def said(seconds: float | None) -> str:
    """Return a time in words."""
    if seconds is None:
        return "not measured"
    if seconds < 1800:
        return f"about {max(1, round(seconds / 60))} min"
    hours = seconds / 3600
    return f"about {hours:.1f} h" if hours < 10 else f"about {hours:.0f} h"
