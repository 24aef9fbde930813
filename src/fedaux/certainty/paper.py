"""The paper's mechanism (Eq. 4 to 6, Theorem 1), with what its proof needs in order to hold.

w_i* = argmin_w J(w), J(w) = a sum_x l(t_x <w, u(x)>) + lambda/2 |w|^2 over D_i (t = +1) and D- (t = -1), where
a = 1 / (|D_i| + |D-|).
Three corrections. The norm bound is the largest norm of the *public* negatives, and private features are clipped to
it: a bound that looks at private data, as published, is itself a leak. The loss is log(1 + exp(-z)); with the published
sign a client would score its own data low. The solver stops at a gradient norm of at most `TOLERANCE`, which puts it
within TOLERANCE / lambda of the optimum; that slack is part of the sensitivity, 2 (a + TOLERANCE) / lambda.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedaux.certainty.gaussian import noise_multiplier
from fedaux.certainty.mechanism import Noise, Public, Release
from fedaux.config import Certainty

TOLERANCE = 1e-9
SCORE_FLOOR = 1e-8
"""The paper's xi, which keeps weighted means defined where every score vanishes."""


class PaperRegression:
    """Regularised logistic regression of client data against negatives, perturbed at the output."""

    def __init__(self, section: Certainty) -> None:
        self._epsilon = section.epsilon
        self._delta = section.delta
        self._regularisation = section.regularisation

    def publish(self, negatives: Tensor) -> Public:
        """Return the norm bound [] and the negatives' features divided by it [M, F]."""
        public = {"bound": negatives.double().norm(dim=1).amax().clamp_min(1e-12).float()}
        return public | {"negatives": self.project(negatives, public).float()}

    def release(self, features: Tensor, public: Public, *, noise: Noise) -> Release:
        """Release the regression's weights; sensitivity 2 (a + TOLERANCE) / lambda."""
        if len(features) == 0:
            raise ValueError("a client without examples has nothing to release")
        positives, negatives = self.project(features, public), public["negatives"].double()
        weights = solve(positives, negatives, regularisation=self._regularisation)
        share = 1.0 / (len(positives) + len(negatives))
        sensitivity = 2.0 * (share + TOLERANCE) / self._regularisation
        sigma = sensitivity * noise_multiplier(epsilon=self._epsilon, delta=self._delta)
        vector = weights + noise.gaussian(len(weights), sigma=sigma).to(weights.device)
        return Release(vector, "paper", sensitivity, sigma, self._epsilon, self._delta, noise.kind)

    def project(self, features: Tensor, public: Public) -> Tensor:
        """Return u(x) [N, F], the features over the public bound, clipped to norm 1."""
        scaled = features.double() / public["bound"]
        projected: Tensor = scaled / scaled.norm(dim=1, keepdim=True).clamp_min(1.0)
        return projected

    def log_scores(self, vectors: Tensor, sigmas: Tensor, public: Public, projected: Tensor) -> Tensor:
        """Return log s_i(x) = log(1 / (1 + exp(-<w_i, u(x)>)) + xi) [K, N]."""
        return torch.log(torch.sigmoid(vectors @ projected.T) + SCORE_FLOOR)


def objective(weights: Tensor, positives: Tensor, negatives: Tensor, *, regularisation: float) -> Tensor:
    """Return J(w) for features [n, F] and [M, F] (Eq. 5)."""
    total = functional.softplus(-(positives @ weights)).sum() + functional.softplus(negatives @ weights).sum()
    return total / (len(positives) + len(negatives)) + 0.5 * regularisation * weights.square().sum()


def solve(positives: Tensor, negatives: Tensor, *, regularisation: float) -> Tensor:
    """Return a point at which the gradient of J has norm at most TOLERANCE, in double precision.

    L-BFGS comes near; it cannot come nearer than the square root of the precision of J's value. Newton's steps look at
    gradients only, and from there double the right digits each time.
    """
    weights = torch.zeros(positives.shape[1], dtype=torch.float64, device=positives.device, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=1000, tolerance_grad=1e-7, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(weights, positives, negatives, regularisation=regularisation)
        value.backward()
        return value

    optimizer.step(closure)
    solution = weights.detach()
    inputs = torch.cat([positives, -negatives])  # t_x u(x)
    for _ in range(20):
        misfit = torch.sigmoid(-(inputs @ solution))
        gradient = regularisation * solution - inputs.T @ misfit / len(inputs)
        if float(gradient.norm()) <= TOLERANCE:
            return solution
        curvature = (inputs.T * (misfit * (1 - misfit))) @ inputs / len(inputs)
        curvature.diagonal().add_(regularisation)
        solution = solution - torch.linalg.solve(curvature, gradient)
    raise ValueError(
        f"certainty.regularisation = {regularisation}: the regression stopped at a gradient norm of "
        f"{float(gradient.norm()):.1e}, above the {TOLERANCE:.0e} that the privacy proof allows; use a larger value"
    )
