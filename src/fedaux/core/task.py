"""A task: one method and one seed, with what the server works on; its state and its models."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedaux import seeding
from fedaux.config import ExperimentFields
from fedaux.core.backend import Backend
from fedaux.core.compute import Compute, inference_batch
from fedaux.core.messages import ClientState, ScoreRelease, Weights
from fedaux.core.methods import Method
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanism import Public

if TYPE_CHECKING:
    from fedaux.models import SplitModel

Fields = TypeVar("Fields", bound=ExperimentFields)


@dataclass(frozen=True)
class Task:
    """One method and one seed of an experiment, with everything public that the server works on."""

    experiment: ExperimentFields
    method: Method
    seed: int
    input_shape: tuple[int, ...]
    """(channels, height, width) of images, (tokens, vocabulary) of texts."""
    num_classes: int
    prototype_of: tuple[str, ...]
    """The prototype of each client."""
    negatives: Tensor
    """Public examples, as all others here uint8 images [N, C, H, W] or token ids, int32 [N, L]."""
    distill_images: Tensor
    test_images: Tensor
    test_labels: Tensor
    backend: Backend = field(compare=False)
    """Computes what clients and server ask for."""
    validation: tuple[Tensor, Tensor] | None = None
    """Images and labels at the server, for methods that stop distillation early."""

    @property
    def compute(self) -> Compute:
        """Device and precision of the backend."""
        return self.backend.compute

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        return self.distill_images.device

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
    """All that the server carries from round to round."""

    round: int
    weights: Mapping[str, Weights]
    """The server model of each prototype."""
    releases: Mapping[int, ScoreRelease] = field(default_factory=dict)
    """What clients have released; no client is asked twice."""
    ledger: tuple[LedgerEntry, ...] = ()
    """What private updates have cost the clients."""
    memory: Mapping[int, ClientState] = field(default_factory=dict)
    """What is kept of each client's last answer: "logits", "weights/NAME", "control/NAME"."""
    smoothed: Mapping[str, Weights] = field(default_factory=dict)
    """The server models' average over rounds, if the method asks for it (`Method.smoothing`)."""

    @property
    def final(self) -> Mapping[str, Weights]:
        """The models that are evaluated: the averages over rounds or, without, the last ones."""
        return self.smoothed or self.weights


@dataclass(frozen=True)
class Preparation:
    """What the preparation phase leaves behind."""

    extractors: Mapping[str, Weights]
    """h0 of each prototype, if the method uses scores or trains heads on features."""
    public: Mapping[str, Public]
    seconds: Mapping[str, float]
    bytes_up: int
    bytes_down: int


class Callback(Protocol):
    """Receives the progress of a run."""

    def phase(self, task: Task, round: int, name: str) -> None:
        """Called when a phase begins."""
        ...

    def round(self, row: Mapping[str, Any]) -> None:
        """Called with the metrics of a finished round."""
        ...


def objectives_of(task: Task) -> tuple[str, ...]:
    """Return what clients minimise besides cross-entropy: the method's objectives and further
    ones."""
    return tuple(dict.fromkeys((*task.method.objectives, *task.experiment.local.objectives)))


def rehearsed_rows(task: Task) -> Tensor:
    """Return which examples of the distill set clients rehearse, the same in all rounds [M]."""
    size = len(task.distill_images)
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


def population(experiment: Fields, method: Method) -> tuple[Fields, tuple[str, ...]]:
    """Return the experiment as a method's clients see it, and the prototype of each client.

    Clients that share no models train in every round. Of pooled data, each prototype has one
    client, which holds all of it.
    """
    if method.exchange == "models":
        return experiment, assign_prototypes(experiment)
    changes: dict[str, Any] = {"participation_rate": 1.0}
    if method.exchange == "nothing":
        return experiment.model_copy(update=changes), assign_prototypes(experiment)
    prototypes = tuple(prototype.name for prototype in experiment.prototypes)
    changes["split"] = experiment.split.model_copy(update={"num_clients": len(prototypes)})
    return experiment.model_copy(update=changes), prototypes


def build_models(task: Task) -> dict[str, SplitModel]:
    """Return each prototype's model with its initial random weights, as a copy."""
    return deepcopy(task.initial_models)


def trainable_models(task: Task) -> dict[str, SplitModel]:
    """Return what is trained of each prototype's model: all of it or, in linear mode, the head."""
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
    module, batch_size = (
        build_models(task)[prototype].features,
        task.experiment.evaluation.batch_size,
    )
    try:
        return task.backend.features(module, weights, examples, batch_size=batch_size, rows=rows)
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(
            f"features of {prototype}: out of GPU memory. Reduce evaluation.batch_size (now "
            f"{batch_size or inference_batch(task.device)}), in a new run directory"
        ) from error
