"""A distribution over models, fitted to those of the clients, and models drawn from it (FedBE, Chen & Chao 2021)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedaux.config import Bayesian
from fedaux.core.messages import Weights
from fedaux.core.weights import average

STATISTICS = ("running_mean", "running_var")
"""Last names of tensors that are never drawn but averaged: statistics of data, of which a drawn variance can be < 0."""


def draw(
    weights: Sequence[Weights], *, sizes: Sequence[float], section: Bayesian, generator: np.random.Generator
) -> Iterator[Weights]:
    """Yield `samples` models, one at a time, from the distribution that the section names, fitted to the weights."""
    if section.distribution == "dirichlet":
        yield from draw_dirichlet(weights, sizes=sizes, section=section, generator=generator)
    else:
        yield from draw_gaussian(weights, sizes=sizes, section=section, generator=generator)


def draw_gaussian(
    weights: Sequence[Weights], *, sizes: Sequence[float], section: Bayesian, generator: np.random.Generator
) -> Iterator[Weights]:
    """Yield mean + sqrt(scale * variance) * noise, with standard normal noise for every parameter.

    The generator gives one number, the seed of a torch generator on the weights' device: millions of draws stay where
    they are used. They are made tensor by tensor in the order of names, so the same device repeats them.
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
            noise = torch.randn(deviation.shape, generator=source, device=device, dtype=deviation.dtype)
            sample[name] = noise.mul_(deviation).add_(mean[name])
        yield sample


def draw_dirichlet(
    weights: Sequence[Weights], *, sizes: Sequence[float], section: Bayesian, generator: np.random.Generator
) -> Iterator[Weights]:
    """Yield sum_i g_i |D_i| theta_i / sum_j g_j |D_j|, with g from a symmetric Dirichlet distribution."""
    mean = average(weights, sizes=sizes)
    for _ in range(section.samples):
        shares = generator.dirichlet(np.full(len(weights), section.concentration)) * np.asarray(sizes, dtype=float)
        shares /= shares.sum()
        sample = dict(mean)
        for name in _drawn(mean):
            result = torch.zeros_like(mean[name])
            for client_weights, share in zip(weights, shares.tolist(), strict=True):
                result.add_(client_weights[name], alpha=share)
            sample[name] = result
        yield sample


def variance(weights: Sequence[Weights], *, sizes: Sequence[float], mean: Weights) -> Weights:
    """Return sum_i |D_i| (theta_i - mean)^2 / sum_l |D_l| of every parameter, without correction for the mean.

    In double precision: the square of a large weight is no number in single.
    """
    total = float(sum(sizes))
    result = {name: torch.zeros_like(mean[name], dtype=torch.float64) for name in _drawn(mean)}
    for client_weights, size in zip(weights, sizes, strict=True):
        for name, tensor in result.items():
            tensor.add_((client_weights[name] - mean[name]).double().square_(), alpha=size / total)
    return result


def _drawn(weights: Weights) -> list[str]:
    """Return the names of what is drawn: all numbers but counters and statistics of batch normalisation."""
    return [
        name
        for name, tensor in weights.items()
        if tensor.is_floating_point() and name.rpartition(".")[2] not in STATISTICS
    ]
