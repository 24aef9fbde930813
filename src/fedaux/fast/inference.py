"""Predictions of many models of one architecture on many examples: teachers, features, evaluation.

On a GPU in half precision, batch normalisation is folded into the convolution before it, and
operations are joined (`fedaux.fast.fusion`). No image ever sees its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedaux.core.compute import Compute, inference_batch
from fedaux.core.messages import Weights
from fedaux.core.plain_backend import PlainPredictor
from fedaux.data.texts import WIDTH_STEP, token_lengths
from fedaux.fast.fusion import FusedInference, Untraceable
from fedaux.models import SplitModel


class FastPredictor(PlainPredictor):
    """Predicts with joined operations where the module's can be listed."""

    def __init__(self, module: nn.Module, compute: Compute) -> None:
        super().__init__(module, compute)
        self._by_length = ByLength()
        self._trims = any(
            getattr(part, "ignores_padding", False) for part in self._module.modules()
        )
        self._fused: FusedInference | None = None
        if compute.device.type == "cuda" and compute.precision is not torch.float32:
            try:
                self._fused = FusedInference(module)
            except Untraceable:
                self._fused = None  # a user's own architecture: operation by operation, then

    @torch.no_grad()
    def many(
        self, models: Sequence[Weights], inputs: Tensor, *, batch_size: int | None = None
    ) -> list[Tensor]:
        """Return the outputs [N, ...] of several models on the same inputs."""
        if len(inputs) > 0 and self._fused is not None:
            return self._folded(models, inputs.split(batch_size or inference_batch(inputs.device)))
        return super().many(models, inputs, batch_size=batch_size)

    def _outputs(
        self, weights: Weights, inputs: Tensor, batch_size: int, rows: Tensor | None
    ) -> Tensor:
        if not self._trims:
            return super()._outputs(weights, inputs, batch_size, rows)
        forward = self._forward(weights, inputs)
        return self._by_length(forward, inputs, batch_size=batch_size, rows=rows)

    def _folded(self, models: Sequence[Weights], batches: Sequence[Tensor]) -> list[Tensor]:
        inference, dtype = self._fused, self._compute.precision
        assert inference is not None
        folded = [inference.fold(weights, dtype=dtype) for weights in models]
        outputs: list[list[Tensor]] = [[] for _ in models]
        for batch in batches:
            prepared = inference.prepared(self._compute.floats(batch), dtype=dtype)
            for own, weights in zip(outputs, folded, strict=True):
                own.append(inference(weights, prepared).float())
        return [torch.cat(own) for own in outputs]

    def _forward(self, weights: Weights, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        inference, floats = self._fused, self._compute.floats
        if inference is None:
            return super()._forward(weights, inputs)
        dtype = self._compute.precision
        folded = inference.fold(weights, dtype=dtype)
        return lambda batch: inference(folded, inference.prepared(floats(batch), dtype=dtype))

    def _load(self, weights: Weights) -> None:
        """Give the module weights; on a CPU without a copy, which takes as long as a few images."""
        if self._compute.device.type != "cpu":
            super()._load(weights)
            return
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            tensor.data = weights[name]


class ThreadedPredictor(FastPredictor):
    """Predicts with several models at a time on a CPU, one per thread."""

    def __init__(self, module: nn.Module, compute: Compute) -> None:
        super().__init__(module, compute)
        self._workers = [
            self,
            *(FastPredictor(module, compute) for _ in range(compute.workers - 1)),
        ]

    def many(
        self, models: Sequence[Weights], inputs: Tensor, *, batch_size: int | None = None
    ) -> list[Tensor]:
        """Return the outputs [N, ...] of several models on the same inputs."""
        count = len(self._workers)

        def work(number: int) -> list[Tensor]:
            predict = self._workers[number]
            return [predict(one, inputs, batch_size=batch_size) for one in models[number::count]]

        dealt = self._compute.spread(work, range(count))
        return [dealt[index % count][index // count] for index in range(len(models))]


class LinearPredictor(FastPredictor):
    """Predicts with several linear heads as one matrix product, which reads the features once."""

    @torch.no_grad()
    def many(
        self, models: Sequence[Weights], inputs: Tensor, *, batch_size: int | None = None
    ) -> list[Tensor]:
        """Return [x W_1 + b_1, x W_2 + b_2, ...] for features x [N, F]."""
        products = inputs @ torch.cat([one["head.weight"] for one in models]).T
        if "head.bias" in models[0]:
            products += torch.cat([one["head.bias"] for one in models])
        return [part.contiguous() for part in products.tensor_split(len(models), dim=1)]


def is_linear(model: nn.Module) -> bool:
    """Whether a model is only a linear head on features."""
    alone = isinstance(model, SplitModel) and isinstance(model.features, nn.Identity)
    return alone and type(model.head) is nn.Linear


class ByLength:
    """Batches of token ids [N, L], long texts first, so that none is wider than its texts.

    The widths take a wait for the device. They are remembered for inputs that come again in every
    round.
    """

    REMEMBERED = 2
    """The distill set and the test set."""

    def __init__(self) -> None:
        self._plans: list[tuple[Tensor, int, list[tuple[Tensor, int]]]] = []

    def __call__(
        self,
        forward: Callable[[Tensor], Tensor],
        texts: Tensor,
        *,
        batch_size: int,
        rows: Tensor | None,
    ) -> Tensor:
        """Return outputs [N, ...] on all texts or on some rows of them, in their order."""
        chosen = texts if rows is None else texts[rows]
        parts = self._parts(chosen, batch_size, again=rows is None and len(texts) > batch_size)
        outputs = torch.cat([forward(chosen[part, :width]).float() for part, width in parts])
        return torch.empty_like(outputs).index_copy_(
            0, torch.cat([part for part, _ in parts]), outputs
        )

    def _parts(self, texts: Tensor, batch_size: int, *, again: bool) -> list[tuple[Tensor, int]]:
        """Return the rows of each batch and its width; `again`: the same texts will come again."""
        for known, size, parts in self._plans:
            if known is texts and size == batch_size:
                return parts
        lengths = token_lengths(texts)
        order = lengths.argsort(descending=True, stable=True)
        longest = lengths[order[::batch_size]].tolist()
        widths = [max(1, -(-length // WIDTH_STEP)) * WIDTH_STEP for length in longest]
        parts = list(zip(order.split(batch_size), widths, strict=True))
        if again:
            self._plans = [(texts, batch_size, parts), *self._plans][: self.REMEMBERED]
        return parts
