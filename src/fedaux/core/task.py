"""A task (one method and one seed), its state, and its models."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedaux import seeding
from fedaux.config import ExperimentFields
from fedaux.core.asks import Asking, Asks
from fedaux.core.backend import Backend
from fedaux.core.compute import Compute, inference_batch
from fedaux.core.messages import ClientRelease, ClientState, Weights
from fedaux.core.weights import flat
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanism import Public

if TYPE_CHECKING:
    from fedaux.models import SplitModel

Fields = TypeVar("Fields", bound=ExperimentFields)
MAP_EXAMPLES = 20_000
"""Most public examples from which the map of standardised features is computed."""


@dataclass(frozen=True)
class Task:
    """One method and one seed of an experiment, with all public data of the server."""

    experiment: ExperimentFields
    method: Asking
    seed: int
    input_shape: tuple[int, ...]
    """(channels, height, width) of images, (tokens, vocabulary) of texts."""
    num_classes: int
    prototype_of: tuple[str, ...]
    """The prototype of each client."""
    negatives: Tensor
    """Like the distill set and the test data: uint8 images [N, C, H, W], token ids int32 [N, L], or
    features [N, F]."""
    distill_set: Tensor
    test_images: Tensor
    test_labels: Tensor
    backend: Backend = field(compare=False)
    """Trains, predicts and distills."""
    validation: tuple[Tensor, Tensor] | None = None
    """Images and labels at the server, for methods that need some."""

    @cached_property
    def asks(self) -> Asks:
        """What the method asks of clients."""
        return self.method.asks(self.experiment)

    @property
    def objectives(self) -> tuple[str, ...]:
        """What clients minimise besides cross-entropy: for this method, and for all of the run."""
        return tuple(dict.fromkeys((*self.asks.objectives, *self.experiment.local.objectives)))

    @property
    def compute(self) -> Compute:
        """Device and precision of the backend."""
        return self.backend.compute

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        return self.distill_set.device

    @cached_property
    def initial_models(self) -> dict[str, SplitModel]:
        """Each prototype's model with its initial random weights; to be copied, not changed."""
        from fedaux.models import MODELS  # late: they are half of the package

        models = {}
        for prototype in self.experiment.prototypes:
            build = MODELS[prototype.model]
            with seeding.initialisation(self.seed, part=prototype.name):
                model = build(self.input_shape, self.num_classes, **prototype.options)
            models[prototype.name] = self.backend.place(model)
        return models

    @property
    def mirrors(self) -> bool:
        """Whether images are mirrored at random in training. Raises ValueError for texts."""
        if self.experiment.data.mirror and len(self.input_shape) != 3:
            raise ValueError("data.mirror = true: texts cannot be mirrored; should be false")
        return self.experiment.data.mirror

    def architecture(self, prototype: str) -> str:
        """Return a name for the architecture of a prototype's models."""
        (section,) = [one for one in self.experiment.prototypes if one.name == prototype]
        shape = "x".join(map(str, self.input_shape))
        options, mode = sorted(section.options.items()), self.experiment.mode
        return f"{section.model} {options} {shape} {self.num_classes} {mode}"


@dataclass(frozen=True)
class State:
    """All that the server carries from round to round. A checkpoint is a state."""

    round: int
    models: Mapping[str, Weights]
    """The server model of each prototype."""
    releases: Mapping[int, ClientRelease] = field(default_factory=dict)
    """What clients have released; a client with a usable release is not asked again."""
    ledger: tuple[LedgerEntry, ...] = ()
    """The privacy cost of updates, and of releases that are not in `releases`."""
    memory: Mapping[int, ClientState] = field(default_factory=dict)
    """What the server keeps of each client's last answer: "logits", "weights/NAME", ..."""
    own: Mapping[str, Tensor] = field(default_factory=dict)
    """Other tensors of the method, as KIND/PROTOTYPE/NAME: see `carry`."""

    def next(self, models: Mapping[str, Weights]) -> State:
        """Return the state with the models of this round, whose number the server counts."""
        return replace(self, models=models)

    def remember(self, kept: Mapping[int, Mapping[str, Tensor]]) -> State:
        """Return the state with tensors to keep of clients that have answered in this round."""
        stamped = {client: ClientState(self.round + 1, tensors) for client, tensors in kept.items()}
        return replace(self, memory={**self.memory, **stamped})

    def carry(self, kind: str, groups: Mapping[str, Weights]) -> State:
        """Return the state with tensors of the method's own, by prototype."""
        others = {key: own for key, own in self.own.items() if not key.startswith(f"{kind}/")}
        return replace(self, own={**others, **flat(groups, prefix=f"{kind}/")})

    def carried(self, kind: str) -> dict[str, Weights]:
        """Return what `carry` has kept, by prototype; empty before the first time."""
        groups: dict[str, Weights] = {}
        for key, tensor in self.own.items():
            own_kind, prototype, name = key.split("/", 2)
            if own_kind == kind:
                groups.setdefault(prototype, {})[name] = tensor
        return groups

    @property
    def final(self) -> Mapping[str, Weights]:
        """The models that are evaluated and kept: what a method carries as "final", or the server
        models."""
        return self.carried("final") or self.models


