"""OBJECTIVES: what local training minimises. A method names its own in `Asks.objectives`.

For a batch of private rows (x, y) and rehearsed public rows with the server's soft labels q,

    mean of cross_entropy(a * f(x) + b, y) + strength * term(f(x), y)    over private rows
    + strength * mean of D_KL(q(x) || softmax(f(x)))                     over public rows.

The scale a and the offset b, [C] each, follow from the client's class counts, which stay there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedaux.config import Local

Adjust = Callable[[Tensor, float], tuple[Tensor, Tensor]]
"""adjust(counts, strength) returns the scale and the offset of a client's logits, [C] each."""
Term = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""term(logits [B, C], labels [B], beliefs [B, C], prior [C]) returns a loss per private row, [B].

Beliefs are the server model's probabilities for the same rows; `prior` has the client's class
shares.
"""
SMALLEST_PRIOR = 1e-3
"""Floor of a class prior, so that its logarithm is finite."""
VACANT_PRIOR = 1e-9
"""Added to a class prior by `balanced-softmax`: cross-entropy leaves missing classes alone."""


@dataclass(frozen=True)
class Objective:
    """One part of a local objective. `Steps` and `LocalLoss` have those without functions."""

    strength: float = 1.0
    """The default of `local.strengths`."""
    adjust: Adjust | None = None
    term: Term | None = None


def log_prior(counts: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Add strength * log(prior): classes that a client lacks are not pushed down (Menon 2021)."""
    prior = (counts / counts.sum()).clamp_min(SMALLEST_PRIOR)
    return torch.ones_like(prior), strength * prior.log()


