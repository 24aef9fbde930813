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
from fedaux.core.local_training import OPTIMIZERS, epoch_orders
from fedaux.core.messages import Weights
from fedaux.core.plain_backend import one_by_one
from fedaux.core.steps import batch_sizes, optimizer_state, restore_optimizer
from fedaux.core.weights import load, snapshot
from fedaux.fast.capture import CapturedSteps
from fedaux.fast.fallback import attempt


class StreamTraining:
    """Trains `compute.clients_at_once` clients at once; one by one if steps cannot be captured."""

    def __init__(self, context: TrainContext, *, capacity: int) -> None:
        self._context = context
        self._capacity = capacity
        self._slots: list[CapturedSteps] = []
        self._plain: Training | None = None

    def __call__(
        self, jobs: Sequence[ClientJob], weights: Weights
    ) -> Iterator[tuple[ClientJob, Weights, TrainResult]]:
        """Train each job from the given weights, large ones first, so that neighbours end
        together."""
        ordered = sorted(jobs, key=lambda job: (-len(job.rows), job.client))
        width = self._context.compute.clients_at_once
        for begin in range(0, len(ordered), width):
            wave = ordered[begin : begin + width]
            if self._plain is None and not self._prepared(wave):
                self._plain = one_by_one(self._context)
            yield from (
                self._wave(wave, weights) if self._plain is None else self._plain(wave, weights)
            )

    def _prepared(self, wave: Sequence[ClientJob]) -> bool:
        """Capture the steps that a wave needs; return whether it was possible."""
        batch_size = self._context.section.batch_size

        def capture() -> bool:
            while len(self._slots) < len(wave):
                self._slots.append(self._slot())
            for slot, job in zip(self._slots, wave, strict=False):
                slot.prepare(sorted(set(batch_sizes(len(job.rows), batch_size)), reverse=True))
            return True

        otherwise = f"{self._context.key}: steps cannot be captured, training is slower"
        possible = (
            attempt(capture, device=self._context.compute.device, otherwise=otherwise) is not None
        )
        if not possible:
            self._slots.clear()
        return possible

    def _slot(self) -> CapturedSteps:
        context, section = self._context, self._context.section
        how = {"fused": True} | ({"capturable": True} if section.optimizer == "adam" else {})
        return CapturedSteps(
            context.compute.place(copy.deepcopy(context.model)),
            context.inputs,
            context.labels,
            loss=functional.cross_entropy,
            optimizer=lambda parameters: OPTIMIZERS[section.optimizer](parameters, section, **how),
            compute=context.compute,
            capacity=self._capacity,
            batch_size=section.batch_size,
            key=context.key,
            proximal=context.proximal,
        )

    def _wave(
        self, wave: Sequence[ClientJob], weights: Weights
    ) -> Iterator[tuple[ClientJob, Weights, TrainResult]]:
        section, here = (
            self._context.section,
            torch.cuda.current_stream(self._context.compute.device),
        )
        slots = self._slots[: len(wave)]
        orders = [
            [
                job.rows[order.to(job.rows.device, non_blocking=True)]
                for order in epoch_orders(
                    len(job.rows), epochs=section.epochs, generator=job.generator
                )
            ]
            for job in wave
        ]
        for slot, job in zip(slots, wave, strict=True):
            load(slot.model, weights)
            slot.reset()
            if job.state:
                restore_optimizer(slot.optimizer, slot.model, dict(job.state))
            slot.start()
        for slot in slots:
            slot.stream.wait_stream(here)
        # In turn: otherwise the first client would have finished before the last one starts.
        running = [
            _steps(slot, rows, batch_size=section.batch_size)
            for slot, rows in zip(slots, orders, strict=True)
        ]
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


def _steps(slot: CapturedSteps, epochs: Sequence[Tensor], *, batch_size: int) -> Iterator[bool]:
    """Launch a client's next step on its own stream whenever asked; yield True for each."""
    for rows in epochs:
        for number, size in enumerate(batch_sizes(len(rows), batch_size)):
            with torch.cuda.stream(slot.stream):
                if number == 0:
                    slot.begin(rows)
                slot.step(size)
            yield True
