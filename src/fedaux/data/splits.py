"""Split labelled data among clients, and auxiliary data into negatives and distill set."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_ITERATIONS = 1000
"""The paper stops the alternating normalisation after 1000 iterations."""


def split_dirichlet(
    labels: NDArray[np.int64],
    *,
    num_clients: int,
    alpha: float,
    num_classes: int,
    generator: np.random.Generator,
) -> list[NDArray[np.int64]]:
    """Split examples among clients by class (appendix, Data Splitting Methodology).

    Client i gets P[i, j] M_j of the M_j examples of class j, where P comes from `client_shares`.
    Fractions are rounded so that each example goes to exactly one client. Clients can be empty.
    """
    if len(labels) == 0:
        raise ValueError("no labelled examples to split")
    shares_NC = client_shares(num_clients, num_classes, alpha=alpha, generator=generator)
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(num_clients)]
    for class_index in range(num_classes):
        members = generator.permutation(np.flatnonzero(labels == class_index))
        counts = round_to_sum(shares_NC[:, class_index] * len(members), total=len(members))
        for client, piece in enumerate(np.split(members, np.cumsum(counts)[:-1])):
            parts[client].append(piece)
    return [np.sort(np.concatenate(pieces)).astype(np.int64) for pieces in parts]


def client_shares(
    num_clients: int, num_classes: int, *, alpha: float, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Draw P, clients x classes: each column sums to 1, each row to about classes / clients.

    Each column is drawn from Dir(alpha); then rows and columns are normalised alternately, columns
    last, so that all examples of a class are used. Computed in logarithms, because at alpha = 0.01
    a Dirichlet draw underflows.
    """
    if num_clients < 1 or num_classes < 1:
        raise ValueError(
            f"need at least one client and one class, got {num_clients} and {num_classes}"
        )
    if not alpha > 0:
        raise ValueError(f"split.alpha = {alpha}: should be greater than 0")
    shape = (num_clients, num_classes)
    # If G ~ Gamma(alpha + 1) and U ~ Uniform(0, 1], then G U^(1/alpha) ~ Gamma(alpha).
    log_shares = (
        np.log(generator.gamma(alpha + 1.0, size=shape))
        + np.log1p(-generator.random(shape)) / alpha
    )
    log_row_sum = np.log(num_classes / num_clients)
    for _ in range(MAX_ITERATIONS):
        log_rows = _logsumexp(log_shares, axis=1)
        log_shares -= log_rows - log_row_sum
        log_columns = _logsumexp(log_shares, axis=0)
        log_shares -= log_columns
        if np.abs(log_columns).max() < 1e-9:  # rows and columns agree
            break
    shares: NDArray[np.float64] = np.exp(log_shares)
    return shares


def round_to_sum(values: NDArray[np.float64], *, total: int) -> NDArray[np.int64]:
    """Round non-negative values that sum to `total` to integers that do, by largest remainder."""
    floors = np.floor(values).astype(np.int64)
    missing = total - int(floors.sum())
    order = np.argsort(-(values - floors), kind="stable")
    floors[order[:missing]] += 1
    return floors


def split_auxiliary(
    size: int, *, negatives_fraction: float, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return disjoint indices of negatives D- and distill set, together all of D_aux."""
    order = generator.permutation(size)
    num_negatives = round(negatives_fraction * size)
    if not 0 < num_negatives < size:
        raise ValueError(
            f"auxiliary.negatives_fraction = {negatives_fraction}: gives {num_negatives} negatives "
            f"and {size - num_negatives} distill examples of {size}; both need at least one"
        )
    return np.sort(order[:num_negatives]), np.sort(order[num_negatives:])


def _logsumexp(values: NDArray[np.float64], *, axis: int) -> NDArray[np.float64]:
    peak = values.max(axis=axis, keepdims=True)
    total: NDArray[np.float64] = peak + np.log(np.exp(values - peak).sum(axis=axis, keepdims=True))
    return total
