"""The server's side of a prototype: whose statistics batch normalisation uses, and where clients are asked."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engines import federation
from torch import Tensor, nn
from torch.nn import functional

from fedaux import seeding, student
from fedaux.clients import TrainRequest, Update, Weights
from fedaux.compute import Compute
from fedaux.config import Distillation
from fedaux.distillation import distill
from fedaux.ensemble import TEACHERS, Ensemble, Member, without_negligible
from fedaux.models import SplitModel
from fedaux.server import average, snapshot
from fedaux.student import Student

RNG = np.random.default_rng(0)
PUBLIC = torch.from_numpy(RNG.integers(0, 256, (23, 1, 6, 6), dtype=np.uint8))
TEST = torch.from_numpy(RNG.integers(0, 256, (9, 1, 6, 6), dtype=np.uint8))
STATISTICS = ("running_mean", "running_var")
OPTIONS = [(teachers, server) for teachers in ("client", "auxiliary", "batch") for server in ("training", "batch")]


def network(*, normalised: bool = True, part: str = "test") -> SplitModel:
    with seeding.initialisation(0, part=part):
        layers: list[nn.Module] = [nn.Conv2d(1, 3, 3, bias=False), nn.ReLU(), nn.Conv2d(3, 4, 3, bias=False)]
        if normalised:
            layers.insert(1, nn.BatchNorm2d(3))
            layers.append(nn.BatchNorm2d(4))
        model = SplitModel(nn.Sequential(*layers, nn.ReLU(), nn.Flatten()), nn.Linear(16, 3), feature_width=16)
    generator = torch.Generator().manual_seed(len(part))
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.normal_(0, 0.5, generator=generator)
            layer.running_var.uniform_(0.5, 2.0, generator=generator)
    return model


def server_of(model: SplitModel, **changes: Any) -> Student:
    defaults = {"evaluation": {"batch_size": 7}}
    return Student(
        model,
        experiment=tiny(**(defaults | changes)),
        compute=Compute(),
        architecture="network",
        distill_inputs=PUBLIC,
        test_inputs=TEST,
        validation=None,
    )


def evaluated(weights: Weights, images: Tensor, *, training: bool = False) -> Tensor:
    """The logits of the network, batch by batch of seven images."""
    model = network().train(training)
    model.load_state_dict(weights)
    with torch.no_grad():
        return torch.cat([model(batch.float() / 255) for batch in images.split(7)])


def public_statistics(weights: Weights, images: Tensor, *, batch_size: int) -> Weights:
    """What batch normalisation sees of images: means over batches, each image with the same weight, by hand.

    Inside a batch, the layer before normalises by that batch's own (biased) variance; what is averaged is unbiased.
    """
    totals = {f"features.{layer}.{name}": 0.0 for layer in (1, 4) for name in STATISTICS}
    found: dict[str, Any] = dict(totals)
    for batch in images.split(batch_size):
        values = functional.conv2d(batch.float() / 255, weights["features.0.weight"])
        for layer, following in ((1, "features.3.weight"), (4, None)):
            channels = values.transpose(0, 1).flatten(1).double()  # [C, N * positions]
            mean = channels.mean(dim=1)
            squares = (channels - mean[:, None]).square().sum(dim=1)
            found[f"features.{layer}.running_mean"] += mean * len(batch) / len(images)
            unbiased = squares / (channels.shape[1] - 1)
            found[f"features.{layer}.running_var"] += unbiased * len(batch) / len(images)
            if following is not None:
                scale = torch.sqrt(squares / channels.shape[1] + 1e-5)
                values = (values.double() - mean[:, None, None]) / scale[:, None, None]
                values = functional.conv2d(functional.relu(values).float(), weights[following])
    return {name: tensor.float() for name, tensor in found.items()}


def test_teachers_use_their_own_statistics_unless_told_otherwise() -> None:
    server, weights = server_of(network()), snapshot(network(part="client"))
    assert torch.allclose(server.logits(weights), evaluated(weights, PUBLIC), atol=1e-5)
    shifted = weights | {"features.1.running_mean": weights["features.1.running_mean"] + 1}
    assert not torch.allclose(server.logits(shifted), server.logits(weights), atol=0.01)


@pytest.mark.parametrize(("images", "batch_size"), [(12, 512), (12, 5), (4096, 512), (4096, 8)])
def test_auxiliary_statistics_are_those_of_the_first_public_images(
    images: int, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(student, "STATISTICS_BATCH", batch_size)
    server = server_of(network(), batch_normalisation={"teachers": "auxiliary", "images": images})
    weights = snapshot(network(part="client"))
    expected = public_statistics(weights, PUBLIC[:images], batch_size=batch_size)
    found = server.with_public_statistics(weights)
    for name, tensor in weights.items():
        if name in expected:
            assert torch.allclose(found[name], expected[name], atol=1e-5), name
            assert not torch.allclose(found[name], tensor, atol=0.01)
        elif tensor.is_floating_point():
            assert torch.equal(found[name], tensor)
    assert torch.allclose(server.logits(weights), evaluated(weights | expected, PUBLIC), atol=1e-4)


def test_auxiliary_statistics_do_not_look_at_those_of_the_client() -> None:
    server = server_of(network(), batch_normalisation={"teachers": "auxiliary"})
    weights = snapshot(network(part="client"))
    before = {name: tensor.clone() for name, tensor in weights.items()}
    other = {
        name: tensor * 3 + 1 if name.rpartition(".")[2] in STATISTICS else tensor for name, tensor in weights.items()
    }
    assert torch.equal(server.logits(weights), server.logits(other))
    assert not torch.allclose(server.logits(weights), evaluated(weights, PUBLIC), atol=0.01)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights.items())


def test_the_statistics_of_batches_are_those_of_training_mode() -> None:
    """As in the authors' released code: twenty-three images in batches of seven, the last one of two."""
    server = server_of(network(), batch_normalisation={"teachers": "batch", "server": "batch"})
    weights = snapshot(network(part="client"))
    assert torch.allclose(server.logits(weights), evaluated(weights, PUBLIC, training=True), atol=1e-5)
    assert torch.allclose(server.test_logits(weights), evaluated(weights, TEST, training=True), atol=1e-5)
    assert not torch.allclose(server.logits(weights), evaluated(weights, PUBLIC), atol=0.01)


