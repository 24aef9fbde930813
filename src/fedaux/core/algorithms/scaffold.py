"""SCAFFOLD (Karimireddy et al. 2020) and FedDyn (Acar et al. 2021): gradients are corrected.

Each client i has a control variate g_i in the form of its parameters, zero at first; g is the mean
over all clients of its prototype. The server derives g_i from the client's update and sends the
correction with the weights, so clients keep no state. Both papers average clients equally.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fedaux.config import ExperimentFields, Local
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.asks import Asks
from fedaux.core.messages import ClientState, Weights
from fedaux.core.server import Server
from fedaux.core.task import State
from fedaux.core.weights import parameter_names


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SCAFFOLD, option II: clients add g - g_i to their gradients."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask for a model in every round, trained with a correction."""
        return replace(super().asks(settings), remembers=True)

    def problems(self, settings: ExperimentFields) -> list[str]:
        """Refuse optimizers whose steps are not gradients."""
        local, lines = settings.local, private_problems(self.name, settings)
        if local.optimizer != "sgd" or local.momentum > 0:
            found = (
                "adam" if local.optimizer != "sgd" else f"sgd with a momentum of {local.momentum}"
            )
            lines.append(
                f"local.optimizer: {found}; {self.name} needs local.optimizer = 'sgd' and "
                "local.momentum = 0, because its control variates are the mean gradients of the "
                "local steps"
            )
        return lines

    def round(self, server: Server, state: State) -> State:
        """Train with corrections, average equally, renew the control variates."""
        task = server.task
        known = {client: stored_control(kept) for client, kept in state.memory.items()}
        population = {*server.log.present, *known}
        means = {
            name: mean_control(
                [own for client, own in sorted(known.items()) if task.prototype_of[client] == name],
                over=sum(task.prototype_of[client] == name for client in population),
                like=model,
            )
            for name, model in state.models.items()
        }

        def control(client: int) -> Weights:
            return known.get(client) or zeros(means[task.prototype_of[client]])

        corrections = {
            client: self.added(control(client), means[task.prototype_of[client]])
            for client in server.log.asked
        }
        members = server.train(state, corrections=corrections)
        renewed = {}
        for one in members:
            mean, start = means[one.prototype], state.models[one.prototype]
            moved = {name: one.weights[name] - start[name] for name in mean}
            steps = local_steps(task.experiment.local, one.num_examples)
            renewed[one.client] = self.renewed(
                control(one.client), mean, moved, steps, task.experiment.local
            )
        models = server.average(state, [replace(one, num_examples=1) for one in members])
        for name in {one.prototype for one in members}:
            every = sorted({**known, **renewed}.items())
            own = [control for client, control in every if task.prototype_of[client] == name]
            after = mean_control(
                own,
                over=sum(task.prototype_of[client] == name for client in population),
                like=models[name],
            )
            models[name] = self.shifted(models[name], after, task.experiment.local)
        kept = {
            client: {f"control/{name}": tensor for name, tensor in own.items()}
            for client, own in renewed.items()
        }
        return state.next(models).remember(kept)

    def added(self, own: Weights, mean: Weights) -> Weights:
        """Return what a client adds to its gradients, from g_i and g."""
        return {name: mean[name] - own[name] for name in mean}

    def renewed(
        self, own: Weights, mean: Weights, moved: Weights, steps: int, local: Local
    ) -> Weights:
        """Return g_i - g - (theta_i - theta) / (K eta): the client's mean gradient over K steps."""
        scale = steps * local.learning_rate
        return {name: own[name] - mean[name] - moved[name] / scale for name in mean}

    def shifted(self, average: Weights, mean: Weights, local: Local) -> Weights:
        """Return the server's next model."""
        return average


@dataclass(frozen=True)
class FedDyn(Scaffold):
    """FedDyn: clients add -g_i to their gradients, and a proximal term with alpha =
    `local.proximal`."""

    objectives: tuple[str, ...] = ("proximal",)

    def problems(self, settings: ExperimentFields) -> list[str]:
        """Refuse an alpha of zero."""
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


def private_problems(name: str, settings: ExperimentFields) -> list[str]:
    """Refuse DP-SGD, whose gradients are not corrected."""
    if settings.local.privacy is None:
        return []
    return [f"local.privacy: not supported by {name}, which corrects gradients"]


def local_steps(local: Local, num_examples: int) -> int:
    """Return the number of steps K that a client takes in a round."""
    return local.epochs * math.ceil(num_examples / local.batch_size)


def zeros(like: Weights) -> Weights:
    """Return a control variate of zeros."""
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def mean_control(controls: list[Weights], *, over: int, like: Weights) -> Weights:
    """Return g = sum_i g_i / N over the clients of a prototype, zero for those without one."""
    total = zeros({name: like[name] for name in parameter_names(like)})
    for own in controls:
        total = {name: total[name] + own[name] for name in total}
    return {name: tensor / max(1, over) for name, tensor in total.items()}


def stored_control(state: ClientState) -> Weights:
    """Return the control variate that is remembered of a client."""
    return {
        key.removeprefix("control/"): tensor
        for key, tensor in state.tensors.items()
        if key.startswith("control/")
    }
