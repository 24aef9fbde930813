"""Teachers: how the clients' predictions on the distill set become soft labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedaux.clients import Weights


@dataclass(frozen=True)
class Member:
    """One client model of a round."""

    client: int
    prototype: str
    num_examples: int
    weights: Weights


@dataclass(frozen=True)
class Ensemble:
    """What a teacher may look at in one round: the members, by rising client id, and two ways to ask about them."""

    members: Sequence[Member]
    predict: Callable[[Member], Tensor]
    """The logits f_i(x) of a member on the distill set, [N, C]."""
    log_scores: Callable[[Sequence[int]], Tensor]
    """The log certainty scores log s_i(x) of clients on the distill set, [K, N]."""


Teacher = Callable[[Ensemble], Tensor]
"""Returns soft labels on the distill set, [N, C], each row a distribution."""


def mean_teacher(ensemble: Ensemble) -> Tensor:
    """Softmax of the mean of the clients' logits (Eq. 2)."""
    share = 1.0 / len(ensemble.members)
    return soft_labels((ensemble.predict(member), torch.tensor(share)) for member in ensemble.members)


def certainty_teacher(ensemble: Ensemble) -> Tensor:
    """Softmax of the certainty-weighted mean of the clients' logits (Eq. 3)."""
    return soft_labels(
        (ensemble.predict(member), weights[:, None])
        for member, weights in zip(ensemble.members, certainty_weights(ensemble), strict=True)
    )


def mixture_teacher(ensemble: Ensemble) -> Tensor:
    """Certainty-weighted mean of the clients' probabilities, sum_i w_i(x) softmax(f_i(x)).

    This is the distribution-weighted combination of Mansour et al. (2008) to the letter: hypotheses, not their logits,
    are combined, so a client that is very sure and hardly concerned cannot outshout the others.
    """
    labels = torch.zeros(())
    for member, weights in zip(ensemble.members, certainty_weights(ensemble), strict=True):
        probabilities = torch.softmax(ensemble.predict(member), dim=1)
        labels = labels.to(probabilities.device) + probabilities * weights[:, None].to(probabilities.device)
    return labels


def certainty_weights(ensemble: Ensemble) -> Tensor:
    """Return s_i(x) / sum_j s_j(x) [K, N].

    It is the softmax over clients of log s_i, which neither overflows nor divides by zero.
    """
    log_scores = ensemble.log_scores([member.client for member in ensemble.members])
    return torch.softmax(log_scores, dim=0).to(torch.float32)


def soft_labels(weighted: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return softmax(sum_i w_i f_i): logits [N, C] and weights that broadcast to them, one client at a time."""
    total: Tensor | None = None
    for logits, weight in weighted:
        term = logits * weight.to(logits.device)
        total = term if total is None else total + term
    assert total is not None, "a teacher needs at least one client"
    return torch.softmax(total, dim=1)


TEACHERS: dict[str, Teacher] = {
    "mean": mean_teacher,
    "certainty": certainty_teacher,
    "mixture": mixture_teacher,
}
