"""FedYogi (Reddi et al. 2021): the server takes steps of the optimizer Yogi.

fedaux run demo --plugin examples/methods/fedyogi.py --set 'method=["fedyogi+p","fedavg+p"]'
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedaux import METHODS
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.messages import Weights
from fedaux.core.server import Server
from fedaux.core.task import State
from fedaux.core.weights import parameter_names


@dataclass(frozen=True)
class FedYogi(FedAvg):
    """theta + eta m / (sqrt(v) + tau), with moments m and v of the mean update D."""

    rate: float = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def round(self, server: Server, state: State) -> State:
        """Train, average, take a step."""
        averages = server.average(state, server.train(state))
        models: dict[str, Weights] = {}
        first, second = state.carried("first"), state.carried("second")
        for name, before in state.models.items():
            models[name], own = dict(averages[name]), averages[name]
            m, v = first.setdefault(name, {}), second.setdefault(name, {})
            for key in parameter_names(before):
                update = own[key] - before[key]
                old = v.get(key, torch.full_like(update, self.tau**2))
                m[key] = self.beta_1 * m.get(key, 0.0) + (1 - self.beta_1) * update
                v[key] = old - (1 - self.beta_2) * update**2 * (old - update**2).sign()
                models[name][key] = before[key] + self.rate * m[key] / (v[key].sqrt() + self.tau)
        return state.next(models).carry("first", first).carry("second", second)


METHODS["fedyogi"] = FedYogi("fedyogi")
METHODS["fedyogi+p"] = FedYogi("fedyogi+p", pretrained=True)
