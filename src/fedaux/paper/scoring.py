"""Any certainty mechanism on features that are at hand: what the toy examples ask of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.privacy.mechanisms import MECHANISMS, Noise, SimulatedNoise


class Silence:
    """Noise that is none: it shows what a mechanism would say if nothing had to be hidden."""

    kind = "none"

    def perturb(self, vector: Tensor, *, sensitivity: float, sigma: float) -> Tensor:
        """Return the vector as it is."""
        return vector.clone()


def log_scores(
    section: Certainty,
    *,
    negatives: Tensor,
    clients: Sequence[Tensor],
    points: Tensor,
    noise: Callable[[int], Noise],
) -> Tensor:
    """Return log s_i(x) [K, N] of points [N, F] for clients that hold features [n_i, F], with the noise of each."""
    mechanism = MECHANISMS[section.mechanism](section)
    public = mechanism.publish(negatives)
    sources = [noise(client) for client in range(len(clients))]
    releases = [
        mechanism.release(features, public, noise=source) for features, source in zip(clients, sources, strict=True)
    ]
    # A mechanism that knows of noise must not correct for noise that was left out.
    sigmas = [
        0.0 if source.kind == "none" else release.sigma for release, source in zip(releases, sources, strict=True)
    ]
    vectors = torch.stack([release.vector for release in releases])
    projected = mechanism.project(points, public)
    return mechanism.log_scores(vectors, torch.tensor(sigmas).to(vectors), public, projected)


def silent(client: int) -> Noise:
    """Return the noise of a client at infinite epsilon."""
    return Silence()


def drawn(seed: int, *, draw: int) -> Callable[[int], Noise]:
    """Return the noise of each client in one of several draws."""
    return lambda client: SimulatedNoise(seeding.generator(seed, "certainty noise", client=client, round=draw))


def promise(section: Certainty) -> str:
    """Say what epsilon means to a mechanism, by the price of a release: proved, claimed, or no noise."""
    mechanism = MECHANISMS[section.mechanism](section)
    features = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 3.0]])
    release = mechanism.release(features, mechanism.publish(features), noise=Silence())
    if release.sigma == 0:
        return "no noise"
    return "claimed" if math.isinf(release.epsilon) else "proved"


def variants(
    changes: Sequence[Mapping[str, Any]], *, weigh: Callable[[Certainty], Tensor]
) -> Iterator[tuple[str, Certainty]]:
    """Yield every mechanism under every change of settings that changes its weights, with a name for each.

    ``weigh`` returns the weights without noise; a change that leaves them as they are does not concern a mechanism.
    """
    for name in MECHANISMS:
        seen: list[Tensor] = []
        for change in changes:
            section = Certainty(mechanism=name, **change)
            weights = weigh(section)
            if not any(torch.equal(weights, other) for other in seen):
                seen.append(weights)
                yield ", ".join([name, *(f"{key} {value:g}" for key, value in change.items())]), section


def homogeneous(points: Tensor) -> Tensor:
    """Return h0(x) = (1, x): the constant gives a regression without intercept one; whitening ignores it."""
    return torch.cat([torch.ones(len(points), 1, dtype=points.dtype), points], dim=1)
