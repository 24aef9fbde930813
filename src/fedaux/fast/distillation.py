"""Distillation steps of the server's model as CUDA graphs, or by custom kernels."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
from torch import Tensor, nn

from fedaux.config import Distillation
from fedaux.core.compute import Compute
from fedaux.core.distillation import distill, distillation_loss, for_each
from fedaux.core.messages import Weights
from fedaux.core.steps import OPTIMIZERS, Stepping, batch_sizes
from fedaux.fast import triton as kernels
from fedaux.fast.capture import CapturedSteps
from fedaux.fast.fallback import attempt
from fedaux.fast.inference import is_linear
from fedaux.models import SplitModel


class FastDistiller:
    """Distills one model in captured steps on a GPU, or a linear head on one core of a CPU."""

    def __init__(
        self, model: nn.Module, inputs: Tensor, *, section: Distillation, compute: Compute, key: str
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._section = section
        self._compute = compute
        self._key = key
        self._captures = compute.captures
        self._steps: Stepping | None = None

    def __call__(
        self, weights: Weights, targets: Tensor, generator: np.random.Generator
    ) -> Weights:
        """Return the weights after learning the soft labels [N, C] of the inputs (Eq. 1)."""
        if self._captures:
            self._captures = False  # tried once; steps that cannot be captured stay eager
            self._steps = prepared_steps(
                self._model,
                self._inputs,
                for_each(self._inputs, targets),
                size=len(targets),
                section=self._section,
                compute=self._compute,
                key=self._key,
            )
        with self._compute.one_thread() if is_linear(self._model) else nullcontext():
            return distill(
                self._model,
                weights,
                self._inputs,
                targets,
                section=self._section,
                generator=generator,
                compute=self._compute,
                steps=self._steps,
            )


def prepared_steps(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    *,
    section: Distillation,
    compute: Compute,
    key: str,
    size: int | None = None,
) -> Stepping | None:
    """Return distillation steps as CUDA graphs, or None, with a warning, if that fails.

    An epoch has `size` rows, by default all. The model's weights change; `distill` loads them
    again.
    """
    if kernels.possible(
        model,
        images,
        optimizer=section.optimizer,
        batch_size=section.batch_size,
        clients=1,
        compute=compute,
    ):
        made = attempt(
            lambda: _kernel_steps(model, images, targets, section=section, compute=compute),
            device=compute.device,
            otherwise=f"{key}: no custom kernels here, distillation is slower",
            errors=Exception,
        )
        if made is not None:
            return made
    return attempt(
        lambda: _captured_steps(
            model,
            images,
            targets,
            size=size or len(images),
            section=section,
            compute=compute,
            key=key,
        ),
        device=compute.device,
        otherwise=f"{key}: steps cannot be captured, distillation is slower",
    )


def _kernel_steps(
    model: nn.Module, images: Tensor, targets: Tensor, *, section: Distillation, compute: Compute
) -> Stepping:
    from fedaux.fast.triton.steps import BatchedSteps, ServerModelSteps  # which needs Triton

    assert isinstance(model, SplitModel)
    batched = BatchedSteps(
        model,
        images,
        targets.clone(),
        clients=1,
        learning_rate=section.learning_rate,
        weight_decay=section.weight_decay,
        compute=compute,
        capacity=len(images),
        batch_size=section.batch_size,
    )
    batched.prepare()
    return ServerModelSteps(model, batched)


def _captured_steps(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    *,
    size: int,
    section: Distillation,
    compute: Compute,
    key: str,
) -> CapturedSteps:
    how = {"fused": True} | ({"capturable": True} if section.optimizer == "adam" else {})
    steps = CapturedSteps(
        model,
        images,
        targets.clone(),
        loss=distillation_loss,
        optimizer=lambda parameters: OPTIMIZERS[section.optimizer](parameters, section, **how),
        compute=compute,
        capacity=len(images),
        batch_size=section.batch_size,
        key=key,
    )
    model.train()
    steps.prepare(sorted(set(batch_sizes(size, section.batch_size)), reverse=True))
    return steps
