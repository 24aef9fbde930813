"""The paper's mechanism (Eq. 4 to 6, Theorem 1), with what its proof needs in order to hold.

w_i* = argmin_w J(w), J(w) = a sum_x l(t_x <w, u(x)>) + lambda/2 |w|^2 over D_i (t = +1) and D- (t =
-1), where a = 1 / (|D_i| + |D-|). Three corrections. The norm bound is the largest norm of the
*public* negatives, and private features are clipped to it: a bound computed from private data, as
published, is itself a leak. The loss is log(1 + exp(-z)); with the published sign a client would
score its own data low. The solver stops at a gradient norm of at most `TOLERANCE`, within TOLERANCE
/ lambda of the optimum; that slack is part of the sensitivity, 2 (a + TOLERANCE) / lambda.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedaux.config import Certainty
from fedaux.privacy.bounds import require_exact_regression, require_size
from fedaux.privacy.mechanism import (
    GaussianMechanism,
    Limits,
    Noise,
    Public,
    Release,
    require_shapes,
    within_unit_ball,
)

TOLERANCE = 1e-9
NEWTON_FEATURES = 64
SCORE_FLOOR = 1e-8
"""The paper's xi, which keeps weighted means defined if all scores vanish."""


def sensitivity_of(num_examples: int, num_negatives: int, *, regularisation: float) -> float:
    """Return how far replacing one of n examples moves the weights: 2 (a + TOLERANCE) / lambda."""
    return 2.0 * (1.0 / (num_examples + num_negatives) + TOLERANCE) / regularisation


