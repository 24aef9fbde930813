"""Models drawn from a distribution that is fitted to the clients' models (FedBE, Chen & Chao
2021)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedaux.config import Bayesian
from fedaux.core.messages import Weights
from fedaux.core.weights import average, parameter_names


def draw(
    weights: Sequence[Weights],
    *,
    sizes: Sequence[float],
    section: Bayesian,
    generator: np.random.Generator,
) -> Iterator[Weights]:
    """Yield `samples` models from the distribution that the section names, fitted to the
    weights."""
    if section.distribution == "dirichlet":
        yield from draw_dirichlet(weights, sizes=sizes, section=section, generator=generator)
    else:
        yield from draw_gaussian(weights, sizes=sizes, section=section, generator=generator)


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


def draw_dirichlet(
    weights: Sequence[Weights],
    *,
    sizes: Sequence[float],
    section: Bayesian,
    generator: np.random.Generator,
) -> Iterator[Weights]:
    """Yield sum_i g_i |D_i| theta_i / sum_j g_j |D_j|, g drawn from a symmetric Dirichlet."""
    mean = average(weights, sizes=sizes)
    for _ in range(section.samples):
        shares = generator.dirichlet(np.full(len(weights), section.concentration)) * np.asarray(
            sizes, dtype=float
        )
        shares /= shares.sum()
        sample = dict(mean)
        for name in parameter_names(mean):
            result = torch.zeros_like(mean[name])
            for client_weights, share in zip(weights, shares.tolist(), strict=True):
                result.add_(client_weights[name], alpha=share)
            sample[name] = result
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
