"""FedAVG (McMahan et al. 2017), and its peers that differ in what clients minimise."""

from __future__ import annotations

from dataclasses import dataclass

from fedaux.config import ExperimentFields
from fedaux.core.asks import Asks
from fedaux.core.server import Method, Server, kept_weights
from fedaux.core.task import State


@dataclass(frozen=True)
class FedAvg(Method):
    """Average the clients' models.

    With the objective `proximal` it is FedPROX (Li et al. 2020); FedLC, FedRS, FedNTD and FedVLS
    have other objectives.
    """

    pretrained: bool = False
    """Whether it starts from h0 (`+p`)."""
    memory: bool = False
    """Whether clients that are absent from a round count with their last answer (`+m`)."""
    objectives: tuple[str, ...] = ()

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask for a model in every round."""
        return Asks(pretrained=self.pretrained, objectives=self.objectives, remembers=self.memory)

    def round(self, server: Server, state: State) -> State:
        """Train and average."""
        members = server.train(state)
        absent = server.absent(state, members) if self.memory else []
        state = state.next(server.average(state, [*members, *absent]))
        return state.remember(kept_weights(members)) if self.memory else state
