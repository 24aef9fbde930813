"""The mechanisms that can be audited: all registered ones, and the paper's claim as published."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedaux.config import Certainty
from fedaux.privacy.mechanisms import MECHANISMS, Mechanism, Noise, Public, Release
from fedaux.privacy.paper import solve
from fedaux.privacy.released_code import (
    ReleasedRegression,
    claimed_sensitivity,
    classical_multiplier,
    regress,
)

Build = Callable[[Certainty], Mechanism]


def auditable() -> dict[str, Build]:
    """Return every registered mechanism, and `published`: the paper's formulas as printed."""
    return {**MECHANISMS, "published": Published}


class FixedNoise:
    """A fixed number of standard deviations in every entry: 0 gives the noiseless vector."""

    def __init__(self, deviations: float, *, kind: str = "simulated") -> None:
        self._deviations = deviations
        self.kind = kind

    def perturb(self, vector: Tensor, *, sensitivity: float, sigma: float) -> Tensor:
        """Return vector [k] + deviations * sigma."""
        return vector + self._deviations * sigma


class Published(ReleasedRegression):
    """Theorem 1 as printed: averaged loss, features over the largest norm of D_i and D-.

    The norm is left out of the vector, in the paper's favour: scores need it, and it is not
    protected.
    """

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        """Release the weights [F] with the claimed sensitivity 2 / (lambda (|D_i| + |D-|))."""
        both = torch.cat([features.double(), public["negatives"].double()])
        scaled = (both / both.norm(dim=1).amax()).split([len(features), len(public["negatives"])])
        weights = solve(*scaled, regularisation=self._regularisation)
        claimed = claimed_sensitivity(len(both), regularisation=self._regularisation)
        sigma = claimed * classical_multiplier(epsilon=self._epsilon, delta=self._delta)
        vector = noise.perturb(weights, sensitivity=claimed, sigma=sigma)
        return Release(vector, "published", claimed, sigma, self._epsilon, self._delta, noise.kind)


class Unfolded(ReleasedRegression):
    """(w, b) of the released code in the units of the paper's claim: before w is divided by r."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        """Return (w, b) [F + 1] without noise, with the sensitivity that the paper claims."""
        negatives = public["negatives"].double()
        vector, _ = regress(features.double(), negatives, regularisation=self._regularisation)
        size = len(features) + len(negatives)
        claimed = claimed_sensitivity(size, regularisation=self._regularisation)
        return Release(vector, "released-code", claimed, 0.0, math.inf, self._delta, noise.kind)
