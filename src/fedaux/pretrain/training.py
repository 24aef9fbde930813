"""Self-supervised training of a feature extractor, which can be saved and continued after any
epoch.

On a GPU a step (batch, random views, forward, backward and update) is one CUDA graph, and the host
synchronises once per epoch.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fedaux.config import Pretraining
from fedaux.core.compute import Compute
from fedaux.core.steps import optimizer_state, reset, restore_optimizer
from fedaux.core.weights import below, flat, snapshot
from fedaux.data.tensor_files import save_tensors
from fedaux.data.vocabulary import Vocabulary
from fedaux.fast.capture import capture
from fedaux.fast.fallback import attempt, compiled
from fedaux.pretrain.objectives import Objective, objective_of, resolved

SAVE_SECONDS = 30.0
"""Minimum time between two saves of progress, at the end of an epoch."""
OPTIMIZERS: dict[str, type[torch.optim.Adam]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True)
class EpochProgress:
    """A finished epoch."""

    epoch: int
    """From 1."""
    epochs: int
    loss: float
    seconds_left: float

    def __str__(self) -> str:
        return f"{self.epoch}/{self.epochs}, loss {self.loss:.3f}, ETA {self.seconds_left:.0f} s"


OnEpoch = Callable[[EpochProgress], None]


class Stopped(KeyboardInterrupt):
    """Training was interrupted; it can continue after `saved` of `epochs`."""

    def __init__(self, *, saved: int, epochs: int) -> None:
        super().__init__()
        self.saved = saved
        self.epochs = epochs


class Training:
    """Trains features in place on images uint8 [N, C, H, W] or token ids int32 [N, L].

    An epoch is one pass over the examples in random order; an incomplete last batch is dropped
    unless it is the only one, because losses depend on the batch size. Raises ValueError for too
    few or unsuitable examples.
    """

    def __init__(
        self,
        features: nn.Module,
        images: Tensor,
        *,
        feature_width: int,
        section: Pretraining,
        generator: torch.Generator,
        compute: Compute | None = None,
        key: Hashable = "features",
        vocabulary: Vocabulary | None = None,
    ) -> None:
        section = resolved(section, features, texts=vocabulary is not None, given=False)
        device = images.device
        self.losses: list[float] = []
        """Mean loss of every epoch so far."""
        self.seconds = 0.0
        """Time of all epochs so far."""
        self.features = features
        self.section = section
        self.device = device
        self._images = images
        self._generator = generator
        self._compute = compute or Compute(device)
        self._objective = objective_of(
            features,
            images,
            feature_width=feature_width,
            section=section,
            generator=generator,
            compute=self._compute,
            vocabulary=vocabulary,
        )
        if len(images) < self._objective.least:
            raise ValueError(
                f"pretraining needs at least {self._objective.least} examples, got {len(images)}"
            )
        self._batch_size = min(section.batch_size, len(images))
        self._batches = len(images) // self._batch_size
        self._model = self._objective.model
        self._named = dict(self._model.named_parameters()), dict(self._model.named_buffers())
        shape = (self._batch_size, *images.shape[1:])
        self._key = ("pretraining", key, section.model_dump_json(), shape, self._objective.key)

        # CUDA graphs read these in place.
        self._order = torch.zeros(
            self._batches * self._batch_size, dtype=torch.int64, device=device
        )
        self._offsets = torch.arange(self._batch_size, device=device)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._total = torch.zeros((), device=device)
        self._rates = [
            learning_rate(step, section=section, steps_per_epoch=self._batches)
            for step in range(section.epochs * self._batches)
        ]
        self._taken = 0
        self._device_rates: DeviceRates | None = (
            DeviceRates(self._rates, device) if device.type == "cuda" else None
        )
        self._optimizer = self._make_optimizer()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._prepared = not self._compute.captures

    def epoch(self) -> float:
        """Train for one epoch and return its mean loss. Raises ValueError if it is not finite."""
        began = time.monotonic()
        self._model.train()
        if not self._prepared:
            self._prepare()
        order = torch.randperm(
            len(self._images), generator=self._generator, device=self._images.device
        )
        self._order.copy_(order[: len(self._order)])
        self._position.zero_()
        # Summed on the device, to avoid synchronisation in every step.
        self._total.zero_()
        for _ in range(self._batches):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()
        self._taken = (len(self.losses) + 1) * self._batches
        loss = float(self._total) / self._batches
        if not math.isfinite(loss):
            raise ValueError(
                f"pretraining.learning_rate = {self.section.learning_rate}: the loss is {loss} "
                f"after {len(self.losses) + 1} epochs; should be lower"
            )
        self.losses.append(loss)
        self.seconds += time.monotonic() - began
        return loss

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the state of training."""
        moments = optimizer_state(self._optimizer, self._model)
        weights = flat({"model": snapshot(self._model), "optimizer": moments})
        return weights | {"generator": self._generator.get_state()}

    def load(self, state: Mapping[str, Tensor], *, losses: list[float]) -> None:
        """Continue from a state after `len(losses)` epochs."""
        self._model.load_state_dict(below("model/", state))
        reset(self._optimizer)
        parameters = self._named[0]
        moments = {}
        for name, value in below("optimizer/", state).items():
            like = parameters[name.rpartition("/")[0]]
            # Fused optimizers need moments with the memory format of their weights.
            moments[name] = (
                torch.empty_like(like).copy_(value) if value.shape == like.shape else value
            )
        restore_optimizer(self._optimizer, self._model, moments)
        self._generator.set_state(state["generator"].cpu())
        self.losses = list(losses)
        self._taken = len(losses) * self._batches
        if self._device_rates is not None:
            self._device_rates.go_to(self._taken)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        section = self.section
        parameters = list(self._model.parameters())
        groups: list[dict[str, object]] = [{"params": parameters}]
        if section.weight_decay > 0:
            groups = [
                {"params": [parameter for parameter in parameters if parameter.ndim > 1]},
                {
                    "params": [parameter for parameter in parameters if parameter.ndim <= 1],
                    "weight_decay": 0.0,
                },
            ]
        make = OPTIMIZERS[section.optimizer]
        if self._device_rates is None:
            return make(groups, lr=section.learning_rate, weight_decay=section.weight_decay)
        return make(
            groups,
            lr=self._device_rates.rate,
            weight_decay=section.weight_decay,
            fused=True,
            capturable=True,
        )

    def _step(self) -> None:
        """Take a step on the next batch."""
        if self._device_rates is not None:
            self._device_rates.advance()
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = self._rates[min(self._taken, len(self._rates) - 1)]
            self._taken += 1
        rows = self._order.index_select(0, self._position + self._offsets)
        numbers = self._objective.draw(self._batch_size, generator=self._generator)
        loss = self._loss(self._images[rows], numbers)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        self._total += loss.detach()
        self._position += self._batch_size

    def _loss(self, inputs: Tensor, numbers: Tensor) -> Tensor:
        """Return the loss of a batch, compiled if requested."""
        function: Callable[..., Tensor] = self._objective.loss
        if self._compute.compile:
            function = compiled(self._compute, self._key, lambda: self._copied().loss)
        return function(*self._named, inputs, numbers)

    def _copied(self) -> Objective:
        """Return the objective with a copy of the model, for compilation."""
        objective = copy.copy(self._objective)
        objective.model = copy.deepcopy(self._model).train()
        return objective

    def _prepare(self) -> None:
        """Capture a step; if that fails, warn and keep eager steps."""
        self._prepared = True
        kept, losses = self.state(), self.losses
        self._graph = attempt(
            lambda: capture(
                self._step,
                stream=torch.cuda.Stream(self._images.device),
                rewind=self._position.zero_,
                generator=self._generator,
            ),
            otherwise="pretraining: steps cannot be captured, training is slower",
        )
        if self._graph is None:
            # The old generator may still be registered with a broken graph.
            self._generator = torch.Generator(self._images.device)
            self._optimizer.zero_grad(set_to_none=True)
        self.load(kept, losses=losses)


