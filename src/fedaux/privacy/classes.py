"""Class sums: one noisy sum of features and one noisy count per class.

Public map: u(x), |u(x)| <= 1, of the mechanism `mean`, but of all public features, with shrinkage
of their covariance.

Release: T[c] = sum of (u(x), 1) over the client's examples of class c, shape [C, k + 1], plus
Gaussian noise on all rows. Replacing one example moves T by at most 2 (docs/proofs.md): within a
class the constants cancel and |u - u'| <= 2; between two classes two rows move, by sqrt(2) each. An
example whose label is not in 0 .. C - 1, or whose features are not finite, contributes zero.

Estimate: the server sees T_i + noise of known sigma_i from K clients.
1. Counts. n_ic is estimated by its posterior mean under a prior on [0, max], fitted to all K C
   noisy counts by maximum likelihood (Kiefer & Wolfowitz, 1956).
2. Class means. m_c = sum_i n_ic T_i[c] / sum_i n_ic^2, of noise variance v_c per coordinate: the
   weights of least variance.
3. Shrinkage. P(c) follows from the posterior means of the noisy totals. The shifts e_c = m_c - g
   from the centre g = sum_c P(c) m_c have a prior variance of t_j = a j^-p in the j-th component. a
   and p are fitted by maximum likelihood, and e_cj is multiplied by t_j / (t_j + v_c).
4. Discriminant, with unit covariance before division by the clipping norm b:
   f0(x)_c = b^2 (<e_c, u(x) - g> - |e_c|^2 / 2) + log P(c).
Everything after the release is post-processing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedaux.config import Certainty
from fedaux.privacy.bounds import MOST_COMPONENTS
from fedaux.privacy.gaussian import noise_multiplier
from fedaux.privacy.ledger import CLASS_SUMS
from fedaux.privacy.mean import PrivateMean
from fedaux.privacy.mechanism import (
    Limits,
    Noise,
    Public,
    Release,
    integer_sums,
    number_of_classes,
    require_shapes,
)

SENSITIVITY = 2.0
"""How far replacing one example moves the class sums."""
FLOOR = 1e-6
"""Added to the shares before the logarithm, so that scores stay finite."""
GRID_SPACING = 0.5
"""Between support points of the prior of counts, in units of the noise."""
GRID_POINTS = 512
"""Counts that would need more points are hardly noisy, and are used as they are."""
FITTED_COUNTS = 4096
"""Noisy counts to which the prior is fitted."""
LEAST_SPREAD = 1e-3
"""Smallest standard deviation of the classes' numbers of examples, relative to the largest."""
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Candidates for p."""
SIGNAL = 0.07
"""Variance between class means per whitened component that is expected beforehand."""
TAIL, FLAT = 0.75, 40
"""Class means are expected to vary by TAIL sqrt(R) / (j + FLAT) in whitened component j, with R the
effective rank of the public features. Chosen on ResNet-8 and EfficientNet-lite0, the form with
MiniLM in view (notes/successor.md)."""
USUAL_RANK = 100.0
"""An effective rank, where features are not known yet: 33 is that of ResNet-8, 326 that of
EfficientNet-lite0."""
RELIABLE = 0.6
"""An expected reliability above this is enough for a useful private head."""
HOPELESS = 1 / 3
"""An expected reliability below this is too little even if class means differ three times as much
as SIGNAL says. So they do on the digits: 0.38 is expected of them, and 0.80 is found."""
LEAST_COMPONENTS = 16
"""The number of components is at least this, or the number of classes if that is smaller."""
FEWEST = 0.25
"""Public examples per feature below which the public map is poor."""


@dataclass(frozen=True)
class ClassEstimate:
    """What the releases of K clients tell about C classes, in units of u(x)."""

    centre: Tensor
    """g [k]."""
    shifts: Tensor
    """Shrunk class means less the centre, e [C, k]."""
    scale: Tensor
    """b^2 []."""
    counts: Tensor
    """Estimated numbers of examples n_ic [K, C]."""
    prior: Tensor
    """P(class) [C]."""
    reliability: float
    """rho: signal variance over signal plus noise variance of the class means, in 0 .. 1."""

    @property
    def shares(self) -> Tensor:
        """P(client | class) [K, C]; equal shares of a class that no client seems to hold."""
        totals = self.counts.sum(dim=0)
        equal = torch.full_like(self.counts, 1.0 / len(self.counts))
        return torch.where(totals > 0, self.counts / totals.clamp_min(1e-30), equal)

    def logits(self, projected: Tensor) -> Tensor:
        """Return f0(x) [N, C] of projected features u(x) [N, k]."""
        linear = (projected - self.centre) @ self.shifts.T
        return self.scale * (linear - self.shifts.square().sum(dim=1) / 2) + self.prior.log()


class ClassSums(PrivateMean):
    """Noisy class sums with a linear discriminant."""

    purpose = CLASS_SUMS
    scores = "together"
    is_sum = True

    def __init__(self, section: Certainty) -> None:
        super().__init__(section)
        self._given = section.components

    def publish(
        self, negatives: Tensor, *, num_classes: int = 0, sizes: Sequence[int] = ()
    ) -> Public:
        """Return the map of `mean`, and the number of classes [].

        Raises ValueError without classes, or without both `certainty.components` and the sizes from
        which it follows.
        """
        if num_classes < 1:
            raise ValueError(f"num_classes = {num_classes}: should be at least 1")
        components = self._given
        if components is None:
            components = suitable_components(
                sizes,
                num_classes=num_classes,
                epsilon=self._epsilon,
                delta=self._delta,
                rank=effective_rank(negatives),
            )
        examples, width = negatives.shape
        if examples < FEWEST * width:
            warnings.warn(
                f"{examples} public examples for {width} features, {examples / width:.2g} per "
                f"feature: class sums know few directions of the features well; at least "
                f"{math.ceil(FEWEST * width)} public examples would be better",
                stacklevel=2,
            )
        public = self.whitening_map(negatives, components=components)
        return public | {"classes": torch.tensor(num_classes, device=negatives.device)}

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        """Release the client's class sums [C (k + 1)]; sensitivity 2."""
        if labels is None or tuple(labels.shape) != (len(features),):
            raise ValueError("mechanism classes: needs one label per example")
        rows = functional.pad(self.project(features, public), (0, 1), value=1.0)
        classes = classes_of(public)
        usable = features.isfinite().all(dim=1)
        sums = integer_sums(rows, torch.where(usable, labels, -1), count=classes)
        return self._released(sums.flatten(), "classes", noise, *self._scale(len(features)))

    def _spectrum(self, variances: Tensor, *, num_examples: int) -> Tensor:
        """Return the variances [F] with shrinkage towards their mean."""
        return torch.lerp(variances, variances.mean(), shrinkage(variances, num_examples))

    def limits(self, num_examples: int, public: Public) -> Limits:
        """Return the range of a release: n vectors of norm at most sqrt(2), plus noise."""
        return Limits(math.sqrt(2.0) * num_examples, *self._scale(num_examples))

    def _scale(self, num_examples: int) -> tuple[float, float]:
        """Return sensitivity and sigma, which do not depend on n."""
        return SENSITIVITY, SENSITIVITY * self._multiplier

    def estimate(self, vectors: Tensor, sigmas: Tensor, public: Public) -> ClassEstimate:
        """Return what releases [K, C (k + 1)] with noise sigmas [K] tell about the classes."""
        sums = vectors.double().unflatten(1, (classes_of(public), -1))  # [K, C, k + 1]
        noise = sigmas.double()[:, None]
        counts = denoised_counts(sums[:, :, -1], noise)
        # A class that nobody seems to hold is estimated from all clients, and shrinks to nothing.
        weights = torch.where(counts.sum(dim=0) > 0, counts, 1.0)
        spread = (weights * noise).square().sum(dim=0)  # [C], variance of the weighted sums
        totals = torch.maximum((weights * counts).sum(dim=0), spread.sqrt()).clamp_min(1e-9)
        means = torch.einsum("ic,ick->ck", weights, sums[:, :, :-1]) / totals[:, None]
        variances = spread / totals.square()
        prior = class_prior(sums[:, :, -1].sum(dim=0), variance=float(noise.square().sum()))
        centre = prior @ means
        # The variance of m_c - g: g holds a share P(c) of m_c itself.
        noise_of_shifts = (1 - 2 * prior) * variances + prior.square() @ variances
        shifts, reliability = shrunk(means - centre, noise_of_shifts.clamp_min(0))
        scale = public["bound"].double().square()
        return ClassEstimate(centre, shifts, scale, counts, prior, reliability)

    def log_scores(
        self,
        vectors: Tensor,
        sigmas: Tensor,
        public: Public,
        projected: Tensor,
        *,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Return log s_i(x) = log(sum_c P(i | c) softmax(f0(x))_c + FLOOR) [K, N]."""
        estimate = self.estimate(vectors, sigmas, public)
        beliefs = torch.softmax(estimate.logits(projected.double()), dim=1)
        return torch.log(estimate.shares @ beliefs.T + FLOOR)


def shrinkage(variances: Tensor, num_examples: int) -> float:
    """Return the weight of the mean variance in a covariance with eigenvalues l [F] of n examples.

    It is that of OAS (Chen et al., 2010): (a + m^2) / ((n + 1) (a - m^2 / F)) with m the mean of l
    and a = sum l^2 / F^2, at most 1.
    """
    width, level = len(variances), float(variances.mean()) ** 2
    squares = float(variances.square().sum()) / width**2
    apart = (num_examples + 1) * (squares - level / width)
    return 1.0 if apart <= 0 else min(1.0, (squares + level) / apart)


def classes_of(public: Public) -> int:
    """Return the number of classes of a public map. Raises ValueError if it cannot be one."""
    require_shapes(public, {"whitening": (None, None)})
    return number_of_classes(public, width=public["whitening"].shape[1] + 1)


def denoised_counts(noisy: Tensor, sigmas: Tensor) -> Tensor:
    """Return the posterior means of counts [K, C], given noise of sigmas [K, 1].

    The prior on a grid over [0, max] maximises the likelihood of all counts (by EM).
    """
    highest, spacing = float(noisy.max()), GRID_SPACING * float(sigmas.min())
    if highest <= 0 or spacing * GRID_POINTS < highest:
        return noisy.clamp_min(0.0)
    grid = torch.linspace(0, highest, 2 + int(highest / spacing)).to(noisy)
    values, deviations = noisy.flatten(), sigmas.expand_as(noisy).flatten()
    log_likelihood = -((values[:, None] - grid) / deviations[:, None]).square() / 2
    fitted = log_likelihood[:: 1 + len(values) // FITTED_COUNTS]
    log_prior = torch.full_like(grid, -math.log(len(grid)))
    for _ in range(100):
        posterior = torch.softmax(fitted + log_prior, dim=1)
        log_prior = posterior.mean(dim=0).clamp_min(1e-300).log()
    return (torch.softmax(log_likelihood + log_prior, dim=1) @ grid).reshape(noisy.shape)


def class_prior(totals: Tensor, *, variance: float) -> Tensor:
    """Return P(c) [C] from noisy numbers of examples [C]; `variance` is that of the noise.

    Each number is replaced by its posterior mean. The prior: true numbers are not negative, and
    their standard deviation is log-uniform between LEAST_SPREAD and 1 times m sqrt(C - 1), its
    largest possible value for the mean m. At least half an example per class, so that none is
    ruled out.
    """
    degrees, mean = len(totals) - 1, totals.mean()
    apart, widest = totals - mean, float(mean.clamp_min(0)) * math.sqrt(degrees)
    signals = (torch.logspace(math.log10(LEAST_SPREAD), 0, 256).to(totals) * widest).square()
    both = (signals + variance).clamp_min(1e-30)
    log_likelihood = -(apart.square().sum() / both + degrees * both.log()) / 2
    trusted = torch.softmax(log_likelihood, dim=0) @ (signals / both)
    expected, deviation = mean + trusted * apart, (trusted * variance).sqrt().clamp_min(1e-9)
    # The mean of a normal distribution that is cut off at zero.
    z = (expected / deviation).clamp(-30, 30)
    above = torch.exp(-z.square() / 2 - torch.special.log_ndtr(z)) / math.sqrt(2 * math.pi)
    counts = (expected + deviation * above).clamp_min(0.5)
    return counts / counts.sum()


def shrunk(shifts: Tensor, variances: Tensor) -> tuple[Tensor, float]:
    """Return shifts [C, k], shrunk by the share of noise of variances [C] in them, and rho.

    The signal variance of component j is a j^-p, with the a and p of the highest likelihood.
    """
    noise = variances[:, None]
    if float(noise.max()) <= 0:
        return shifts, 1.0
    typical, width = float(variances.mean()), shifts.shape[1]
    highest = max(float(shifts.square().max()), typical)
    sizes = torch.logspace(math.log10(1e-3 * typical), math.log10(highest), 60).to(shifts)
    order = torch.arange(1, width + 1).to(shifts)
    best, signal = -math.inf, torch.zeros_like(order)
    for exponent in EXPONENTS:
        candidates = sizes[:, None] * order**-exponent  # [60, k]
        total = candidates[:, None, :] + noise.clamp_min(1e-30)  # [60, C, k]
        likelihood = -(shifts.square() / total + total.log()).sum(dim=(1, 2))
        if float(likelihood.max()) > best:
            best, signal = float(likelihood.max()), candidates[int(likelihood.argmax())]
    reliability = float(signal.sum() / (signal.sum() + typical * width))
    return shifts * (signal / (signal + noise)), reliability


def expected_reliability(
    components: int,
    sizes: Sequence[int],
    *,
    num_classes: int,
    held: float,
    epsilon: float,
    delta: float,
) -> float:
    """Return the reliability to expect beforehand: t / (t + v), t = SIGNAL / k.

    If each client holds h of C classes (`held`), a class mean has the variance v = sigma^2 / sum_i
    n_ic^2 = C h sigma^2 / sum_i n_i^2.
    """
    noise = _noise_of_means(sizes, num_classes=num_classes, held=held, epsilon=epsilon, delta=delta)
    return SIGNAL / (SIGNAL + components * noise)


def _noise_of_means(
    sizes: Sequence[int], *, num_classes: int, held: float, epsilon: float, delta: float
) -> float:
    """Return v, the variance of the noise of a class mean per coordinate of u."""
    sigma = SENSITIVITY * noise_multiplier(epsilon=epsilon, delta=delta)
    squares = float(sum(size * size for size in sizes))
    return num_classes * held * sigma**2 / max(squares, 1.0)


def effective_rank(features: Tensor) -> float:
    """Return e^H of features [N, F]; H is the entropy of their components' shares of variance."""
    variances = torch.linalg.eigvalsh(torch.cov(features.double().T)).clamp_min(0)
    shares = variances / variances.sum().clamp_min(1e-30)
    return float(torch.exp(-torch.xlogy(shares, shares).sum()))


def suitable_components(
    sizes: Sequence[int],
    *,
    num_classes: int,
    epsilon: float,
    delta: float,
    rank: float = USUAL_RANK,
) -> int:
    """Return the number of components k for clients of n_i examples: at least one per class, or
    LEAST_COMPONENTS if there are more classes.

    A whitened class mean has noise of variance k v per component, because all components share a
    norm of 1. The last component is the one whose signal equals that: k (k + FLAT) = TAIL sqrt(R) /
    v. How many classes a client holds is not known beforehand: between 1 and C, so sqrt(C) is
    taken.
    Raises ValueError without sizes. The result is public, because all n_i are.
    """
    if not sizes:
        raise ValueError(
            "certainty.components: missing, and the numbers of examples are not known; should be a "
            "whole number, which `fedaux privacy` suggests"
        )
    held = math.sqrt(num_classes)
    noise = _noise_of_means(sizes, num_classes=num_classes, held=held, epsilon=epsilon, delta=delta)
    largest = max(1, MOST_COMPONENTS // num_classes - 1)
    half = FLAT / 2
    most = math.sqrt(half * half + TAIL * math.sqrt(rank) / noise) - half
    return min(largest, max(min(LEAST_COMPONENTS, num_classes), round(most)))
