"""Distillation: the server's student learns the teacher's soft labels on the distill set (Eq. 1).

Schedules, averages and validation happen between steps. Without early stopping, nothing waits for
the device between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.config import Averaging, Distillation, Stopping
from fedaux.core.compute import Compute
from fedaux.core.messages import Weights
from fedaux.core.steps import (
    OPTIMIZERS,
    PreparedStepping,
    Stepping,
    Steps,
    batch_sizes,
    epoch_orders,
)
from fedaux.core.weights import load, recompute_statistics, snapshot


def distill(
    model: nn.Module,
    weights: Weights,
    images: Tensor,
    targets: Tensor,
    *,
    section: Distillation,
    generator: np.random.Generator,
    compute: Compute | None = None,
    validate: Callable[[nn.Module], float] | None = None,
    steps: PreparedStepping | None = None,
) -> Weights:
    """Return the weights after minimising D_KL(targets || softmax f(x)) over inputs [N, ...].

    Targets are soft labels [N, C]. Inputs [2N, ...] are N examples and the same ones mirrored, of
    which each epoch sees one or the other at random. `validate` measures a model on the server's
    labelled data; higher is better. `steps` are the model's own prepared ones; without them, steps
    are eager.
    Raises ValueError if the section asks for stopping and `validate` is missing, or for an average
    of weights that no step reaches.
    """
    if section.stopping is not None and validate is None:
        raise ValueError(
            "distillation.stopping: needs labels at the server; data.server_validation should be "
            "above 0"
        )
    total = number_of_steps(len(targets), section=section)
    compute = Compute(images.device) if compute is None else compute
    load(model, weights)
    mean = None if section.averaging is None else MeanWeights(model, section.averaging, total=total)
    sharp = sharpen(targets, temperature=section.sharpening)
    student = _started(model, images, for_each(images, sharp), section, compute, steps)
    best = (
        None
        if section.stopping is None or validate is None
        else Best(model, section.stopping, validate, total=total)
    )
    rate: float | None = None
    sizes = _batch_sizes(student, images, len(targets), section=section, generator=generator)
    for number, size in zip(range(1, total + 1), sizes, strict=False):
        previous, rate = rate, SCHEDULES[section.schedule](number, total, section)
        if rate != previous:
            student.set_rate(rate)
        student.step(size)
        if mean is not None and mean.counts(number):
            student.settle()
            mean.look()
        if best is not None and best.measures(number):
            student.settle()
            if best.is_final(number):
                break
    student.settle()
    if mean is not None:
        mean.load()
        recompute_statistics(model, images, batch_size=section.batch_size, compute=compute)
    return snapshot(model) if best is None else best.weights


def _started(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    section: Distillation,
    compute: Compute,
    captured: PreparedStepping | None,
) -> Stepping:
    """Return steps that begin at the model's present weights with a fresh optimizer."""
    steps: Stepping
    if captured is None:
        steps = Steps(
            model,
            images,
            targets,
            loss=distillation_loss,
            optimizer=lambda parameters: OPTIMIZERS[section.optimizer](parameters, section),
            compute=compute,
            clip=section.clip,
        )
    else:
        assert captured.model is model, (
            "captured steps change the model that they were captured with"
        )
        captured.set_targets(targets)
        captured.reset()
        steps = captured
    steps.start()
    return steps


def number_of_steps(size: int, *, section: Distillation) -> int:
    """Return the number of steps on `size` examples, unless distillation stops early."""
    return section.steps or section.epochs * math.ceil(size / section.batch_size)


