"""Gradient corrections: what SCAFFOLD and FedDyn add to the gradients of local training.

Each client i has a control variate g_i in the form of its parameters, zero at first; g is the mean
over all clients of its prototype. The server derives g_i from the client's update and sends the
correction with the weights, so clients keep no state. Both papers average clients equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedaux.config import Local
from fedaux.core.messages import ClientState, Weights
from fedaux.core.teachers import Member
from fedaux.core.weights import parameter_names


@dataclass(frozen=True)
class Rule:
    """One kind of correction, tensor by tensor."""

    added: Callable[[Tensor, Tensor], Tensor]
    """added(g_i, g) is added to each gradient of the client."""
    renewed: Callable[[Tensor, Tensor, Tensor, int, Local], Tensor]
    """renewed(g_i, g, moved, steps, local) is g_i after the client moved by theta_i - theta."""
    shift: Callable[[Tensor, Local], Tensor] | None = None
    """shift(g, local) is added to the average of the clients' models."""


def scaffold_renewed(own: Tensor, mean: Tensor, moved: Tensor, steps: int, local: Local) -> Tensor:
    """Return g_i - g - (theta_i - theta) / (K eta): the client's mean gradient over K steps."""
    return own - mean - moved / (steps * local.learning_rate)


def feddyn_renewed(own: Tensor, mean: Tensor, moved: Tensor, steps: int, local: Local) -> Tensor:
    """Return g_i - alpha (theta_i - theta)."""
    return own - local.proximal * moved


RULES: dict[str, Rule] = {
    "scaffold": Rule(lambda own, mean: mean - own, scaffold_renewed),
    "feddyn": Rule(
        lambda own, mean: -own, feddyn_renewed, lambda mean, local: -mean / local.proximal
    ),
}
"""SCAFFOLD (Karimireddy et al. 2020, option II) and FedDyn (Acar et al. 2021), whose alpha is
`local.proximal`: its other term is the proximal one."""


@dataclass(frozen=True)
class Controls:
    """The control variates of the clients of one prototype."""

    name: str
    """Of the prototype."""
    rule: Rule
    local: Local
    own: Mapping[int, Weights]
    """g_i of clients that have trained; zero for others."""
    population: int
    """Number of clients over which the mean is taken."""
    weights: Weights
    """The server's model, from which clients start."""

    def of(self, client: int) -> Weights:
        """Return g_i."""
        if client in self.own:
            return self.own[client]
        return {name: torch.zeros_like(self.weights[name]) for name in self._names}

    @cached_property
    def mean(self) -> Weights:
        """The mean g over all clients."""
        total = {name: torch.zeros_like(self.weights[name]) for name in self._names}
        for _, own in sorted(self.own.items()):
            total = {name: total[name] + own[name] for name in total}
        return {name: tensor / self.population for name, tensor in total.items()}

    def correction(self, client: int) -> Weights:
        """Return what a client adds to its gradients."""
        own, mean = self.of(client), self.mean
        return {name: self.rule.added(own[name], mean[name]) for name in mean}

    def renewed(self, member: Member) -> Weights:
        """Return g_i of a client that has trained in this round."""
        own, local, start = self.of(member.client), self.local, self.weights
        steps = local.epochs * math.ceil(member.num_examples / local.batch_size)
        return {
            name: self.rule.renewed(
                own[name], mean, member.weights[name] - start[name], steps, local
            )
            for name, mean in self.mean.items()
        }

    def shifted(self, average: Weights, members: Sequence[Member]) -> Weights:
        """Return the server's next model from the average of the members that are of its
        prototype."""
        if (shift := self.rule.shift) is None:
            return average
        trained = {one.client: self.renewed(one) for one in members if one.prototype == self.name}
        after = replace(self, own={**self.own, **trained}).mean
        return average | {
            name: average[name] + shift(mean, self.local) for name, mean in after.items()
        }

    @property
    def _names(self) -> list[str]:
        return parameter_names(self.weights)


def controls_of(
    kind: str,
    *,
    local: Local,
    weights: Mapping[str, Weights],
    memory: Mapping[int, ClientState],
    population: Iterable[int],
    prototype_of: Sequence[str],
) -> dict[str, Controls]:
    """Return the control variates that the server remembers, by prototype."""
    everybody = set(population) | set(memory)
    return {
        name: Controls(
            name,
            RULES[kind],
            local,
            {
                client: stored_control(state)
                for client, state in memory.items()
                if prototype_of[client] == name
            },
            sum(prototype_of[client] == name for client in everybody),
            own,
        )
        for name, own in weights.items()
    }


def stored_control(state: ClientState) -> Weights:
    """Return the control variate in what is remembered of a client."""
    return {
        key.removeprefix("control/"): tensor
        for key, tensor in state.tensors.items()
        if key.startswith("control/")
    }
