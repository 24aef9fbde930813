"""fedcounts: averaging repaired by label counts, the cheapest release that tells who holds what.

Clients share p(x | c) and differ by their class shares. Each rehearses public
examples with the server's beliefs, so that it does not forget the classes that it lacks, and adds
the logarithm of the class shares of all that it trains on to its logits, so that its model learns
p(x | c). Row c of the head is averaged in proportion to the noisy numbers of examples of class c.
Nothing is distilled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedaux.config import Certainty, ExperimentFields
from fedaux.core.algorithms.by_class import class_counts, class_shares, head_by_class, smoothed
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.algorithms.private_head import require_linear
from fedaux.core.asks import Asks
from fedaux.core.messages import Weights
from fedaux.core.server import Server
from fedaux.core.task import State
from fedaux.core.weights import server_step


@dataclass(frozen=True)
class FedCounts(FedAvg):
    """Start from h0, adjust and rehearse, average heads by class and models over rounds."""

    pretrained: bool = True
    objectives: tuple[str, ...] = ("jointly-adjusted", "rehearsal")
    server_rate: float = 2.0
    """The server's parameters become old + rate * (average - old)."""
    smoothing: float = 0.8
    """Decay of the server models' average over rounds, which is evaluated."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask each client for label counts, and for a model in every round."""
        return replace(super().asks(settings), releases=(self.counts(settings),))

    def counts(self, settings: ExperimentFields) -> Certainty:
        """Return the settings of a release of label counts."""
        return settings.certainty.model_copy(update={"mechanism": "counts"})

    def prepare(self, server: Server) -> State:
        """Start from h0; let each client release its label counts."""
        for name, model in server.task.initial_models.items():
            require_linear(model.head, prototype=name)
        state = server.start()
        releases = server.collect(self.counts(server.task.experiment)).releases
        return replace(state, releases=releases)

    def round(self, server: Server, state: State) -> State:
        """Train with rehearsal, average heads by class, smooth over rounds."""
        estimates = server.scorer.class_estimates(state.releases)
        members = server.train(state)
        models = server.average(state, members)
        with server.log.phase("average"):
            for name in sorted({member.prototype for member in members}):
                before, own = state.models[name], [one for one in members if one.prototype == name]
                if server.task.experiment.aggregation == "mean":
                    shares = class_shares(class_counts(estimates, own), own)
                    head = head_by_class([one.weights for one in own], shares, before=before)
                    models[name] = {**models[name], **head}
                models[name] = server_step(before, models[name], rate=self.server_rate)
        return state.next(models).carry("final", self._smoothed(state, models, server.log.round))

    def _smoothed(
        self, state: State, models: Mapping[str, Weights], number: int
    ) -> dict[str, Weights]:
        """Return the average of the server models over rounds."""
        before = state.carried("final")
        return {
            name: smoothed(
                before.get(name), state.models[name], own, decay=self.smoothing, round=number
            )
            for name, own in models.items()
        }
