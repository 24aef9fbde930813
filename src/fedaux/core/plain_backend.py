"""The plain backend: eager PyTorch, one client and one model after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedaux.config import Distillation
from fedaux.core.backend import (
    ClientJob,
    Distill,
    Extract,
    Model,
    TrainContext,
    Training,
    TrainResult,
)
from fedaux.core.compute import Compute, inference_batch
from fedaux.core.distillation import distill
from fedaux.core.local_training import train_locally
from fedaux.core.messages import Weights
from fedaux.core.weights import load, snapshot


@dataclass(frozen=True)
class PlainBackend:
    """Computes everything in a plain loop, which faster backends must equal."""

    compute: Compute

    def place(self, model: Model) -> Model:
        """Move a model to the device."""
        return self.compute.place(model)

    def training(self, context: TrainContext, *, most_examples: int) -> Training:
        """Train one client after another."""
        return one_by_one(context)

    def predictor(self, module: nn.Module) -> PlainPredictor:
        """Predict with one model after another."""
        return PlainPredictor(module, self.compute)

    def extractor(self, module: nn.Module, *, batch_size: int | None) -> Extract:
        """Compute features as predictions."""
        predict = PlainPredictor(module, self.compute)
        return lambda h0, examples, rows: predict(h0, examples, batch_size=batch_size, rows=rows)

    def distiller(
        self, model: nn.Module, inputs: Tensor, *, section: Distillation, key: str
    ) -> Distill:
        """Distill in eager steps."""
        return lambda weights, targets, generator: distill(
            model,
            weights,
            inputs,
            targets,
            section=section,
            generator=generator,
            compute=self.compute,
        )


def one_by_one(context: TrainContext) -> Training:
    """Train one client after another."""

    def train(
        jobs: Sequence[ClientJob], weights: Weights
    ) -> Iterator[tuple[ClientJob, Weights, TrainResult]]:
        for job in jobs:
            load(context.model, weights)
            trained = train_locally(context, job)
            yield job, snapshot(context.model), trained

    return train


class PlainPredictor:
    """Predicts with a copy of a module, batch by batch."""

    def __init__(self, module: nn.Module, compute: Compute) -> None:
        self._module = copy.deepcopy(module).eval()  # the original may be in training meanwhile
        self._compute = compute

    @torch.no_grad()
    def __call__(
        self,
        weights: Weights,
        inputs: Tensor,
        *,
        batch_size: int | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return outputs [N, ...] in single precision, on all inputs or on some rows of them."""
        batch_size = batch_size or inference_batch(inputs.device)
        if len(inputs if rows is None else rows) == 0:  # zero rows of outputs, in their shape
            return self(weights, inputs.new_zeros(1, *inputs.shape[1:]))[:0]
        return self._outputs(weights, inputs, batch_size, rows)

    @torch.no_grad()
    def many(
        self, models: Sequence[Weights], inputs: Tensor, *, batch_size: int | None = None
    ) -> list[Tensor]:
        """Return the outputs [N, ...] of several models on the same inputs."""
        return [self(weights, inputs, batch_size=batch_size) for weights in models]

    def alone(self, weights: Weights, inputs: Tensor) -> Tensor:
        """Return outputs [N, ...], each from a separate pass on one thread.

        Each is a function of its input alone, to the last bit: in a batch, the size of the batch
        and the place in it decide how an input is rounded.
        """
        if len(inputs) == 0:
            return self(weights, inputs)
        forward = self._forward(weights, inputs)

        @torch.no_grad()  # of each thread
        def work(rows: Sequence[int]) -> Tensor:
            return torch.cat([forward(inputs[row : row + 1].clone()).float() for row in rows])

        return torch.cat(self._compute.spread_alone(work, range(len(inputs))))

    def _outputs(
        self, weights: Weights, inputs: Tensor, batch_size: int, rows: Tensor | None
    ) -> Tensor:
        return _in_batches(self._forward(weights, inputs), inputs, batch_size, rows)

    def _forward(self, weights: Weights, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        module, compute = self._module, self._compute
        self._load(weights)

        def forward(batch: Tensor) -> Tensor:
            with compute.autocast():
                outputs: Tensor = module(compute.floats(batch))
            return outputs

        return forward

    def _load(self, weights: Weights) -> None:
        load(self._module, weights)


def _in_batches(
    forward: Callable[[Tensor], Tensor], inputs: Tensor, batch_size: int, rows: Tensor | None
) -> Tensor:
    batches: Iterable[Tensor] = inputs.split(batch_size)
    if rows is not None:
        batches = (inputs[part] for part in rows.split(batch_size))
    return torch.cat([forward(batch).float() for batch in batches])
