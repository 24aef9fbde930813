"""What the authors' released code computes (github.com/fedl-repo/fedaux), for comparison. It is not
private.

(w, b) = argmin sum_x l(t_x (<w, h(x)> / r + b)) + lambda/2 |w|^2 over D_i (t = +1) and D- (t = -1),
where r is the largest norm over D_i *and* D-, and b is free. That is scikit-learn's
LogisticRegression with C = 1 / lambda. Noise of sigma = sqrt(2 ln(1.25 / delta)) 2 / (lambda (|D_i|
+ |D-|) epsilon), the paper's, is added to w and b. Scores use h(x) / r, so the released vector is
(w / r, b), with noise of sigma / r on the first part.

Three things break the paper's claim. The paper bounds the *averaged* loss; with the summed one an
example moves w |D_i| + |D-| times as far. The intercept is not regularised, so the strong convexity
that the proof needs is missing. And r scales the noise: one example of a huge norm leaves w / r
almost without noise, which no epsilon allows. Hence epsilon and sensitivity are stated as infinite
(docs/proofs.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedaux.privacy.mechanism import Limits, Noise, Public, Release
from fedaux.privacy.paper import Regression, minimise


class ReleasedRegression(Regression):
    """Logistic regression on the summed loss, with a free intercept and the client's own norm."""

    def publish(
        self, negatives: Tensor, *, num_classes: int = 0, sizes: Sequence[int] = ()
    ) -> Public:
        """Return the negatives' features [M, F]."""
        return {"negatives": negatives.float()}

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        """Release (w / r, b) [F + 1]; `sigma` is the noise on w and b, before w is divided by r."""
        if len(features) == 0:
            raise ValueError("a client without examples has nothing to release")
        negatives = public["negatives"].double()
        solution, largest = regress(
            features.double(), negatives, regularisation=self._regularisation
        )
        sigma = self._sigma(len(features) + len(negatives))
        vector = noise.perturb(solution, sensitivity=math.inf, sigma=sigma)
        vector[:-1] /= largest
        return Release(vector, "released-code", math.inf, sigma, math.inf, self._delta, noise.kind)

    def limits(self, num_examples: int, public: Public) -> Limits:
        """Return the range of a release (w / r, b), where r is at least the negatives' largest
        norm.

        lambda/2 |w|^2 <= N log 2 of N rows, as at w = b = 0. The optimal b satisfies sum_+
        sigmoid(-z) = sum_- sigmoid(z) with z = <w, x> / r + b, so |b| <= |w| + |log(n / |D-|)|.
        """
        negatives = public["negatives"].double()
        rows = num_examples + len(negatives)
        least = float(negatives.norm(dim=1).amax().clamp_min(1e-12))
        weights = math.sqrt(2.0 * rows * math.log(2.0) / self._regularisation)
        radius = weights / least + weights + abs(math.log(num_examples / len(negatives))) + 1.0
        sigma = self._sigma(rows) * (1.0 + 1.0 / least)
        return Limits(radius, math.inf, sigma)

    def _sigma(self, rows: int) -> float:
        claimed = claimed_sensitivity(rows, regularisation=self._regularisation)
        return claimed * classical_multiplier(epsilon=self._epsilon, delta=self._delta)

    def project(self, features: Tensor, public: Public) -> Tensor:
        """Return the features with a column of ones [N, F + 1]."""
        return _with_ones(features.double())


def regress(
    positives: Tensor, negatives: Tensor, *, regularisation: float
) -> tuple[Tensor, Tensor]:
    """Return (w, b) [F + 1] and r [] of features [n, F] and [M, F] in double precision."""
    largest = torch.cat([positives, negatives]).norm(dim=1).amax().clamp_min(1e-12)
    if not bool(largest.isfinite()):
        raise ValueError("the client's features are not finite")
    inputs = torch.cat([_with_ones(positives / largest), -_with_ones(negatives / largest)])
    penalties = torch.full_like(
        inputs[0], regularisation / len(inputs)
    )  # `minimise` takes the mean loss
    penalties[-1] = 0.0
    return minimise(
        inputs, penalties, tolerance=max(1e-13, 1e-6 * regularisation / len(inputs))
    ), largest


def claimed_sensitivity(num_examples: int, *, regularisation: float) -> float:
    """Return the paper's 2 / (lambda (|D_i| + |D-|)) (Theorem 1), for the examples of both sets."""
    return 2.0 / (regularisation * num_examples)


def classical_multiplier(*, epsilon: float, delta: float) -> float:
    """Return sigma / sensitivity of the classical Gaussian mechanism, proved for epsilon < 1
    only."""
    return math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon


def _with_ones(features: Tensor) -> Tensor:
    return functional.pad(features, (0, 1), value=1.0)
