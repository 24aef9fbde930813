"""The server's side of one prototype: its model, the public inputs it sees, and what is done with weights there.

Batch normalisation, where a model has it (`[batch_normalisation]`): statistics are averaged and sent like weights, and
the prediction of an image never depends on its batch, unless `batch` asks for what the authors' released code does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from fedaux.config import ExperimentFields
from fedaux.core.compute import Compute
from fedaux.core.distillation import distill, prepared_steps, recompute_statistics
from fedaux.core.messages import Weights
from fedaux.core.steps import PreparedStepping
from fedaux.core.weights import evaluate, load, snapshot
from fedaux.fast.inference import Predictor
from fedaux.models import SplitModel

STATISTICS_BATCH = 512
LOOKED_AT = 16
"""Public examples on which every model that comes in, and the one that comes of a round, has to predict numbers."""


class Student:
    """One prototype at the server. Inputs are uint8 images [N, C, H, W], or features [N, F] of a frozen h0."""

    def __init__(
        self,
        model: nn.Module,
        *,
        experiment: ExperimentFields,
        compute: Compute,
        architecture: str,
        distill_inputs: Tensor,
        test_inputs: Tensor,
        validation: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._model = model
        self._experiment = experiment
        self._compute = compute
        self._architecture = architecture
        self._distill_inputs = distill_inputs
        self._test_inputs = test_inputs
        self._validation = validation
        self._predictors = [Predictor(model, compute) for _ in range(compute.workers)]
        self._steps: PreparedStepping | None = None
        self._captures = compute.captures
        self._normalised = any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())
        alone = isinstance(model, SplitModel) and isinstance(model.features, nn.Identity)
        self._linear = alone and type(model.head) is nn.Linear
        """Whether the model is no more than a linear head, so that many are one product of matrices."""

    @property
    def num_public(self) -> int:
        """Return how many examples the distill set has."""
        return len(self._distill_inputs)

    def logits(self, weights: Weights) -> Tensor:
        """Return a client's logits on the distill set [N, C]."""
        statistics = self._experiment.batch_normalisation.teachers
        if statistics == "auxiliary":
            weights = self.with_public_statistics(weights)
        return self._predict(weights, self._distill_inputs, by_batch=statistics == "batch")

    def predict_numbers(self, models: Sequence[Weights]) -> Tensor:
        """Say which models' logits on a few public examples are neither NaN nor infinite: flags [K] on the device.

        Weights that are numbers can still be such that nothing can be computed with them: huge ones, or a negative
        variance in batch normalisation.
        """
        few = self._distill_inputs[:LOOKED_AT]
        by_batch = self._experiment.batch_normalisation.teachers == "batch"
        logits = [self._predict(weights, few, by_batch=by_batch) for weights in models]
        return torch.stack([torch.isfinite(own).all() for own in logits])

    @property
    def shares_work(self) -> bool:
        """Whether several clients' logits are computed at the same time."""
        together = self._linear or self._compute.workers > 1 or self._predictors[0].takes_many
        return together and self._experiment.batch_normalisation.teachers == "client"

    def all_logits(self, clients: Sequence[Weights]) -> list[Tensor]:
        """Return the logits [N, C] of several clients on the distill set, side by side."""
        if self._linear:
            return self._all_products(clients)
        workers = self._compute.workers
        batch_size = self._experiment.evaluation.batch_size

        def work(number: int) -> list[Tensor]:
            return self._predictors[number].many(clients[number::workers], self._distill_inputs, batch_size=batch_size)

        dealt = self._compute.spread(work, range(workers))
        return [dealt[index % workers][index // workers] for index in range(len(clients))]

    @torch.no_grad()
    def _all_products(self, clients: Sequence[Weights]) -> list[Tensor]:
        """Return [x W_1 + b_1, x W_2 + b_2, ...] as one product, which reads the features x once for all clients."""
        weight = torch.cat([client["head.weight"] for client in clients])
        products = self._distill_inputs @ weight.T
        if "head.bias" in clients[0]:
            products += torch.cat([client["head.bias"] for client in clients])
        return [part.contiguous() for part in products.tensor_split(len(clients), dim=1)]

    def test_logits(self, weights: Weights) -> Tensor:
        """Return the logits of a server model on the test data [M, C]."""
        by_batch = self._experiment.batch_normalisation.server == "batch"
        return self._predict(weights, self._test_inputs, by_batch=by_batch)

    def distill(
        self,
        weights: Weights,
        targets: Tensor,
        *,
        generator: np.random.Generator,
    ) -> Weights:
        """Return the weights after distillation on soft labels [N, C]."""
        section = self._experiment.distillation
        if self._captures and self._steps is None:
            self._captures = False  # tried once; what cannot be captured stays eager
            self._steps = prepared_steps(
                self._model,
                self._distill_inputs,
                targets,
                section=section,
                compute=self._compute,
                key=self._architecture,
            )
        with self._compute.one_thread() if self._linear else nullcontext():
            return distill(
                self._model,
                weights,
                self._distill_inputs,
                targets,
                section=section,
                generator=generator,
                compute=self._compute,
                validate=None if self._validation is None else self._validate(*self._validation),
                steps=self._steps,
            )

    def _validate(self, inputs: Tensor, labels: Tensor) -> Callable[[nn.Module], float]:
        return lambda model: evaluate(self._predict(snapshot(model), inputs), labels)[0]

    def _predict(self, weights: Weights, inputs: Tensor, *, by_batch: bool = False) -> Tensor:
        return self._predictors[0](
            weights, inputs, batch_size=self._experiment.evaluation.batch_size, by_batch=by_batch
        )

    def with_public_statistics(self, weights: Weights) -> Weights:
        """Return the weights with the statistics of batch normalisation that they have on public images."""
        if not self._normalised:
            return weights
        load(self._model, weights)
        recompute_statistics(
            self._model,
            self._distill_inputs[: self._experiment.batch_normalisation.images],
            batch_size=STATISTICS_BATCH,
            compute=self._compute,
        )
        return snapshot(self._model)
