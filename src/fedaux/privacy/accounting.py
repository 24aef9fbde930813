"""The total cost of a client's releases, by privacy loss distributions (Google's dp-accounting).

Neighbours differ by replacing one example. A Gaussian release is the pair N(0, sigma^2),
N(sensitivity, sigma^2). A step of DP-SGD with clipping norm C and sampling probability q is
dominated by the pair (1-q) N(0, sigma^2) + q N(C, sigma^2), (1-q) N(0, sigma^2) + q N(-C, sigma^2)
(proof: docs/proofs.md). Losses of a composition add up, so their distribution is a convolution;
rounding is always upwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedaux.formatting import install_hint, interval, privacy_budget
from fedaux.privacy.gaussian import epsilon_of
from fedaux.privacy.ledger import SCORES, Accountant, LedgerEntry, basic_composition

LOSS_SPACING = 5e-4
"""Spacing of the grid of privacy losses, which are rounded up; coarser if noise is small."""


class MissingAccountantError(ValueError):
    """dp-accounting is not installed."""


@dataclass(frozen=True)
class Query:
    """One use of Gaussian noise: a release or, with a sampling probability, a step of DP-SGD.

    `noise_multiplier` is sigma over the distance between neighbours for a release and, as is
    customary, sigma over the clipping norm, half that distance, for a step of DP-SGD.
    """

    noise_multiplier: float
    sampling_probability: float | None = None


def query_of(entry: LedgerEntry) -> Query:
    """Return the query of a ledger entry, or of each of its steps."""
    if entry.steps is None:
        return Query(entry.sigma / entry.sensitivity)
    assert entry.sampling_probability is not None, "an entry with steps has a sampling probability"
    return Query(2.0 * entry.sigma / entry.sensitivity, entry.sampling_probability)


def tight_composition(*, delta: float) -> Accountant:
    """Return the accountant by privacy loss distributions, at one delta.

    Never above basic composition if that holds at this delta; infinite if a release was not
    protected. It raises ValueError for entries of several clients, and if dp-accounting is not
    installed.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta = {delta}: should lie between 0 and 1")

    def cost(entries: Sequence[LedgerEntry], /) -> tuple[float, float]:
        if len({entry.client for entry in entries}) > 1:
            raise ValueError("entries of several clients: compose each client's entries separately")
        if any(math.isinf(entry.epsilon) for entry in entries):
            return math.inf, delta
        counts: Counter[Query] = Counter()
        for entry in entries:
            counts[query_of(entry)] += 1 if entry.steps is None else entry.steps
        tight = composed_epsilon(counts, delta=delta)
        epsilon, spent = basic_composition(entries)
        return min(tight, epsilon) if spent <= delta else tight, delta

    return cost


def total_cost(entries: Sequence[LedgerEntry], /) -> tuple[float, float]:
    """Return one (epsilon, delta) for everything that one client has sent.

    One release has its own price. Several have the exact price of their composition, at the largest
    delta of any entry: Gaussian releases at distances mu_i are one at distance sqrt(sum mu_i^2).
    With DP-SGD, tight composition at that delta; if dp-accounting is not installed, the sums.
    """
    if len(entries) == 1 or any(math.isinf(entry.epsilon) for entry in entries):
        return basic_composition(entries)
    delta = max(entry.delta for entry in entries)
    if all(entry.steps is None for entry in entries):
        squared = math.fsum((entry.sensitivity / entry.sigma) ** 2 for entry in entries)
        return epsilon_of(1.0 / math.sqrt(squared), delta=delta), delta
    try:
        return tight_composition(delta=delta)(entries)
    except MissingAccountantError:
        return basic_composition(entries)


