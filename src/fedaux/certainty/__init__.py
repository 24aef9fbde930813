"""Certainty scores: what a client releases about its data, once, and how the server weights clients by it.

This package is the only place that adds noise to scores. A mechanism states what its release cost.
"""

from __future__ import annotations

from collections.abc import Callable

from fedaux.certainty.mean import PrivateMean, unprotected_mean
from fedaux.certainty.mechanism import Mechanism, Noise, Public, Release, SimulatedNoise
from fedaux.certainty.paper import PaperRegression
from fedaux.certainty.release import ReleasedRegression
from fedaux.config import Certainty

MECHANISMS: dict[str, Callable[[Certainty], Mechanism]] = {
    "mean": PrivateMean,
    "paper": PaperRegression,
    "release": ReleasedRegression,
    "none": unprotected_mean,
}

__all__ = ["MECHANISMS", "Mechanism", "Noise", "Public", "Release", "SimulatedNoise"]
