"""FedPer (Arivazhagan et al. 2019): features are shared, heads stay with the clients.

    fedaux run demo --plugin examples/methods/fedper.py --set 'method=["fedper+p","local-only+p"]'

Accuracy is personal: each client's model is measured on the test examples in the proportions of its
own classes. Real clients would keep their heads and measure themselves, which takes code at the
nodes; so the simulator alone runs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from fedaux import METHODS
from fedaux.config import ExperimentFields
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.asks import Asks
from fedaux.core.messages import Weights
from fedaux.core.server import Server
from fedaux.core.task import State


@dataclass(frozen=True)
class FedPer(FedAvg):
    """Each client trains the shared features and its own head."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask for a model whose head the client keeps."""
        return replace(super().asks(settings), remembers=True, personal=True)

    def own(self, server: Server, state: State, client: int) -> Weights:
        """Return a client's model: the shared features, and its own head if it has trained."""
        head = state.memory[client].tensors if client in state.memory else {}
        return {**state.models[server.task.prototype_of[client]], **head}

    def round(self, server: Server, state: State) -> State:
        """Train features and heads; average the features."""
        prototype_of = server.task.prototype_of
        members = server.train(
            state,
            start=lambda one: {**state.models, prototype_of[one]: self.own(server, state, one)},
        )
        heads = {
            one.client: {k: t for k, t in one.weights.items() if k.startswith("head.")}
            for one in members
        }
        return state.next(server.average(state, members)).remember(heads)

    def evaluated(self, server: Server, state: State) -> Iterable[tuple[str, Weights, Tensor]]:
        """Return each client's model, with its shares of the classes."""
        for client in server.log.present:
            shares = server.class_shares(client)
            yield server.task.prototype_of[client], self.own(server, state, client), shares


METHODS["fedper"] = FedPer("fedper")
METHODS["fedper+p"] = FedPer("fedper+p", pretrained=True)
