"""Soft labels: predictions on the distill set [N, C] are combined into targets of distillation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedaux.core.messages import Member
from fedaux.core.metrics import information

Mix = Literal["probabilities", "logits"]
INFORMATIVE = 0.25
"""Information about the class from which soft labels are not balanced, in units of log C."""


def mixture(members: Sequence[Member], weights: Tensor, *, of: Mix = "probabilities") -> Tensor:
    """Return sum_i w_i softmax(f_i) or softmax(sum_i w_i f_i) [N, C], for weights [K, N] or [K, 1].

    A mean of probabilities is the distribution-weighted combination of Mansour et al. (2008): a
    confident client with a small weight cannot dominate the others, as it can in a mean of logits.
    """
    total: Tensor | None = None
    for member, weight in zip(members, weights, strict=True):
        assert member.logits is not None, "`Server.predict` gives members their logits"
        values = member.logits if of == "logits" else torch.softmax(member.logits, dim=1)
        term = values * weight[:, None].to(values.device)
        total = term if total is None else total + term
    assert total is not None, "there is at least one member"
    return torch.softmax(total, dim=1) if of == "logits" else total


def share_weights(members: Sequence[Member]) -> Tensor:
    """Return r_i / sum_j r_j of the members' shares [K, 1]."""
    total = sum(member.share for member in members)
    return torch.tensor([member.share / total for member in members])[:, None]


def score_weights(members: Sequence[Member], log_scores: Tensor) -> Tensor:
    """Return r_i s_i(x) / sum_j r_j s_j(x) [K, N], for shares r and scores s (Eq. 3).

    The softmax over clients of log s_i + log r_i neither overflows nor divides by zero.
    """
    log_shares = torch.tensor([member.share for member in members]).to(log_scores).log()
    return torch.softmax(log_scores + log_shares[:, None], dim=0).to(torch.float32)


def balanced(labels: Tensor, prior: Tensor) -> Tensor:
    """Return soft labels p(c | x) [N, C] with class shares m moved towards a prior P [C].

    p(c | x) (P(c) / m_c)^t, normalised, with t = max(0, 1 - I / INFORMATIVE), where I, their
    `information`, is what labels tell about single examples. Where that is little, m shows the
    clients' leanings; where it is much, the public examples' classes.
    """
    strength = (1 - information(labels) / INFORMATIVE).clamp(min=0)
    moved = labels * (prior.to(labels) / labels.mean(dim=0).clamp_min(1e-12)).pow(strength)
    return moved / moved.sum(dim=1, keepdim=True)


def problem_of_labels(labels: object, *, shape: tuple[int, int]) -> str | None:
    """Return why soft labels are invalid, or None: not a tensor of this shape, no distributions."""
    if not isinstance(labels, Tensor):
        return f"are {type(labels).__name__}, should be a torch.Tensor"
    if tuple(labels.shape) != shape:
        return f"are {list(labels.shape)}, should be {list(shape)}: public examples, classes"
    off = (labels.sum(dim=1) - 1).abs().amax() + (-labels).clamp_min(0).amax()
    error = float(off)  # the one wait for the device
    return None if error < 1e-2 else f"have rows that are not distributions (off by {error:g})"
