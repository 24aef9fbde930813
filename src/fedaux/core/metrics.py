"""Figures of predictions: accuracy, loss, balanced accuracy, F1, AUC, confusion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def evaluate(logits: Tensor, labels: Tensor, shares: Tensor | None = None) -> tuple[float, float]:
    """Return accuracy and mean cross-entropy of logits [N, C] against labels [N]: over examples or,
    with class shares [C], over classes in these proportions, without classes
    that have no examples."""
    hits = (logits.argmax(dim=1) == labels).double()
    if shares is None:
        return float(hits.mean()), float(functional.cross_entropy(logits, labels))
    counts = torch.bincount(labels, minlength=len(shares)).clamp_min(1)
    weights = (shares.to(hits) / counts)[labels]
    losses = functional.cross_entropy(logits, labels, reduction="none").double()
    weights = weights / weights.sum()
    return float(weights @ hits), float(weights @ losses)


def information(q_NC: Tensor) -> Tensor:
    """Return the information of predictions [N, C] about the class, a scalar,
    (H(mean q) - mean H(q)) / log C: 0 where all are alike, 1 where all are sure and classes are
    balanced."""

    def entropy(rows: Tensor) -> Tensor:
        return -torch.xlogy(rows, rows).sum(dim=-1)

    gain = entropy(q_NC.mean(dim=0)) - entropy(q_NC).mean()
    return gain / math.log(max(2, q_NC.shape[1]))


def measure(logits: Tensor, labels: Tensor, shares: Tensor | None = None) -> dict[str, Any]:
    """Return all figures of logits [N, C] against labels [N]; None for figures that do not exist.

    Accuracy and loss are means over the examples or, with class shares [C], over the classes in
    these proportions. Balanced accuracy and macro F1 are means over the classes that have test
    examples, the AUC (one class against the rest) over classes that have examples and
    counterexamples.
    """
    accuracy, loss = evaluate(logits, labels, shares)
    confusion = confusion_matrix(logits, labels)
    hits, actual, predicted = confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)
    there = actual > 0
    return {
        "accuracy": accuracy,
        "loss": loss if math.isfinite(loss) else None,
        "balanced_accuracy": float((hits / actual)[there].mean()),
        "macro_f1": float((2 * hits / (actual + predicted))[there].mean()),
        "auc": mean_auc(logits, labels),
        "confusion": confusion,
    }


def measure_models(
    models: Iterable[tuple[str, Tensor, Tensor | None]], labels: Tensor
) -> dict[str, Any]:
    """Return the figures of several models: prototype, logits [N, C], class shares [C] or None.

    Figures are means over models; counts of the confusion matrix are sums. The ensemble averages
    their logits.
    """
    measured: dict[str, list[dict[str, Any]]] = {}
    total: Tensor | None = None
    for name, logits, shares in models:
        measured.setdefault(name, []).append(measure(logits, labels, shares))
        total = logits if total is None else total + logits
    assert total is not None, "there is at least one model"
    every = [one for own in measured.values() for one in own]
    figures = {
        key: None if any(one[key] is None for one in every) else _mean(every, key)
        for key in ("accuracy", "loss", "balanced_accuracy", "macro_f1", "auc")
    }
    return {
        **figures,
        "accuracy_by_prototype": {name: _mean(own, "accuracy") for name, own in measured.items()},
        "accuracy_ensemble": evaluate(total / len(every), labels)[0],
        "confusion": sum(one["confusion"] for one in every).tolist(),
    }


def _mean(measured: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(np.mean([one[key] for one in measured]))


def confusion_matrix(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many examples of a class (row) are predicted as each class (column) [C, C]."""
    classes = logits.shape[1]
    cells = labels * classes + logits.argmax(dim=1)
    return torch.bincount(cells, minlength=classes**2).view(classes, classes).cpu()


def mean_auc(logits: Tensor, labels: Tensor) -> float | None:
    """Return the mean over classes of P(p_c(x) > p_c(x')) for x of class c and x' of another.

    Ties count half: of n_c examples with midranks r, the area is
    (sum r - n_c (n_c + 1) / 2) / (n_c (N - n_c)). None if a prediction is not finite.
    """
    scores_CN = torch.softmax(logits.double(), dim=1).T.contiguous()
    own = torch.nn.functional.one_hot(labels, logits.shape[1]).T
    sizes = own.sum(dim=1).double()
    rest = len(labels) - sizes
    there = (sizes > 0) & (rest > 0)
    if not bool(torch.isfinite(scores_CN).all()) or not bool(there.any()):
        return None
    ordered = scores_CN.sort(dim=1).values
    below = torch.searchsorted(ordered, scores_CN)
    up_to = torch.searchsorted(ordered, scores_CN, right=True)
    ranks = ((below + up_to + 1) / 2 * own).sum(dim=1, dtype=torch.float64)
    areas = (ranks - sizes * (sizes + 1) / 2) / (sizes * rest)
    return float(areas[there].mean())
