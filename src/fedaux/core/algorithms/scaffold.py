"""SCAFFOLD (Karimireddy et al. 2020) and FedDyn (Acar et al. 2021): gradients are corrected.

Each client i has a control variate g_i in the form of its parameters, zero at first; g is the mean
over all clients of its prototype. The server derives g_i from the client's update and sends the
correction with the weights, so clients keep no state. Both papers average clients equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fedaux.config import ExperimentFields, Local
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.asks import Asks
from fedaux.core.messages import ClientState, Member, Weights
from fedaux.core.server import Server
from fedaux.core.task import State
from fedaux.core.weights import below, parameter_names

PREFIX = "control/"
Added = Callable[[Weights, Weights], Weights]
Renew = Callable[[Weights, Weights, Weights, int, Local], Weights]


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SCAFFOLD, option II: clients add g - g_i to their gradients."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask for a model in every round, trained with a correction."""
        return replace(super().asks(settings), remembers=True)

    def problems(self, settings: ExperimentFields) -> list[str]:
        """Refuse DP-SGD, and optimizers whose steps are not gradients."""
        return private_problems(self.name, settings) + sgd_problems(self.name, settings)

    def round(self, server: Server, state: State) -> State:
        """Train with corrections, average equally, renew the control variates."""
        local = server.task.experiment.local
        controls = Controls.of(server, state)
        members = server.train(state, corrections=controls.corrections(self.added))
        renewed = controls.renewed(members, state.models, local, self.renewed)
        models = server.average(state, [replace(one, num_examples=1) for one in members])
        means = replace(controls, known={**controls.known, **renewed}).means
        for name in {one.prototype for one in members}:
            models[name] = self.shifted(models[name], means[name], local)
        return state.next(models).remember(stored(renewed))

    def added(self, own: Weights, mean: Weights) -> Weights:
        """Return what a client adds to its gradients, from g_i and g."""
        return corrected(own, mean)

    def renewed(
        self, own: Weights, mean: Weights, moved: Weights, steps: int, local: Local
    ) -> Weights:
        """Return the next g_i."""
        return mean_gradient(own, mean, moved, steps, local)

    def shifted(self, average: Weights, mean: Weights, local: Local) -> Weights:
        """Return the server's next model."""
        return average


@dataclass(frozen=True)
class FedDyn(Scaffold):
    """FedDyn: clients add -g_i to their gradients, and a proximal term with alpha =
    `local.proximal`."""

    objectives: tuple[str, ...] = ("proximal",)

    def problems(self, settings: ExperimentFields) -> list[str]:
        """Refuse DP-SGD, and an alpha of zero."""
        lines = private_problems(self.name, settings)
        if settings.local.proximal == 0:
            lines.append(f"local.proximal = 0: should be above 0, it is the alpha of {self.name}")
        return lines

    def added(self, own: Weights, mean: Weights) -> Weights:
        """Return what a client adds to its gradients."""
        return {name: -own[name] for name in mean}

    def renewed(
        self, own: Weights, mean: Weights, moved: Weights, steps: int, local: Local
    ) -> Weights:
        """Return g_i - alpha (theta_i - theta)."""
        return {name: own[name] - local.proximal * moved[name] for name in mean}

    def shifted(self, average: Weights, mean: Weights, local: Local) -> Weights:
        """Return the average - g / alpha."""
        return average | {name: average[name] - own / local.proximal for name, own in mean.items()}


def sgd_problems(name: str, settings: ExperimentFields) -> list[str]:
    """Refuse optimizers whose steps are not gradients."""
    local = settings.local
    if local.optimizer == "sgd" and local.momentum == 0:
        return []
    found = "adam" if local.optimizer != "sgd" else f"sgd with a momentum of {local.momentum}"
    return [
        f"local.optimizer: {found}; {name} needs local.optimizer = 'sgd' and local.momentum = 0, "
        "because its control variates are the mean gradients of the local steps"
    ]


def private_problems(name: str, settings: ExperimentFields) -> list[str]:
    """Refuse DP-SGD, whose gradients are not corrected."""
    if settings.local.privacy is None:
        return []
    return [f"local.privacy: not supported by {name}, which corrects gradients"]


@dataclass(frozen=True)
class Controls:
    """The control variates g_i of clients that have answered before; all others have zeros."""

    known: Mapping[int, Weights]
    asked: Sequence[int]
    population: Collection[int]
    prototype_of: Sequence[str]
    models: Mapping[str, Weights]

    @classmethod
    def of(cls, server: Server, state: State) -> Controls:
        """Return the control variates that the state remembers."""
        log, known = server.log, {one: stored_control(kept) for one, kept in state.memory.items()}
        population = {*log.present, *known}
        return cls(known, log.asked, population, server.task.prototype_of, state.models)

    @cached_property
    def means(self) -> dict[str, Weights]:
        """g = sum_i g_i / N over the clients of each prototype."""
        found = {}
        for name, model in self.models.items():
            total = {key: torch.zeros_like(model[key]) for key in parameter_names(model)}
            for client, own in sorted(self.known.items()):
                if self.prototype_of[client] == name:
                    total = {key: tensor + own[key] for key, tensor in total.items()}
            clients = sum(self.prototype_of[client] == name for client in self.population)
            found[name] = {key: tensor / max(1, clients) for key, tensor in total.items()}
        return found

    def own(self, client: int) -> Weights:
        """Return g_i."""
        mean = self.means[self.prototype_of[client]]
        return self.known.get(client) or {key: torch.zeros_like(one) for key, one in mean.items()}

    def corrections(self, added: Added) -> dict[int, Weights]:
        """Return added(g_i, g) for each client that is asked."""
        means, prototype_of = self.means, self.prototype_of
        return {one: added(self.own(one), means[prototype_of[one]]) for one in self.asked}

    def renewed(
        self, members: Sequence[Member], before: Mapping[str, Weights], local: Local, renew: Renew
    ) -> dict[int, Weights]:
        """Return renew(g_i, g, theta_i - theta, K, local) of members that took K steps."""
        found = {}
        for one in members:
            mean, start = self.means[one.prototype], before[one.prototype]
            moved = {name: one.weights[name] - start[name] for name in mean}
            steps = local_steps(local, one.num_examples)
            found[one.client] = renew(self.own(one.client), mean, moved, steps, local)
        return found


def local_steps(local: Local, num_examples: float) -> int:
    """Return the number of steps K that a client with n readable examples takes in a round."""
    return local.epochs * math.ceil(num_examples / local.batch_size)


def corrected(own: Weights, mean: Weights) -> Weights:
    """Return g - g_i, which a client of SCAFFOLD adds to its gradients."""
    return {name: mean[name] - own[name] for name in mean}


def mean_gradient(own: Weights, mean: Weights, moved: Weights, steps: int, local: Local) -> Weights:
    """Return g_i - g - (theta_i - theta) / (K eta): the client's mean gradient over K steps."""
    scale = steps * local.learning_rate
    return {name: own[name] - mean[name] - moved[name] / scale for name in mean}


def stored(controls: Mapping[int, Weights]) -> dict[int, Weights]:
    """Return control variates under the names that the server stores."""
    return {
        client: {f"{PREFIX}{name}": tensor for name, tensor in own.items()}
        for client, own in controls.items()
    }


def stored_control(state: ClientState) -> Weights:
    """Return a client's control variate from its remembered tensors."""
    return below(PREFIX, state.tensors)
