"""FedDF and FedBE with the distillation of their authors' code, as a plugin with two recipes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers import oracles
from helpers.experiments import tiny
from helpers.federations import federation
from helpers.paths import ROOT
from torch import Tensor, nn

import fedaux
from fedaux import METHODS
from fedaux.core.algorithms.fedbe import FedBE
from fedaux.core.compute import Compute
from fedaux.core.server import Server
from fedaux.core.weights import snapshot
from fedaux.recipes import load_experiment
from fedaux.running import plugins
from fedaux.running.preflight import problems_of

FOLDER = ROOT / "reproduce" / "originals"
STEPS = 12
SETTINGS: dict[str, Any] = {
    "data": {"server_validation": 60},
    "distillation": {"learning_rate": 0.05, "optimizer": "sgd", "steps": STEPS, "batch_size": 16},
    "rounds": 1,
}


@pytest.fixture(autouse=True)
def original() -> Iterator[ModuleType]:
    before = {name: dict(rows) for name, rows in plugins.REGISTRIES.items()}
    yield fedaux.load_plugin(FOLDER / "methods.py")
    plugins.LOADED.clear()
    for name, rows in before.items():
        plugins.REGISTRIES[name].clear()
        plugins.REGISTRIES[name].update(rows)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return federation(tmp_path, method="feddf-original", **SETTINGS)[0]


def labels_of(server: Server) -> Tensor:
    rng = np.random.default_rng(0)
    shape = len(server.task.distill_set), server.task.num_classes
    return torch.softmax(torch.from_numpy(rng.normal(0, 2, shape)).float(), dim=1)


def test_the_recipes_hold_the_settings_of_their_sources() -> None:
    feddf, fedbe = (load_experiment(FOLDER / f"{name}.toml") for name in ("feddf", "fedbe"))
    assert (feddf.distillation.steps, feddf.distillation.learning_rate) == (10_000, 1e-3)
    assert (feddf.local.epochs, feddf.data.server_validation) == (40, 5000)
    assert (fedbe.bayesian.samples, fedbe.distillation.optimizer) == (10, "sgd")
    one, other = METHODS["feddf-original"], METHODS["fedbe-original"]
    assert (one.clip, one.every, one.patience) == (5.0, 100, 1000)  # type: ignore[attr-defined]
    assert (other.temperature, other.start, other.every) == (0.5, 500, 25)  # type: ignore[attr-defined]


def test_they_need_full_models_and_labels_at_the_server() -> None:
    (problem,) = problems_of(tiny(method="feddf-original"))
    assert "data.server_validation: feddf-original needs labels at the server" in problem
    (problem,) = problems_of(tiny(method="fedbe-original", data={"mirror": True}))
    assert "data.mirror: fedbe-original mirrors nothing" in problem


def test_the_rate_falls_as_a_cosine_and_gradients_are_clipped(
    original: ModuleType, server: Server
) -> None:
    found = [original.cosine_rate(number, 10, 0.1) for number in range(1, 11)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for rate in found:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        optimizer.step()
        scheduler.step()
    before = snapshot(server.task.initial_models["cnn"])
    for clip in (None, 1e-3):
        student = original.students(
            server, "cnn", before, labels_of(server), rate=lambda *_: 1.0, clip=clip
        )
        _, model = next(student)
        moved = torch.cat([(p.detach() - before[n]).flatten() for n, p in model.named_parameters()])
        assert (float(moved.norm()) <= 1.001e-3) == (clip is not None)


def test_the_best_student_on_validation_data_is_kept(
    original: ModuleType, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = [0.1, 0.5, math.nan, 0.5, 0.3, 0.9]
    shown: list[int] = []

    def measured(logits: Tensor, labels: Tensor) -> tuple[float, float]:
        assert len(logits) == len(labels) == 60
        shown.append(len(shown))
        return accuracies[shown[-1]], 0.0

    monkeypatch.setattr(original, "evaluate", measured)
    before, labels = snapshot(server.task.initial_models["cnn"]), labels_of(server)
    method = replace(METHODS["feddf-original"], every=2, patience=6)  # type: ignore[call-arg]
    best = method.student(server, "cnn", before, labels)  # type: ignore[attr-defined]
    assert len(shown) == 5  # the best, at step 4, is six steps old at step 10
    students = original.students(
        server,
        "cnn",
        before,
        labels,
        rate=original.cosine_rate,
        clip=method.clip,  # type: ignore[attr-defined]
    )
    at = {number: snapshot(model) for number, model in students}
    assert len(at) == STEPS
    assert all(torch.equal(best[name], tensor) for name, tensor in at[4].items())


def test_the_mean_of_weights_at_some_steps_is_the_student(
    original: ModuleType, server: Server
) -> None:
    before, labels = snapshot(server.task.initial_models["cnn"]), labels_of(server)
    method = replace(METHODS["fedbe-original"], start=3, every=4)  # type: ignore[call-arg]
    found = method.student(server, "cnn", before, labels)  # type: ignore[attr-defined]
    at = {n: snapshot(model) for n, model in original.students(server, "cnn", before, labels)}
    for name, parameter in server.task.initial_models["cnn"].named_parameters():
        expected = torch.stack([at[n][name] for n in (4, 8, 12)]).double().mean(dim=0)
        assert torch.allclose(found[name].double(), expected, atol=1e-6)
        assert not torch.equal(parameter, found[name])
    late = replace(METHODS["fedbe-original"], start=12)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="no step of 12 counts"):
        late.student(server, "cnn", before, labels)  # type: ignore[attr-defined]


def test_statistics_are_means_over_batches_and_batches_of_one_do_not_count(
    original: ModuleType,
) -> None:
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (21, 1, 2, 2), dtype=np.uint8))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
    original.recompute_statistics(model, images, batch_size=10, compute=Compute())
    with torch.no_grad():
        hidden = model[1](images[:20].flatten(1).float() / 255)
    layer = model[2]
    assert isinstance(layer, nn.BatchNorm1d)
    assert torch.allclose(layer.running_mean, hidden.mean(dim=0), atol=1e-5)  # type: ignore[arg-type]
    variance = torch.stack([part.var(dim=0) for part in hidden.split(10)]).mean(dim=0)
    assert torch.allclose(layer.running_var, variance, atol=1e-5)  # type: ignore[arg-type]
    assert model.training
    assert layer.momentum == 0.1


@pytest.mark.parametrize("name", ["feddf-original", "fedbe-original"])
def test_a_round_is_played(name: str, tmp_path: Path) -> None:
    changes = {"every": 4} | ({"start": 0} if name.startswith("fedbe") else {})
    METHODS[name] = replace(METHODS[name], **changes)  # type: ignore[arg-type]
    server, state, _, _ = federation(tmp_path, method=name, **SETTINGS)
    after, row = server.play_round(state)
    assert row["accuracy"] is not None
    assert not torch.equal(after.models["cnn"]["head.bias"], state.models["cnn"]["head.bias"])


def test_targets_are_sharpened(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = labels_of(server)
    monkeypatch.setattr(FedBE, "soft_labels", lambda *_: targets)
    found = METHODS["fedbe-original"].soft_labels(server, None, [])  # type: ignore[attr-defined]
    for row, own in zip(found[:20].tolist(), targets[:20].tolist(), strict=True):
        assert row == pytest.approx(oracles.sharpen_loop(own, temperature=0.5), abs=1e-6)
