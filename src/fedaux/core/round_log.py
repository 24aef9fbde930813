"""The record of a round: seconds, bytes, dropped clients, privacy costs, and the metrics row."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from fedaux.core.messages import ClientState
from fedaux.core.task import Callback, Task
from fedaux.privacy.ledger import LedgerEntry


class RoundLog:
    """The record of one round."""

    def __init__(self, task: Task, number: int, callback: Callback) -> None:
        self.round = number
        self.present: Sequence[int] = ()
        self.asked: list[int] = []
        self.dropped: dict[int, str] = {}
        """Why clients that were asked do not count, by client."""
        self.losses: dict[int, float] = {}
        """Mean training loss, by client."""
        self.answered: list[int] = []
        """Clients whose updates were usable."""
        self.weights: dict[int, float] = {}
        """Each client's mean weight on the distill set."""
        self.weight_by_class: list[float] = []
        """Each class's share of the soft labels [C]."""
        self.ledger: list[LedgerEntry] = []
        self._task = task
        self._callback = callback
        self._clock = Clock(task, number, callback)
        self.bytes_up = self.bytes_down = 0

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase, and announce it."""
        return self._clock.phase(name)

    def count(self, *, down: int, up: int) -> None:
        """Add bytes that went to clients and came from them."""
        self.bytes_down += down
        self.bytes_up += up

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase."""
        return self._clock.seconds

    def row(self, memory: Mapping[int, ClientState], measured: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of the finished round, and announce them."""
        task = self._task
        answered = [client for client in self.answered if client not in self.dropped]
        losses = [self.losses[client] for client in answered if client in self.losses]
        everybody, present = range(task.experiment.split.num_clients), self.present
        absent = {*everybody} - {*present} if len(present) < len(everybody) else set[int]()
        row: dict[str, Any] = {
            "method": task.method.name,
            "seed": task.seed,
            "round": self.round,
            "accuracy": None,
            "loss": None,
            "accuracy_by_prototype": {},
            "accuracy_ensemble": None,
            "balanced_accuracy": None,
            "macro_f1": None,
            "auc": None,
            "local_loss": float(np.mean(losses)) if losses else None,
            "clients_asked": self.asked,
            "clients_answered": answered,
            "clients_dropped": {str(client): why for client, why in sorted(self.dropped.items())},
            "clients_absent": sorted(absent),
            "clients_remembered": sorted(set(memory) - set(answered)) if answered else [],
            "model_kept": task.asks.trains and not answered,
            **self._public_weight(),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            **measured,
            "seconds": dict(self._clock.seconds),
        }
        self._callback.round(row)
        return row

    def _public_weight(self) -> dict[str, Any]:
        """Return how the weight on public data is spread over clients and classes."""
        if not self.weight_by_class:
            return {}
        return {
            "public_weight_by_client": {
                str(client): round(weight, 6) for client, weight in self.weights.items()
            },
            "public_weight_by_class": [round(weight, 6) for weight in self.weight_by_class],
        }


class Clock:
    """Seconds by phase, announced to a callback; features that later tasks share are a phase of
    their own."""

    def __init__(self, task: Task, round: int, callback: Callback) -> None:
        self.seconds: dict[str, float] = {}
        self._task = task
        self._round = round
        self._callback = callback

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; wait for the GPU, so that its work counts in the phase that started it."""
        self._callback.phase(self._task, self._round, name)
        began, before = time.perf_counter(), self._task.compute.shared_seconds
        yield
        if self._task.device.type == "cuda":
            torch.cuda.synchronize(self._task.device)
        shared = self._task.compute.take_shared_seconds()  # some were perhaps between phases
        self._add(name, time.perf_counter() - began - (shared - before))
        if shared:
            self._add("features", shared)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 6)
