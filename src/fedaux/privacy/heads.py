"""Private heads: a client's own linear classifier, perturbed at the output (Hoech et al., 2022).

Public map: v(x) = (u(x), 1) / sqrt(2), where u(x) are features less the negatives' mean, divided by
the negatives' median norm and clipped to norm 1; so |v(x)| <= 1.

Release: W [C, F + 1], the minimiser of J(W) = (1/n) sum_x l(W v(x), y) + lambda/2 |W|^2, l being
softmax cross-entropy, plus Gaussian noise. An example whose label is not in 0 .. C - 1, or whose
features are not finite, counts in n and has no loss. Replacing one example moves the solver's W by
at most (sqrt(2 + 6 P) / n + 2 TOLERANCE) / lambda, where P bounds all probabilities that a head
with this lambda can predict (docs/proofs.md).

Penalty: signal and noise both grow with 1 / lambda, but the signal less. lambda is so large that
the noise has a standard deviation of at most NOISE. It depends on n, epsilon and delta, which are
public.

Solver: Nesterov's method from 0. J is lambda-strongly convex with a Lipschitz gradient of L =
lambda + 1/2, so a number of steps that follows from lambda and C alone brings the gradient's norm
below TOLERANCE, for all data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedaux.privacy.bounds import require_exact_regression, require_size
from fedaux.privacy.ledger import HEADS
from fedaux.privacy.mechanism import (
    GaussianMechanism,
    Limits,
    Noise,
    Public,
    Release,
    number_of_classes,
    require_shapes,
    within_unit_ball,
)

TOLERANCE = 1e-9
"""Norm of the gradient at which the solver stops."""
NOISE = 0.2
"""Largest standard deviation of the noise on W; 0.02 to 0.2 are as good on the embedded digits."""
LEAST_PENALTY = 1e-3
"""lambda is at least this, which keeps the solver at about 1,000 steps."""
ATTEMPTS = 10
"""The steps are repeated this often at most; the first time is enough but for rounding."""


def sensitivity_of(num_examples: int, *, num_classes: int, penalty: float) -> float:
    """Return how far replacing one of n examples moves W: (sqrt(2 + 6 P) / n + 2 TOLERANCE) /
    lambda."""
    _, most = largest(num_classes, penalty=penalty)
    return (math.sqrt(2.0 + 6.0 * most) / num_examples + 2.0 * TOLERANCE) / penalty


def penalty_of(num_examples: int, *, multiplier: float) -> float:
    """Return the lambda of a client with n examples: at most NOISE even at P = 1."""
    worst = math.sqrt(8.0) / num_examples + 2.0 * TOLERANCE
    return max(LEAST_PENALTY, multiplier * worst / NOISE)


def largest(num_classes: int, *, penalty: float) -> tuple[float, float]:
    """Return bounds on the minimiser: R on |W|, and P on each probability softmax(W v(x))_c.

    P = 1 / (1 + (C - 1) exp(-R sqrt(C / (C - 1)))), R = sqrt(1 + P) / lambda or, from J(W) <= J(0),
    sqrt(2 log(C P) / lambda). Each follows from the other, starting at P = 1.
    """
    norm, most = math.inf, 1.0
    if num_classes < 2:
        return 0.0, 1.0
    for _ in range(30):
        norm = min(
            math.sqrt(1.0 + most) / penalty,
            math.sqrt(2.0 * max(0.0, math.log(num_classes * most)) / penalty),
        )
        apart = math.exp(-min(700.0, norm * math.sqrt(num_classes / (num_classes - 1))))
        most = 1.0 / (1.0 + (num_classes - 1) * apart)
    return norm, min(1.0, most * (1.0 + 1e-12))


class PrivateHeads(GaussianMechanism):
    """Regularised multinomial logistic regression on clipped features, perturbed at the output."""

    purpose = HEADS
    scores = "none"
    stream = "heads"

    def publish(
        self, negatives: Tensor, *, num_classes: int = 0, sizes: Sequence[int] = ()
    ) -> Public:
        """Return the negatives' mean [F] and median norm [], and the number of classes []."""
        if num_classes < 1:
            raise ValueError(f"num_classes = {num_classes}: should be at least 1")
        features = negatives.double()
        centre = features.mean(dim=0)
        bound = (features - centre).norm(dim=1).median()
        if not bound > 1e-12:
            raise ValueError(
                "more than half of the negatives' features are equal: no scale to clip to"
            )
        public = {"centre": centre.float(), "bound": bound.float()}
        return public | {"classes": torch.tensor(num_classes, device=negatives.device)}

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        """Release the client's W [C (F + 1)], with the sensitivity of `sensitivity_of`."""
        if labels is None or tuple(labels.shape) != (len(features),):
            raise ValueError("mechanism heads: needs one label per example")
        inputs, classes = self.project(features, public), classes_of(public)
        width = classes * inputs.shape[1]
        require_size(len(inputs), width=width)
        penalty, sensitivity, sigma = self._scale(len(inputs), classes)
        if noise.kind == "secure":
            require_exact_regression(
                len(inputs), width=width, regularisation=penalty, mechanism="heads"
            )
        usable = features.isfinite().all(dim=1) & (labels >= 0) & (labels < classes)
        weights = solve(
            inputs, torch.where(usable, labels, -1), num_classes=classes, penalty=penalty
        )
        return self._released(weights.flatten(), "heads", noise, sensitivity, sigma)

    def limits(self, num_examples: int, public: Public) -> Limits:
        """Return the range of a release: the largest |W|, plus the solver's slack and noise."""
        classes = classes_of(public)
        penalty, sensitivity, sigma = self._scale(num_examples, classes)
        radius, _ = largest(classes, penalty=penalty)
        return Limits(radius + TOLERANCE / penalty, sensitivity, sigma)

    def _scale(self, num_examples: int, num_classes: int) -> tuple[float, float, float]:
        """Return lambda, sensitivity and sigma."""
        penalty = penalty_of(num_examples, multiplier=self._multiplier)
        sensitivity = sensitivity_of(num_examples, num_classes=num_classes, penalty=penalty)
        return penalty, sensitivity, sensitivity * self._multiplier

    def project(self, features: Tensor, public: Public) -> Tensor:
        """Return v(x) [N, F + 1], each of norm at most 1, for any features."""
        require_shapes(public, {"centre": (features.shape[1],), "bound": ()})
        clipped = within_unit_ball((features.double() - public["centre"]) / public["bound"])
        return functional.pad(clipped, (0, 1), value=1.0) / math.sqrt(2.0)


