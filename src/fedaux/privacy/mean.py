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

Shrinkage: errors make clients look more different than they are. d_i is its client's true shift
plus an error of mean square N_i. If true shifts scatter about a centre with mean square t, then
Q = sum_i w_i |d_i - g|^2 with w_i = 1/N_i and g the w-weighted mean has the expectation
K - 1 + t (sum w - sum w^2 / sum w), which gives t, at least 0 (DerSimonian and Laird, 1986). The
best linear estimate of a shift is then g' + (d_i - g') t / (t + N_i), g' being the mean with
weights 1 / (t + N_i). Clients that differ by no more than their errors are weighted equally, and
one with a single example hardly moves from the centre of the others.

Errors: noise gives N_i = k sigma_i^2 = 4 k z^2 / n_i^2, z being the noise multiplier. The sampling
error of a mean of n_i examples is v / n_i, v <= 1 being the mean square of u(x) about its client's
true mean. Noise is larger for n_i < 4 k z^2, which is 360 000 with the default settings and 5 000
at epsilon 1, so `mean` counts noise alone, which is too little with few components and many
examples; `none`, without noise, counts the sampling error. As
|u| <= 1, v is at most 1 minus the mean square of the true means, weighted by n_i; that of the
released means is larger by K v / n with n = sum_i n_i, so
v = (1 - sum_i n_i |m_i|^2 / n) / (1 - K / n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedaux.config import MEAN_COMPONENTS, Certainty
from fedaux.privacy.bounds import COMPONENTS
from fedaux.privacy.gaussian import noise_multiplier
from fedaux.privacy.mechanism import (
    GaussianMechanism,
    Limits,
    Noise,
    Public,
    Release,
    integer_mean,
    products,
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


class PrivateMean(GaussianMechanism):
    """Whitened, clipped, private mean with density-ratio scores."""

    remedy = "raise certainty.epsilon or lower certainty.components"

    def __init__(self, section: Certainty) -> None:
        super().__init__(section)
        self._components = section.components or MEAN_COMPONENTS
        self._sharpness = section.sharpness

    def publish(
        self, negatives: Tensor, *, num_classes: int = 0, sizes: Sequence[int] = ()
    ) -> Public:
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
        variances = self._spectrum(variances, num_examples=len(features))
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

    def _spectrum(self, variances: Tensor, *, num_examples: int) -> Tensor:
        """Return the variances [F] of the negatives, by which components are whitened."""
        return variances

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        """Release the client's mean; sensitivity 2 / n_i."""
        mean = integer_mean(self.project(features, public))
        return self._released(mean, "mean", noise, *self._scale(len(features)))

    def limits(self, num_examples: int, public: Public) -> Limits:
        """Return the range of a release: a mean of vectors of norm at most 1, plus noise."""
        return Limits(1.0, *self._scale(num_examples))

    def noise_share(
        self, num_examples: int, *, feature_width: int, num_negatives: int, num_classes: int
    ) -> float | None:
        """Return sigma sqrt(k) for a mean of vectors of norm 1, of which class sums of a client
        with one class are n times as large."""
        components = min(self._components, feature_width)
        return sensitivity_of(num_examples) * self._multiplier * math.sqrt(components)

    def _scale(self, num_examples: int) -> tuple[float, float]:
        """Return sensitivity and sigma."""
        sensitivity = sensitivity_of(num_examples)
        return sensitivity, sensitivity * self._multiplier

    def project(self, features: Tensor, public: Public) -> Tensor:
        """Return u(x) [N, k], each of norm at most 1, for any features."""
        width = features.shape[1]
        require_shapes(public, {"centre": (width,), "whitening": (width, None), "bound": ()})
        components = public["whitening"].shape[1]
        if (problem := COMPONENTS.problem("the public map's components", components)) is not None:
            raise ValueError(problem)
        centred = features.double() - public["centre"].double()
        return within_unit_ball(products(centred, public["whitening"].double()) / public["bound"])

    def log_scores(
        self,
        vectors: Tensor,
        sigmas: Tensor,
        public: Public,
        projected: Tensor,
        *,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Return log s_i(x) [K, N]."""
        shifts = without_errors(vectors - public["mean"], self.errors(vectors, sigmas, sizes))
        ratio = shifts @ (projected - public["mean"]).T - shifts.square().sum(dim=1)[:, None] / 2
        return self._sharpness * public["bound"].square() * ratio

    def errors(self, vectors: Tensor, sigmas: Tensor, sizes: Tensor | None) -> Tensor:
        """Return the mean square [K] of the noise in released means [K, k]."""
        return vectors.shape[1] * sigmas.square()


def variance_within(means: Tensor, *, sizes: Tensor) -> Tensor:
    """Return v [], the mean square of u about its client's true mean, of means [K, k] of `sizes`
    [K] examples; 1, the maximum, if no client has two examples."""
    total = sizes.sum()
    between = (sizes * means.square().sum(dim=1)).sum() / total
    within = (1.0 - between) / (1.0 - len(sizes) / total).clamp_min(1e-30)
    return torch.where(total > len(sizes), within.clamp(0.0, 1.0), 1.0)


def without_errors(shifts: Tensor, errors: Tensor) -> Tensor:
    """Return shifts [K, k] with errors of mean square [K], shrunk towards their centre by the share
    of errors in their differences."""
    clients = len(shifts)
    errors = errors.to(shifts).clamp_min(1e-30)
    weights = 1.0 / errors
    distances = (shifts - _centre(shifts, weights)).square().sum(dim=1)
    total = weights.sum()
    excess = (weights * distances).sum() - (clients - 1)
    scatter = excess / (total - weights.square().sum() / total).clamp_min(1e-30)
    scatter = scatter.clamp_min(0.0)
    centre = _centre(shifts, 1.0 / (scatter + errors))
    return centre + (scatter / (scatter + errors))[:, None] * (shifts - centre)


def _centre(shifts: Tensor, weights: Tensor) -> Tensor:
    return (weights[:, None] * shifts).sum(dim=0) / weights.sum()


class UnprotectedMean(PrivateMean):
    """The `mean` mechanism without noise, at infinite epsilon: for ablations."""

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        """Release the client's mean without noise."""
        mean = integer_mean(self.project(features, public))
        return Release(mean, "none", sensitivity_of(len(features)), 0.0, math.inf, 0.0, "none")

    def limits(self, num_examples: int, public: Public) -> Limits:
        """Return the range of a release: a mean of vectors of norm at most 1."""
        return Limits(1.0, sensitivity_of(num_examples), 0.0)

    def noise_share(
        self, num_examples: int, *, feature_width: int, num_negatives: int, num_classes: int
    ) -> float | None:
        """Return None: nothing is protected."""
        return None

    def errors(self, vectors: Tensor, sigmas: Tensor, sizes: Tensor | None) -> Tensor:
        """Return the mean square [K] of the sampling error in means [K, k] of `sizes` [K]; 0
        without sizes."""
        if sizes is None:
            return torch.zeros_like(sigmas)
        return variance_within(vectors, sizes=sizes) / sizes
