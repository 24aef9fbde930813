"""EXPERIMENTS: the paper's results besides tables of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from reproduce import (
    ensemble,
    privacy_grid,
    qualitative,
    robustness,
    similar_images,
    split,
    toy_gaussians,
    toy_iris,
)
from reproduce.document import Document


@dataclass(frozen=True)
class Reproduction:
    """An experiment: `run(context, **options)`, or `run(**options)` if it needs no data."""

    run: Callable[..., Document]
    shows: str
    quick_time: str
    """Measured, on 2 cores."""
    data: tuple[str, ...] = ()
    """The paper's data sets: the clients', then the server's. Without any, there is one version
    only."""
    sweeps: bool = False
    """Whether it is a grid of runs, which devices, processes or a cluster can share."""
    varies: Mapping[str, str] = field(default_factory=dict)
    """The settings that it varies, and the options of `run` that choose their values."""
    one_seed: bool = False
    """Whether it uses the first seed only."""
    unused: tuple[str, ...] = ()
    """Settings of runs, or sections of them, that have no effect on it."""


EXPERIMENTS: dict[str, Reproduction] = {
    "privacy": Reproduction(
        privacy_grid.run,
        "accuracy over epsilon, delta and the settings of each mechanism",
        "2 minutes",
        ("cifar10", "stl10"),
        sweeps=True,
        varies={
            "method": "method",
            "certainty.mechanism": "grids",
            "certainty.epsilon": "grids",
            "certainty.delta": "grids",
            "certainty.sharpness": "grids",
            "certainty.regularisation": "grids",
        },
        unused=("output",),
    ),
    "split": Reproduction(
        split.run,
        "which client holds which classes at four values of alpha",
        "5 seconds",
        ("cifar10",),
        varies={"split.alpha": "alphas"},
        one_seed=True,
        unused=("method", "rounds"),
    ),
    "toy-iris": Reproduction(
        toy_iris.run,
        "weighted ensembles on Iris: plain mean, density-weighted mean, every mechanism",
        "20 seconds",
    ),
    "toy-gaussians": Reproduction(
        toy_gaussians.run,
        "how close certainty weights are to distribution weights; the calibrated sharpness",
        "30 seconds",
    ),
    "similar-images": Reproduction(
        similar_images.run,
        "the public images a client scores highest beside its nearest private ones, with and "
        "without noise",
        "20 seconds",
        ("cifar10", "imagenet32"),
        one_seed=True,
        unused=("method", "rounds"),
    ),
    "qualitative": Reproduction(
        qualitative.run,
        "operations, communication and privacy, counted in a run",
        "20 seconds",
        ("cifar10", "stl10"),
        one_seed=True,
    ),
    "ensemble": Reproduction(
        ensemble.run,
        "ours: accuracy of the teacher itself over heterogeneity, by kind of weights",
        "30 seconds",
        ("cifar10", "stl10"),
        varies={"split.alpha": "alphas", "certainty.mechanism": "mechanisms"},
        unused=("method", "rounds", "participation_rate", "local.objectives"),
    ),
    "robustness": Reproduction(
        robustness.run,
        "ours: fedaux2 beside its peers over heterogeneity, privacy, participation and sizes",
        "10 minutes",
        ("cifar10", "tinyimagenet32"),
        sweeps=True,
        varies={
            "split.alpha": "alphas",
            "participation_rate": "rates",
            "certainty.epsilon": "epsilons",
            "data.size": "sizes",
        },
        unused=("output",),
    ),
}
