"""Averages of clients that hold different classes: heads by class, and models over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedaux.core.messages import Member, Weights
from fedaux.core.task import State
from fedaux.core.weights import clones

SETTLED = 30
"""Rounds over which the decay of the server models' average grows to its value."""
HEAD = ("head.weight", "head.bias")
"""A linear head: row c belongs to class c."""


def class_shares(counts: Tensor, members: Sequence[Member]) -> Tensor:
    """Return P(i | c) = r_i n_ic / sum_j r_j n_jc [K, C] of members i, from their numbers of
    examples n_ic; a class that no member seems to hold is shared by all."""
    shares = torch.tensor([member.share for member in members]).to(counts)
    held = (shares[:, None] * counts).clamp_min(1e-9)
    return held / held.sum(dim=0)


def head_by_class(weights: Sequence[Weights], shares: Tensor, *, before: Weights) -> Weights:
    """Return the head whose row c is sum_i P(i | c) theta_i[c], from P(i | c) [K, C].

    In a mean over all clients the few that hold a class count little, and the others hardly change
    its row. The same vector added to all rows of a client changes none of its predictions, so each
    head is moved to the mean row of the server's (`before`) first.
    """
    head: Weights = {}
    for name in HEAD:
        rows = torch.stack([own[name] for own in weights])
        rows = rows - rows.mean(dim=1, keepdim=True) + before[name].mean(dim=0)
        head[name] = torch.einsum("kc,kc...->c...", shares.to(rows), rows)
    return head


def smoothed(
    state: State, models: Mapping[str, Weights], *, decay: float, round: int
) -> dict[str, Weights]:
    """Return d * average + (1 - d) * (last + model) / 2 of each prototype with d = decay * min(1,
    round / 30); the average is what the state carries as "final". Counters are the newest.

    With a server rate above 1 models swing from round to round, and the middle of two is better
    than either (FedExP, Jhunjhunwala et al. 2023). The first rounds are forgotten sooner, so that
    the average does not lag behind.
    """
    averages, share = state.carried("final"), 1.0 - decay * min(1.0, round / SETTLED)
    found = {}
    for name, weights in models.items():
        if name not in averages:
            found[name] = clones(weights)  # a checkpoint holds both
            continue
        keys = [key for key, tensor in weights.items() if tensor.is_floating_point()]
        average, last, own = (
            [group[key] for key in keys] for group in (averages[name], state.models[name], weights)
        )
        mixed = torch._foreach_lerp(average, torch._foreach_lerp(last, own, 0.5), share)
        others = {key: tensor.clone() for key, tensor in weights.items() if key not in keys}
        found[name] = {**others, **dict(zip(keys, mixed, strict=True))}
    return found
