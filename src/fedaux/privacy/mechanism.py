"""The interface of certainty mechanisms: publish, release, score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedaux.privacy.bounds import require_size

Public = dict[str, Tensor]
"""What a mechanism derives from public data alone and sends to every client."""


@dataclass(frozen=True)
class Release:
    """What a client releases, with its privacy cost.

    `sensitivity` is the proved bound on the l2 distance between the noiseless vectors of
    neighbouring data sets: those that differ by replacing one example, the number of examples being
    public.
    """

    vector: Tensor
    mechanism: str
    sensitivity: float
    sigma: float
    epsilon: float
    delta: float
    noise: str


class Noise(Protocol):
    """A source of Gaussian noise; `kind` is "simulated" or "secure"."""

    kind: str

    def perturb(self, vector: Tensor, *, sensitivity: float, sigma: float) -> Tensor:
        """Return vector [k] + N(0, sigma^2 I), as private as that for every epsilon >= 0.

        `sensitivity` bounds the l2 distance between vectors of neighbours; sources that round need
        it.
        """
        ...


class SimulatedNoise:
    """Seeded noise for simulations: reproducible, so without protection, as the ledger states."""

    kind = "simulated"

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def perturb(self, vector: Tensor, *, sensitivity: float, sigma: float) -> Tensor:
        """Return vector [k] + N(0, sigma^2 I), drawn in double precision."""
        return vector + torch.from_numpy(self._generator.normal(0.0, sigma, len(vector))).to(
            vector.device
        )


class Mechanism(Protocol):
    """One way to release certainty. `release` runs where the data is; the rest needs public data
    and releases."""

    def publish(self, negatives: Tensor) -> Public:
        """Derive from the negatives' features [M, F] what clients need (server)."""
        ...

    def release(self, features: Tensor, public: Public, *, noise: Noise) -> Release:
        """Release a vector about the client's features [n, F] (client)."""
        ...

    def project(self, features: Tensor, public: Public) -> Tensor:
        """Prepare public features [N, F] for scoring, once (server)."""
        ...

    def log_scores(
        self,
        vectors: Tensor,
        sigmas: Tensor,
        public: Public,
        projected: Tensor,
        *,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Return log s_i(x) [K, N] of released vectors [K, D] with noise sigmas [K] on projected
        features (server); `sizes` [K] are the clients' numbers of examples."""
        ...


def require_shapes(public: Public, expected: Mapping[str, tuple[int | None, ...]]) -> None:
    """Raise ValueError where a tensor of the public map has another shape; None stands for any
    length.

    The map comes from the server. Broadcasting by another shape could make one example part of many
    rows, or lay examples along the axis that is cut to norm 1, and no sensitivity would hold.
    """
    for name, shape in expected.items():
        held = tuple(public[name].shape) if name in public else None
        if (
            held is None
            or len(held) != len(shape)
            or any(w not in (None, h) for h, w in zip(held, shape, strict=True))
        ):
            raise ValueError(f"the public map's tensor {name} is missing or has the wrong shape")


def within_unit_ball(rows: Tensor) -> Tensor:
    """Return rows [N, k] clipped to norm 1; non-finite rows, and rows whose norm overflows, become
    0.

    The map comes from the server. If it overflows on some examples, the client must not fail: the
    failure would reveal them without noise.
    """
    numbers = torch.where(rows.isfinite().all(dim=1, keepdim=True), rows, 0.0)
    cut: Tensor = numbers / numbers.norm(dim=1, keepdim=True).clamp_min(1.0)
    return cut


def integer_mean(rows: Tensor) -> Tensor:
    """Return the mean [k] of rows [n, k] of norm at most 1, summed exactly.

    Each coordinate is rounded to a multiple of 2^-32 and summed as integers, so that the error does
    not grow with n. `bounds` states the n and k for which the sums fit.
    """
    require_size(len(rows), width=rows.shape[1])
    total = (rows * 2.0**32).round().to(torch.int64).sum(dim=0)
    return total.double() / (2.0**32 * len(rows))
