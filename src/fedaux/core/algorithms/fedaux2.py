"""fedaux2: our successor of FedAUX. Class sums tell the server which client holds which class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedaux.config import Certainty, ExperimentFields
from fedaux.core.algorithms.by_class import class_counts, class_shares, head_by_class, smoothed
from fedaux.core.algorithms.fedaux import FedAux
from fedaux.core.algorithms.private_head import (
    class_sums,
    private_beliefs,
    require_linear,
    start_with_head,
)
from fedaux.core.asks import Asks
from fedaux.core.messages import Member, Weights
from fedaux.core.releases import ClassEstimates
from fedaux.core.server import Server
from fedaux.core.soft_labels import share_weights
from fedaux.core.task import State
from fedaux.core.weights import server_step
from fedaux.privacy.classes import ClassEstimate

LARGEST_START = 0.5
"""Share of the private head in the start of training where clients hold one class each and their
releases are reliable. A smaller share is a less certain head, which training can still change; with
clients that are alike or releases of noise, a random one is better (notes/successor.md)."""
LARGEST_START_OF_HEADS = 0.25
"""The same where heads alone are trained: a poor start cannot spoil frozen features."""
INFORMATIVE = 0.25
"""Information about the class from which soft labels are not balanced, in units of log C."""
LAST_RATE = 0.1
"""Share of the server rate that is left in the last round where every client holds one class."""
EVENNESS = 0.5
"""How far the rows of heads move alike in the first round (`evened`): 0 not at all, 1 fully."""


@dataclass(frozen=True)
class FedAux2(FedAux):
    """Start from the private head, rehearse public examples, average and teach by class."""

    memory: bool = True
    objectives: tuple[str, ...] = ("logit-adjusted", "rehearsal")
    from_private_head: bool = True
    weighting: Literal["beliefs", "equal"] = "beliefs"
    """How clients count on a public example: by the classes that the server sees in it, or
    alike."""
    distills: bool = True
    anchor: float = 0.5
    """Share of the private head in the server's beliefs, times the reliability of the releases,
    divided by the round's number."""
    server_rate: float = 2.0
    """The server's parameters become old + rate * (average - old). In linear mode a rate above 1
    falls to a tenth of it over the rounds."""
    head_by_class: bool = True
    """Whether row c of the head is averaged in proportion to the clients' examples of class c.
    Robust averages (`aggregation`) ignore it: a client could claim a whole class."""
    smoothing: float = 0.8
    """Decay of the server models' average over rounds, which is evaluated; 0 evaluates the last."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask each client for class sums, and for a model in every round."""
        return replace(super().asks(settings), distills=self.distills)

    def certainty(self, settings: ExperimentFields) -> Certainty:
        """Return the settings of a release of class sums."""
        return class_sums(settings)

    def prepare(self, server: Server) -> State:
        """Start from the private head: more where clients hold few classes and it is reliable."""
        for name, model in server.task.initial_models.items():
            require_linear(model.head, prototype=name)
        if not self.from_private_head:
            return super().prepare(server)
        linear = server.task.experiment.mode == "linear"
        largest = LARGEST_START_OF_HEADS if linear else LARGEST_START
        return start_with_head(
            server, share=lambda estimate: largest * estimate.concentration * estimate.trust
        )

    def round(self, server: Server, state: State) -> State:
        """Train with rehearsal, average heads by class, distill by class, smooth over rounds."""
        estimates = server.scorer.class_estimates(state.releases)
        every = [estimate for _, estimate in estimates.values()]
        reliability = sum(estimate.reliability for estimate in every) / len(every)
        beliefs = torch.lerp(
            server.beliefs(state.models),
            private_beliefs(server, state),
            self.anchor * reliability / server.log.round,
        )
        normalised = any(model.normalised for model in server.server_models.values())
        members = server.train(
            state,
            rehearse=beliefs,
            rehearsal_strength=reliability,
            strengths={"logit-adjusted": 1.0 if normalised else 1.0 - reliability},
        )
        if self.distills:
            absent = server.absent(state, members) if self.memory else []
            members = server.predict([*members, *absent])
        models = self._average(server, state, members, every, estimates)
        if self.distills:
            weights = share_weights(members)
            if self.weighting == "beliefs":
                weights = belief_weights(members, estimates, beliefs)
            prior = torch.stack([estimate.prior for estimate in every]).mean(dim=0)
            models = server.distill(models, balanced(server.mix(members, weights), prior))
        after = self.remembering(server, state.next(models), members)
        return after.carry("final", self._smoothed(state, models, server.log.round))

    def _average(
        self,
        server: Server,
        state: State,
        members: Sequence[Member],
        every: Sequence[ClassEstimate],
        estimates: ClassEstimates,
    ) -> dict[str, Weights]:
        """Return the averages, with heads by class, moved by the server rate."""
        experiment, rate = server.task.experiment, self.server_rate
        linear = experiment.mode == "linear"
        if linear and rate > 1:
            concentration = sum(estimate.concentration for estimate in every) / len(every)
            rate = falling(
                rate,
                round=server.log.round,
                rounds=experiment.rounds,
                concentration=concentration,
            )
        models = server.average(state, members)
        trained = {member.prototype for member in members if member.weights}
        with server.log.phase("average"):
            for name in sorted(trained):
                before = state.models[name]
                if self.head_by_class and experiment.aggregation == "mean":
                    own = [one for one in members if one.prototype == name and one.weights]
                    shares = class_shares(class_counts(estimates, own), own)
                    head = head_by_class([one.weights for one in own], shares, before=before)
                    if linear:
                        head = evened(head, before=before, round=server.log.round)
                    models[name] = {**models[name], **head}
                models[name] = server_step(before, models[name], rate=rate)
        return models

    def _smoothed(
        self, state: State, models: Mapping[str, Weights], number: int
    ) -> dict[str, Weights]:
        """Return the average of the server models over rounds, if it is asked for."""
        before = state.carried("final")
        return {
            name: smoothed(
                before.get(name), state.models[name], own, decay=self.smoothing, round=number
            )
            for name, own in models.items()
            if self.smoothing > 0
        }


def belief_weights(members: Sequence[Member], estimates: ClassEstimates, beliefs: Tensor) -> Tensor:
    """Return r_i sum_c q(c | x) P(i | c) [K, N], normalised over members i."""
    shares = class_shares(class_counts(estimates, members), members)
    weights = shares @ beliefs.to(shares).T
    return (weights / weights.sum(dim=0)).to(torch.float32)


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


def falling(rate: float, *, round: int, rounds: int, concentration: float) -> float:
    """Return a rate that falls linearly over the rounds: to a tenth where every client holds one
    class (a concentration of 1), not at all where clients are alike (0)."""
    fall = concentration * (1.0 - LAST_RATE)
    return rate * (1.0 - fall * min(1.0, (round - 1) / max(1, rounds - 1)))


def evened(head: Weights, *, before: Weights, round: int) -> Weights:
    """Return the head with the change d_c of its row c times (m / |d_c|)^(EVENNESS / round), where
    m is the mean of |d_c| over classes.

    Different clients train different rows. Of two similar classes, the one whose row has moved
    further takes the other's examples; later rounds correct that, a single one cannot.
    """
    lengths = (head["head.weight"] - before["head.weight"]).norm(dim=1).clamp_min(1e-12)
    factors = (lengths.mean() / lengths).pow(EVENNESS / round)
    return {
        name: torch.addcmul(
            before[name], factors.view(-1, *[1] * (rows.ndim - 1)), rows - before[name]
        )
        for name, rows in head.items()
    }