class Regression(GaussianMechanism):
    """Logistic regression of client data against negatives; the rows of `project` give scores."""

    def __init__(self, section: Certainty) -> None:
        super().__init__(section)
        self._regularisation = section.regularisation

    def log_scores(
        self,
        vectors: Tensor,
        sigmas: Tensor,
        public: Public,
        projected: Tensor,
        *,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Return log s_i(x) = log(1 / (1 + exp(-<w_i, u(x)>)) + xi) [K, N] of projected u(x)."""
        return torch.log(torch.sigmoid(vectors @ projected.T) + SCORE_FLOOR)


class PaperRegression(Regression):
    """Regularised logistic regression of client data against negatives, perturbed at the output."""

    remedy = "raise certainty.epsilon or certainty.regularisation"

    def publish(
        self, negatives: Tensor, *, num_classes: int = 0, sizes: Sequence[int] = ()
    ) -> Public:
        """Return the norm bound [] and the negatives' features divided by it [M, F]."""
        public = {"bound": negatives.double().norm(dim=1).amax().clamp_min(1e-12).float()}
        return public | {"negatives": self.project(negatives, public).float()}

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        """Release the regression's weights; sensitivity 2 (a + TOLERANCE) / lambda."""
        require_shapes(public, {"negatives": (None, features.shape[1])})
        # Negatives are clipped too, so that every client's regression is equally well conditioned.
        positives, negatives = (
            self.project(features, public),
            within_unit_ball(public["negatives"].double()),
        )
        require_size(len(positives), width=positives.shape[1])
        if noise.kind == "secure":
            require_exact_regression(
                len(positives) + len(negatives),
                width=positives.shape[1],
                regularisation=self._regularisation,
            )
        weights = solve(positives, negatives, regularisation=self._regularisation)
        return self._released(weights, "paper", noise, *self._scale(len(positives), len(negatives)))

    def limits(self, num_examples: int, public: Public) -> Limits:
        """Return the range of a release: lambda/2 |w*|^2 <= J(0) = log 2, plus the solver's
        slack and noise."""
        penalty = self._regularisation
        radius = math.sqrt(2.0 * math.log(2.0) / penalty) + TOLERANCE / penalty
        return Limits(radius, *self._scale(num_examples, len(public["negatives"])))

    def noise_share(
        self, num_examples: int, *, feature_width: int, num_negatives: int, num_classes: int
    ) -> float | None:
        """Return sigma sqrt(F) over the largest |w|: at the optimum lambda |w| is a mean of vectors
        of norm <= 1, and J(w) <= J(0) = log 2."""
        penalty = self._regularisation
        signal = min(1.0 / penalty, math.sqrt(2.0 * math.log(2.0) / penalty))
        _, sigma = self._scale(num_examples, num_negatives)
        return sigma * math.sqrt(feature_width) / signal

    def _scale(self, num_examples: int, num_negatives: int) -> tuple[float, float]:
        """Return sensitivity and sigma."""
        sensitivity = sensitivity_of(
            num_examples, num_negatives, regularisation=self._regularisation
        )
        return sensitivity, sensitivity * self._multiplier

    def project(self, features: Tensor, public: Public) -> Tensor:
        """Return u(x) [N, F], the features over the public bound, clipped to norm 1; 0 if
        non-finite."""
        require_shapes(public, {"bound": ()})
        return within_unit_ball(features.double() / public["bound"])


def objective(
    weights: Tensor, positives: Tensor, negatives: Tensor, *, regularisation: float
) -> Tensor:
    """Return J(w) for features [n, F] and [M, F] (Eq. 5)."""
    return _penalised_loss(
        weights, torch.cat([positives, -negatives]), torch.full_like(weights, regularisation)
    )


def solve(positives: Tensor, negatives: Tensor, *, regularisation: float) -> Tensor:
    """Return a point at which the gradient of J has norm at most TOLERANCE, in double precision."""
    inputs = torch.cat([positives, -negatives])
    return minimise(inputs, torch.full_like(inputs[0], regularisation), tolerance=TOLERANCE)


def minimise(inputs: Tensor, penalties: Tensor, *, tolerance: float) -> Tensor:
    """Return w [F] at which the gradient of mean_x l(<w, z_x>) + sum_j p_j w_j^2 / 2 has norm at
    most `tolerance`.

    `inputs` [N, F] holds z_x = t_x u(x) and `penalties` [F] the p_j, both in double precision.
    Newton's method; a step is halved until the gradient's norm falls. Raises ValueError if rounding
    stops it above `tolerance`.
    """
    # A Newton step costs N F^2. With many features, L-BFGS at N F per step is a cheaper start.
    weights = (
        _approach(inputs, penalties)
        if inputs.shape[1] > NEWTON_FEATURES
        else torch.zeros_like(inputs[0])
    )
    gradient, misfit = _gradient(weights, inputs, penalties)
    for _ in range(100):
        norm = float(gradient.norm())
        if norm <= tolerance:
            return weights
        curvature = (inputs.T * (misfit * (1 - misfit))) @ inputs / len(inputs)
        curvature.diagonal().add_(penalties)
        direction, singular = torch.linalg.solve_ex(curvature, gradient)
        step = 1.0
        while not int(singular) and step > 1e-9:
            moved = weights - step * direction
            gradient, misfit = _gradient(moved, inputs, penalties)
            if float(gradient.norm()) <= (1 - 1e-4 * step) * norm:
                break
            step /= 2
        else:
            break
        weights = moved
    raise ValueError(
        f"the regression of the certainty scores stopped at a gradient norm of {norm:.1e}, above "
        f"{tolerance:.0e}; use a larger certainty.regularisation"
    )


def _approach(inputs: Tensor, penalties: Tensor) -> Tensor:
    """Return a point near the minimum, by L-BFGS: at best the square root of the loss's
    precision."""
    weights = torch.zeros_like(inputs[0], requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=200,
        tolerance_grad=1e-5,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = _penalised_loss(weights, inputs, penalties)
        value.backward()
        return value

    optimizer.step(closure)
    return weights.detach()


def _penalised_loss(weights: Tensor, inputs: Tensor, penalties: Tensor) -> Tensor:
    return (
        functional.softplus(-(inputs @ weights)).mean() + 0.5 * (penalties * weights.square()).sum()
    )


def _gradient(weights: Tensor, inputs: Tensor, penalties: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient [F] and the misfits -l'(<w, z_x>) [N]."""
    misfit = torch.sigmoid(-(inputs @ weights))
    return penalties * weights - inputs.T @ misfit / len(inputs), misfit