def for_each(inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the targets [N, C] of inputs [N, ...], or twice [2N, C] if mirrored inputs follow."""
    return targets if len(inputs) == len(targets) else targets.repeat(2, 1)


def _batch_sizes(
    steps: Stepping,
    images: Tensor,
    size: int,
    *,
    section: Distillation,
    generator: np.random.Generator,
) -> Iterator[int]:
    """Yield the size of every batch; give the steps the random order of each epoch."""
    epochs = math.ceil(
        number_of_steps(size, section=section) / math.ceil(size / section.batch_size)
    )
    rows, mirrored = torch.arange(size, device=images.device), len(images) - size
    for order in epoch_orders(rows, epochs=epochs, generator=generator, mirrored=mirrored):
        steps.begin(order)
        yield from batch_sizes(size, section.batch_size)


def distillation_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of D_KL(targets || softmax(logits)) over rows [N, C] (Eq. 1)."""
    return functional.kl_div(torch.log_softmax(logits, dim=1), targets, reduction="batchmean")


def sharpen(targets: Tensor, *, temperature: float) -> Tensor:
    """Return p^(1/T) / sum_c p_c^(1/T) of every row p of targets [N, C] (MixMatch, 2019)."""
    return targets if temperature == 1.0 else torch.softmax(targets.log() / temperature, dim=1)


def constant_rate(number: int, total: int, section: Distillation) -> float:
    """Return the learning rate itself."""
    return section.learning_rate


def cosine_rate(number: int, total: int, section: Distillation) -> float:
    """Return rate / 2 * (1 + cos(pi (number - 1) / total))."""
    return section.learning_rate * 0.5 * (1.0 + math.cos(math.pi * (number - 1) / total))


def cyclic_rate(number: int, total: int, section: Distillation) -> float:
    """Return (1 - t) rate + t lowest, t = ((number - 1) mod c + 1) / c (Izmailov et al. 2018)."""
    passed = ((number - 1) % section.cycle_steps + 1) / section.cycle_steps
    return (1.0 - passed) * section.learning_rate + passed * section.lowest_learning_rate


SCHEDULES: dict[str, Callable[[int, int, Distillation], float]] = {
    "constant": constant_rate,
    "cosine": cosine_rate,
    "cyclic": cyclic_rate,
}
"""The learning rate of step `number`, from 1 to `total`."""


class MeanWeights:
    """The running mean of a model's parameters at some of its steps (SWA, Izmailov et al. 2018)."""

    def __init__(self, model: nn.Module, section: Averaging, *, total: int) -> None:
        check_averaging(section, total=total)
        self._section = section
        self._parameters = list(model.parameters())
        self._means = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._count = 0

    def counts(self, number: int) -> bool:
        """Return whether the weights after step `number` count."""
        return number > self._section.start and number % self._section.every == 0

    @torch.no_grad()
    def look(self) -> None:
        """Add the present weights: mean_n = mean_(n-1) + (theta - mean_(n-1)) / n."""
        self._count += 1
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            mean.lerp_(parameter, 1.0 / self._count)

    @torch.no_grad()
    def load(self) -> None:
        """Give the model the mean."""
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            parameter.copy_(mean)


def check_averaging(section: Averaging, *, total: int) -> None:
    """Raise ValueError if no step of a distillation counts for the mean of its weights."""
    if total - total % section.every <= section.start:
        raise ValueError(
            f"distillation.averaging.start = {section.start}: the last of {total} steps to count, "
            "of every "
            f"{section.every}, is {total - total % section.every}; start should be less"
        )


class Best:
    """The best weights so far, and early stopping."""

    def __init__(
        self,
        model: nn.Module,
        section: Stopping,
        validate: Callable[[nn.Module], float],
        *,
        total: int,
    ) -> None:
        self.weights: Weights = {}
        self._model = model
        self._section = section
        self._validate = validate
        self._total = total
        self._score = -math.inf
        self._number = 0
        if section.include_start:
            self._measure(0)

    def measures(self, number: int) -> bool:
        """Return whether to validate after step `number`."""
        return number % self._section.every == 0 or number == self._total

    def is_final(self, number: int) -> bool:
        """Validate the weights after step `number`; return whether patience has run out."""
        self._measure(number)
        return number - self._number >= self._section.patience

    def _measure(self, number: int) -> None:
        score = self._validate(self._model)
        score = -math.inf if math.isnan(score) else score
        self._model.train()
        if not self.weights or score > self._score:
            self.weights, self._score, self._number = snapshot(self._model), score, number