def layer_of(vector: Tensor, public: Public) -> tuple[Tensor, Tensor]:
    """Return weight [C, F] and bias [C] of a released W as a linear layer on h0's features."""
    released = vector.double().unflatten(0, (classes_of(public), -1)) / math.sqrt(2.0)
    weight = released[:, :-1] / public["bound"].double()
    return weight.float(), (released[:, -1] - weight @ public["centre"].double()).float()


def classes_of(public: Public) -> int:
    """Return the number of classes of a public map. Raises ValueError if it cannot be one."""
    require_shapes(public, {"centre": (None,)})
    return number_of_classes(public, width=public["centre"].shape[0] + 1)


def num_steps(num_classes: int, *, penalty: float) -> int:
    """Return the steps after which the gradient's norm is at most TOLERANCE / 2 for all data.

    |grad J(W_k)|^2 <= 2 L (J(W_k) - min J) <= 2 L log(C) (1 - sqrt(lambda / L))^k.
    """
    smoothness = penalty + 0.5
    first = 2.0 * smoothness * math.log(max(2, num_classes))
    shrinkage = math.log1p(-math.sqrt(penalty / smoothness))
    return math.ceil(math.log((TOLERANCE / 2) ** 2 / first) / shrinkage)


def solve(inputs: Tensor, labels: Tensor, *, num_classes: int, penalty: float) -> Tensor:
    """Return W [C, D] at which the gradient of J has norm at most TOLERANCE, for inputs [n, D] of
    norm at most 1 and labels [n]; an example of another label than 0 .. C - 1 has no loss.

    The number of steps does not depend on the data.
    """
    known = ((labels >= 0) & (labels < num_classes))[:, None]
    targets = functional.one_hot(torch.where(known[:, 0], labels, 0).long(), num_classes)

    def gradient(weights: Tensor) -> Tensor:
        misfit = torch.softmax(inputs @ weights.T, dim=1) - targets
        return (misfit * known).T @ inputs / len(inputs) + penalty * weights

    smoothness = penalty + 0.5
    root = math.sqrt(penalty / smoothness)
    momentum = (1 - root) / (1 + root)
    weights = ahead = torch.zeros(num_classes, inputs.shape[1]).to(inputs)
    for _ in range(ATTEMPTS):
        for _ in range(num_steps(num_classes, penalty=penalty)):
            before, weights = weights, ahead - gradient(ahead) / smoothness
            ahead = weights + momentum * (weights - before)
        if float(gradient(weights).norm()) <= TOLERANCE:
            return weights
    raise ValueError("the regression of the private head did not converge; this is an error here")
