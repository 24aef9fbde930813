"""The ledger: every release of every client with its (epsilon, delta), and their composition."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fedaux.privacy.mechanism import SCORES as SCORES
from fedaux.privacy.mechanism import Release

NEIGHBOURS = "data sets that differ by replacing one example; the number of examples n_i is public"
UNPROTECTED_UPDATES = (
    "The model updates of local training are sent without differential privacy. So are their mean "
    "training losses, the number of examples of a client, and whether it takes part in a round."
)
UNPROTECTED = UNPROTECTED_UPDATES + (
    " An (epsilon, delta) covers what a client releases besides, such as class sums."
)
UNPROTECTED_DATA = "One party holds the examples of all clients. Nothing is protected."
UNPROTECTED_BESIDES_UPDATES = (
    "The number of examples of a client, and whether it takes part in a round, are sent as they "
    "are. Model updates are trained with DP-SGD and are part of the (epsilon, delta) stated here."
)
UNPROTECTED_BESIDES_RELEASES = (
    "The number of examples of a client is sent as it is. No model update leaves a client: the "
    "(epsilon, delta) stated here covers everything else that it sends."
)
CLASS_SUMS = "class sums"
CLASS_COUNTS = "class counts"
HEADS = "linear heads"
UPDATE = "model update"


@dataclass(frozen=True)
class LedgerEntry:
    """One release of one client: Gaussian noise on a vector or, if `steps` is set, on steps of
    DP-SGD."""

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
    """DP-SGD: number of steps, each with noise of sigma on a sum that one example moves by
    `sensitivity`."""
    sampling_probability: float | None = None
    """DP-SGD: probability that an example is part of a step."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry for JSON; an infinite epsilon or sensitivity is the string "inf"."""
        fields = {key: value for key, value in asdict(self).items() if value is not None}
        return {key: "inf" if value == math.inf else value for key, value in fields.items()}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> LedgerEntry:
        """Return the entry that `to_json` wrote."""
        return LedgerEntry(
            **(fields | {key: float(fields[key]) for key in ("epsilon", "sensitivity")})
        )


def entry_of(release: Release, *, client: int, num_examples: int, purpose: str) -> LedgerEntry:
    """Return the ledger entry of a release, as the mechanism stated it."""
    return LedgerEntry(
        *(client, num_examples, release.mechanism, purpose, release.sensitivity),
        *(release.sigma, release.epsilon, release.delta, release.noise),
    )


class Accountant(Protocol):
    """Turns everything that one client has sent into one (epsilon, delta)."""

    def __call__(self, entries: Sequence[LedgerEntry], /) -> tuple[float, float]:
        """Return the cost of all entries of one client together."""
        ...


def basic_composition(entries: Sequence[LedgerEntry], /) -> tuple[float, float]:
    """Return the sums of epsilon and of delta (Dwork & Roth, 2014)."""
    return sum(entry.epsilon for entry in entries), min(1.0, sum(entry.delta for entry in entries))


def worst_client(
    entries: Iterable[LedgerEntry], *, accountant: Accountant = basic_composition
) -> tuple[float, float] | None:
    """Return the largest composed epsilon over clients, with its delta; None if nothing was
    released."""
    by_client: dict[int, list[LedgerEntry]] = {}
    for entry in entries:
        by_client.setdefault(entry.client, []).append(entry)
    return max(map(accountant, by_client.values()), default=None)
