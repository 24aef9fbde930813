"""Local training of one client: a method's objectives, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedaux.core.backend import ClientJob, TrainContext, TrainResult
from fedaux.core.compute import inference_batch
from fedaux.core.objectives import joined_targets
from fedaux.core.steps import (
    OPTIMIZERS,
    Steps,
    epoch_orders,
    optimizer_state,
    restore_optimizer,
)
from fedaux.data.texts import padded


def train_locally(context: TrainContext, job: ClientJob) -> TrainResult:
    """Train `context.model` in place, from its present weights, on a client's examples.

    Minimises loss + proximal / 2 * |theta - theta_0|^2, where theta_0 are the weights at the start.
    """
    if len(job.rows) == 0:
        raise ValueError("a client without examples cannot train")
    section, model = context.section, context.model
    steps = Steps(
        model,
        context.inputs,
        targets_of(context, job),
        loss=context.loss,
        optimizer=lambda parameters: OPTIMIZERS[section.optimizer](parameters, section),
        compute=context.compute,
        proximal=context.proximal,
        constants=() if job.adjustment is None else (job.adjustment,),
        uncounted=context.loss.rehearsed,
        correction=job.correction,
    )
    if job.state:
        restore_optimizer(steps.optimizer, model, dict(job.state))
    steps.start()
    for batch in client_batches(context, job):
        steps.begin(batch)
        steps.step(len(batch))
    mean = float(steps.total) / (section.epochs * len(job.rows))
    return TrainResult(
        mean, optimizer_state(steps.optimizer, model) if section.optimizer_state == "kept" else {}
    )


@torch.no_grad()
def targets_of(context: TrainContext, job: ClientJob) -> Tensor:
    """Return what the loss compares logits with: labels [n], or (label, beliefs) [n + M, 1 + C].

    The beliefs about a client's own rows are the probabilities of the model before training.
    """
    if job.soft_labels is None and not context.loss.terms:
        return context.labels
    model, compute, rows = context.model, context.compute, job.rows
    if context.mirrored:
        rows = torch.cat([rows, rows + len(context.labels) // 2])
    logits = []
    if context.loss.terms:
        model.eval()
        for part in rows.split(inference_batch(compute.device)):
            with compute.autocast():
                logits.append(model(compute.floats(context.inputs[part])).float())
    if job.soft_labels is None:
        public = logits[0].new_zeros(0, logits[0].shape[1])
    else:
        public = job.soft_labels.float()
    targets = joined_targets(context.labels, public)
    if logits:
        targets[rows, 1:] = torch.cat(logits).softmax(dim=1)
    return targets


def client_batches(context: TrainContext, job: ClientJob) -> Iterator[Tensor]:
    """Yield the rows of each batch of a client's round: every epoch in a new random order.

    Each batch ends with public rows to rehearse, drawn at random. If images are mirrored, a
    random half of the private rows are rows of mirrored images.
    """
    section, rehearsed, first = context.section, context.loss.rehearsed, len(context.labels)
    mirrored = first // 2 if context.mirrored else 0
    for order in epoch_orders(
        job.rows, epochs=section.epochs, generator=job.generator, mirrored=mirrored
    ):
        own = order.split(section.batch_size)
        if rehearsed == 0:
            yield from own
            continue
        drawn = job.generator.integers(first, len(context.inputs), size=(len(own), rehearsed))
        for batch, others in zip(own, torch.from_numpy(drawn).to(order.device), strict=True):
            yield torch.cat([batch, others])


def joined_inputs(parts: Sequence[Tensor]) -> Tensor:
    """Return private and public examples as one tensor; texts [N, L] are padded to the longest."""
    if len(parts) == 1:
        return parts[0]
    widths = {part.shape[-1] for part in parts}
    if len(widths) > 1:
        parts = [padded(part, width=max(widths)) for part in parts]
    return torch.cat([*parts])


def rows_per_round(context: TrainContext, examples: int) -> int:
    """Return how many rows the batches of a client's round hold, for its number of examples."""
    section = context.section
    num_batches = math.ceil(examples / section.batch_size)
    return section.epochs * (examples + num_batches * context.loss.rehearsed)
