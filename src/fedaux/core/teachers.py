"""Teachers: how clients' predictions on the distill set become soft labels.

`teach` asks a method's teacher and leaves out clients with non-finite predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedaux.config import Bayesian, ExperimentFields
from fedaux.core.messages import ClientState, Weights
from fedaux.core.methods import Method
from fedaux.core.weights import average, class_shares

if TYPE_CHECKING:
    from fedaux.core.server_model import ServerModel

NONFINITE = "its model predicts NaN or infinity on public examples"
HALF = torch.finfo(torch.float16).max
"""Remembered predictions are kept in half precision."""
INFORMATIVE = 0.25
"""Information about the class from which soft labels are not balanced, in units of log C
(notes/successor.md)."""
NO_CLIENT = -1
"""The client of a member that belongs to no client: a drawn model, or the average."""


@dataclass(frozen=True)
class Member:
    """One client model of a round, or what is remembered of one."""

    client: int
    prototype: str
    num_examples: int
    weights: Weights
    """Empty for a client of which only predictions are remembered."""
    share: float = 1.0
    """Its weight relative to other members; below 1 for a remembered one with a discount."""


@dataclass(frozen=True)
class Ensemble:
    """What a teacher sees of one round: the members, by client id, their logits and scores."""

    members: Sequence[Member]
    predict: Callable[[Member], Tensor]
    """predict(member) is its logits f_i(x) on the distill set, [N, C]."""
    log_scores: Callable[[Sequence[int]], Tensor]
    """The log certainty scores log s_i(x) of clients on the distill set, [K, N]."""
    generator: np.random.Generator | None = None
    """Randomness of the Bayesian teacher."""
    bayesian: Bayesian = field(default_factory=Bayesian)
    """Settings of the Bayesian teacher."""
    beliefs: Tensor | None = None
    """The server's own probabilities q(c | x) on the distill set before the round, [N, C]."""
    class_counts: Callable[[Sequence[int]], Tensor] | None = None
    """Estimated numbers of examples of clients per class, from their private class sums, [K, C]."""
    class_prior: Callable[[], Tensor] | None = None
    """Estimated class shares P(c) of all clients together, from their private class sums, [C]."""
    record: Callable[[Tensor], None] = lambda weights: None
    """Receives the members' weights [K, N], or [K, 1] if they are the same for all examples."""


Teacher = Callable[[Ensemble], Tensor]
"""Returns soft labels on the distill set, [N, C], each row a distribution."""


def mean_teacher(ensemble: Ensemble) -> Tensor:
    """Softmax of the mean of the clients' logits (Eq. 2), weighted by r_i / sum_j r_j."""
    return soft_labels(
        (ensemble.predict(member), torch.tensor(weight))
        for member, weight in zip(ensemble.members, share_weights(ensemble), strict=True)
    )


def certainty_teacher(ensemble: Ensemble) -> Tensor:
    """Softmax of the certainty-weighted mean of the clients' logits (Eq. 3)."""
    return soft_labels(_weighted_by_certainty(ensemble))


def mixture_teacher(ensemble: Ensemble) -> Tensor:
    """Certainty-weighted mean of the clients' probabilities, sum_i w_i(x) softmax(f_i(x)).

    This is the distribution-weighted combination of Mansour et al. (2008): it combines
    probabilities, not logits, so a confident client with a low score cannot dominate the others.
    """
    return mixed_probabilities(_weighted_by_certainty(ensemble))


def _weighted_by_certainty(ensemble: Ensemble) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield the logits [N, C] of each member and its weights [N, 1]."""
    weights = certainty_weights(ensemble)
    for member, own in zip(ensemble.members, weights, strict=True):
        yield ensemble.predict(member), own[:, None]


def belief_teacher(ensemble: Ensemble) -> Tensor:
    """Mean of the clients' probabilities with weights r_i sum_c q(c | x) P(i | c), balanced.

    q is the server's belief before the round, and P(i | c) a member's share of a class.
    """
    assert ensemble.class_prior is not None, "methods with this teacher have the mechanism classes"
    weights = belief_weights(ensemble)
    ensemble.record(weights)
    labels = mixed_probabilities(
        (ensemble.predict(member), own[:, None])
        for member, own in zip(ensemble.members, weights, strict=True)
    )
    return balanced(labels, ensemble.class_prior())


def balanced(labels: Tensor, prior: Tensor) -> Tensor:
    """Return soft labels p(c | x) [N, C] with class shares m moved towards a prior P [C].

    p(c | x) (P(c) / m_c)^t, normalised, with t = max(0, 1 - I / (INFORMATIVE log C)). I = H(m) -
    mean_x H(p(. | x)) is what labels tell about single examples. Where that is little, m shows the
    clients' leanings; where it is much, the public examples' classes.
    """
    shares = labels.mean(dim=0)
    entropies = [-torch.xlogy(own, own).sum(dim=-1) for own in (shares, labels)]
    informed = (entropies[0] - entropies[1].mean()) / math.log(max(2, labels.shape[1]))
    strength = (1 - informed / INFORMATIVE).clamp(min=0)
    moved = labels * (prior.to(labels) / shares.clamp_min(1e-12)).pow(strength)
    return moved / moved.sum(dim=1, keepdim=True)


def private_head_teacher(ensemble: Ensemble) -> Tensor:
    """The private head's own probabilities; no client is asked."""
    assert ensemble.beliefs is not None, "methods with this teacher have the mechanism classes"
    return ensemble.beliefs