def test_teachers_and_server_are_set_apart() -> None:
    weights = snapshot(network(part="client"))
    for teachers, server in OPTIONS:
        asked = server_of(network(), batch_normalisation={"teachers": teachers, "server": server})
        assert torch.allclose(
            asked.test_logits(weights), evaluated(weights, TEST, training=server == "batch"), atol=1e-5
        )
        own = torch.allclose(asked.logits(weights), evaluated(weights, PUBLIC), atol=1e-3)
        assert own == (teachers == "client")


def test_models_without_batch_normalisation_do_not_look_at_it() -> None:
    weights = snapshot(network(normalised=False, part="client"))
    plain = server_of(network(normalised=False))
    where = torch.arange(23) % 3 == 0
    for teachers, server in [*OPTIONS, ("auxiliary", "auxiliary")]:
        asked = server_of(network(normalised=False), batch_normalisation={"teachers": teachers, "server": server})
        assert torch.equal(asked.logits(weights), plain.logits(weights))
        assert torch.equal(asked.logits(weights, where=where), plain.logits(weights, where=where))
        assert torch.equal(asked.test_logits(weights), plain.test_logits(weights))
        assert asked.with_public_statistics(weights) is weights


@pytest.mark.parametrize("teachers", ["client", "auxiliary", "batch"])
@pytest.mark.parametrize("asked", [[0, 3, 4, 11, 22], [5], [], list(range(23))])
def test_a_client_is_asked_only_where_it_should_be(teachers: str, asked: list[int]) -> None:
    server = server_of(network(), batch_normalisation={"teachers": teachers})
    weights = snapshot(network(part="client"))
    everything = server.logits(weights)
    where = torch.zeros(23, dtype=torch.bool)
    where[asked] = True
    found = server.logits(weights, where=where)
    assert found.shape == everything.shape
    assert torch.equal(found[~where], torch.zeros(23 - len(asked), 3))
    assert torch.allclose(found[where], everything[where], atol=1e-5)
    assert bool((everything.abs().sum(dim=1) > 0).all())


