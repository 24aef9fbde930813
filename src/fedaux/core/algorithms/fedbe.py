"""FedBE (Chen & Chao 2021): the teacher also asks models drawn from a distribution that is fitted
to the clients' models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedaux.config import Bayesian
from fedaux.core.algorithms.feddf import FedDF
from fedaux.core.messages import Member, Weights
from fedaux.core.server import NO_CLIENT, Server
from fedaux.core.soft_labels import Mix, share_weights
from fedaux.core.task import State
from fedaux.core.weights import average, parameter_names


@dataclass(frozen=True)
class FedBE(FedDF):
    """Distill the mean of the probabilities of clients and drawn models.

    For each prototype, a distribution is fitted to its members' weights. The drawn models and the
    members' average count as much as a client with share 1; so do the clients' own models, unless
    `bayesian.include_clients` is off. Members of which only predictions are remembered count as
    clients and are not part of the distribution.
    """

    mix: Mix = "probabilities"

    def soft_labels(self, server: Server, state: State, members: Sequence[Member]) -> Tensor:
        """Return the mean over clients and drawn models [N, C]."""
        section = server.task.experiment.bayesian
        generator = server.generator("bayesian")
        drawn: list[Member] = []
        for name in sorted({member.prototype for member in members}):
            group = [
                one for one in members if one.prototype == name and one.weights and one.share > 0
            ]
            if group:
                drawn += drawn_members(group, section=section, generator=generator)
        everyone = [*(members if section.include_clients else ()), *server.predict(drawn)]
        return server.mix(everyone, share_weights(everyone), of=self.mix)


def drawn_members(
    group: Sequence[Member], *, section: Bayesian, generator: np.random.Generator
) -> Iterator[Member]:
    """Yield the average of a prototype's members, then the drawn models."""
    weights = [member.weights for member in group]
    sizes = [member.num_examples * member.share for member in group]
    prototype, examples = group[0].prototype, sum(member.num_examples for member in group)
    yield Member(NO_CLIENT, prototype, examples, average(weights, sizes=sizes))
    for sample in draw_gaussian(weights, sizes=sizes, section=section, generator=generator):
        yield Member(NO_CLIENT, prototype, examples, sample)


def draw_gaussian(
    weights: Sequence[Weights],
    *,
    sizes: Sequence[float],
    section: Bayesian,
    generator: np.random.Generator,
) -> Iterator[Weights]:
    """Yield mean + sqrt(scale * variance) * noise, with standard normal noise for every parameter.

    Statistics of batch normalisation are averaged: a drawn variance could be negative.
    The generator seeds a torch generator on the weights' device. Tensors are drawn in the order of
    their names, so a device repeats its draws.
    """
    mean = average(weights, sizes=sizes)
    deviations = {
        name: tensor.mul_(section.scale).sqrt_().to(mean[name].dtype)
        for name, tensor in variance(weights, sizes=sizes, mean=mean).items()
    }
    device = next(iter(mean.values())).device
    source = torch.Generator(device=device).manual_seed(int(generator.integers(2**63)))
    for _ in range(section.samples):
        sample = dict(mean)
        for name, deviation in sorted(deviations.items()):
            noise = torch.randn(
                deviation.shape, generator=source, device=device, dtype=deviation.dtype
            )
            sample[name] = noise.mul_(deviation).add_(mean[name])
        yield sample


def variance(weights: Sequence[Weights], *, sizes: Sequence[float], mean: Weights) -> Weights:
    """Return sum_i |D_i| (theta_i - mean)^2 / sum_l |D_l| of every parameter, uncorrected.

    In double precision: the square of a large weight overflows single precision.
    """
    total = float(sum(sizes))
    result = {
        name: torch.zeros_like(mean[name], dtype=torch.float64) for name in parameter_names(mean)
    }
    for client_weights, size in zip(weights, sizes, strict=True):
        for name, tensor in result.items():
            tensor.add_((client_weights[name] - mean[name]).double().square_(), alpha=size / total)
    return result