def belief_weights(ensemble: Ensemble) -> Tensor:
    """Return r_i sum_c q(c | x) P(i | c) [K, N], normalised over members i."""
    assert ensemble.class_counts is not None
    assert ensemble.beliefs is not None
    counts = ensemble.class_counts([member.client for member in ensemble.members])
    weights = class_shares(counts, ensemble.members) @ ensemble.beliefs.to(counts).T
    return (weights / weights.sum(dim=0)).to(torch.float32)


def probabilities_teacher(ensemble: Ensemble) -> Tensor:
    """Mean of the clients' probabilities, sum_i r_i softmax(f_i(x)) / sum_j r_j."""
    return mixed_probabilities(
        (ensemble.predict(member), torch.tensor(weight))
        for member, weight in zip(ensemble.members, share_weights(ensemble), strict=True)
    )


def bayesian_teacher(ensemble: Ensemble) -> Tensor:
    """Mean of the probabilities of models drawn from a distribution over weights (FedBE, 2021).

    For each prototype, a distribution is fitted to its members' weights. The drawn models and the
    members' average count as much as a client with share 1; so do the clients' own models, unless
    `include_clients` is off. Members of which only predictions are remembered count as clients and
    are not part of the distribution. Raises ValueError without a generator.
    """
    members = sorted(ensemble.members, key=lambda member: member.client)
    groups: dict[str, list[Member]] = {}
    for member in members:
        if member.weights and member.share > 0:
            groups.setdefault(member.prototype, []).append(member)
    clients = members if ensemble.bayesian.include_clients else []
    total = sum(member.share for member in clients) + len(groups) * (ensemble.bayesian.samples + 1)

    def models() -> Iterable[Member]:
        yield from clients
        for _, group in sorted(groups.items()):
            yield from _drawn_members(group, ensemble)

    return mixed_probabilities(
        (ensemble.predict(member), torch.tensor(member.share / total)) for member in models()
    )


def _drawn_members(group: Sequence[Member], ensemble: Ensemble) -> Iterable[Member]:
    """Yield the average of a prototype's members, then the drawn models, one at a time."""
    from fedaux.core.bayesian import draw  # late: one teacher of many

    if ensemble.generator is None:
        raise ValueError(
            "Ensemble.generator = None: the Bayesian teacher draws models, it should be a generator"
        )
    weights, sizes = (
        [member.weights for member in group],
        [member.num_examples * member.share for member in group],
    )
    prototype, examples = group[0].prototype, sum(member.num_examples for member in group)
    yield Member(NO_CLIENT, prototype, examples, average(weights, sizes=sizes))
    for sample in draw(
        weights, sizes=sizes, section=ensemble.bayesian, generator=ensemble.generator
    ):
        yield Member(NO_CLIENT, prototype, examples, sample)


def share_weights(ensemble: Ensemble) -> list[float]:
    """Return r_i / sum_j r_j of the members' shares."""
    total = sum(member.share for member in ensemble.members)
    weights = [member.share / total for member in ensemble.members]
    ensemble.record(torch.tensor(weights)[:, None])
    return weights


def certainty_weights(ensemble: Ensemble) -> Tensor:
    """Return r_i s_i(x) / sum_j r_j s_j(x) [K, N], for shares r and certainty scores s.

    The softmax over clients of log s_i + log r_i neither overflows nor divides by zero.
    """
    log_scores = ensemble.log_scores([member.client for member in ensemble.members])
    shares = [member.share for member in ensemble.members]
    log_shares = torch.tensor(shares, dtype=log_scores.dtype, device=log_scores.device).log()
    weights = torch.softmax(log_scores + log_shares[:, None], dim=0).to(torch.float32)
    ensemble.record(weights)
    return weights


