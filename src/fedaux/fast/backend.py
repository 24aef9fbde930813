"""The fast backend, and the one place that chooses how to compute."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedaux.config import Distillation
from fedaux.core.backend import Backend, Distill, Extract, Model, TrainContext, Training
from fedaux.core.compute import Compute
from fedaux.core.plain_backend import PlainBackend, PlainPredictor, one_by_one
from fedaux.fast.batched import BatchedTraining
from fedaux.fast.convolutions import accelerate
from fedaux.fast.distillation import FastDistiller
from fedaux.fast.feature_cache import FeatureCache
from fedaux.fast.inference import FastPredictor, LinearPredictor, ThreadedPredictor, is_linear
from fedaux.fast.stacked import StackedTraining, can_stack
from fedaux.fast.streams import StreamTraining


def best_backend(compute: Compute, *, features: FeatureCache | None = None) -> Backend:
    """Return the fastest backend for a device and precision.

    `features` is the feature cache of linear mode; heads are then trained in single precision,
    which costs next to nothing.
    """
    if features is not None:
        compute = replace(compute, precision=torch.float32)
    return FastBackend(compute, features)


@dataclass(frozen=True)
class FastBackend(PlainBackend):
    """Several clients or models at a time, with kernels and CUDA graphs on a GPU."""

    cache: FeatureCache | None = None

    def place(self, model: Model) -> Model:
        """Move a model to the device; on a GPU, with faster convolutions."""
        placed = super().place(model)
        if self.compute.device.type == "cuda":
            accelerate(placed, self.compute.device)
        return placed

    def training(self, context: TrainContext, *, most_examples: int) -> Training:
        """Return the fastest way to train clients of one prototype."""
        if context.compute.clients_at_once == 1 or context.loss.terms:
            return one_by_one(context)
        kernels = context.compute.captures and not context.corrected
        if kernels and BatchedTraining.possible(context):
            return BatchedTraining(context, capacity=most_examples)
        if context.compute.captures:
            return StreamTraining(context, capacity=most_examples)
        return StackedTraining(context) if can_stack(context.model) else one_by_one(context)

    def predictor(self, module: nn.Module) -> PlainPredictor:
        """Return the fastest way to predict with models of one architecture."""
        if is_linear(module):
            return LinearPredictor(module, self.compute)
        if self.compute.workers > 1:
            return ThreadedPredictor(module, self.compute)
        return FastPredictor(module, self.compute)

    def extractor(self, module: nn.Module, *, batch_size: int | None) -> Extract:
        """Compute features, or take them from the cache if there is one."""
        if (cache := self.cache) is not None:
            return lambda h0, examples, rows: cache(module, h0, examples, rows=rows)
        predict = FastPredictor(module, self.compute)
        return lambda h0, examples, rows: predict(h0, examples, batch_size=batch_size, rows=rows)

    def distiller(
        self, model: nn.Module, inputs: Tensor, *, section: Distillation, key: str
    ) -> Distill:
        """Return the fastest way to distill one architecture."""
        if self.compute.captures or is_linear(model):
            return FastDistiller(model, inputs, section=section, compute=self.compute, key=key)
        return super().distiller(model, inputs, section=section, key=key)
