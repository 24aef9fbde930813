"""How long a study takes on an NVIDIA H200: an estimate from the seconds of one measured round.

Measured (CIFAR-10, 20 clients, 8 a round, 2,500 examples each, ResNet-8, 80,000 distill images, bf16, compiled): a
round of 1.89 s, of which training 0.33, teachers 0.67, distillation 0.86 (docs/performance.md), and 1.20 s for an epoch
of SimCLR on 100,000 images (docs/pretraining.md). The rest follows from numbers of examples.
Other networks have not been timed, and count as ResNet-8. Heads alone need no GPU: their time is that of one core
(docs/performance.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fedaux.config import Experiment
from fedaux.data.sources import count_auxiliary
from fedaux.methods import METHODS
from fedaux.reading import flatten, read_recipe
from fedaux.reproduce import places, published
from fedaux.reproduce.study import Grid, Study, concerning

TRAINING = 0.33 / 20_000
"""Seconds an example."""
TEACHING = 0.67 / (8 * 80_000)
"""Seconds an example and teacher."""
DISTILLING = 0.86 / 80_000
OVERHEAD = 0.03
"""Seconds a round: averages, evaluation."""
PRETRAINING = 1.2 / 100_000
"""Seconds an image and epoch."""
HEADS = (0.3, 2.0)
"""Seconds a round of linear mode on one core, 32 clients and 80,000 distill images: without and with distillation."""
HEADS_ONCE = 360.0
"""Seconds for the features of 160,000 images under ResNet-8, in bf16."""
EXAMPLES = 50_000
PUBLIC = {"stl10": 100_000, "cifar100": 60_000, "svhn": 73_257}


def estimate(study: Study) -> float | None:
    """Return the seconds of all runs of a study as in the paper, or None where nothing comparable was measured."""
    grid = study.grid
    named = (name for block, column in grid.points() for name in grid.data_of(block, column))
    if any(places.DATA_SETS[name].text for name in named):
        return None
    raw, _ = read_recipe(grid.path())
    recipe = flatten(raw)
    if is_linear(study):
        rounds = len(raw.get("seeds", [0])) * len(list(grid.points())) * recipe["rounds"]
        return HEADS_ONCE + sum(float(rounds) * HEADS[METHODS[method].teacher is not None] for method in raw["method"])
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
                    total += len(raw.get("seeds", [0])) * 100 * PRETRAINING * public
    return total


def estimate_runs(experiments: Iterable[Experiment]) -> float | None:
    """Return the seconds of runs whose data is at hand, or None where nothing comparable was measured.

    h0 is trained once for all runs that need the same, and not where a checkpoint is given.
    """
    total = 0.0
    sizes: dict[str, int | None] = {}
    prepared: set[str] = set()
    for experiment in experiments:
        section = experiment.auxiliary
        key = section.model_dump_json()
        public = sizes[key] if key in sizes else sizes.setdefault(key, count_auxiliary(section))
        if experiment.text is not None or experiment.mode == "linear" or public is None:
            return None
        settings = flatten(experiment.to_dict())
        examples = experiment.data.size or EXAMPLES
        pretraining = experiment.pretraining
        for method in experiment.method:
            seconds = experiment.rounds * round_seconds(method, settings, public, examples=examples)
            total += len(experiment.seeds) * seconds
            if METHODS[method].start != "pretrained" or pretraining.checkpoint is not None:
                continue
            for prototype in experiment.prototypes:
                for seed in experiment.seeds:
                    h0 = json.dumps([key, prototype.model_dump_json(), pretraining.model_dump_json(), seed])
                    total += 0 if h0 in prepared else pretraining.epochs * PRETRAINING * public
                    prepared.add(h0)
    return total


def is_linear(study: Study) -> bool:
    """Whether only heads are trained."""
    return bool(read_recipe(study.grid.path())[0].get("mode") == "linear")


def round_seconds(method: str, settings: Mapping[str, Any], public: int, *, examples: int = EXAMPLES) -> float:
    """Return the seconds of a round of a method with these settings and so many public and private examples."""
    row = METHODS[method]
    clients = max(1, round(settings["participation_rate"] * settings["split.num_clients"]))
    trained = clients * examples / settings["split.num_clients"] * settings.get("local.epochs", 1)
    seconds = OVERHEAD + TRAINING * trained
    if row.teacher is not None:
        distill = 0.8 * public
        teachers = clients + (11 if row.teacher == "bayesian" else 0)
        students = len(settings["prototypes"])
        seconds += distill * (TEACHING * teachers + DISTILLING * students)
    return float(seconds)


def _public(grid: Grid, changes: Mapping[str, Any], name: str) -> int:
    if subset := changes.get("auxiliary.wordnet"):
        return int(published.tables()["subsets"][subset][1])
    return PUBLIC[name]


def said(seconds: float | None) -> str:
    """Return a time in words."""
    if seconds is None:
        return "not measured"
    if seconds < 1800:
        return f"about {max(1, round(seconds / 60))} min"
    hours = seconds / 3600
    return f"about {hours:.1f} h" if hours < 10 else f"about {hours:.0f} h"
