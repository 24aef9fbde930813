"""A federated round the way it is usually written: eager PyTorch, client after client, batch after batch.

No data loader and no waiting for the device inside a phase: images lie on the device, so what is measured is the loop.
Batches come in fedaux's seeded order, so that its engine has to end with the same weights.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux import seeding
from fedaux.config import Distillation, Local
from fedaux.core.methods import Method

TEACHERS = {"mean", "certainty", "mixture"}
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


class Clock:
    """Seconds by phase; the device is waited for where a phase begins and ends."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase."""
        wait(self._device)
        began = time.perf_counter()
        yield
        wait(self._device)
        self.seconds[name] = time.perf_counter() - began


def wait(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_input(images: Tensor) -> Tensor:
    """Map uint8 to single precision in [0, 1]."""
    return images.float() / 255


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context of mixed precision: bf16 where it is safe, or nothing for fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def can_play(method: Method) -> bool:
    """Whether the plain loop knows all that a method does."""
    return not method.memory and (method.teacher is None or method.teacher in TEACHERS)


def train_client(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    section: Local,
    proximal: float,
    precision: str,
    generator: np.random.Generator,
) -> None:
    """Train a client's model in place: cross-entropy, and mu/2 |theta - theta_0|^2 where mu is above 0."""
    anchors = [parameter.detach().clone() for parameter in model.parameters()] if proximal > 0 else []
    optimizer = OPTIMIZERS[section.optimizer](model.parameters(), lr=section.learning_rate)
    for _ in range(section.epochs):
        order = torch.from_numpy(generator.permutation(len(labels))).to(labels.device)
        for batch in order.split(section.batch_size):
            model.train(len(batch) > 1)  # one image has no variance to normalise by
            with autocast(precision, images.device):
                loss = functional.cross_entropy(model(as_input(images[batch])), labels[batch])
            if proximal > 0:
                distances = [
                    (parameter - anchor).square().sum()
                    for parameter, anchor in zip(model.parameters(), anchors, strict=True)
                ]
                loss = loss + proximal / 2 * torch.stack(distances).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def plainly_convolved(model: nn.Module) -> nn.Module:
    """Return the model with torch's own operations, as people write them, in the place of ours."""
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            part.__class__ = nn.Conv2d  # whose settings and weights ours have
    return model


def average_models(models: Sequence[nn.Module], *, sizes: Sequence[int]) -> dict[str, Tensor]:
    """Return the weights averaged by the sizes of the clients' data; of counters the largest."""
    states = [model.state_dict() for model in models]
    averaged = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            averaged[name] = sum(
                (state[name] * (size / sum(sizes)) for state, size in zip(states, sizes, strict=True)),
                start=torch.zeros_like(first),
            )
        else:
            averaged[name] = torch.stack([state[name] for state in states]).amax(dim=0)
    return averaged


@torch.no_grad()
def logits_of(model: nn.Module, images: Tensor, *, batch_size: int, precision: str) -> Tensor:
    """Return the model's logits [N, C] in evaluation mode."""
    model.eval()
    with autocast(precision, images.device):
        return torch.cat([model(as_input(batch)).float() for batch in images.split(batch_size)])


def soft_labels(logits_KNC: Tensor, weights_KN: Tensor, *, teacher: str) -> Tensor:
    """Return soft labels [N, C]: softmax of the weighted mean of logits, or the weighted mean of softmaxes."""
    if teacher == "mixture":
        return (torch.softmax(logits_KNC, dim=2) * weights_KN[:, :, None]).sum(dim=0)
    return torch.softmax((logits_KNC * weights_KN[:, :, None]).sum(dim=0), dim=1)


def distill(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    *,
    section: Distillation,
    precision: str,
    generator: np.random.Generator,
) -> None:
    """Distill soft labels [N, C] into a model in place."""
    optimizer = torch.optim.Adam(model.parameters(), lr=section.learning_rate)
    for _ in range(section.epochs):
        order = torch.from_numpy(generator.permutation(len(images))).to(images.device)
        for batch in order.split(section.batch_size):
            model.train(len(batch) > 1)
            with autocast(precision, images.device):
                log_probabilities = functional.log_softmax(model(as_input(images[batch])), dim=1)
                loss = functional.kl_div(log_probabilities, targets[batch], reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@dataclass(frozen=True)
class PlainFederation:
    """What a plain round needs besides the weights it starts from."""

    model: nn.Module
    prototype: str
    method: Method
    seed: int
    local: Local
    distillation: Distillation
    batch_size: int
    """Of predictions."""
    images: Tensor
    labels: Tensor
    parts: Sequence[Tensor]
    distill_images: Tensor
    test_images: Tensor
    test_labels: Tensor
    certainty_weights: Callable[[Sequence[int]], Tensor]
    """The weights [K, N] of clients on the distill set: they are taken as given, and not timed."""
    precision: str

    def play_round(
        self, weights: dict[str, Tensor], *, number: int, chosen: Sequence[int]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Train the chosen clients, average, teach, distill, evaluate; return new weights and seconds by phase."""
        device = self.images.device
        clock = Clock(device)
        server = copy.deepcopy(self.model)
        server.load_state_dict(weights)
        with clock.phase("train"):
            models = []
            for client in chosen:
                model = copy.deepcopy(server)
                train_client(
                    model,
                    self.images[self.parts[client]],
                    self.labels[self.parts[client]],
                    section=self.local,
                    proximal=self.local.proximal if self.method.proximal else 0.0,
                    precision=self.precision,
                    generator=seeding.generator(self.seed, "local", round=number, client=client),
                )
                models.append(model)
        with clock.phase("average"):
            server.load_state_dict(average_models(models, sizes=[len(self.parts[client]) for client in chosen]))
        if self.method.teacher is not None:
            if self.method.scores:
                weights_KN = self.certainty_weights(chosen)
            else:
                weights_KN = torch.full((len(chosen), len(self.distill_images)), 1 / len(chosen), device=device)
            with clock.phase("teach"):
                logits = [self._logits(model, self.distill_images) for model in models]
                targets = soft_labels(torch.stack(logits), weights_KN, teacher=self.method.teacher)
            with clock.phase("distill"):
                distill(
                    server,
                    self.distill_images,
                    targets,
                    section=self.distillation,
                    precision=self.precision,
                    generator=seeding.generator(self.seed, "distillation", round=number, part=self.prototype),
                )
        with clock.phase("evaluate"):
            logits_NC = self._logits(server, self.test_images)
            float((logits_NC.argmax(dim=1) == self.test_labels).double().mean())
            float(functional.cross_entropy(logits_NC, self.test_labels))
        return {name: tensor.detach() for name, tensor in server.state_dict().items()}, clock.seconds

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        return logits_of(model, images, batch_size=self.batch_size, precision=self.precision)