@dataclass(frozen=True)
class Preparation:
    """Results of the preparation phase, which no round changes."""

    extractors: Mapping[str, Weights] = field(default_factory=dict)
    """h0 of each prototype, if clients release something or train heads on features."""
    public: Mapping[str, Public] = field(default_factory=dict)
    """What clients need for their release, by prototype."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0


class Callback(Protocol):
    """Receives the progress of a run."""

    def phase(self, task: Task, round: int, name: str) -> None:
        """Called when a phase begins."""
        ...

    def round(self, row: Mapping[str, Any]) -> None:
        """Called with the metrics of a finished round."""
        ...


def rehearsed_rows(task: Task) -> Tensor:
    """Return which examples of the distill set clients rehearse, the same in all rounds [M]."""
    size = len(task.distill_set)
    chosen = seeding.generator(task.seed, "rehearsal").permutation(size)
    count = task.experiment.rehearsal.examples or size
    return torch.from_numpy(np.sort(chosen[:count])).to(task.device)


def assign_prototypes(experiment: ExperimentFields) -> tuple[str, ...]:
    """Return the prototype of each client: as named, all others by share."""
    names: dict[int, str] = {
        client: prototype.name
        for prototype in experiment.prototypes
        for client in prototype.clients or ()
    }
    sharing = [prototype for prototype in experiment.prototypes if prototype.clients is None]
    given = {prototype.name: 0 for prototype in sharing}
    for client in range(experiment.split.num_clients):
        if client not in names:
            # The one furthest behind its share is next, so any first few clients are well mixed.
            behind = min(
                sharing, key=lambda prototype: (given[prototype.name] + 1) / prototype.share
            )
            given[behind.name] += 1
            names[client] = behind.name
    return tuple(names[client] for client in range(experiment.split.num_clients))


def population(experiment: Fields, method: Asking) -> tuple[Fields, tuple[str, ...]]:
    """Return the experiment as a method's clients see it, and the prototype of each client.

    Clients that share no models train in every round. Pooled data belong to one client per
    prototype.
    """
    shares = method.asks(experiment).shares
    if shares == "models":
        return experiment, assign_prototypes(experiment)
    changes: dict[str, Any] = {"participation_rate": 1.0}
    if shares == "nothing":
        return experiment.model_copy(update=changes), assign_prototypes(experiment)
    prototypes = tuple(prototype.name for prototype in experiment.prototypes)
    changes["split"] = experiment.split.model_copy(update={"num_clients": len(prototypes)})
    return experiment.model_copy(update=changes), prototypes


def build_models(task: Task) -> dict[str, SplitModel]:
    """Return each prototype's model with its initial random weights, as a copy."""
    return deepcopy(task.initial_models)


def trainable_models(task: Task) -> dict[str, SplitModel]:
    """Return the trained part of each prototype's model: all of it or, in linear mode, the head."""
    models = build_models(task)
    if task.experiment.mode == "full":
        return models
    return {name: head_alone(model) for name, model in models.items()}


def head_alone(model: SplitModel) -> SplitModel:
    """Return a model of features: only the head."""
    from fedaux.models import SplitModel

    return SplitModel(nn.Identity(), model.head, feature_width=model.feature_width)


def extract(
    task: Task, prototype: str, weights: Weights, examples: Tensor, *, rows: Tensor | None = None
) -> Tensor:
    """Return the features [n, F] of examples, or of some rows of them, under a prototype's h0.

    Raises ValueError if they do not fit into a GPU's memory.
    """
    from fedaux.models.standardised import has_map, standardise, standardised

    model, batch_size = build_models(task)[prototype], task.experiment.evaluation.batch_size
    if isinstance(model.features, nn.Identity):  # data themselves, read where they are needed
        chosen = examples if rows is None else examples[rows]
        return standardise(chosen, weights) if has_map(weights) else chosen.float()
    module = standardised(model).features if has_map(weights) else model.features
    try:
        return task.backend.extractor(module, batch_size=batch_size)(weights, examples, rows)
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(
            f"features of {prototype}: out of GPU memory. Reduce evaluation.batch_size (now "
            f"{batch_size or inference_batch(task.device)}), in a new run directory"
        ) from error


def standardised_by_public(task: Task, prototype: str, weights: Weights) -> Weights:
    """Return a prototype's h0 with the map of `models/standardised.py`, if its head allows one."""
    from fedaux.models.standardised import public_map, standardised, with_map

    model = build_models(task)[prototype]
    if standardised(model) is model:
        return weights
    features = []
    for examples in (task.negatives, task.distill_set):
        rows = torch.arange(min(len(examples), MAP_EXAMPLES), device=examples.device)
        features.append(extract(task, prototype, weights, examples, rows=rows))
    return with_map(weights, public_map(torch.cat(features)[:MAP_EXAMPLES]))
