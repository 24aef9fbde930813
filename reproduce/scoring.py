"""Certainty mechanisms on points in the plane, for the two toy examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.privacy.mechanisms import MECHANISMS, Noise, SimulatedNoise
from fedaux.report.tables import Table
from reproduce.document import epsilon_text


class NoNoise:
    """No noise: what a mechanism would release at infinite epsilon."""

    kind = "none"

    def perturb(self, vector: Tensor, *, sensitivity: float, sigma: float) -> Tensor:
        """Return the vector unchanged."""
        return vector.clone()


def without_noise(client: int) -> Noise:
    """Return no noise, for any client."""
    return NoNoise()


def seeded_noise(seed: int, *, draw: int) -> Callable[[int], Noise]:
    """Return the seeded noise of each client in one of several draws."""
    return lambda client: SimulatedNoise(
        seeding.generator(seed, "certainty noise", client=client, round=draw)
    )


@dataclass(frozen=True)
class Toy:
    """The points of each client [n_i, F], and public points [M, F]."""

    clients: Sequence[Tensor]
    negatives: Tensor

    def log_scores(
        self, section: Certainty, points: Tensor, *, noise: Callable[[int], Noise] = without_noise
    ) -> Tensor:
        """Return log s_i(x) [K, N] of points [N, F] under h0(x) = (1, x)."""
        mechanism = MECHANISMS[section.mechanism](section)
        public = mechanism.publish(homogeneous(self.negatives))
        sources = [noise(client) for client in range(len(self.clients))]
        releases = [
            mechanism.release(homogeneous(features), public, noise=source)
            for features, source in zip(self.clients, sources, strict=True)
        ]
        # A mechanism must not correct for noise that is not there.
        sigmas = [
            0.0 if source.kind == "none" else release.sigma
            for release, source in zip(releases, sources, strict=True)
        ]
        vectors = torch.stack([release.vector for release in releases])
        projected = mechanism.project(homogeneous(points), public)
        return mechanism.log_scores(vectors, torch.tensor(sigmas).to(vectors), public, projected)

    def variants(
        self, changes: Sequence[Mapping[str, Any]], points: Tensor
    ) -> Iterator[tuple[str, Certainty]]:
        """Yield every mechanism without labels under every change of settings that changes its
        weights, with a name for each."""
        for name, build in MECHANISMS.items():
            if build(Certainty()).scores != "alone":
                continue
            seen: list[Tensor] = []
            for change in changes:
                section = Certainty(mechanism=name, **change)
                weights = torch.softmax(self.log_scores(section, points), dim=0)
                if not any(torch.equal(weights, other) for other in seen):
                    seen.append(weights)
                    yield (
                        ", ".join([name, *(f"{key} {value:g}" for key, value in change.items())]),
                        section,
                    )

    def measure(
        self,
        changes: Sequence[Mapping[str, Any]],
        points: Tensor,
        *,
        judge: Callable[[Tensor], float],
        seed: int,
        epsilons: Sequence[float],
        draws: int,
    ) -> list[dict[str, Any]]:
        """Return one row per mechanism, setting and epsilon: mean, least and largest value of
        `judge` over draws.

        `judge` takes the weights [K, N] of the points.
        """

        def value(section: Certainty, noise: Callable[[int], Noise]) -> float:
            return judge(torch.softmax(self.log_scores(section, points, noise=noise), dim=0))

        rows = []
        for setting, section in self.variants(changes, points):
            kept = promise(section)
            found = {math.inf: [value(section, without_noise)]}
            for epsilon in () if kept == "no noise" else epsilons:
                noisy = section.model_copy(update={"epsilon": epsilon})
                found[epsilon] = [
                    value(noisy, seeded_noise(seed, draw=draw)) for draw in range(draws)
                ]
            rows += [
                {
                    "mechanism": section.mechanism,
                    "setting": setting,
                    "certainty": section.model_dump(exclude={"epsilon"}),
                    "promise": kept,
                    "epsilon": "inf" if math.isinf(epsilon) else epsilon,
                    "mean": float(np.mean(values)),
                    "least": min(values),
                    "largest": max(values),
                }
                for epsilon, values in found.items()
            ]
        return rows


def promise(section: Certainty) -> str:
    """Return the status of a mechanism's epsilon: proved, claimed, or no noise."""
    mechanism = MECHANISMS[section.mechanism](section)
    features = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 3.0]])
    release = mechanism.release(features, mechanism.publish(features), noise=NoNoise())
    if release.sigma == 0:
        return "no noise"
    return "claimed" if math.isinf(release.epsilon) else "proved"


def homogeneous(points: Tensor) -> Tensor:
    """Return h0(x) = (1, x): the constant acts as an intercept; whitening ignores it."""
    return torch.cat([torch.ones(len(points), 1, dtype=points.dtype), points], dim=1)


def square_grid(low: Iterable[float], high: Iterable[float], side: int) -> Tensor:
    """Return the points [side * side, 2] of a grid over a box, row by row."""
    axes = [
        torch.linspace(float(a), float(b), side, dtype=torch.float64)
        for a, b in zip(low, high, strict=True)
    ]
    across, up = torch.meshgrid(*axes, indexing="xy")
    return torch.stack([across.flatten(), up.flatten()], dim=1)


def epsilon_table(
    rows: Sequence[Mapping[str, Any]],
    headers: Mapping[str, str],
    *,
    text: Callable[[Mapping[str, Any]], str],
    caption: str = "",
) -> Table:
    """Return a table with one column per epsilon, after the columns of the keys in `headers`,
    {key: its header}."""
    epsilons = sorted({float(row["epsilon"]) for row in rows})
    lines: dict[tuple[Any, ...], dict[float, str]] = {}
    for row in rows:
        lines.setdefault(tuple(row[key] for key in headers), {})[float(row["epsilon"])] = text(row)
    return Table(
        [*headers.values(), *map(epsilon_text, epsilons)],
        [
            [*key, *(cells.get(epsilon, "–") for epsilon in epsilons)]
            for key, cells in lines.items()
        ],
        caption=caption,
    )
