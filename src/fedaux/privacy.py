"""The ledger: every release of every client with its (epsilon, delta), and their composition."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fedaux.certainty.mechanism import Release

NEIGHBOURS = "data sets that differ by replacing one example; the number of examples n_i is public"
UNPROTECTED = (
    "The model updates of local training are sent without differential privacy. "
    "The (epsilon, delta) stated here covers the certainty scores alone."
)


@dataclass(frozen=True)
class LedgerEntry:
    """One release of one client."""

    client: int
    num_examples: int
    mechanism: str
    purpose: str
    sensitivity: float
    sigma: float
    epsilon: float
    delta: float
    noise: str

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON can hold it; an infinite epsilon is the string "inf"."""
        return asdict(self) | {"epsilon": "inf" if math.isinf(self.epsilon) else self.epsilon}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> LedgerEntry:
        """Read what `to_json` wrote."""
        return LedgerEntry(**(fields | {"epsilon": float(fields["epsilon"])}))


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


def worst_client(entries: Iterable[LedgerEntry]) -> tuple[float, float] | None:
    """Return the largest composed epsilon over the clients, with its delta; None where nothing was released."""
    by_client: dict[int, list[LedgerEntry]] = {}
    for entry in entries:
        by_client.setdefault(entry.client, []).append(entry)
    return max(map(basic_composition, by_client.values()), default=None)
