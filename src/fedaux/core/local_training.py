"""Local training of one client: a method's objectives, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedaux.config import Distillation, Local
from fedaux.core.backend import ClientJob, TrainContext, TrainResult
from fedaux.core.compute import Compute, inference_batch
from fedaux.core.objectives import CROSS_ENTROPY, LocalLoss, joined_targets
from fedaux.core.steps import Steps, optimizer_state, restore_optimizer


def adam(
    parameters: Iterable[nn.Parameter], section: Local | Distillation, **how: Any
) -> torch.optim.Optimizer:
    """Adam with a section's settings (Kingma & Ba 2015); fused on a CPU."""
    parameters = list(parameters)
    how = (
        {"fused": True} if all(parameter.device.type == "cpu" for parameter in parameters) else {}
    ) | how
    return torch.optim.Adam(
        parameters, lr=section.learning_rate, weight_decay=section.weight_decay, **how
    )


def sgd(
    parameters: Iterable[nn.Parameter], section: Local | Distillation, **how: Any
) -> torch.optim.Optimizer:
    """Stochastic gradient descent with a section's settings."""
    return torch.optim.SGD(
        parameters,
        lr=section.learning_rate,
        momentum=section.momentum,
        weight_decay=section.weight_decay,
        **how,
    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": adam, "sgd": sgd}
"""Called as optimizer(parameters, section, **how), for local training and distillation."""


def train_locally(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    section: Local,
    proximal: float,
    generator: np.random.Generator,
    rows: Tensor | None = None,
    compute: Compute | None = None,
    state: Mapping[str, Tensor] | None = None,
    loss: LocalLoss = CROSS_ENTROPY,
    adjustment: Tensor | None = None,
    beliefs: Tensor | None = None,
    correction: Mapping[str, Tensor] | None = None,
    mirrored: bool = False,
) -> TrainResult:
    """Train `model` in place on inputs (uint8 [n, C, H, W] or features [n, F]) and labels [n].

    Minimises loss + proximal / 2 * |theta - theta_0|^2, where theta_0 are the weights at the start.
    The client holds `rows` of the n examples, by default all. Rehearsed examples follow them in
    `inputs`, one for each row of `beliefs` [M, C]. The optimizer continues from `state`; without
    one, it starts fresh. A `correction` is added to each gradient. If `mirrored`, the second half
    of the n examples is the first one mirrored, and `rows` are of the first.
    """
    if rows is None:
        rows = torch.arange(len(labels) // (1 + mirrored), device=labels.device)
    if len(rows) == 0:
        raise ValueError("a client without examples cannot train")
    compute = Compute(labels.device) if compute is None else compute
    steps = Steps(
        model,
        inputs,
        targets_of(
            model,
            inputs,
            labels,
            torch.cat([rows, rows + len(labels) // 2]) if mirrored else rows,
            loss=loss,
            beliefs=beliefs,
            compute=compute,
        ),
        loss=loss,
        optimizer=lambda parameters: OPTIMIZERS[section.optimizer](parameters, section),
        compute=compute,
        proximal=proximal,
        constants=() if adjustment is None else (adjustment,),
        uncounted=loss.rehearsed,
        correction=correction,
    )
    if state:
        restore_optimizer(steps.optimizer, model, dict(state))
    steps.start()
    for batch in batches(
        rows,
        section=section,
        generator=generator,
        rehearsed=loss.rehearsed,
        public=(len(labels), len(inputs)),
        mirrored=len(labels) // 2 if mirrored else 0,
    ):
        steps.begin(batch)
        steps.step(len(batch))
    mean = float(steps.total) / (section.epochs * len(rows))
    return TrainResult(
        mean, optimizer_state(steps.optimizer, model) if section.optimizer_state == "kept" else {}
    )


@torch.no_grad()
def targets_of(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    rows: Tensor,
    *,
    loss: LocalLoss,
    beliefs: Tensor | None,
    compute: Compute,
) -> Tensor:
    """Return what the loss compares logits with: labels [n], or (label, beliefs) [n + M, 1 + C].

    The beliefs about a client's own rows are the probabilities of the model before training.
    """
    if beliefs is None and not loss.terms:
        return labels
    logits = []
    if loss.terms:
        model.eval()
        for part in rows.split(inference_batch(compute.device)):
            with compute.autocast():
                logits.append(model(compute.floats(inputs[part])).float())
    public = logits[0].new_zeros(0, logits[0].shape[1]) if beliefs is None else beliefs.float()
    targets = joined_targets(labels, public)
    if logits:
        targets[rows, 1:] = torch.cat(logits).softmax(dim=1)
    return targets


def batches(
    rows: Tensor,
    *,
    section: Local,
    generator: np.random.Generator,
    rehearsed: int = 0,
    public: tuple[int, int] = (0, 0),
    mirrored: int = 0,
) -> Iterator[Tensor]:
    """Yield the rows of each batch of local training: every epoch in a new random order.

    Each batch ends with `rehearsed` rows drawn at random from the public ones, `range(*public)`. If
    `mirrored` is given, half of the rows at random become row + `mirrored`, the mirrored image.
    """
    for order in epoch_orders(rows, epochs=section.epochs, generator=generator, mirrored=mirrored):
        own = order.split(section.batch_size)
        if rehearsed == 0:
            yield from own
            continue
        drawn = generator.integers(*public, size=(len(own), rehearsed))
        for batch, others in zip(own, torch.from_numpy(drawn).to(rows.device), strict=True):
            yield torch.cat([batch, others])


def client_batches(context: TrainContext, job: ClientJob) -> Iterator[Tensor]:
    """Yield the rows of each batch of a client's round."""
    return batches(
        job.rows,
        section=context.section,
        generator=job.generator,
        rehearsed=context.loss.rehearsed,
        public=(len(context.labels), len(context.inputs)),
        mirrored=len(context.labels) // 2 if context.mirrored else 0,
    )


def rows_per_epoch(context: TrainContext, examples: int) -> int:
    """Return how many rows the batches of an epoch hold, for so many examples of a client."""
    return examples + math.ceil(examples / context.section.batch_size) * context.loss.rehearsed


def epoch_orders(
    rows: Tensor, *, epochs: int, generator: np.random.Generator, mirrored: int = 0
) -> Iterator[Tensor]:
    """Yield a random order of the rows [n] for each epoch.

    If `mirrored` is given, half of them at random become row + `mirrored`, the mirrored image.
    """
    for _ in range(epochs):
        order = rows[torch.from_numpy(generator.permutation(len(rows))).to(rows.device)]
        if mirrored:
            flips = torch.from_numpy(generator.integers(2, size=len(rows)))
            order = order + mirrored * flips.to(rows.device)
        yield order
