"""FedNova (Wang et al. 2020): clients that take more steps do not count more.

    fedaux run demo --plugin examples/methods/fednova.py --set 'method=["fednova+p","fedavg+p"]' \
        --set 'local={optimizer="sgd",learning_rate=0.1}'
"""

from __future__ import annotations

from dataclasses import dataclass

from fedaux import METHODS
from fedaux.config import ExperimentFields
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.algorithms.scaffold import local_steps
from fedaux.core.server import Server
from fedaux.core.task import State
from fedaux.core.weights import parameter_names


@dataclass(frozen=True)
class FedNova(FedAvg):
    """theta + (sum_i p_i tau_i) sum_i p_i (theta_i - theta) / tau_i, for tau_i steps of SGD."""

    def problems(self, settings: ExperimentFields) -> list[str]:
        """Refuse optimizers whose steps do not weigh alike."""
        if settings.local.optimizer == "sgd" and settings.local.momentum == 0:
            return []
        return [f"local.optimizer: {self.name} needs 'sgd' with local.momentum = 0"]

    def round(self, server: Server, state: State) -> State:
        """Train, and average updates per step."""
        members = server.train(state)
        models = server.average(state, members)
        for name in {one.prototype for one in members}:
            own, before = [one for one in members if one.prototype == name], state.models[name]
            total = sum(one.num_examples for one in own)
            shares = [one.num_examples / total for one in own]
            taus = [local_steps(server.task.experiment.local, one.num_examples) for one in own]
            effective = sum(p * tau for p, tau in zip(shares, taus, strict=True))
            for key in parameter_names(before):
                moved = [one.weights[key] - before[key] for one in own]
                mean = sum(p / t * d for p, t, d in zip(shares, taus, moved, strict=True))
                models[name][key] = before[key] + effective * mean
        return state.next(models)


METHODS["fednova"] = FedNova("fednova")
METHODS["fednova+p"] = FedNova("fednova+p", pretrained=True)
