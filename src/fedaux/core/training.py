"""Local training of many clients of one prototype: what there is to do, and the plain way, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedaux.config import Local
from fedaux.core.compute import Compute
from fedaux.core.local_training import Trained, train_locally
from fedaux.core.messages import Weights
from fedaux.core.weights import load, snapshot
from fedaux.models import SplitModel


@dataclass(frozen=True)
class Workplace:
    """What the clients of one prototype share: data on the device, of which each holds some rows, and settings."""

    model: SplitModel
    inputs: Tensor
    labels: Tensor
    section: Local
    proximal: float
    compute: Compute
    key: str
    """Names the architecture: what is compiled for one model serves all models of the same key."""


@dataclass(frozen=True)
class Job:
    """One client's part of a round."""

    client: int
    rows: Tensor
    """Its examples, as rows of the shared data [n]."""
    generator: np.random.Generator
    """Where the order of its examples comes from."""
    state: Mapping[str, Tensor]
    """The optimizer's tensors of its last round; empty where it starts anew."""


Training = Callable[[Sequence[Job], Weights], Iterator[tuple[Job, Weights, Trained]]]
"""Trains each job from the given weights, in any order."""


def one_by_one(place: Workplace) -> Training:
    """Train one client after another in a plain loop, which the faster ways must equal."""

    def train(jobs: Sequence[Job], weights: Weights) -> Iterator[tuple[Job, Weights, Trained]]:
        for job in jobs:
            load(place.model, weights)
            trained = train_locally(
                place.model,
                place.inputs[job.rows],
                place.labels[job.rows],
                section=place.section,
                proximal=place.proximal,
                generator=job.generator,
                compute=place.compute,
                state=job.state,
            )
            yield job, snapshot(place.model), trained

    return train
