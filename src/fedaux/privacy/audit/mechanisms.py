"""What can be audited: every registered mechanism, and the paper's claim as published."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fedaux.config import Certainty
from fedaux.privacy.mechanisms import MECHANISMS, Noise, Public, Release
from fedaux.privacy.paper import solve
from fedaux.privacy.released_code import (
    ReleasedRegression,
    claimed_sensitivity,
    classical_multiplier,
    regress,
)


class Auditable(Protocol):
    """The two methods of a mechanism that matter for privacy."""

    def publish(self, negatives: Tensor) -> Public:
        """Derive from the negatives' features [M, F] what clients need."""
        ...

    def release(self, features: Tensor, public: Public, *, noise: Noise) -> Release:
        """Release a vector about the client's features [n, F]."""
        ...


Build = Callable[[Certainty], Auditable]


def auditable() -> dict[str, Build]:
    """Return every registered mechanism, and `published`: the paper's formulas word for word."""
    return {**MECHANISMS, "published": Published}


class FixedNoise:
    """A fixed number of standard deviations in every entry: 0 shows the noiseless vector, 1 the scale of the noise."""

    def __init__(self, deviations: float, *, kind: str = "simulated") -> None:
        self._deviations = deviations
        self.kind = kind

    def perturb(self, vector: Tensor, *, sensitivity: float, sigma: float) -> Tensor:
        """Return vector [k] + deviations * sigma."""
        return vector + self._deviations * sigma


class Published:
    """Theorem 1 word for word: averaged loss, features over the largest norm of D_i and D-, classical noise.

    The norm is left out of the vector, in the paper's favour: it is also needed for the scores, and not protected.
    """

    def __init__(self, section: Certainty) -> None:
        self._section = section

    def publish(self, negatives: Tensor) -> Public:
        """Return the negatives' features [M, F]."""
        return {"negatives": negatives.double()}

    def release(self, features: Tensor, public: Public, *, noise: Noise) -> Release:
        """Release the regression's weights [F] with the claimed sensitivity 2 / (lambda (|D_i| + |D-|))."""
        section, negatives = self._section, public["negatives"]
        largest = torch.cat([features.double(), negatives]).norm(dim=1).amax()
        scaled = features.double() / largest, negatives / largest
        weights = solve(*scaled, regularisation=section.regularisation)
        size = len(features) + len(negatives)
        claimed = claimed_sensitivity(size, regularisation=section.regularisation)
        sigma = claimed * classical_multiplier(epsilon=section.epsilon, delta=section.delta)
        vector = noise.perturb(weights, sensitivity=claimed, sigma=sigma)
        return Release(
            vector, "published", claimed, sigma, section.epsilon, section.delta, noise.kind
        )


class Unfolded(ReleasedRegression):
    """(w, b) of the released code in the units of the paper's claim: before the client's norm is folded into w."""

    def release(self, features: Tensor, public: Public, *, noise: Noise) -> Release:
        """Return (w, b) [F + 1] without noise, beside the sensitivity that the paper claims."""
        negatives = public["negatives"].double()
        vector, _ = regress(features.double(), negatives, regularisation=self._regularisation)
        size = len(features) + len(negatives)
        claimed = claimed_sensitivity(size, regularisation=self._regularisation)
        return Release(vector, "release", claimed, 0.0, math.inf, self._delta, noise.kind)
