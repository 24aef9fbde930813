"""CCVR: the head is trained once more, on virtual features of all classes (Luo et al. 2021).

After the last round clients release class sums of the trained features. Virtual features of class c
are drawn from N(mu_c, Sigma), in numbers proportional to P(c). The class means mu_c come from the
private release, the covariance Sigma from public examples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import ExperimentFields
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.algorithms.private_head import class_sums, require_linear_heads
from fedaux.core.asks import Asks
from fedaux.core.backend import ClientJob, TrainContext
from fedaux.core.local_training import train_locally
from fedaux.core.releases import class_estimates
from fedaux.core.server import Server
from fedaux.core.task import State, build_models, head_alone
from fedaux.core.weights import below, clones, load, snapshot
from fedaux.privacy.classes import ClassEstimate
from fedaux.privacy.mechanism import Public

VIRTUAL_FEATURES = 1000
"""Per class, on average."""


@dataclass(frozen=True)
class Ccvr(FedAvg):
    """FedAVG, then heads trained on virtual features, with the settings of local training."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask for a model in every round, and for class sums after the last one."""
        return replace(super().asks(settings), last_releases=(class_sums(settings),))

    def prepare(self, server: Server) -> State:
        """Start as FedAVG does. Raises ValueError if a head is not a linear layer."""
        require_linear_heads(server.task)
        return super().prepare(server)

    def round(self, server: Server, state: State) -> State:
        """Train and average; a head of an earlier last round is out of date."""
        return super().round(server, state).carry("final", {})

    def finish(self, server: Server, state: State) -> State:
        """Calibrate the heads. Raises ValueError if clients have released class sums before."""
        task, section = server.task, class_sums(server.task.experiment)
        if state.releases:
            raise ValueError(
                f"method {self.name}: clients have released class sums after the last round, and "
                "more rounds would need a second release; start a new run"
            )
        extractors = server.preparation.extractors or {
            name: below("features.", own) for name, own in state.models.items()
        }
        found = server.collect(section, extractors=extractors)
        calibrated = {name: clones(own) for name, own in state.models.items()}
        estimates = class_estimates(task, found.releases, found.public, section)
        for name, (_, estimate) in estimates.items():
            negatives = server.features(name, task.negatives, extractors=extractors)
            generator = seeding.generator(task.seed, "virtual features", part=name)
            features, labels = virtual_features(
                estimate, found.public[name], negatives, generator=generator
            )
            model = head_alone(build_models(task)[name])
            load(model, {key: state.models[name][key] for key in model.state_dict()})
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
        return replace(state, releases=found.releases).carry("final", calibrated)


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
