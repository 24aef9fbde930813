"""What the server does with the average: momentum, adaptive rates, extrapolation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.messages import Member, Weights
from fedaux.core.server import Server
from fedaux.core.task import State
from fedaux.core.weights import parameter_names, server_step


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAVG with server momentum (Hsu et al. 2019): v <- beta v + D, theta <- theta + v, for the
    mean update D."""

    beta: float = 0.9

    def round(self, server: Server, state: State) -> State:
        """Train, average, move by the velocity."""
        models, updates = mean_updates(server, state)
        velocity = state.carried("velocity")
        for name, update in updates.items():
            old = velocity.get(name) or zeros(update)
            velocity[name] = {key: self.beta * old[key] + own for key, own in update.items()}
            models[name] = moved(state.models[name], models[name], velocity[name])
        return state.next(models).carry("velocity", velocity)


@dataclass(frozen=True)
class FedAdam(FedAvg):
    """Adam at the server (Reddi et al. 2021): theta <- theta + eta m / (sqrt(v) + tau) with
    m <- beta_1 m + (1 - beta_1) D and v <- beta_2 v + (1 - beta_2) D^2."""

    rate: float = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def round(self, server: Server, state: State) -> State:
        """Train, average, move by the moments."""
        models, updates = mean_updates(server, state)
        first, second = state.carried("first"), state.carried("second")
        for name, update in updates.items():
            m, v = first.get(name) or zeros(update), second.get(name)
            v = v or {key: torch.full_like(own, self.tau**2) for key, own in update.items()}
            first[name] = {
                key: self.beta_1 * m[key] + (1 - self.beta_1) * own for key, own in update.items()
            }
            second[name] = {
                key: self.beta_2 * v[key] + (1 - self.beta_2) * own.square()
                for key, own in update.items()
            }
            step = {
                key: self.rate * first[name][key] / (second[name][key].sqrt() + self.tau)
                for key in update
            }
            models[name] = moved(state.models[name], models[name], step)
        return state.next(models).carry("first", first).carry("second", second)


@dataclass(frozen=True)
class FedExP(FedAvg):
    """FedExP (Jhunjhunwala et al. 2023): the server extrapolates, and the middle of the last two
    models is evaluated."""

    def round(self, server: Server, state: State) -> State:
        """Train, average, extrapolate."""
        members = server.train(state)
        models, middle = server.average(state, members), {}
        for name, before in state.models.items():
            own = [one for one in members if one.prototype == name]
            rate = extrapolation(own, before, models[name]) if own else 1.0
            models[name] = server_step(before, models[name], rate=rate)
            middle[name] = server_step(before, models[name], rate=0.5)
        return state.next(models).carry("final", middle)


def extrapolation(members: Sequence[Member], before: Weights, average: Weights) -> float:
    """Return max(1, sum_i |D_i|^2 / (2 K (|mean D|^2 + e))) for the updates D_i of K clients."""
    names = parameter_names(before)

    def square(model: Weights) -> float:
        return float(torch.stack([(model[key] - before[key]).norm() for key in names]).norm() ** 2)

    total = sum(square(member.weights) for member in members)
    return max(1.0, total / (2 * len(members) * (square(average) + 1e-12)))


def mean_updates(server: Server, state: State) -> tuple[dict[str, Weights], dict[str, Weights]]:
    """Train; return the averages, and the mean update of the parameters of each prototype that was
    trained."""
    members = server.train(state)
    models = server.average(state, members)
    return models, {
        name: {
            key: models[name][key] - state.models[name][key]
            for key in parameter_names(models[name])
        }
        for name in sorted({one.prototype for one in members})
    }


def moved(before: Weights, average: Weights, step: Weights) -> Weights:
    """Return parameters before + step, with the statistics of the average."""
    return {**average, **{key: before[key] + own for key, own in step.items()}}


def zeros(like: Weights) -> Weights:
    """Return zeros of the same shapes."""
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}