def ledger_lines(ledger: Mapping[str, Any]) -> list[str]:
    """Summarise a ledger.json in sentences, by method: scores, updates, and a client's total."""
    lines = []
    for method in sorted({row["method"] for row in ledger["entries"]}):
        cells: dict[tuple[int, int], list[LedgerEntry]] = {}
        for row in ledger["entries"]:
            if row["method"] == method:
                fields = {key: value for key, value in row.items() if key not in {"method", "seed"}}
                cells.setdefault((row["seed"], row["client"]), []).append(
                    LedgerEntry.from_json(fields)
                )
        entries = [entry for cell in cells.values() for entry in cell]
        sizes = interval(entry.num_examples for entry in entries)
        kinds = " and ".join(sorted({entry.noise for entry in entries}))
        about = (
            f"({sizes} examples per client, {kinds} noise). Neighbours are {ledger['neighbours']}."
        )
        scores = [entry for entry in entries if entry.steps is None]
        updates = [entry for entry in entries if entry.steps is not None]
        prices = {(entry.purpose, entry.epsilon, entry.delta) for entry in scores}
        for purpose, epsilon, delta in sorted(prices):
            what = f"for {SCORES}" if purpose == SCORES else f"of {purpose}"
            if math.isinf(epsilon):
                names = " and ".join(
                    sorted(
                        {f"`{entry.mechanism}`" for entry in scores if math.isinf(entry.epsilon)}
                    )
                )
                lines.append(
                    f"NOT PRIVATE: each client of {method} released a vector for certainty scores "
                    f"through {names}, which has no finite ε {about}"
                )
                continue
            lines.append(
                f"Privacy: each client of {method} released one vector {what} at "
                f"(ε, δ) = {privacy_budget(epsilon, delta)} {about}"
            )
        if len({purpose for purpose, _, _ in prices}) > 1 and not updates:
            cost = privacy_budget(*max(map(total_cost, cells.values())))
            lines.append(
                f"Privacy: all that a client of {method} released together is at most (ε, δ) = "
                f"{cost}."
            )
        if updates:
            sent = interval(
                sum(entry.steps is not None for entry in cell) for cell in cells.values()
            )
            epsilon, delta = max(map(total_cost, cells.values()))
            lines.append(
                f"Privacy: each client of {method} sent {sent} model updates, trained with DP-SGD, "
                f"at ε = {interval(round(entry.epsilon, 2) for entry in updates)} each. All it "
                f"sent together is at most (ε, δ) = {privacy_budget(epsilon, delta)} {about}"
            )
    return [*lines, f"Not protected: {ledger['unprotected']}"]


def composed_epsilon(counts: Mapping[Query, int], *, delta: float) -> float:
    """Return the epsilon at `delta` of the given number of each query, composed adaptively."""
    return _composed_epsilon(tuple(sorted(counts.items(), key=repr)), delta)


@lru_cache(maxsize=4096)
def _composed_epsilon(counts: tuple[tuple[Query, int], ...], delta: float) -> float:
    # Losses grow with 1 / noise_multiplier^2; the number of grid points should not.
    least = min((query.noise_multiplier for query, _ in counts), default=1.0)
    interval = LOSS_SPACING * max(1.0, 0.25 / least**2)
    together: Any = None
    try:
        for query, count in counts:
            losses = _losses(query, interval).self_compose(count)
            together = losses if together is None else together.compose(losses)
        return 0.0 if together is None else float(together.get_epsilon_for_delta(delta))
    except OverflowError:  # losses in the millions: no protection
        return math.inf


@lru_cache(maxsize=64)
def _losses(query: Query, interval: float) -> Any:
    """Return the privacy loss distribution of one query."""
    try:
        from dp_accounting import NeighboringRelation
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise MissingAccountantError(
            f"tight composition needs dp-accounting: {install_hint('privacy')}"
        ) from error
    # dp-accounting's sensitivity is for adding an example; replacing one doubles it.
    sampled = query.sampling_probability is not None
    return privacy_loss_distribution.from_gaussian_mechanism(
        query.noise_multiplier,
        value_discretization_interval=interval,
        sampling_prob=query.sampling_probability if sampled else 1.0,
        neighboring_relation=NeighboringRelation.REPLACE_ONE
        if sampled
        else NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
