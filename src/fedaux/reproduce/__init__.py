"""The paper's figures and analyses as experiments that run in seconds to minutes, each writing figures and numbers.

`EXPERIMENTS["toy-iris"].run(out)` writes NAME.md, NAME.json and figures into a directory and returns an `Outcome`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedaux.reproduce import ensemble, privacy_grid, similar_images, toy_gaussians, toy_iris
from fedaux.reproduce.writing import Outcome

__all__ = ["EXPERIMENTS", "Outcome", "Reproduction"]


@dataclass(frozen=True)
class Reproduction:
    """An experiment: `run(out, **options)`, what it shows, what data it needs, how long it takes on two slow cores."""

    run: Callable[..., Outcome]
    shows: str
    data: str
    time: str
    takes_base: bool = False
    """Whether `run` takes an `Experiment` as ``base``."""


EXPERIMENTS: dict[str, Reproduction] = {
    "toy-iris": Reproduction(
        toy_iris.run,
        shows="weighted ensembles on Iris: plain mean, density-weighted mean, every mechanism",
        data="Iris, with scikit-learn",
        time="20 seconds",
    ),
    "toy-gaussians": Reproduction(
        toy_gaussians.run,
        shows="how near certainty weights come to distribution weights; the calibrated sharpness",
        data="drawn",
        time="30 seconds",
    ),
    "privacy-grid": Reproduction(
        privacy_grid.run,
        shows="accuracy over epsilon, delta and the settings of each mechanism",
        data="the embedded demo, or any recipe's",
        time="2 minutes; cells are kept and not run again",
        takes_base=True,
    ),
    "ensemble": Reproduction(
        ensemble.run,
        shows="accuracy of the teacher itself over heterogeneity, by kind of weights",
        data="the embedded demo, or any recipe's",
        time="30 seconds",
        takes_base=True,
    ),
    "similar-images": Reproduction(
        similar_images.run,
        shows="the public images a client scores highest beside its nearest private ones",
        data="the embedded demo, or any recipe's",
        time="20 seconds",
        takes_base=True,
    ),
}
