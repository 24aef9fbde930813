"""CCVR: the head is trained once more, on virtual features of all classes (Luo et al. 2021).

After the last round clients release class sums of the trained features. Virtual features of class c
are drawn from N(mu_c, Sigma), in numbers proportional to P(c). The class means mu_c come from the
private release, the covariance Sigma from public examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedaux import seeding
from fedaux.core.backend import ClientJob, TrainContext
from fedaux.core.local_training import train_locally
from fedaux.core.messages import Clients, ScoreRelease, Weights
from fedaux.core.preparation import class_estimates, mechanism_of, release_scores, users_of
from fedaux.core.task import Preparation, Task, build_models, extract, head_alone
from fedaux.core.weights import clones, load, snapshot
from fedaux.privacy.classes import ClassEstimate
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanism import Public
from fedaux.privacy.mechanisms import publish_map

VIRTUAL_FEATURES = 1000
"""Per class, on average."""


@dataclass(frozen=True)
class Calibration:
    """The calibrated models, and what they cost."""

    weights: Mapping[str, Weights]
    releases: Mapping[int, ScoreRelease]
    wasted: Sequence[LedgerEntry]
    bytes_down: int
    bytes_up: int


def calibrate(
    task: Task,
    preparation: Preparation,
    clients: Clients,
    present: Sequence[int],
    weights: Mapping[str, Weights],
) -> Calibration:
    """Ask clients for class sums of the trained features and train the heads on virtual ones, with
    the settings of local training."""
    extractors = preparation.extractors or {
        name: {
            key.removeprefix("features."): tensor
            for key, tensor in own.items()
            if key.startswith("features.")
        }
        for name, own in weights.items()
    }
    negatives = {name: extract(task, name, extractors[name], task.negatives) for name in weights}
    public: dict[str, Public] = {}
    for name, own in negatives.items():
        sizes = clients.sizes(users_of(task, name, present))
        public[name] = publish_map(
            mechanism_of(task), own, num_classes=task.num_classes, sizes=sizes
        )
    releases, wasted, down, up = release_scores(
        task, clients, present, extractors=extractors, public=public
    )
    calibrated = {name: clones(own) for name, own in weights.items()}  # a checkpoint holds both
    for name, (_, estimate) in class_estimates(task, releases, public).items():
        generator = seeding.generator(task.seed, "virtual features", part=name)
        features, labels = virtual_features(
            estimate, public[name], negatives[name], generator=generator
        )
        model = head_alone(build_models(task)[name])
        load(model, {key: weights[name][key] for key in model.state_dict()})
        context = TrainContext(
            model,
            features,
            labels,
            task.experiment.local,
            proximal=0.0,
            compute=task.compute,
            key="virtual features",
        )
        rows = torch.arange(len(labels), device=labels.device)
        train_locally(context, ClientJob(0, rows, generator, state={}))
        calibrated[name] |= snapshot(model)
    return Calibration(calibrated, releases, wasted, down, up)


def virtual_features(
    estimate: ClassEstimate, public: Public, negatives: Tensor, *, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return features [M, F] and labels [M], for the features of public examples [N, F].

    mu_c = centre + b A (A^T A)^-1 m_c takes a class mean m_c back through the whitening A.
    """
    whitening, bound = public["whitening"].double(), public["bound"].double()
    inverse = whitening @ torch.linalg.inv(whitening.T @ whitening)  # [F, k]
    projected = (estimate.centre + estimate.shifts).to(inverse)
    means = public["centre"].double() + bound * projected @ inverse.T
    apart = negatives.double() - negatives.double().mean(dim=0)
    variances, directions = torch.linalg.eigh(apart.T @ apart / len(apart))
    root = directions * variances.clamp_min(0).sqrt() @ directions.T
    counts = (VIRTUAL_FEATURES * len(means) * estimate.prior).round().long().clamp_min(1)
    labels = torch.repeat_interleave(counts).to(negatives.device)
    noise = torch.from_numpy(generator.standard_normal((len(labels), len(root)))).to(root)
    return (means[labels] + noise @ root).to(negatives), labels
