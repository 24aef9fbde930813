"""Local training of several clients of a ResNet-8 as one network: one CUDA graph per step.

Clients may differ in size: kernels return immediately for clients that have finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from fedaux.core.backend import ClientJob, TrainContext, Training, TrainResult
from fedaux.core.local_training import client_batches, rows_per_round
from fedaux.core.messages import Weights
from fedaux.fast import triton as kernels
from fedaux.fast.fallback import attempt
from fedaux.fast.streams import StreamTraining, waves
from fedaux.models import SplitModel

if TYPE_CHECKING:
    from fedaux.fast.triton.steps import BatchedSteps


class BatchedTraining:
    """Trains `compute.clients_at_once` clients at once; on streams if kernels cannot be
    compiled."""

    def __init__(self, context: TrainContext, *, capacity: int) -> None:
        self._context = context
        self._capacity = capacity
        self._steps: BatchedSteps | None = None
        self._otherwise: Training | None = None

    @staticmethod
    def possible(context: TrainContext) -> bool:
        """Return whether there are kernels for what clients train."""
        return kernels.possible(
            context.model,
            context.inputs,
            optimizer=context.section.optimizer,
            batch_size=context.section.batch_size + context.loss.rehearsed,
            clients=context.compute.clients_at_once,
            compute=context.compute,
        )

    def __call__(
        self, jobs: Sequence[ClientJob], weights: Weights
    ) -> Iterator[tuple[ClientJob, Weights, TrainResult]]:
        """Train each job from the given weights."""
        if self._steps is None and self._otherwise is None:
            self._steps = attempt(
                self._prepared,
                device=self._context.compute.device,
                otherwise=f"{self._context.key}: no custom kernels here, training is slower",
                errors=Exception,
            )
            if self._steps is None:
                self._otherwise = StreamTraining(self._context, capacity=self._capacity)
        if self._otherwise is not None:
            yield from self._otherwise(jobs, weights)
            return
        assert self._steps is not None
        for wave in waves(jobs, width=self._context.compute.clients_at_once):
            yield from self._wave(self._steps, wave, weights)

    def _prepared(self) -> BatchedSteps:
        from fedaux.fast.triton.steps import BatchedSteps  # which needs Triton

        context, section, model = self._context, self._context.section, self._context.model
        assert isinstance(model, SplitModel), "others are not possible"
        steps = BatchedSteps(
            model,
            context.inputs,
            context.labels,
            clients=context.compute.clients_at_once,
            learning_rate=section.learning_rate,
            weight_decay=section.weight_decay,
            proximal=context.proximal,
            compute=context.compute,
            capacity=rows_per_round(context, self._capacity),
            batch_size=section.batch_size + context.loss.rehearsed,
            loss=context.loss,
        )
        steps.prepare()
        return steps

    def _wave(
        self, steps: BatchedSteps, wave: Sequence[ClientJob], weights: Weights
    ) -> Iterator[tuple[ClientJob, Weights, TrainResult]]:
        context, section = self._context, self._context.section
        rows = [torch.cat(list(client_batches(context, job))) for job in wave]
        steps.load(weights)
        steps.reset()
        if not context.loss.plain:
            steps.set_objective([job.adjustment for job in wave], wave[0].soft_labels)
        for number, job in enumerate(wave):
            if job.state:
                steps.restore_optimizer(number, job.state)
        steps.start()
        steps.run(rows, epochs=section.epochs)
        losses, trained = (
            steps.total.tolist(),
            steps.weights(len(wave)),
        )  # one wait for the device per wave
        for number, job in enumerate(wave):
            kept = steps.optimizer_state(number) if section.optimizer_state == "kept" else {}
            yield (
                job,
                trained[number],
                TrainResult(losses[number] / (section.epochs * len(job.rows)), kept),
            )
