"""FedDF and FedBE with the distillation of their authors' code (docs/paper.md).

    fedaux run reproduce/originals/feddf.toml --plugin reproduce/originals/methods.py \
        --set data.path=DIR --set auxiliary.path=DIR
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedaux import METHODS
from fedaux.config import ExperimentFields
from fedaux.core.algorithms.fedbe import FedBE
from fedaux.core.algorithms.feddf import FedDF
from fedaux.core.compute import Compute
from fedaux.core.distillation import distillation_loss, number_of_steps
from fedaux.core.messages import Member, Weights
from fedaux.core.metrics import evaluate
from fedaux.core.server import Server
from fedaux.core.steps import OPTIMIZERS, Steps, batch_sizes, epoch_orders
from fedaux.core.task import State, trainable_models
from fedaux.core.weights import load, snapshot

Student = Iterator[tuple[int, nn.Module]]
"""A student in training, after each of its steps, from 1."""


@dataclass(frozen=True)
class OriginalFedDF(FedDF):
    """FedDF: a rate that falls as a cosine, clipped gradients, the best student on validation data.

    Distillation stops `patience` steps after the best measurement.
    """

    clip: float = 5.0
    every: int = 100
    patience: int = 1000

    def problems(self, settings: ExperimentFields) -> list[str]:
        """Ask for full models and validation data."""
        problems = whole_models(self.name, settings)
        if settings.data.server_validation == 0:
            problems.append(f"data.server_validation: {self.name} needs labels at the server")
        return problems

    def round(self, server: Server, state: State) -> State:
        """Train, average, distill."""
        return distilled(self, server, state, self.student)

    def student(self, server: Server, name: str, weights: Weights, labels: Tensor) -> Weights:
        """Return the student with the best accuracy on the server's validation data."""
        found = students(server, name, weights, labels, rate=cosine_rate, clip=self.clip)
        total = number_of_steps(len(labels), section=server.task.experiment.distillation)
        assert server.task.validation is not None, "problems asks for it"
        images, truth = server.task.validation
        best, accuracy, at = weights, -math.inf, 0
        for number, model in found:
            if number % self.every and number != total:
                continue
            predict = server.task.backend.predictor(model)
            measured = evaluate(predict(snapshot(model), images), truth)[0]
            if measured > accuracy:
                best, accuracy, at = snapshot(model), measured, number
            if number - at >= self.patience:
                break
        return best


@dataclass(frozen=True)
class OriginalFedBE(FedBE):
    """FedBE: sharpened targets p^(1/T), and the mean of the student's weights at several steps
    (SWA, Izmailov et al. 2018)."""

    temperature: float = 0.5
    start: int = 500
    every: int = 25

    def problems(self, settings: ExperimentFields) -> list[str]:
        """Ask for full models."""
        return whole_models(self.name, settings)

    def round(self, server: Server, state: State) -> State:
        """Train, average, distill."""
        return distilled(self, server, state, self.student)

    def soft_labels(self, server: Server, state: State, members: Sequence[Member]) -> Tensor:
        """Return sharpened soft labels [N, C]."""
        labels = super().soft_labels(server, state, members)
        return torch.softmax(labels.log() / self.temperature, dim=1)

    def student(self, server: Server, name: str, weights: Weights, labels: Tensor) -> Weights:
        """Return the mean of the weights after every `every` steps from `start` on."""
        means: list[Tensor] = []
        count = 0
        for number, model in students(server, name, weights, labels):
            own = [parameter.detach() for parameter in model.parameters()]
            if number <= self.start or number % self.every:
                continue
            count += 1
            means = means or [torch.zeros_like(parameter) for parameter in own]
            for mean, parameter in zip(means, own, strict=True):
                mean.lerp_(parameter, 1.0 / count)
        if not means:
            raise ValueError(f"{self.name}: no step of {number} counts for the mean of weights")
        with torch.no_grad():
            for mean, parameter in zip(means, model.parameters(), strict=True):
                parameter.copy_(mean)
        size = server.task.experiment.distillation.batch_size
        images, compute = server.task.distill_set, server.task.compute
        recompute_statistics(model, images, batch_size=size, compute=compute)
        return snapshot(model)


def whole_models(name: str, settings: ExperimentFields) -> list[str]:
    """Return why the settings do not fit: heads alone, or mirrored images."""
    problems = [] if settings.mode == "full" else [f"mode: {name} distills full models"]
    return problems + ([f"data.mirror: {name} mirrors nothing"] if settings.data.mirror else [])


def distilled(
    method: FedDF,
    server: Server,
    state: State,
    student: Callable[[Server, str, Weights, Tensor], Weights],
) -> State:
    """Return the state after a round of FedDF with other students."""
    members = server.predict(server.train(state))
    models: Mapping[str, Weights] = server.average(state, members)
    labels = method.soft_labels(server, state, members)
    with server.log.phase("distill"):
        return state.next(
            {name: student(server, name, own, labels) for name, own in models.items()}
        )


def students(
    server: Server,
    name: str,
    weights: Weights,
    labels: Tensor,
    *,
    rate: Callable[[int, int, float], float] | None = None,
    clip: float | None = None,
) -> Student:
    """Yield a prototype's student after each step on soft labels [N, C]."""
    task, section = server.task, server.task.experiment.distillation
    model = trainable_models(task)[name]
    load(model, weights)
    steps = Steps(
        model,
        task.distill_set,
        labels,
        loss=distillation_loss,
        optimizer=lambda parameters: OPTIMIZERS[section.optimizer](parameters, section),
        compute=task.compute,
    )
    if clip is not None:

        def clipped(*_: object) -> None:
            nn.utils.clip_grad_norm_(steps.parameters, clip)

        steps.optimizer.register_step_pre_hook(clipped)
    steps.start()
    total, number = number_of_steps(len(labels), section=section), 0
    epochs = math.ceil(total / math.ceil(len(labels) / section.batch_size))
    rows, generator = (
        torch.arange(len(labels), device=task.device),
        server.generator("distillation", part=name),
    )
    for order in epoch_orders(rows, epochs=epochs, generator=generator):
        steps.begin(order)
        for size in list(batch_sizes(len(labels), section.batch_size))[: total - number]:
            number += 1
            if rate is not None:
                for group in steps.optimizer.param_groups:
                    group["lr"] = rate(number, total, section.learning_rate)
            steps.step(size)
            yield number, model


def cosine_rate(number: int, total: int, highest: float) -> float:
    """Return highest / 2 * (1 + cos(pi (number - 1) / total)), the rate of step `number`."""
    return highest * 0.5 * (1.0 + math.cos(math.pi * (number - 1) / total))


@torch.no_grad()
def recompute_statistics(
    model: nn.Module, images: Tensor, *, batch_size: int, compute: Compute
) -> None:
    """Set the statistics of batch normalisation to their means over images.

    Other parts of the model are in evaluation mode. Batches of one are left out: they have no
    variance.
    """
    layers = [
        module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    batches = [batch for batch in images.split(batch_size) if len(batch) > 1]
    if not layers or not batches:
        return
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.train()
    seen = 0
    for batch in batches:
        seen += len(batch)
        for layer in layers:
            layer.momentum = len(batch) / seen
        with compute.autocast():
            model(compute.floats(batch))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    model.train()


METHODS["feddf-original"] = OriginalFedDF("feddf-original")
METHODS["fedbe-original"] = OriginalFedBE("fedbe-original")
