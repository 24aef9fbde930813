"""FedDF (Lin et al. 2020): the average learns the ensemble's predictions on public data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedaux.config import ExperimentFields
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.asks import Asks
from fedaux.core.messages import Member
from fedaux.core.server import Server, kept_logits
from fedaux.core.soft_labels import Mix, share_weights
from fedaux.core.task import State


@dataclass(frozen=True)
class FedDF(FedAvg):
    """Average, then distill the clients' mean logits. A method of this family differs in its soft
    labels."""

    mix: Mix = "logits"
    """The quantity that is averaged over clients."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask for a model in every round."""
        return replace(super().asks(settings), distills=True)

    def round(self, server: Server, state: State) -> State:
        """Train, average, distill."""
        members = server.train(state)
        absent = server.absent(state, members) if self.memory else []
        everyone = server.predict([*members, *absent])
        models = server.average(state, everyone)
        labels = self.soft_labels(server, state, everyone)
        return self.remembering(server, state.next(server.distill(models, labels)), everyone)

    def soft_labels(self, server: Server, state: State, members: Sequence[Member]) -> Tensor:
        """Return the teacher's soft labels [N, C] from the members' logits (Eq. 2)."""
        return server.mix(members, share_weights(members), of=self.mix)

    def remembering(self, server: Server, state: State, members: Sequence[Member]) -> State:
        """Return the state with the predictions of this round's clients, for a method with
        memory."""
        return state.remember(kept_logits(members, server.log.answered)) if self.memory else state
