"""Label counts: one noisy number of examples per class, and nothing about features.

Public map: the number of classes C.

Release: n_c = the client's number of examples of class c, shape [C], plus Gaussian noise. Replacing
one example moves the counts by at most sqrt(2): it takes one from a class and adds one to another
(docs/proofs.md). An example whose label is not in 0 .. C - 1 counts nowhere.

Estimate: posterior means of the counts, and P(c), as for class sums (`privacy/classes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedaux.privacy.classes import ClassEstimate, class_prior, denoised_counts
from fedaux.privacy.ledger import CLASS_COUNTS
from fedaux.privacy.mechanism import (
    GaussianMechanism,
    Limits,
    Noise,
    Public,
    Release,
    integer_sums,
    number_of_classes,
)

SENSITIVITY = math.sqrt(2.0)
"""How far replacing one example moves the counts."""


class ClassCounts(GaussianMechanism):
    """Noisy numbers of examples per class."""

    purpose = CLASS_COUNTS
    reads_features = False
    scores = "none"
    is_sum = True

    def publish(
        self, negatives: Tensor, *, num_classes: int = 0, sizes: Sequence[int] = ()
    ) -> Public:
        """Return the number of classes []."""
        if num_classes < 1:
            raise ValueError(f"num_classes = {num_classes}: should be at least 1")
        return {"classes": torch.tensor(num_classes, device=negatives.device)}

    def release(
        self, features: Tensor, public: Public, *, noise: Noise, labels: Tensor | None = None
    ) -> Release:
        """Release the client's counts [C]; sensitivity sqrt(2). Only the number of features' rows
        matters."""
        if labels is None or tuple(labels.shape) != (len(features),):
            raise ValueError("mechanism counts: needs one label per example")
        ones = torch.ones(len(labels), 1, dtype=torch.float64, device=labels.device)
        counts = integer_sums(ones, labels, count=number_of_classes(public, width=1)).flatten()
        return self._released(counts, "counts", noise, *self._scale())

    def limits(self, num_examples: int, public: Public) -> Limits:
        """Return the range of a release: n examples of one class, plus noise."""
        return Limits(float(num_examples), *self._scale())

    def noise_share(
        self, num_examples: int, *, feature_width: int, num_negatives: int, num_classes: int
    ) -> float | None:
        """Return sigma sqrt(C) over n."""
        return SENSITIVITY / num_examples * self._multiplier * math.sqrt(num_classes)

    def _scale(self) -> tuple[float, float]:
        """Return sensitivity and sigma, which do not depend on n."""
        return SENSITIVITY, SENSITIVITY * self._multiplier

    def estimate(self, vectors: Tensor, sigmas: Tensor, public: Public) -> ClassEstimate:
        """Return what releases [K, C] with noise sigmas [K] tell; of class means, nothing."""
        noisy, noise = vectors.double(), sigmas.double()[:, None]
        prior = class_prior(noisy.sum(dim=0), variance=float(noise.square().sum()))
        spread = float(noisy.var(correction=0))
        reliability = 1.0 - float(noise.square().mean()) / spread if spread > 0 else 0.0
        return ClassEstimate(
            centre=noisy.new_zeros(0),
            shifts=noisy.new_zeros(noisy.shape[1], 0),
            scale=noisy.new_ones(()),
            counts=denoised_counts(noisy, noise),
            prior=prior,
            reliability=max(0.0, reliability),
        )

    def project(self, features: Tensor, public: Public) -> Tensor:
        """Return no numbers [N, 0]: counts say nothing about features."""
        return features.new_zeros(len(features), 0)
