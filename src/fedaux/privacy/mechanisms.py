"""Certainty scores: what a client releases about its data, once, and how the server weights clients by it.

This package is the only place that adds noise to scores. A mechanism states what its release cost.
"""

from __future__ import annotations

from collections.abc import Callable

from fedaux.config import Certainty
from fedaux.privacy.mean import PrivateMean, unprotected_mean
from fedaux.privacy.mechanism import Mechanism, Noise, Public, Release, SimulatedNoise
from fedaux.privacy.paper import PaperRegression
from fedaux.privacy.released_code import ReleasedRegression

MECHANISMS: dict[str, Callable[[Certainty], Mechanism]] = {
    "mean": PrivateMean,
    "paper": PaperRegression,
    "release": ReleasedRegression,
    "none": unprotected_mean,
}

__all__ = ["MECHANISMS", "Mechanism", "Noise", "Public", "Release", "SimulatedNoise"]
