"""The ledger: every release of every client with its (epsilon, delta), and their composition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedaux.privacy.mechanism import Release

NEIGHBOURS = "data sets that differ by replacing one example; the number of examples n_i is public"
UNPROTECTED = (
    "The model updates of local training are sent without differential privacy. So are their mean training losses, "
    "the number of examples of a client, and whether it takes part in a round. "
    "The (epsilon, delta) stated here covers the certainty scores alone."
)
UNPROTECTED_BESIDES_UPDATES = (
    "The number of examples of a client, and whether it takes part in a round, are sent as they are. "
    "Model updates are trained with DP-SGD and are part of the (epsilon, delta) stated here."
)
SCORES = "certainty scores"
UPDATE = "model update"


@dataclass(frozen=True)
class LedgerEntry:
    """One release of one client: Gaussian noise on a vector or, where `steps` is set, on each step of DP-SGD."""

    client: int
    num_examples: int
    mechanism: str
    purpose: str
    sensitivity: float
    sigma: float
    epsilon: float
    delta: float
    noise: str
    steps: int | None = None
    """DP-SGD: how many steps, each with noise of sigma on a sum that one example moves by `sensitivity`."""
    sampling_probability: float | None = None
    """DP-SGD: the probability with which an example is part of a step."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON can hold it; an infinite epsilon or sensitivity is the string "inf"."""
        fields = {key: value for key, value in asdict(self).items() if value is not None}
        return {key: "inf" if value == math.inf else value for key, value in fields.items()}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> LedgerEntry:
        """Read what `to_json` wrote."""
        return LedgerEntry(
            **(fields | {key: float(fields[key]) for key in ("epsilon", "sensitivity")})
        )


def entry_of(release: Release, *, client: int, num_examples: int, purpose: str) -> LedgerEntry:
    """Return the ledger entry of a release, as the mechanism stated it."""
    return LedgerEntry(
        client=client,
        num_examples=num_examples,
        mechanism=release.mechanism,
        purpose=purpose,
        sensitivity=release.sensitivity,
        sigma=release.sigma,
        epsilon=release.epsilon,
        delta=release.delta,
        noise=release.noise,
    )


def basic_composition(entries: Iterable[LedgerEntry]) -> tuple[float, float]:
    """Return the (epsilon, delta) of all releases of one client together: the sums (Dwork & Roth, 2014)."""
    listed = list(entries)
    return sum(entry.epsilon for entry in listed), min(1.0, sum(entry.delta for entry in listed))


def worst_client(
    entries: Iterable[LedgerEntry],
    *,
    compose: Callable[[Sequence[LedgerEntry]], tuple[float, float]] = basic_composition,
) -> tuple[float, float] | None:
    """Return the largest composed epsilon over the clients, with its delta; None where nothing was released."""
    by_client: dict[int, list[LedgerEntry]] = {}
    for entry in entries:
        by_client.setdefault(entry.client, []).append(entry)
    return max(map(compose, by_client.values()), default=None)