def test_asking_a_client_changes_nothing_for_the_next() -> None:
    for teachers in ("client", "auxiliary", "batch"):
        server = server_of(network(), batch_normalisation={"teachers": teachers})
        first, second = snapshot(network(part="client")), snapshot(network(part="another"))
        before = server.logits(first)
        assert not torch.allclose(server.logits(second), before, atol=0.01)
        assert torch.equal(server.logits(first), before)


def test_distillation_at_the_server_is_distillation() -> None:
    section: dict[str, Any] = {"batch_size": 8, "learning_rate": 0.01, "epochs": 2}
    server, weights = server_of(network(), distillation=section), snapshot(network(part="client"))
    targets = torch.softmax(torch.from_numpy(RNG.normal(size=(23, 3))).float(), dim=1)
    found = server.distill(weights, targets, generator=seeding.generator(0, "distillation"))
    expected = distill(
        network(),
        weights,
        PUBLIC,
        targets,
        section=Distillation(**section),
        generator=seeding.generator(0, "distillation"),
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(found["head.weight"], weights["head.weight"])


@pytest.mark.parametrize("server", ["training", "auxiliary", "batch"])
def test_a_round_ends_with_the_statistics_that_were_asked_for(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "method": "fedavg",
        "prototypes": [{"name": "p", "model": "mobilenetv2", "options": {"width": 0.1}}],
        "split": {"num_clients": 80, "alpha": 100.0},
        "auxiliary": {"size": 60},
        "participation_rate": 0.025,
        "evaluation": {"batch_size": 50},
        "batch_normalisation": {"server": server, "images": 32},
    }
    round, state, clients = federation(tmp_path, clients_at_once=1, **changes)
    updates: list[tuple[Weights, int]] = []
    train = clients.train

    def watched(chosen: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for update in train(chosen, request):
            updates.append((copy.deepcopy(update.weights), update.num_examples))
            yield update

    monkeypatch.setattr(clients, "train", watched)
    after, row = round.play_round(state)
    found = after.weights["p"]
    mean = average([weights for weights, _ in updates], sizes=[size for _, size in updates])
    model = clients._models["p"]
    if server == "auxiliary":
        model.load_state_dict(mean)
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 1.0  # one batch of 32 images: its statistics are the result
        with torch.no_grad():
            model.train()(round.task.distill_images[:32].float() / 255)
        expected = snapshot(model)
    else:
        expected = mean
    assert len(updates) == 2
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-4) or not tensor.is_floating_point(), name
    model.load_state_dict(found)
    images = round.task.test_images
    with torch.no_grad():
        model.train(server == "batch")
        logits = torch.cat([model(batch.float() / 255) for batch in images.split(50)])
    loss = float(functional.cross_entropy(logits, round.task.test_labels))
    assert row["loss"] == pytest.approx(loss, rel=1e-4)


weights_and_logits = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "clients": st.integers(1, 8),
        "sharpness": st.floats(0.1, 20),
        "below": st.one_of(st.floats(0, 0.999), st.floats(0, 0.05)),
    }
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(weights_and_logits)
def test_what_is_left_out_moves_soft_labels_by_no_more_than_is_stated(case: dict[str, Any]) -> None:
    generator, below = np.random.default_rng(case["seed"]), case["below"]
    clients = case["clients"]
    scores = torch.from_numpy(case["sharpness"] * generator.normal(size=(clients, 20)))
    weights = torch.softmax(scores, dim=0)
    logits = torch.from_numpy(generator.normal(0, 5, size=(clients, 20, 4)))
    kept = without_negligible(weights, below=below)
    assert torch.allclose(kept.sum(dim=0), torch.ones(20, dtype=torch.float64), atol=1e-12)
    largest = weights.argmax(dim=0)
    assert bool((kept.gather(0, largest[None]) > 0).all())
    gone = kept == 0
    assert bool((weights[gone] < below).all())
    assert torch.equal(gone, (weights < below) & (weights < weights.amax(dim=0)))
    ratios = torch.where(gone, torch.nan, kept / weights)
    assert torch.allclose(ratios.nan_to_num(0).amax(dim=0), ratios.nan_to_num(1e9).amin(dim=0), rtol=1e-9)
    lost = torch.where(gone, weights, 0.0).sum(dim=0)
    assert bool((lost <= clients * below).all())

    def teach(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed = (weights[:, :, None] * torch.softmax(logits, dim=2)).sum(dim=0)
        mean = (weights[:, :, None] * logits).sum(dim=0)
        return mixed, mean, torch.softmax(mean, dim=1)

    moved = [(new - old).abs() for new, old in zip(teach(kept), teach(weights), strict=True)]
    bound = 2 * lost * logits.abs().amax(dim=(0, 2))
    slack = 1e-12
    assert bool((moved[0].sum(dim=1) <= 2 * lost + slack).all())
    assert bool((moved[1].amax(dim=1) <= bound + slack).all())
    assert bool((moved[2].sum(dim=1) <= bound + slack).all())


def test_something_is_left_out_and_the_rest_is_scaled() -> None:
    weights = torch.tensor([[0.90, 0.3, 0.25], [0.09, 0.4, 0.25], [0.01, 0.3, 0.5]])
    assert torch.equal(without_negligible(weights, below=0.05) == 0, weights < 0.05)
    assert without_negligible(weights, below=0.05)[:, 0].tolist() == pytest.approx([90 / 99, 9 / 99, 0])
    assert without_negligible(weights, below=0.45)[:, 1].tolist() == [0, 1, 0]  # all are small: the largest stays
    assert torch.allclose(without_negligible(weights, below=0.0), weights)


@pytest.mark.parametrize("teacher", ["certainty", "mixture"])
def test_clients_are_asked_where_they_weigh_and_nothing_changes_without_a_limit(teacher: str) -> None:
    server = server_of(network())
    models = [snapshot(network(part=part)) for part in ("a", "bb", "ccc")]
    scores = torch.from_numpy(6 * RNG.normal(size=(3, 23)))
    asked: list[int] = []

    def predict(member: Member, where: Tensor | None = None) -> Tensor:
        asked.append(23 if where is None else int(where.sum()))
        return server.logits(member.weights, where=where)

    def taught(limit: float) -> Tensor:
        members = [Member(client, "network", 1, weights) for client, weights in enumerate(models)]
        asked.clear()
        return TEACHERS[teacher](Ensemble(members, predict, lambda _: scores, negligible_weight=limit))

    exact = taught(0.0)
    assert asked == [23, 23, 23]
    weights = torch.softmax(scores, dim=0).float()
    logits = torch.stack([server.logits(model) for model in models])
    values = torch.softmax(logits, dim=2) if teacher == "mixture" else logits
    total = values[0] * weights[0, :, None] + values[1] * weights[1, :, None] + values[2] * weights[2, :, None]
    assert torch.equal(exact, total if teacher == "mixture" else torch.softmax(total, dim=1))
    close = taught(0.01)
    assert asked == [int(count) for count in (weights >= 0.01).sum(dim=1)]
    assert sum(asked) < 60
    lost = torch.where(weights < 0.01, weights, 0.0).sum(dim=0)
    bound = 2 * lost * (1.0 if teacher == "mixture" else float(logits.abs().max()))
    moved = (close - exact).abs().sum(dim=1)
    assert bool((moved <= bound + 1e-5).all())
    assert float(moved.max()) > 1e-5
