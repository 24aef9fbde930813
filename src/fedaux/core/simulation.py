"""The simulator: all clients in one process, or on the ranks of a run, which share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedaux import seeding
from fedaux.core import ranks
from fedaux.core.backend import ClientJob, TrainContext, Training
from fedaux.core.client import Client, release_stream
from fedaux.core.dpsgd import check_ready
from fedaux.core.local_training import joined_inputs
from fedaux.core.messages import (
    ClientRelease,
    ClientState,
    ReleaseRequest,
    TrainRequest,
    Update,
    as_received,
    surely_finite,
)
from fedaux.core.objectives import LocalLoss, class_adjustment, local_loss
from fedaux.core.task import Task, extract, rehearsed_rows, trainable_models
from fedaux.privacy.exact_gaussian import SimulatedDraws
from fedaux.privacy.mechanism import Noise
from fedaux.privacy.mechanisms import MECHANISMS
from fedaux.privacy.secure import noise_for


class SimulatedClients:
    """Clients whose examples are rows of one tensor. Those without examples are not present."""

    def __init__(
        self, task: Task, images: Tensor, labels: Tensor, parts: Sequence[NDArray[np.int64]]
    ) -> None:
        self._task = task
        self._images = task.compute.place_inputs(images)
        self._labels = labels
        self._parts = [torch.from_numpy(part).to(images.device) for part in parts]
        self._present = [client for client, part in enumerate(parts) if len(part) > 0]
        self._models = trainable_models(task)
        self._inputs: dict[tuple[str, bool], Tensor] = {}
        self._training: dict[tuple[str, float, LocalLoss, bool, str], Training] = {}
        self._kept: dict[int, ClientState] = {}
        if task.experiment.local.privacy is not None:
            check_ready(self._models.values())  # before anything is pretrained

    def present(self) -> Sequence[int]:
        """Return the clients that hold examples."""
        return self._present

    def sizes(self, clients: Sequence[int]) -> Sequence[int]:
        """Return n_i of clients."""
        return [len(self._parts[client]) for client in clients]

    def release(self, clients: Sequence[int], request: ReleaseRequest) -> Iterator[ClientRelease]:
        """Release each client's certainty vector."""
        yield from ranks.joined(self._release(ranks.share(clients), request))

    def _release(self, clients: Sequence[int], request: ReleaseRequest) -> Iterator[ClientRelease]:
        reads = MECHANISMS[request.certainty.mechanism](request.certainty).reads_features
        for prototype, members in self._by_prototype(clients).items():
            sizes = [len(self._parts[client]) for client in members]
            rows = torch.cat([self._parts[client] for client in members])
            features = torch.zeros(len(rows), 0, device=rows.device)
            if reads:
                h0 = request.extractors[prototype]
                features = extract(self._task, prototype, h0, self._images, rows=rows)
            for client, own in zip(members, features.split(sizes), strict=True):
                noise = self.noise(request, client)
                member = self._client(client, self._images)
                yield member.release(request.certainty, own, request.public[prototype], noise=noise)

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        """Train each client from the server's model, several at a time if that is faster."""
        received = {
            name: as_received(weights, wire=request.wire)
            for name, weights in request.weights.items()
        }
        corrections = {
            client: as_received(own, wire=request.wire)
            for client, own in request.corrections.items()
        }
        soft_labels = request.soft_labels
        if soft_labels is not None and request.mirror:
            soft_labels = soft_labels.repeat(2, 1)
        received_request = replace(
            request, weights=received, corrections=corrections, soft_labels=soft_labels
        )
        own = ranks.share(clients)
        updates = (
            replace(update, weights=as_received(update.weights, wire=request.wire))
            for update in self._train(own, received_request)
        )
        yield from ranks.joined(updates)
        if request.local.optimizer_state == "kept" and ranks.size() > 1:
            parts = ranks.gathered({client: self._kept.get(client) for client in own})
            found = {client: kept for part in parts for client, kept in part.items()}
            others = {one: kept for one, kept in self._kept.items() if one not in found}
            self._kept = others | {one: kept for one, kept in found.items() if kept is not None}

    def _train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for prototype, members in self._by_prototype(clients).items():
            if request.local.privacy is not None:
                yield from self._train_privately(prototype, members, request)
                continue
            jobs = [self._job(client, request) for client in members]
            for job, weights, trained in self._training_for(prototype, request)(
                jobs, request.weights[prototype]
            ):
                if trained.optimizer_state:
                    self._keep(job.client, ClientState(request.round, trained.optimizer_state))
                yield Update(job.client, len(job.rows), weights, trained.loss)

    def noise(self, request: ReleaseRequest, client: int) -> Noise:
        """Return the noise of a client's release: seeded, so that a simulation can be repeated."""
        generator = release_stream(request.certainty, seed=request.seed, client=client)
        return noise_for(deployment=False, generator=generator)

    def generator(self, request: TrainRequest, client: int) -> np.random.Generator:
        """Return the source of a client's batches and, in private training, sampling and noise."""
        return seeding.generator(request.seed, "local", round=request.round, client=client)

    def reasons(self) -> Mapping[int, str]:
        """Return nothing: simulated clients answer."""
        return {}

    def class_shares(self, client: int) -> Tensor:
        """Return a client's class shares [C]."""
        held = torch.nn.functional.one_hot(
            self._labels[self._parts[client]], self._task.num_classes
        )
        return held.double().mean(dim=0)

    def client_states(self) -> Mapping[int, ClientState]:
        """Return what clients keep between rounds: their optimizers' tensors, if asked for."""
        return dict(self._kept)

    def load_client_states(self, kept: Mapping[int, ClientState]) -> None:
        """Restore what clients kept between rounds."""
        self._kept = dict(kept)

    def _keep(self, client: int, state: ClientState) -> None:
        """Keep a client's optimizer state, unless it holds NaN or infinity."""
        tensors = list(state.tensors.values())
        if surely_finite(tensors) or all(bool(torch.isfinite(one).all()) for one in tensors):
            self._kept[client] = state
        else:
            self._kept.pop(client, None)

    def _by_prototype(self, clients: Sequence[int]) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for client in clients:
            groups.setdefault(self._task.prototype_of[client], []).append(client)
        return groups

    def _job(self, client: int, request: TrainRequest) -> ClientJob:
        generator = self.generator(request, client)
        kept, rows = self._kept.get(client), self._parts[client]
        adjustment = None
        if not _loss(request).plain:
            adjustment = class_adjustment(
                request.objectives,
                request.local,
                self._labels[rows],
                num_classes=self._task.num_classes,
            )
        state = {} if kept is None else kept.tensors
        correction = request.corrections.get(client, {})
        return ClientJob(
            client, rows, generator, state, adjustment, request.soft_labels, correction
        )

    def _client(self, client: int, inputs: Tensor) -> Client:
        """Return one client with its rows of the shared inputs."""
        rows, model = self._parts[client], self._models[self._task.prototype_of[client]]
        return Client(client, inputs[rows], self._labels[rows], model, self._task.backend)

    def _shared_inputs(self, prototype: str, request: TrainRequest) -> Tensor:
        """Return what models are trained on: images or, in linear mode, features, computed once.

        Public examples that clients rehearse follow the private ones. If images are mirrored at
        random, each of the two parts is followed by its mirrored images.
        """
        rehearses = request.soft_labels is not None or (prototype, True) in self._inputs
        if (prototype, rehearses) not in self._inputs:
            task, h0 = self._task, request.extractors.get(prototype)

            def inputs(images: Tensor, rows: Tensor | None) -> Tensor:
                if h0 is not None:
                    return extract(task, prototype, h0, images, rows=rows)
                return task.compute.place_inputs(images if rows is None else images[rows])

            groups: list[tuple[Tensor, Tensor | None]] = [(self._images, None)]
            if request.soft_labels is not None:
                groups.append((task.distill_set, rehearsed_rows(task)))
            parts = []
            for images, rows in groups:
                parts.append(inputs(images, rows))
                if request.mirror:
                    parts.append(inputs(images.flip(-1), rows))
            self._inputs[prototype, rehearses] = joined_inputs(parts)
        return self._inputs[prototype, rehearses]

    def _training_for(self, prototype: str, request: TrainRequest) -> Training:
        """Return the backend's way of training; it is kept, because it can be costly to set up."""
        own = request.local.model_dump_json(exclude={"strengths"})
        corrected, loss = bool(request.corrections), _loss(request)
        key = (prototype, request.proximal, loss, corrected, own)
        if key not in self._training:
            context = TrainContext(
                model=self._models[prototype],
                inputs=self._shared_inputs(prototype, request),
                labels=self._labels.repeat(2) if request.mirror else self._labels,
                section=request.local,
                proximal=request.proximal,
                compute=self._task.compute,
                key=self._task.architecture(prototype),
                loss=loss,
                corrected=corrected,
                mirrored=request.mirror,
            )
            most_examples = max(len(part) for part in self._parts)
            self._training[key] = self._task.backend.training(context, most_examples=most_examples)
        return self._training[key]

    def _train_privately(
        self, prototype: str, clients: Sequence[int], request: TrainRequest
    ) -> Iterator[Update]:
        inputs = self._shared_inputs(prototype, request)
        for client in clients:
            generator = self.generator(request, client)
            yield self._client(client, inputs).train_privately(
                request.weights[prototype],
                request.local,
                proximal=request.proximal,
                draws=SimulatedDraws(generator, device=self._labels.device),
            )


def _loss(request: TrainRequest) -> LocalLoss:
    return local_loss(request.objectives, request.local, rehearsed=request.rehearsed)
