"""The registry of certainty mechanisms: what a client releases about its data, and how it is
scored."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from fedaux.config import Certainty
from fedaux.privacy.ledger import SCORES
from fedaux.privacy.mean import PrivateMean, UnprotectedMean
from fedaux.privacy.mechanism import (
    Mechanism,
    Noise,
    Public,
    Release,
    SimulatedNoise,
)


def _late(module: str, name: str) -> Callable[[Certainty], Mechanism]:
    """Return a mechanism that is imported when it is used."""

    def build(section: Certainty) -> Mechanism:
        made: Mechanism = getattr(import_module(f"fedaux.privacy.{module}"), name)(section)
        return made

    return build


MECHANISMS: dict[str, Callable[[Certainty], Mechanism]] = {
    "mean": PrivateMean,
    "paper": _late("paper", "PaperRegression"),
    "released-code": _late("released_code", "ReleasedRegression"),
    "none": UnprotectedMean,
    "classes": _late("classes", "ClassSums"),
    "counts": _late("counts", "ClassCounts"),
    "heads": _late("heads", "PrivateHeads"),
}


def what_is_released(section: Certainty) -> str:
    """Return the name of a mechanism's release in the ledger; scores if it is not known."""
    known = section.mechanism in MECHANISMS
    return MECHANISMS[section.mechanism](section).purpose if known else SCORES


UNPROTECTED_MECHANISMS = ("released-code", "none")
"""With an infinite epsilon; the budget of a node that allows them does not cover them."""

__all__ = [
    "MECHANISMS",
    "UNPROTECTED_MECHANISMS",
    "Mechanism",
    "Noise",
    "Public",
    "Release",
    "SimulatedNoise",
    "what_is_released",
]
