"""The registry of certainty mechanisms: what a client releases about its data, and how it is
scored."""

from __future__ import annotations

from collections.abc import Callable

from fedaux.config import Certainty
from fedaux.privacy.classes import ClassSums
from fedaux.privacy.ledger import SCORES, purpose_of
from fedaux.privacy.mean import PrivateMean, UnprotectedMean
from fedaux.privacy.mechanism import (
    Mechanism,
    Noise,
    Public,
    Release,
    SimulatedNoise,
    publish_map,
    release_of,
    takes_features,
    takes_labels,
)


def paper_regression(section: Certainty) -> Mechanism:
    """Return the paper's printed mechanism; imported late, because few use it."""
    from fedaux.privacy.paper import PaperRegression

    return PaperRegression(section)


def released_code(section: Certainty) -> Mechanism:
    """Return the authors' mechanism; imported late, because few use it."""
    from fedaux.privacy.released_code import ReleasedRegression

    return ReleasedRegression(section)


def class_counts(section: Certainty) -> Mechanism:
    """Return the mechanism of label counts; imported late, because few use it."""
    from fedaux.privacy.counts import ClassCounts

    return ClassCounts(section)


def private_heads(section: Certainty) -> Mechanism:
    """Return the mechanism of private heads; imported late, because few use it."""
    from fedaux.privacy.heads import PrivateHeads

    return PrivateHeads(section)


MECHANISMS: dict[str, Callable[[Certainty], Mechanism]] = {
    "mean": PrivateMean,
    "paper": paper_regression,
    "released-code": released_code,
    "none": UnprotectedMean,
    "classes": ClassSums,
    "counts": class_counts,
    "heads": private_heads,
}


def what_is_released(section: Certainty) -> str:
    """Return what a mechanism releases, in the words of the ledger; scores if it is not known."""
    known = section.mechanism in MECHANISMS
    return purpose_of(MECHANISMS[section.mechanism](section)) if known else SCORES


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
    "publish_map",
    "release_of",
    "takes_features",
    "takes_labels",
    "what_is_released",
]