def log_joint_prior(counts: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Add log((prior + strength / C) / (1 + strength)), the class shares of private examples and of
    rehearsed ones that count as many times."""
    prior = (counts / counts.sum() + strength / len(counts)) / (1.0 + strength)
    return torch.ones_like(prior), prior.clamp_min(SMALLEST_PRIOR).log()


def balanced(counts: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Add strength * log(prior + 1e-9) (balanced softmax, as in FedVLS)."""
    offset = strength * (counts / counts.sum() + VACANT_PRIOR).log()
    return torch.ones_like(offset), offset


def fedlc_margin(counts: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Subtract strength * n_c^(-1/4) (FedLC, Zhang et al. 2022); a missing class counts as one."""
    return torch.ones_like(counts), -strength * counts.clamp_min(1).pow(-0.25)


def restricted(counts: Tensor, strength: float) -> tuple[Tensor, Tensor]:
    """Multiply the logits of missing classes by the strength (FedRS, Li & Zhan 2021)."""
    scale = torch.where(counts > 0, 1.0, strength)
    return scale, torch.zeros_like(scale)


def not_true(logits: Tensor, labels: Tensor, beliefs: Tensor, prior: Tensor) -> Tensor:
    """D_KL(server || client) over all classes but the true one (FedNTD, Lee et al. 2022)."""
    hidden = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    return partial_divergence(logits, beliefs, hidden)


def vacant_class(logits: Tensor, labels: Tensor, beliefs: Tensor, prior: Tensor) -> Tensor:
    """D_KL(server || client) over the classes that the client lacks (FedVLS, Guo et al. 2025)."""
    held = prior > 0
    if bool(held.all()):
        return torch.zeros_like(logits[:, 0])
    return partial_divergence(logits, beliefs, held.expand_as(logits))


def suppression(logits: Tensor, labels: Tensor, beliefs: Tensor, prior: Tensor) -> Tensor:
    """sum_c P(c) log mean_x exp([c != y] (f_c(x) - log P(c) - log C)) over the batch (FedVLS).

    The same for all rows, [B].
    """
    others = torch.arange(logits.shape[1], device=logits.device) != labels[:, None]
    shifted = logits - (prior + VACANT_PRIOR).log() - math.log(logits.shape[1])
    means = torch.logsumexp(shifted * others, dim=0) - math.log(len(logits))
    return (prior * means).sum().expand(len(logits))


def partial_divergence(logits: Tensor, beliefs: Tensor, hidden: Tensor) -> Tensor:
    """Return D_KL(server || client) over the classes that are not hidden [B, C], [B]."""
    own = torch.log_softmax(logits.masked_fill(hidden, -torch.inf), dim=1)
    target = beliefs.masked_fill(hidden, 0.0)
    target = target / target.sum(dim=1, keepdim=True).clamp_min(1e-12)
    return (torch.xlogy(target, target) - target * own.masked_fill(hidden, 0.0)).sum(dim=1)


OBJECTIVES: dict[str, Objective] = {
    "proximal": Objective(),
    "logit-adjusted": Objective(adjust=log_prior),
    "jointly-adjusted": Objective(adjust=log_joint_prior),
    "fedlc": Objective(adjust=fedlc_margin),
    "fedrs": Objective(strength=0.5, adjust=restricted),
    "not-true": Objective(term=not_true),
    "balanced-softmax": Objective(adjust=balanced),
    "vacant-class": Objective(strength=0.1, term=vacant_class),
    "suppression": Objective(strength=0.005, term=suppression),
    "rehearsal": Objective(),
}
"""Parts that methods combine; cross-entropy is always there.

`proximal` is FedPROX's term, whose strength is `local.proximal`; `rehearsal` adds public rows.
"""


@dataclass(frozen=True)
class LocalLoss:
    """The loss of a method's batches: the same for all clients, so it is compiled once.

    A batch holds private rows and then `rehearsed` public rows. Targets are labels [B] or, where
    beliefs count, (label, server's probabilities) [B, 1 + C]. The rehearsal's strength is a factor
    of its soft labels.
    """

    adjusted: bool = False
    terms: tuple[tuple[Term, float], ...] = ()
    rehearsed: int = 0

    @property
    def plain(self) -> bool:
        """Whether it is cross-entropy alone."""
        return self == LocalLoss()

    def __call__(self, logits: Tensor, targets: Tensor, adjustment: Tensor | None = None) -> Tensor:
        """Return the loss of a batch, from logits [B, C]."""
        if adjustment is None:
            return functional.cross_entropy(logits, targets)
        labels = (targets if targets.ndim == 1 else targets[:, 0]).long()
        count = len(logits) - self.rehearsed
        own, true = logits[:count], labels[:count]
        loss = functional.cross_entropy(own * adjustment[0] + adjustment[1], true)
        for term, strength in self.terms:
            values = term(own, true, targets[:count, 1:], adjustment[2])
            loss = loss + strength * values.mean()
        if self.rehearsed:
            loss = loss + weighted_divergence(logits[count:], targets[count:, 1:]).mean()
        return loss


CROSS_ENTROPY = LocalLoss()


def weighted_divergence(logits: Tensor, targets: Tensor) -> Tensor:
    """Return w D_KL(q || softmax(logits)) of each row [...], for targets w q [..., C]."""
    weights = targets.sum(dim=-1, keepdim=True)
    entropies = torch.xlogy(targets, targets) - torch.xlogy(targets, weights)
    return (entropies - targets * torch.log_softmax(logits, dim=-1)).sum(dim=-1)


def local_loss(names: Sequence[str], local: Local, *, rehearsed: int = 0) -> LocalLoss:
    """Return the loss of these objectives with the strengths of the settings."""
    parts = [(OBJECTIVES[name], strength_of(name, local)) for name in names]
    return LocalLoss(
        adjusted=any(part.adjust for part, _ in parts),
        terms=tuple((part.term, strength) for part, strength in parts if part.term),
        rehearsed=rehearsed if "rehearsal" in names else 0,
    )


def strength_of(name: str, local: Local) -> float:
    """Return the strength of an objective."""
    return local.strengths.get(name, OBJECTIVES[name].strength)


def class_adjustment(
    names: Sequence[str], local: Local, labels: Tensor, *, num_classes: int
) -> Tensor:
    """Return what a client's labels [n] do to its logits: scale, offset, class shares [3, C]."""
    classes = torch.arange(num_classes, device=labels.device)
    counts = (labels[:, None] == classes).sum(dim=0).float()  # bincount would wait for a GPU
    scale, offset = torch.ones_like(counts), torch.zeros_like(counts)
    for name in names:
        if adjust := OBJECTIVES[name].adjust:
            factor, summand = adjust(counts, strength_of(name, local))
            scale, offset = scale * factor, offset * factor + summand
    return torch.stack([scale, offset, counts / counts.sum()])


def joined_targets(labels: Tensor, beliefs: Tensor) -> Tensor:
    """Return targets [n + M, 1 + C] of n private rows, then M public ones with beliefs [M, C].

    Public rows have no label, and the beliefs of private rows are zero until they are computed.
    """
    targets = beliefs.new_zeros(len(labels) + len(beliefs), 1 + beliefs.shape[1])
    targets[: len(labels), 0] = labels.to(targets)
    targets[len(labels) :, 0] = -1.0
    targets[len(labels) :, 1:] = beliefs
    return targets
