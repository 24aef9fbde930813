"""FedAUXfdp (Hoech et al. 2022): each client releases a linear head on h0's features, with noise.

The server remembers the heads. In every round they teach on public data, and the student starts at
their average.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedaux.config import Certainty, ExperimentFields
from fedaux.core.algorithms.fedaux import FedAux
from fedaux.core.algorithms.private_head import require_linear_heads
from fedaux.core.asks import Asks
from fedaux.core.messages import Member, Weights
from fedaux.core.server import Server, kept_weights
from fedaux.core.task import State
from fedaux.core.weights import average_by_prototype, own_weights
from fedaux.privacy.heads import layer_of


@dataclass(frozen=True)
class FedAuxFdp(FedAux):
    """No client trains: scores and heads are released once, and the heads teach."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask each client for scores and a head."""
        asked = super().asks(settings)
        releases = (*asked.releases, head_section(settings.certainty))
        return replace(asked, trains=False, releases=releases)

    def prepare(self, server: Server) -> State:
        """Collect scores and heads; start from the average of the heads.

        Raises ValueError if a head is not a linear layer, or no client releases one.
        """
        require_linear_heads(server.task)
        task, state = server.task, super().prepare(server)
        section, scored = head_section(task.experiment.certainty), list(state.releases)
        found = server.collect(section, among=scored)
        if not found.releases:
            raise ValueError(f"no client released a head{server.reasons()}")
        members = []
        for client, one in found.releases.items():
            name = task.prototype_of[client]
            layer = layer_of(one.vector.to(task.device), found.public[name])
            head = dict(zip(("head.weight", "head.bias"), layer, strict=True))
            members.append(Member(client, name, one.entry.num_examples, head))
        spent = tuple(one.entry for one in found.releases.values())
        averages = average_by_prototype(members)
        models = {name: {**own, **averages.get(name, {})} for name, own in state.models.items()}
        return replace(state.next(models).remember(kept_weights(members)), ledger=spent)

    def round(self, server: Server, state: State) -> State:
        """Distill the heads."""
        heads = []
        for client, kept in sorted(state.memory.items()):
            name, examples = server.task.prototype_of[client], int(kept.tensors["num_examples"])
            weights = {**features_below(server, name), **own_weights(kept)}
            heads.append(Member(client, name, examples, weights))
        members = server.predict(heads)
        labels = self.soft_labels(server, state, members)
        return state.next(server.distill(state.models, labels))


def features_below(server: Server, prototype: str) -> Weights:
    """Return the features below a head that can predict: none where heads alone are trained."""
    if server.task.experiment.mode == "linear":
        return {}
    own = server.preparation.extractors[prototype]
    return {f"features.{key}": tensor for key, tensor in own.items()}


def head_section(section: Certainty) -> Certainty:
    """Return the settings of the release of heads: mechanism `heads` at its own epsilon."""
    return section.model_copy(update={"mechanism": "heads", "epsilon": section.head_epsilon})
