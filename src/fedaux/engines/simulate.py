"""The simulator: all clients in one process, their data on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedaux import seeding
from fedaux.certainty import MECHANISMS
from fedaux.certainty.secure import noise_for
from fedaux.clients import Certificate, CertifyRequest, TrainRequest, Update
from fedaux.dpsgd import check_ready, train_privately
from fedaux.local import train_locally
from fedaux.privacy import SCORES, LedgerEntry, entry_of
from fedaux.rounds import Task, build_models
from fedaux.server import predict, snapshot


class SimulatedClients:
    """Clients whose examples are rows of one tensor on the device. Those without examples are not present."""

    deployment = False

    def __init__(self, task: Task, images: Tensor, labels: Tensor, parts: Sequence[NDArray[np.int64]]) -> None:
        self._task = task
        self._images = images
        self._labels = labels
        self._parts = [torch.from_numpy(part).to(images.device) for part in parts]
        self._models = build_models(task)
        if task.experiment.local.privacy is not None:
            check_ready(self._models.values())  # before anything is pretrained

    def present(self) -> Sequence[int]:
        """Return the clients that hold examples."""
        return [client for client, part in enumerate(self._parts) if len(part) > 0]

    def certify(self, clients: Sequence[int], request: CertifyRequest) -> Iterator[Certificate]:
        """Release each client's certainty vector, with seeded noise."""
        mechanism = MECHANISMS[request.certainty.mechanism](request.certainty)
        for client in clients:
            prototype = self._task.prototype_of[client]
            extractor = self._models[prototype].features
            extractor.load_state_dict(request.extractors[prototype])
            images = self._images[self._parts[client]]
            features = predict(extractor, images, batch_size=self._task.experiment.evaluation.batch_size)
            generator = seeding.generator(request.seed, "certainty noise", client=client)
            noise = noise_for(deployment=self.deployment, generator=generator)
            release = mechanism.release(features, request.public[prototype], noise=noise)
            entry = entry_of(release, client=client, num_examples=len(images), purpose=SCORES)
            yield Certificate(client, release.vector, entry)

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        """Train each client from the server's model."""
        for client in clients:
            model = self._models[self._task.prototype_of[client]]
            model.load_state_dict(request.weights[self._task.prototype_of[client]])
            images, labels = self._images[self._parts[client]], self._labels[self._parts[client]]
            generator = seeding.generator(request.seed, "local", round=request.round, client=client)
            section, proximal = request.local, request.proximal
            loss: float | None = None
            entry: LedgerEntry | None = None
            if section.privacy is None:
                loss = train_locally(model, images, labels, section=section, proximal=proximal, generator=generator)
            else:  # the loss stays at the client: it has no noise
                _, entry = train_privately(
                    model, images, labels, section=section, proximal=proximal, generator=generator, client=client
                )
            yield Update(client, len(labels), snapshot(model), loss, entry)