class DeviceRates:
    """The learning rates of all steps on the device, for captured steps."""

    def __init__(self, rates: list[float], device: torch.device) -> None:
        self._rates = torch.tensor(rates, device=device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)
        self.rate = self._rates[0].clone()
        """The current rate, [], read by the optimizer."""

    def advance(self) -> None:
        """Set the next rate; the last one is kept."""
        self.rate.copy_(self._rates.index_select(0, self._next.clamp(max=len(self._rates) - 1))[0])
        self._next += 1

    def go_to(self, step: int) -> None:
        """Continue with the rate of a step."""
        self._next.fill_(step)


def learning_rate(step: int, *, section: Pretraining, steps_per_epoch: int) -> float:
    """Return the learning rate of a step, counted from 0 over all epochs.

    It increases linearly over the W steps of `warmup_epochs`; then it is constant, or decays as
    eta / 2 (1 + cos(pi s / (S - W))) with s steps since then and S steps in total (SGDR without
    restarts, Loshchilov & Hutter 2017).
    """
    warmup = section.warmup_epochs * steps_per_epoch
    if step < warmup:
        return section.learning_rate * (step + 1) / warmup
    if section.schedule == "constant":
        return section.learning_rate
    passed = (step - warmup) / (section.epochs * steps_per_epoch - warmup)
    return section.learning_rate / 2 * (1 + math.cos(math.pi * passed))


