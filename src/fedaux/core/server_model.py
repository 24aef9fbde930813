"""The server's side of one prototype: its model and the public inputs it works on.

Statistics of batch normalisation are averaged and sent like weights. The prediction of an image
never depends on its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedaux.config import ExperimentFields
from fedaux.core.backend import Backend
from fedaux.core.messages import Weights
from fedaux.core.task import Task, extract, trainable_models

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
    ) -> None:
        self._batch_size = experiment.evaluation.batch_size
        self._distill_inputs = distill_inputs
        self._test_inputs = test_inputs
        self._predictor = backend.predictor(model)
        taught = distill_inputs
        if mirrored_inputs is not None:
            taught = torch.cat([distill_inputs, mirrored_inputs])
        self.distill = backend.distiller(
            model, taught, section=experiment.distillation, key=architecture
        )

    def logits(self, weights: Weights) -> Tensor:
        """Return a model's logits on the distill set [N, C]."""
        return self._predict(weights, self._distill_inputs)

    def is_finite(self, weights: Weights) -> Tensor:
        """Return whether a model has finite logits on a few public examples: a flag on the device.

        Finite weights can still lead to NaN: huge ones, or a negative variance in batch
        normalisation.
        """
        return torch.isfinite(self._predict(weights, self._distill_inputs[:PROBED_EXAMPLES])).all()

    def all_logits(self, clients: Sequence[Weights]) -> list[Tensor]:
        """Return the logits [N, C] of several clients on the distill set."""
        if len(clients) == 1:
            return [self.logits(clients[0])]
        return self._predictor.many(clients, self._distill_inputs, batch_size=self._batch_size)

    def test_logits(self, weights: Weights) -> Tensor:
        """Return the logits of a server model on the test data [M, C]."""
        return self._predict(weights, self._test_inputs)

    def _predict(self, weights: Weights, inputs: Tensor) -> Tensor:
        return self._predictor(weights, inputs, batch_size=self._batch_size)


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
            distill_inputs=inputs(name, task.distill_set),
            mirrored_inputs=inputs(name, task.distill_set.flip(-1)) if task.mirrors else None,
            test_inputs=inputs(name, task.test_images),
        )
        for name, model in trainable_models(task).items()
    }