def soft_labels(weighted: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return softmax(sum_i w_i f_i) of pairs of logits [N, C] and weights that broadcast."""
    return torch.softmax(_weighted_sum(weighted), dim=1)


def mixed_probabilities(weighted: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return sum_i w_i softmax(f_i) of pairs of logits [N, C] and weights that broadcast."""
    return _weighted_sum((torch.softmax(logits, dim=1), weight) for logits, weight in weighted)


def _weighted_sum(weighted: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    total: Tensor | None = None
    for values, weight in weighted:
        term = values * weight.to(values.device)
        total = term if total is None else total + term
    assert total is not None, "a teacher needs at least one model"
    return total


TEACHERS: dict[str, Teacher] = {
    "mean": mean_teacher,
    "probabilities": probabilities_teacher,
    "bayesian": bayesian_teacher,
    "certainty": certainty_teacher,
    "mixture": mixture_teacher,
    "belief": belief_teacher,
    "private-head": private_head_teacher,
}


@dataclass(frozen=True)
class Lesson:
    """What a round's clients teach."""

    targets: Tensor | None
    """Soft labels [N, C]; None if no client has finite predictions."""
    predictions: Mapping[int, Tensor]
    """The clients' logits [N, C] in half precision, if the method remembers them."""
    unusable: Mapping[int, str]
    """Clients that were left out, and why."""
    weight_by_client: Mapping[int, float] = field(default_factory=dict)
    """Each client's mean weight on the distill set; empty if the teacher records none."""
    weight_by_class: Sequence[float] = ()
    """Each class's share of the soft labels [C]."""


def teach(
    present: Sequence[Member],
    absent: Sequence[Member],
    *,
    method: Method,
    experiment: ExperimentFields,
    server_models: Mapping[str, ServerModel],
    memory: Mapping[int, ClientState],
    log_scores: Callable[[Sequence[int]], Tensor],
    generator: Callable[[], np.random.Generator],
    num_classes: int,
    beliefs: Tensor | None = None,
    class_counts: Callable[[Sequence[int]], Tensor] | None = None,
    class_prior: Callable[[], Tensor] | None = None,
) -> Lesson:
    """Return the soft labels of present and remembered members, without non-finite predictions.

    Raises ValueError if a teacher does not return a distribution for every public example.
    """
    assert method.teacher is not None, "a method without a teacher does not teach"
    predictions: dict[int, Tensor] = {}
    finite: dict[int, Tensor] = {}
    remembers = "predictions" in method.memory
    gone = {member.client for member in absent}

    ready = predicted_together(present, server_models)

    def predict(member: Member) -> Tensor:
        if member.client in gone:
            return memory[member.client].tensors["logits"].float()
        logits = (
            ready[member.client]
            if member.client in ready
            else server_models[member.prototype].logits(member.weights)
        )
        if member.client >= 0:
            finite[member.client] = torch.isfinite(logits).all()
            if remembers:
                predictions[member.client] = logits.clamp(-HALF, HALF).half()
        return logits

    members = sorted([*present, *absent], key=lambda member: member.client)
    rows = next(iter(server_models.values())).num_public
    unusable: dict[int, str] = {}
    means: list[Tensor] = []  # of the recorded weights, over the public examples
    while not present or len(unusable) < len(present):
        means.clear()
        ensemble = Ensemble(
            members,
            predict,
            log_scores,
            generator=generator(),
            bayesian=experiment.bayesian,
            beliefs=beliefs,
            class_counts=class_counts,
            class_prior=class_prior,
            record=lambda weights: means.append(weights.mean(dim=1)),
        )
        targets = TEACHERS[method.teacher](ensemble)
        if (problem := problem_of_targets(targets, shape=(rows, num_classes))) is None:
            kept = {
                client: logits for client, logits in predictions.items() if client not in unusable
            }
            clients = [member.client for member in members]
            recorded = means[-1].tolist() if means else []
            by_client = dict(zip(clients, recorded, strict=True)) if recorded else {}
            by_class = targets.mean(dim=0).tolist()
            return Lesson(targets, kept, unusable, by_client, by_class)
        culprits = [
            client for client, flag in finite.items() if not flag and client not in unusable
        ]
        if not culprits:
            raise ValueError(f"teacher {method.teacher}: {problem}")
        unusable |= dict.fromkeys(culprits, NONFINITE)
        members = [member for member in members if member.client not in unusable]
    return Lesson(None, {}, unusable)


def predicted_together(
    members: Sequence[Member], server_models: Mapping[str, ServerModel]
) -> dict[int, Tensor]:
    """Return the logits [N, C] of members of prototypes whose models are predicted together.

    All others are predicted one at a time, as a teacher asks for them, and are not held all at
    once.
    """
    ready: dict[int, Tensor] = {}
    for name, server_model in server_models.items():
        own = [member for member in members if member.prototype == name]
        if server_model.shares_work and len(own) > 1:
            outputs = server_model.all_logits([member.weights for member in own])
            ready |= {member.client: output for member, output in zip(own, outputs, strict=True)}
    return ready


def problem_of_targets(targets: object, *, shape: tuple[int, int]) -> str | None:
    """Return why soft labels are invalid, or None: not a tensor of this shape, no distributions."""
    if not isinstance(targets, Tensor):
        return f"returned {type(targets).__name__}, should be a torch.Tensor"
    if tuple(targets.shape) != shape:
        return f"returned {list(targets.shape)}, should be {list(shape)}: public examples, classes"
    off = (targets.sum(dim=1) - 1).abs().amax() + (-targets).clamp_min(0).amax()
    error = float(off)  # the one wait for the device
    return None if error < 1e-2 else f"returned rows that are no distributions (off by {error:g})"
