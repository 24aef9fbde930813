"""fedaux2: our successor of FedAUX. Private sums tell the server which client holds which class.

Clients share p(x | c) and differ by their class shares p_i(c), so what drifts apart is known: each
client adds the logarithm of the class shares that it trains on to its logits, rehearses public
examples for the classes that it lacks, and counts in row c of the head, and in the soft labels of
examples of class c, in proportion to P(i | c). Heads have a convex loss: from the second round on,
control variates correct their measured drift, and nothing has to be inferred. Networks learn an
ensemble's predictions, because an average of networks is not their ensemble (docs/methods.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedaux.config import Certainty, ExperimentFields
from fedaux.core.algorithms.by_class import class_shares, head_by_class, smoothed
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.algorithms.private_head import (
    private_beliefs,
    require_linear_heads,
    start_with_head,
)
from fedaux.core.algorithms.scaffold import (
    Controls,
    corrected,
    local_steps,
    mean_gradient,
    sgd_problems,
    stored,
)
from fedaux.core.asks import Asks
from fedaux.core.messages import Member, Weights
from fedaux.core.metrics import information
from fedaux.core.server import Server, kept_logits
from fedaux.core.soft_labels import balanced, share_weights
from fedaux.core.task import State
from fedaux.core.weights import server_step

PUSH = 2.5
"""Largest share of rehearsed examples in the class shares of a network, times its local steps."""
LEAST_TOLD = 0.01
"""Least information about the class, in nats, in the soft labels of the first round. With less,
public examples are unlike private ones, and networks learn no soft labels at all."""


@dataclass(frozen=True)
class FedAux2(FedAvg):
    """Start from the private head, adjust, rehearse, average by class; correct measured drift."""

    pretrained: bool = True
    memory: bool = True
    objectives: tuple[str, ...] = ("jointly-adjusted", "rehearsal")
    start: float = 0.5
    """Share of the private head in the start, times the reliability of the releases."""
    mechanism: Literal["classes", "counts"] = "classes"
    """What clients release: class sums, which also give a private head, or label counts alone."""
    by_class: bool = True
    """Whether clients count by class in heads and soft labels. Robust averages (`aggregation`)
    never do: a client could claim a whole class."""
    anchor: float = 0.5
    """Share of the private head in the server's beliefs, times the reliability of the releases,
    divided by the round's number."""
    distills: bool = True
    """Whether networks learn the ensemble's predictions, if the first of these tell anything."""
    corrects: bool = True
    """Whether heads have control variates, which replace class shares after the first round."""
    server_rate: float = 2.0
    """The server's parameters become old + rate * (average - old); see `_average` for heads."""
    smoothing: float = 0.8
    """Decay of the server models' average over rounds, which is evaluated; 0 evaluates the last."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask each client for one release, and for a model in every round."""
        distills = self.distills and settings.mode == "full"
        remembers = self.memory if distills else self._corrects(settings)
        return replace(
            super().asks(settings),
            releases=(self.release(settings),),
            distills=distills,
            remembers=remembers,
        )

    def release(self, settings: ExperimentFields) -> Certainty:
        """Return the settings of the release."""
        return settings.certainty.model_copy(update={"mechanism": self.mechanism})

    def prepare(self, server: Server) -> State:
        """Start from h0 and, with class sums, a share of the private head."""
        require_linear_heads(server.task)
        if self.mechanism == "classes":
            return start_with_head(server, share=lambda one: self.start * one.reliability)
        state = server.start()
        found = server.collect(self.release(server.task.experiment))
        return replace(state, releases=found.releases)

    def round(self, server: Server, state: State) -> State:
        """Train and average by class shares or measured drift, distill networks, smooth."""
        settings = server.task.experiment
        controls = Controls.of(server, state) if self._corrects(settings) else None
        measured = controls is not None and bool(controls.known)
        beliefs = None if measured else self._beliefs(server, state)
        members = server.train(
            state,
            objectives=() if measured else self.objectives,
            rehearse=beliefs,
            strengths={"jointly-adjusted": self._joint(server, state)},
            corrections=None if controls is None else controls.corrections(corrected),
        )
        kept: Mapping[int, Mapping[str, Tensor]] = {}
        if controls is not None:
            kept = stored(controls.renewed(members, state.models, settings.local, mean_gradient))
        models = self._average(server, state, members, measured=measured)
        told = state.carried("told")
        if beliefs is not None and self.asks(settings).distills and _tells(told):
            absent = server.absent(state, members) if self.memory else []
            members = server.predict([*members, *absent])
            labels = self.labels(server, state, members, beliefs)
            told = told or {"labels": {"nats": information(labels) * math.log(labels.shape[1])}}
            if _tells(told):
                models = server.distill(models, labels)
                kept = kept_logits(members, server.log.answered) if self.memory else {}
        after = state.next(models).remember(kept).carry("told", told)
        if self.smoothing == 0:
            return after
        final = smoothed(state, models, decay=self.smoothing, round=server.log.round)
        return after.carry("final", final)

    def problems(self, settings: ExperimentFields) -> list[str]:
        """Refuse heads whose gradients cannot be corrected; DP-SGD does without."""
        if not self._corrects(settings):
            return []
        return sgd_problems(f"{self.name} in linear mode", settings)

    def _corrects(self, settings: ExperimentFields) -> bool:
        return self.corrects and settings.mode == "linear" and settings.local.privacy is None

    def _beliefs(self, server: Server, state: State) -> Tensor:
        """Return q(c | x) on the distill set [N, C]: the server's and, less and less, the private
        head's."""
        beliefs = server.beliefs(state.models)
        if self.mechanism != "classes":
            return beliefs
        estimates = server.scorer.class_estimates(state.releases).values()
        reliability = sum(estimate.reliability for _, estimate in estimates) / len(estimates)
        share = self.anchor * reliability / server.log.round
        return torch.lerp(beliefs, private_beliefs(server, state), share)

    def _joint(self, server: Server, state: State) -> float:
        """Return how much rehearsed examples count in the class shares that clients train on.

        1: as their own, half of all. Each local step of a network pushes a missing class down in
        proportion to its share, so that many steps want a smaller one; heads do not.
        """
        settings = server.task.experiment
        sizes = [one.entry.num_examples for one in state.releases.values()]
        steps = local_steps(settings.local, sum(sizes) / max(1, len(sizes)))
        share = 0.5 if settings.mode == "linear" else min(0.5, PUSH / max(1, steps))
        return share / (1.0 - share)

    def _held(self, server: Server, state: State, members: Sequence[Member]) -> Tensor:
        """Return P(i | c) [K, C] of members."""
        counts = {
            client: row
            for clients, estimate in server.scorer.class_estimates(state.releases).values()
            for client, row in zip(clients, estimate.counts, strict=True)
        }
        return class_shares(torch.stack([counts[one.client] for one in members]), members)

    def _average(
        self, server: Server, state: State, members: Sequence[Member], *, measured: bool
    ) -> dict[str, Weights]:
        """Return the averages, with heads by class unless drift is measured, moved by the rate.

        Control variates of absent clients are old: with them only a share C of the rate's excess
        over 1 remains.
        """
        settings, rate = server.task.experiment, self.server_rate
        by_class = self.by_class and settings.aggregation == "mean" and not measured
        if self._corrects(settings):
            rate = 1.0 + (rate - 1.0) * settings.participation_rate
        models = server.average(state, members)
        with server.log.phase("average"):
            for name in sorted({one.prototype for one in members}):
                before, own = state.models[name], [one for one in members if one.prototype == name]
                if by_class:
                    shares = self._held(server, state, own)
                    head = head_by_class([one.weights for one in own], shares, before=before)
                    models[name] = {**models[name], **head}
                models[name] = server_step(before, models[name], rate=rate)
        return models

    def labels(
        self, server: Server, state: State, members: Sequence[Member], beliefs: Tensor
    ) -> Tensor:
        """Return sum_i w_i(x) p_i(c | x) with w_i = sum_c q(c | x) P(i | c), balanced."""
        weights = share_weights(members)
        if self.by_class and server.task.experiment.aggregation == "mean":
            weights = self._held(server, state, members) @ beliefs.to(torch.float64).T
            weights = (weights / weights.sum(dim=0)).to(torch.float32)
        estimates = server.scorer.class_estimates(state.releases).values()
        prior = torch.stack([estimate.prior for _, estimate in estimates]).mean(dim=0)
        return balanced(server.mix(members, weights), prior)


def _tells(told: Mapping[str, Weights]) -> bool:
    """Return whether the first soft labels tell enough of the class; True before there are any."""
    return not told or not float(told["labels"]["nats"]) < LEAST_TOLD
