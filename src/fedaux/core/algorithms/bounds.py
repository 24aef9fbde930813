"""Reference points, not federated methods: each client alone, and all data pooled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fedaux.config import ExperimentFields
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.asks import Asks
from fedaux.core.messages import Measured, Weights
from fedaux.core.server import Server, kept_weights
from fedaux.core.task import State
from fedaux.core.weights import own_weights


@dataclass(frozen=True)
class Pooled(FedAvg):
    """One client holds all private data."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask for the data itself."""
        return replace(super().asks(settings), shares="data")


@dataclass(frozen=True)
class LocalOnly(FedAvg):
    """Each client trains its own model; accuracy is the mean over clients."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask for nothing: the server only measures the models."""
        return replace(super().asks(settings), shares="nothing", remembers=True)

    def round(self, server: Server, state: State) -> State:
        """Let each client go on from its own model, if it has one."""

        def start(client: int) -> dict[str, Weights]:
            own = own_weights(state.memory[client]) if client in state.memory else {}
            return (
                {**state.models, server.task.prototype_of[client]: own} if own else {**state.models}
            )

        return state.remember(kept_weights(server.train(state, start=start)))

    def evaluated(self, server: Server, state: State) -> Iterable[Measured]:
        """Return the clients' models."""
        known, prototype_of = sorted(state.memory.items()), server.task.prototype_of
        own = [(prototype_of[client], own_weights(kept), None) for client, kept in known]
        return own or super().evaluated(server, state)
