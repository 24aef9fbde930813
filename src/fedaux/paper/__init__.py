"""The paper's tables, figures and analyses as experiments, each writing a page, tables, numbers and figures.

`STUDIES` are grids of runs, `EXPERIMENTS` the others; `fedaux.paper.command.reproduce(name, request)` runs either
and returns an `Outcome`. In Python, `EXPERIMENTS["toy-iris"].run(out)` does too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedaux.paper import ensemble, privacy_grid, qualitative, similar_images, split, toy_gaussians, toy_iris
from fedaux.paper.writing import Outcome

__all__ = ["EXPERIMENTS", "Outcome", "Reproduction"]


@dataclass(frozen=True)
class Reproduction:
    """An experiment that is no table of runs: `run(out, **options)`, what it shows and needs, how long it takes."""

    run: Callable[..., Outcome]
    shows: str
    time: str
    """Measured on embedded data; on 2 cores."""
    data: tuple[str, ...] = ()
    """Data sets of the paper's version: the clients', then the server's. Without any, there is one version only."""
    takes_base: bool = False
    """Whether `run` takes an `Experiment` as ``base``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the paper's version."""


EXPERIMENTS: dict[str, Reproduction] = {
    "privacy": Reproduction(
        privacy_grid.run,
        shows="accuracy over epsilon, delta and the settings of each mechanism",
        time="2 minutes",
        data=("cifar10", "stl10"),
        takes_base=True,
        options={"grids": privacy_grid.PAPER_GRIDS},
    ),
    "split": Reproduction(
        split.run,
        shows="who holds which classes at four values of alpha",
        time="5 seconds",
        data=("cifar10",),
        takes_base=True,
    ),
    "toy-iris": Reproduction(
        toy_iris.run,
        shows="weighted ensembles on Iris: plain mean, density-weighted mean, every mechanism",
        time="20 seconds",
    ),
    "toy-gaussians": Reproduction(
        toy_gaussians.run,
        shows="how near certainty weights come to distribution weights; the calibrated sharpness",
        time="30 seconds",
    ),
    "similar-images": Reproduction(
        similar_images.run,
        shows="the public images a client scores highest beside its nearest private ones, with and without noise",
        time="20 seconds",
        data=("cifar10", "imagenet32"),
        takes_base=True,
    ),
    "qualitative": Reproduction(
        qualitative.run,
        shows="operations, communication and privacy, counted in a run",
        time="20 seconds",
        data=("cifar10", "stl10"),
        takes_base=True,
    ),
    "ensemble": Reproduction(
        ensemble.run,
        shows="ours: accuracy of the teacher itself over heterogeneity, by kind of weights",
        time="30 seconds",
        data=("cifar10", "stl10"),
        takes_base=True,
    ),
}
