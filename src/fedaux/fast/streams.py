"""Local training on a GPU: several clients at a time, each with its own CUDA graphs and stream.

A training step of a small model leaves most of a GPU idle and ends before Python has launched the
next kernel. As a CUDA graph, a step is one launch, and steps of different clients run at the same
time. Clients may differ in size: the last batch of an epoch has its own graph.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedaux.core.backend import ClientJob, TrainContext, Training, TrainResult
from fedaux.core.local_training import client_batches, rows_per_round
from fedaux.core.messages import Weights
from fedaux.core.objectives import joined_targets
from fedaux.core.plain_backend import one_by_one
from fedaux.core.steps import OPTIMIZERS, batch_sizes, optimizer_state, restore_optimizer
from fedaux.core.weights import load, snapshot
from fedaux.fast.capture import CapturedSteps
from fedaux.fast.fallback import attempt


class StreamTraining:
    """Trains `compute.clients_at_once` clients at once; one by one if steps cannot be captured."""

    def __init__(self, context: TrainContext, *, capacity: int) -> None:
        self._context = context
        self._capacity = rows_per_round(context, capacity)
        self._slots: list[CapturedSteps] = []
        self._plain: Training | None = None
        self._targets: Tensor | None = None
        """Labels and soft labels of all rows, if clients rehearse; graphs read them from here."""

    def __call__(
        self, jobs: Sequence[ClientJob], weights: Weights
    ) -> Iterator[tuple[ClientJob, Weights, TrainResult]]:
        """Train each job from the given weights."""
        for wave in waves(jobs, width=self._context.compute.clients_at_once):
            if self._plain is None and not self._prepared(wave):
                self._plain = one_by_one(self._context)
            yield from (
                self._wave(wave, weights) if self._plain is None else self._plain(wave, weights)
            )

    def _prepared(self, wave: Sequence[ClientJob]) -> bool:
        """Capture the steps that a wave needs; return whether it was possible."""
        batch_size, rehearsed = self._context.section.batch_size, self._context.loss.rehearsed

        def capture() -> bool:
            while len(self._slots) < len(wave):
                self._slots.append(self._slot(wave[0]))
            for slot, job in zip(self._slots, wave, strict=False):
                sizes = {size + rehearsed for size in batch_sizes(len(job.rows), batch_size)}
                slot.prepare(sorted(sizes, reverse=True))
            return True

        otherwise = f"{self._context.key}: steps cannot be captured, training is slower"
        possible = (
            attempt(capture, device=self._context.compute.device, otherwise=otherwise) is not None
        )
        if not possible:
            self._slots.clear()
        return possible

    def _slot(self, job: ClientJob) -> CapturedSteps:
        context, section = self._context, self._context.section
        if job.soft_labels is not None and self._targets is None:
            self._targets = joined_targets(context.labels, job.soft_labels.float())
        how = {"fused": True} | ({"capturable": True} if section.optimizer == "adam" else {})
        return CapturedSteps(
            context.compute.place(copy.deepcopy(context.model)),
            context.inputs,
            context.labels if self._targets is None else self._targets,
            loss=functional.cross_entropy if context.loss.plain else context.loss,
            optimizer=lambda parameters: OPTIMIZERS[section.optimizer](parameters, section, **how),
            compute=context.compute,
            capacity=self._capacity,
            batch_size=section.batch_size + context.loss.rehearsed,
            key=context.key,
            proximal=context.proximal,
            constants=() if job.adjustment is None else (job.adjustment.clone(),),
            uncounted=context.loss.rehearsed,
            correction=job.correction,
        )

    def _wave(
        self, wave: Sequence[ClientJob], weights: Weights
    ) -> Iterator[tuple[ClientJob, Weights, TrainResult]]:
        context, section = self._context, self._context.section
        here = torch.cuda.current_stream(context.compute.device)
        slots = self._slots[: len(wave)]
        queues = [list(client_batches(context, job)) for job in wave]
        if self._targets is not None and wave[0].soft_labels is not None:
            self._targets[len(context.labels) :, 1:] = wave[0].soft_labels.to(self._targets)
        for slot, job in zip(slots, wave, strict=True):
            load(slot.model, weights)
            slot.reset()
            if job.adjustment is not None:
                slot.constants[0].copy_(job.adjustment)
            if context.corrected:
                slot.set_correction(job.correction)
            if job.state:
                restore_optimizer(slot.optimizer, slot.model, dict(job.state))
            slot.start()
        for slot in slots:
            slot.stream.wait_stream(here)
        # In turn: otherwise the first client would have finished before the last one starts.
        running = [_steps(slot, queue) for slot, queue in zip(slots, queues, strict=True)]
        while running:
            running = [steps for steps in running if next(steps, False)]
        for slot in slots:
            here.wait_stream(slot.stream)
        losses = torch.stack(
            [slot.total for slot in slots]
        ).tolist()  # one wait for the device per wave
        for slot, job, loss in zip(slots, wave, losses, strict=True):
            kept = (
                optimizer_state(slot.optimizer, slot.model)
                if section.optimizer_state == "kept"
                else {}
            )
            yield (
                job,
                snapshot(slot.model),
                TrainResult(loss / (section.epochs * len(job.rows)), kept),
            )


def waves(jobs: Sequence[ClientJob], *, width: int) -> Iterator[Sequence[ClientJob]]:
    """Yield `width` jobs at a time, large ones first, so that neighbours end together."""
    ordered = sorted(jobs, key=lambda job: (-len(job.rows), job.client))
    for begin in range(0, len(ordered), width):
        yield ordered[begin : begin + width]


def _steps(slot: CapturedSteps, queue: Sequence[Tensor]) -> Iterator[bool]:
    """Launch a client's next step on its own stream whenever asked; yield True for each."""
    with torch.cuda.stream(slot.stream):
        slot.begin(torch.cat(list(queue)))
    for rows in queue:
        with torch.cuda.stream(slot.stream):
            slot.step(len(rows))
        yield True
