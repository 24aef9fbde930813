"""Clients trained side by side on a GPU: the parts that a CPU can check."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedaux import seeding
from fedaux.config import Local
from fedaux.core.backend import ClientJob, TrainContext
from fedaux.core.compute import Compute
from fedaux.core.objectives import class_adjustment, local_loss
from fedaux.core.plain_backend import one_by_one
from fedaux.core.weights import snapshot
from fedaux.fast import streams
from fedaux.fast.batched import BatchedTraining
from fedaux.fast.capture import CapturedSteps
from fedaux.models import MODELS

EXAMPLES, PUBLIC, CLASSES, REHEARSED = 10, 6, 3, 3


def test_without_kernels_and_graphs_the_rows_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two epochs of 3 batches: 10 private rows and 3 public ones with each batch."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (EXAMPLES + PUBLIC, 1, 4, 4), dtype=np.uint8)
    labels = torch.from_numpy(generator.integers(0, CLASSES, EXAMPLES))
    section = Local(batch_size=4, epochs=2, learning_rate=1e-3)
    with seeding.initialisation(0, part="test"):
        model = MODELS["mlp"]((1, 4, 4), CLASSES)
    context = TrainContext(
        model,
        torch.from_numpy(images),
        labels,
        section,
        proximal=0.0,
        compute=Compute(clients_at_once=2),
        key="mlp",
        loss=local_loss(["rehearsal"], section, rehearsed=REHEARSED),
    )

    def job() -> ClientJob:
        beliefs = torch.full((PUBLIC, CLASSES), 1 / CLASSES)
        adjustment = class_adjustment(["rehearsal"], section, labels, num_classes=CLASSES)
        rows, order = torch.arange(EXAMPLES), seeding.generator(0, "local")
        return ClientJob(0, rows, order, {}, adjustment, beliefs)

    capacities = []

    class Recorded(CapturedSteps):
        def __init__(self, *arguments: Any, capacity: int, **settings: Any) -> None:
            capacities.append(capacity)
            raise RuntimeError("no CUDA graphs on a CPU")  # even where there is a GPU as well

    monkeypatch.setattr(streams, "CapturedSteps", Recorded)
    start = snapshot(model)
    with pytest.warns(UserWarning, match="mlp: .* training is slower"):
        ((_, found, _),) = BatchedTraining(context, capacity=EXAMPLES)([job()], start)
    assert capacities == [2 * (EXAMPLES + 3 * REHEARSED)]
    ((_, expected, _),) = one_by_one(context)([job()], start)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
