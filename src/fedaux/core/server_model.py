"""The server's side of one prototype: its model and the public inputs it works on.

Statistics of batch normalisation are averaged and sent like weights. The prediction of an image
never depends on its batch, unless `[batch_normalisation]` asks for `batch`, as in the authors'
code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedaux.config import ExperimentFields
from fedaux.core.backend import Backend
from fedaux.core.messages import Weights
from fedaux.core.metrics import evaluate
from fedaux.core.objectives import is_normalised
from fedaux.core.task import Task, extract, trainable_models
from fedaux.core.weights import load, recompute_statistics, snapshot

STATISTICS_BATCH = 512
PROBED_EXAMPLES = 16
"""Public examples on which the predictions of every model must be finite."""


class ServerModel:
    """One prototype at the server. Inputs are uint8 images [N, C, H, W] or features [N, F] of
    h0."""

    def __init__(
        self,
        model: nn.Module,
        *,
        experiment: ExperimentFields,
        backend: Backend,
        architecture: str,
        distill_inputs: Tensor,
        mirrored_inputs: Tensor | None = None,
        test_inputs: Tensor,
        validation: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._model = model
        self._experiment = experiment
        self._compute = backend.compute
        self._distill_inputs = distill_inputs
        self._test_inputs = test_inputs
        self._validation = validation
        self._predictor = backend.predictor(model)
        taught = distill_inputs
        if mirrored_inputs is not None:
            taught = torch.cat([distill_inputs, mirrored_inputs])
        self._distiller = backend.distiller(
            model, taught, section=experiment.distillation, key=architecture
        )
        self.normalised = is_normalised(model)
        """Whether the model has batch normalisation."""

    @property
    def num_public(self) -> int:
        """Return the size of the distill set."""
        return len(self._distill_inputs)

    def logits(self, weights: Weights) -> Tensor:
        """Return a client's logits on the distill set [N, C]."""
        statistics = self._experiment.batch_normalisation.teachers
        if statistics == "auxiliary":
            weights = self.with_public_statistics(weights)
        return self._predict(weights, self._distill_inputs, by_batch=statistics == "batch")

    def is_finite(self, weights: Weights) -> Tensor:
        """Return whether a model has finite logits on a few public examples: a flag on the device.

        Finite weights can still lead to NaN: huge ones, or a negative variance in batch
        normalisation.
        """
        few = self._distill_inputs[:PROBED_EXAMPLES]
        by_batch = self._experiment.batch_normalisation.teachers == "batch"
        return torch.isfinite(self._predict(weights, few, by_batch=by_batch)).all()

    def all_logits(self, clients: Sequence[Weights]) -> list[Tensor]:
        """Return the logits [N, C] of several clients on the distill set, together if that is
        faster."""
        together = self._experiment.batch_normalisation.teachers == "client"
        if together and self._predictor.takes_many and len(clients) > 1:
            batch_size = self._experiment.evaluation.batch_size
            return self._predictor.many(clients, self._distill_inputs, batch_size=batch_size)
        return [self.logits(weights) for weights in clients]

    def test_logits(self, weights: Weights) -> Tensor:
        """Return the logits of a server model on the test data [M, C]."""
        by_batch = self._experiment.batch_normalisation.server == "batch"
        return self._predict(weights, self._test_inputs, by_batch=by_batch)

    def distill(
        self, weights: Weights, targets: Tensor, *, generator: np.random.Generator
    ) -> Weights:
        """Return the weights after distillation on soft labels [N, C]."""
        validate = None if self._validation is None else self._validate(*self._validation)
        return self._distiller(weights, targets, generator=generator, validate=validate)

    def _validate(self, inputs: Tensor, labels: Tensor) -> Callable[[nn.Module], float]:
        return lambda model: evaluate(self._predict(snapshot(model), inputs), labels)[0]

    def _predict(self, weights: Weights, inputs: Tensor, *, by_batch: bool = False) -> Tensor:
        batch_size = self._experiment.evaluation.batch_size
        return self._predictor(weights, inputs, batch_size=batch_size, by_batch=by_batch)

    def with_public_statistics(self, weights: Weights) -> Weights:
        """Return weights with statistics of batch normalisation recomputed on public images."""
        if not self.normalised:
            return weights
        load(self._model, weights)
        recompute_statistics(
            self._model,
            self._distill_inputs[: self._experiment.batch_normalisation.images],
            batch_size=STATISTICS_BATCH,
            compute=self._compute,
        )
        return snapshot(self._model)


def server_models(task: Task, extractors: Mapping[str, Weights]) -> dict[str, ServerModel]:
    """Return the server's side of each prototype; in linear mode it works on features of h0."""

    def inputs(prototype: str, images: Tensor) -> Tensor:
        if task.experiment.mode == "full":
            return images
        return extract(task, prototype, extractors[prototype], images)

    return {
        name: ServerModel(
            model,
            experiment=task.experiment,
            backend=task.backend,
            architecture=task.architecture(name),
            distill_inputs=inputs(name, task.distill_images),
            mirrored_inputs=inputs(name, task.distill_images.flip(-1)) if task.mirrors else None,
            test_inputs=inputs(name, task.test_images),
            validation=task.validation and (inputs(name, task.validation[0]), task.validation[1]),
        )
        for name, model in trainable_models(task).items()
    }
