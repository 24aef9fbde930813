"""The default mechanism: a linear-discriminant density ratio with a private mean.

Public map: centre features on the negatives' mean, keep their leading principal components scaled
to unit variance, clip to the norm c (the negatives' median norm) and divide by c; call the result
u(x), so |u(x)| <= 1.

Release: m_i = mean of u over the client's n_i examples, plus Gaussian noise. Replacing one example
moves the mean by at most 2/n_i, the sensitivity; everything else is public or post-processing.

Score: with unit covariance and d_i = m_i - m_0 (m_0: the negatives' mean of u), the log density
ratio of x between the client and the negatives is c^2 (<d_i, u(x) - m_0> - |d_i|^2 / 2). The log
score is sharpness times that ratio, so that Eq. 3 becomes the distribution-weighted rule of Mansour
et al. (2008).

Shrinkage: noise makes clients look more different than they are. With e_i = d_i - g, g the mean of
the d_j of the K clients, noise alone gives |e_i|^2 a mean of k sigma_i^2 (1 - 1/K). So e_i is first
shrunk by the factor 1 - k sigma_i^2 (1 - 1/K) / mean_j |e_j|^2: clients that differ by no more than
noise are weighted equally.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedaux.config import MEAN_COMPONENTS, Certainty
from fedaux.privacy.gaussian import noise_multiplier
from fedaux.privacy.mechanism import (
    Limits,
    Noise,
    Public,
    Release,
    integer_mean,
    require_shapes,
    within_unit_ball,
)


def sensitivity_of(num_examples: int) -> float:
    """Return how far replacing one example moves a mean of vectors of norm at most 1: 2 / n."""
    return 2.0 / num_examples


def suitable_components(num_examples: int, *, epsilon: float, delta: float) -> int:
    """Return the number of components that suits the noise of a client with n examples: n / m.

    m is the noise multiplier. With more components, noise dominates; with fewer, clients look alike
    (docs/proofs.md). The result is public, because n is.
    """
    return max(1, round(num_examples / noise_multiplier(epsilon=epsilon, delta=delta)))


class PrivateMean:
    """Whitened, clipped, private mean with density-ratio scores."""

    def __init__(self, section: Certainty) -> None:
        self._components = section.components or MEAN_COMPONENTS
        self._sharpness = section.sharpness
        self._epsilon = section.epsilon
        self._delta = section.delta

    def publish(self, negatives: Tensor) -> Public:
        """Return centre [F], map [F, k], clipping norm [] and the negatives' own mean [k]."""
        return self.whitening_map(negatives, components=self._components)

    def whitening_map(self, negatives: Tensor, *, components: int) -> Public:
        """Return the public map of at most `components` principal components."""
        features = negatives.double()
        centre = features.mean(dim=0)
        covariance = (features - centre).T @ (features - centre) / max(1, len(features) - 1)
        variances, directions = torch.linalg.eigh(covariance)  # rising
        # Whitening would amplify directions in which the negatives hardly vary.
        usable = int((variances > 1e-6 * variances[-1].clamp_min(1e-12)).sum())
        keep = min(components, usable)
        if keep == 0:
            raise ValueError("the negatives' features do not vary: pretraining has collapsed")
        whitening = (directions / variances.clamp_min(1e-30).sqrt()).flip(1)[:, :keep]
        bound = ((features - centre) @ whitening).norm(dim=1).median()
        if not bound > 1e-6:  # of whitened features, whose norm is about the root of their number
            raise ValueError(
                "more than half of the negatives' features are equal: no scale to clip to"
            )
        # Single precision halves the message; the rounded map is public, and norms stay clipped.
        public = {"centre": centre.float(), "whitening": whitening.float(), "bound": bound.float()}
        return public | {"mean": self.project(features, public).mean(dim=0).float()}

    def release(self, features: Tensor, public: Public, *, noise: Noise) -> Release:
        """Release the client's mean; sensitivity 2 / n_i."""
        if len(features) == 0:
            raise ValueError("a client without examples has nothing to release")
        mean = integer_mean(self.project(features, public))
        sensitivity, sigma = self._scale(len(features))
        vector = noise.perturb(mean, sensitivity=sensitivity, sigma=sigma)
        return Release(vector, "mean", sensitivity, sigma, self._epsilon, self._delta, noise.kind)

    def limits(self, num_examples: int, public: Public) -> Limits:
        """Return the range of a release: a mean of vectors of norm at most 1, plus noise."""
        return Limits(1.0, *self._scale(num_examples))

    def _scale(self, num_examples: int) -> tuple[float, float]:
        """Return sensitivity and sigma."""
        sensitivity = sensitivity_of(num_examples)
        multiplier = noise_multiplier(epsilon=self._epsilon, delta=self._delta)
        return sensitivity, sensitivity * multiplier

    def project(self, features: Tensor, public: Public) -> Tensor:
        """Return u(x) [N, k], each of norm at most 1, for any features."""
        width = features.shape[1]
        require_shapes(public, {"centre": (width,), "whitening": (width, None), "bound": ()})
        whitened = (
            (features.double() - public["centre"]) @ public["whitening"].double() / public["bound"]
        )
        return within_unit_ball(whitened)

    def log_scores(
        self, vectors: Tensor, sigmas: Tensor, public: Public, projected: Tensor
    ) -> Tensor:
        """Return log s_i(x) [K, N]."""
        shifts = without_noise(vectors - public["mean"], sigmas)
        ratio = shifts @ (projected - public["mean"]).T - shifts.square().sum(dim=1)[:, None] / 2
        return self._sharpness * public["bound"].square() * ratio


def without_noise(shifts: Tensor, sigmas: Tensor) -> Tensor:
    """Return shifts [K, k], shrunk towards their mean by the share of noise in their
    differences."""
    clients, width = shifts.shape
    common = shifts.mean(dim=0)
    differences = shifts - common
    noise = width * sigmas.square() * (1.0 - 1.0 / clients)
    signal = 1.0 - noise / differences.square().sum(dim=1).mean().clamp_min(1e-30)
    return common + signal.clamp_min(0.0)[:, None] * differences


class UnprotectedMean(PrivateMean):
    """The `mean` mechanism without noise, at infinite epsilon: for ablations."""

    def release(self, features: Tensor, public: Public, *, noise: Noise) -> Release:
        """Release the client's mean without noise."""
        if len(features) == 0:
            raise ValueError("a client without examples has nothing to release")
        mean = integer_mean(self.project(features, public))
        return Release(mean, "none", sensitivity_of(len(features)), 0.0, math.inf, 0.0, "none")

    def limits(self, num_examples: int, public: Public) -> Limits:
        """Return the range of a release: a mean of vectors of norm at most 1."""
        return Limits(1.0, sensitivity_of(num_examples), 0.0)