def pretrain(
    training: Training,
    *,
    progress: Path | None = None,
    save_seconds: float = SAVE_SECONDS,
    on_epoch: OnEpoch | None = None,
) -> None:
    """Train for the remaining epochs.

    With `progress`, training continues from this file and saves to it; the caller ensures that the
    file belongs to the same data, features and settings. Raises Stopped on Ctrl-C; an unfinished
    epoch is lost.
    """
    features, epochs = training.features, training.section.epochs
    was_training = features.training
    if progress is not None and progress.exists():
        _continue(training, progress)
    began = written = time.monotonic()
    before = saved = len(training.losses)
    finished: Finished | None = None
    try:
        for epoch in range(before, epochs):
            loss = training.epoch()
            now = time.monotonic()
            if progress is not None:
                finished = Finished(training.state(), list(training.losses), training.seconds)
                if epoch + 1 < epochs and now - written >= save_seconds:
                    saved = finished.save(progress)
                    written = time.monotonic()
            if on_epoch is not None:
                left = (now - began) / (epoch + 1 - before) * (epochs - epoch - 1)
                on_epoch(EpochProgress(epoch + 1, epochs, loss, left))
    except KeyboardInterrupt as stop:
        if progress is not None and finished is not None and len(finished.losses) > saved:
            with suppress(OSError, KeyboardInterrupt):  # the previous save remains
                saved = finished.save(progress)
        raise Stopped(saved=saved, epochs=epochs) from stop
    features.train(was_training)
    for parameter in features.parameters():
        parameter.grad = None  # would keep the memory of a CUDA graph


@dataclass(frozen=True)
class Finished:
    """The state of training at the end of an epoch."""

    state: dict[str, Tensor]
    losses: list[float]
    seconds: float

    def save(self, progress: Path) -> int:
        """Save the state; return its number of epochs."""
        history = {"losses": json.dumps(self.losses), "seconds": json.dumps(self.seconds)}
        save_tensors(progress, self.state, metadata=history)
        return len(self.losses)


def _continue(training: Training, progress: Path) -> None:
    """Load saved progress. Raises ValueError if it is damaged."""
    try:
        state = load_file(progress, device=str(training.device))
        with safe_open(progress, framework="pt") as file:
            history = {key: json.loads(value) for key, value in file.metadata().items()}
        training.load(state, losses=history["losses"])
        training.seconds = float(history["seconds"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{progress}: damaged, pretraining cannot continue from it ({error}); remove it"
        ) from error
