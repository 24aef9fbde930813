"""The settings for which the proofs of docs/proofs.md hold. A node refuses everything else.

The server chooses these numbers, and a hostile server may choose extreme ones. All bounds are
stated here with their reasons, and use public numbers only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedaux.config import Certainty, Local

MOST_EXAMPLES = 2**26
"""Examples of a client: sums of that many rows on the lattice of `integer_mean` fit 64-bit
integers."""
MOST_COMPONENTS = 2**16
"""Length of a released vector: rounding moves it by at most a 2^-25 of the sensitivity."""
MOST_PARAMETERS = 2**32
"""Parameters trained with DP-SGD: rounding moves a gradient by at most a 2^-9 of the clip bound."""
MOST_STEPS = 2**20
"""Steps of DP-SGD in one update: keeps rounds and their accounting finite."""
MOST_BATCH = 2**20
"""Expected batch size of DP-SGD: sums of that many gradients on the lattice are exact in double
precision."""
MOST_REGRESSION_ERROR = 2.0**37
"""`paper`: N^2 sqrt(F) + N F / sqrt(lambda), N = n + |D-|, below which the gradient's rounding
error is covered."""


@dataclass(frozen=True)
class Bound:
    """The range of one setting and the reason for it."""

    low: float
    high: float
    reason: str

    def problem(self, name: str, value: float) -> str | None:
        """Return the problem of a value; None if it lies in the range."""
        if self.low <= value <= self.high:  # NaN does not
            return None
        return (
            f"{name} = {value:g}: should be between {self.low:g} and {self.high:g}; {self.reason}"
        )


EPSILON = Bound(1e-3, 100.0, "outside, noise is beyond the sampler's range or protects nothing")
DELTA = Bound(1e-12, 0.1, "outside, noise is beyond the sampler's range or protects nothing")
REGULARISATION = Bound(1e-6, 1e6, "outside, the solver could fail for some data and not for others")
COMPONENTS = Bound(1, MOST_COMPONENTS, "the proof of secure noise covers vectors up to this length")
NOISE_MULTIPLIER = Bound(0.1, 1e3, "outside, the accountant or the sampler is not exact")
CLIP = Bound(1e-6, 1e6, "outside, single-precision gradients cannot be clipped to it")
STEPS = Bound(1, MOST_STEPS, "more steps cannot be done, or accounted for, in one update")
BATCH = Bound(1, MOST_BATCH, "sums of larger batches are not exact")


def release_problem(section: Certainty) -> str | None:
    """Return why a release with these settings is outside the proofs; None if it is inside."""
    return _first(
        EPSILON.problem("certainty.epsilon", section.epsilon),
        DELTA.problem("certainty.delta", section.delta),
        COMPONENTS.problem("certainty.components", section.components or 1),
        REGULARISATION.problem("certainty.regularisation", section.regularisation),
    )


def update_problem(section: Local, *, steps: int) -> str | None:
    """Return why DP-SGD with these settings is outside the proofs; None if it is inside or not
    used."""
    if section.privacy is None:
        return None
    return _first(
        NOISE_MULTIPLIER.problem(
            "local.privacy.noise_multiplier", section.privacy.noise_multiplier
        ),
        CLIP.problem("local.privacy.clip", section.privacy.clip),
        DELTA.problem("local.privacy.delta", section.privacy.delta),
        BATCH.problem("local.batch_size", section.batch_size),
        STEPS.problem("local.epochs: steps per update", steps),
    )


def require_size(num_examples: int, *, width: int) -> None:
    """Raise ValueError for a release of more examples or components than the proof covers."""
    if num_examples < 1:
        raise ValueError("a client without examples has nothing to release")
    if num_examples > MOST_EXAMPLES:
        raise ValueError(f"{num_examples} examples: should be between 1 and {MOST_EXAMPLES}")
    if not 1 <= width <= MOST_COMPONENTS:
        raise ValueError(f"a release of {width} numbers: should be between 1 and {MOST_COMPONENTS}")


def require_exact_regression(
    num_rows: int, *, width: int, regularisation: float, mechanism: str = "paper"
) -> None:
    """Raise ValueError for a regression whose rounding error the proof of secure noise does not
    cover."""
    square, linear = math.sqrt(width), width / math.sqrt(regularisation)
    if num_rows**2 * square + num_rows * linear > MOST_REGRESSION_ERROR:
        root = math.sqrt(linear**2 + 4 * square * MOST_REGRESSION_ERROR)
        most = math.floor((root - linear) / (2 * square))
        raise ValueError(
            f"mechanism {mechanism}: a regression of {num_rows} examples on {width} numbers; the "
            f"proof of secure noise covers {most}; use mechanism mean or fewer examples"
        )


def _first(*problems: str | None) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
