"""The private head: a linear layer on h0's features that follows the discriminant of class sums.

The discriminant f0 of `privacy/classes.py` is linear in clipped features, hence not in h0's. A
ridge regression on public examples brings it into the form of a network's last layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedaux.config import Certainty, ExperimentFields
from fedaux.core.asks import Asks
from fedaux.core.server import Method, Server
from fedaux.core.task import State, Task, build_models
from fedaux.privacy.classes import ClassEstimate

RIDGE = 1e-3
"""Penalty, in units of the mean variance of a feature."""

Shares = Callable[[ClassEstimate], float]
"""How far the start is moved to the private head, in 0 .. 1."""


@dataclass(frozen=True)
class PrivateHead(Method):
    """One release of class sums, and no rounds: nothing else leaves a client."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask each client for class sums."""
        return Asks(pretrained=True, trains=False, releases=(class_sums(settings),))

    def prepare(self, server: Server) -> State:
        """Start from the private head."""
        return start_with_head(server, share=lambda _: 1.0)

    def round(self, server: Server, state: State) -> State:
        """Leave the head as it is."""
        return state


@dataclass(frozen=True)
class PrivateStudent(PrivateHead):
    """The whole network learns the private head's soft labels on public data."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask each client for class sums."""
        return replace(super().asks(settings), distills=True)

    def round(self, server: Server, state: State) -> State:
        """Distill the private head."""
        return state.next(server.distill(state.models, private_beliefs(server, state)))


def class_sums(settings: ExperimentFields) -> Certainty:
    """Return the settings of a release of class sums."""
    return settings.certainty.model_copy(update={"mechanism": "classes"})


def start_with_head(server: Server, *, share: Shares) -> State:
    """Collect class sums, and move each prototype's head by a share of the way to the private head.

    Raises ValueError if nobody releases class sums, or for a head that is no linear layer.
    """
    require_linear_heads(server.task)
    task, state = server.task, server.start()
    releases = server.collect(class_sums(task.experiment)).releases
    if not releases and (why := server.reasons()):
        raise ValueError(f"no client released class sums for the private head{why}")
    state = replace(state, releases=releases)
    with server.log.phase("head"):
        logits, shares = {}, {}
        for name, (_, estimate) in server.scorer.class_estimates(releases).items():
            logits[name] = estimate.logits(server.scorer.projected[name])
            shares[name] = torch.tensor(share(estimate))
        models = {}
        for name, model in build_models(task).items():
            targets, own = of_prototype(logits, name), float(of_prototype(shares, name))
            features = server.features(name, task.distill_set)
            set_head(model.head, features, targets, share=own, prototype=name)
            head = {f"head.{key}": tensor for key, tensor in model.head.state_dict().items()}
            models[name] = {**state.models[name], **head}
    return state.next(models)


def private_beliefs(server: Server, state: State) -> Tensor:
    """Return the private head's probabilities on the distill set [N, C]: mean over prototypes."""
    with server.log.phase("beliefs"):
        estimates = server.scorer.class_estimates(state.releases)
        projected = server.scorer.projected
        logits = [one.logits(projected[name]) for name, (_, one) in estimates.items()]
        return torch.stack([own.softmax(dim=1) for own in logits]).mean(dim=0).float()


def fit_head(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [C, F] and bias [C] of the linear layer nearest to targets [N, C].

    Minimises mean_x |W h(x) + b - f0(x)|^2 + r |W|^2 over features h(x) [N, F], in double
    precision; r is RIDGE times the mean variance of a feature, and b is free.
    """
    inputs, outputs = features.double(), targets.double()
    centre, level = inputs.mean(dim=0), outputs.mean(dim=0)
    apart = inputs - centre
    covariance = apart.T @ apart / len(inputs)
    covariance.diagonal().add_(RIDGE * covariance.diagonal().mean().clamp_min(1e-12))
    weight = torch.linalg.solve(covariance, apart.T @ (outputs - level) / len(inputs)).T
    return weight.float(), (level - weight @ centre).float()


def set_head(
    head: nn.Module, features: Tensor, targets: Tensor, *, share: float, prototype: str
) -> None:
    """Set a linear head to share * fit + (1 - share) * head. Raises ValueError for a head of
    another kind."""
    head = require_linear(head, prototype=prototype)
    weight, bias = fit_head(features, targets)
    with torch.no_grad():
        head.weight.lerp_(weight.to(head.weight), share)
        head.bias.lerp_(bias.to(head.bias), share)


def require_linear_heads(task: Task) -> None:
    """Raise ValueError if a head is not a linear layer, before anything is released."""
    for name, model in task.initial_models.items():
        require_linear(model.head, prototype=name)


def require_linear(head: nn.Module, *, prototype: str) -> nn.Linear:
    """Return a head that is a linear layer. Raises ValueError for a head of another kind."""
    if not isinstance(head, nn.Linear) or head.bias is None:
        raise ValueError(
            f"prototypes.name = {prototype!r}: its head is {type(head).__name__}; a method that "
            "makes or averages heads by class needs a model whose head is a Linear layer with a "
            "bias"
        )
    return head


def of_prototype(known: Mapping[str, Tensor], prototype: str) -> Tensor:
    """Return what is known about a prototype from its clients' class sums or, if none of them has
    released any, the mean of the others."""
    return known.get(prototype, torch.stack(list(known.values())).mean(dim=0))
