"""The server's side of a prototype: whose statistics batch normalisation uses, and what clients are
asked."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.experiments import tiny
from helpers.federations import simulated
from torch import Tensor, nn
from torch.nn import functional

from fedaux import seeding
from fedaux.config import Distillation
from fedaux.core import server_model as student
from fedaux.core.compute import Compute
from fedaux.core.distillation import distill
from fedaux.core.messages import Member, TrainRequest, Update, Weights
from fedaux.core.plain_backend import PlainBackend
from fedaux.core.server_model import ServerModel
from fedaux.core.soft_labels import Mix, mixture, score_weights
from fedaux.core.weights import average, snapshot
from fedaux.models import SplitModel

RNG = np.random.default_rng(0)
PUBLIC = torch.from_numpy(RNG.integers(0, 256, (23, 1, 6, 6), dtype=np.uint8))
TEST = torch.from_numpy(RNG.integers(0, 256, (9, 1, 6, 6), dtype=np.uint8))
STATISTICS = ("running_mean", "running_var")
OPTIONS = [
    (teachers, server)
    for teachers in ("client", "auxiliary", "batch")
    for server in ("training", "batch")
]


def network(*, normalised: bool = True, part: str = "test") -> SplitModel:
    with seeding.initialisation(0, part=part):
        layers: list[nn.Module] = [
            nn.Conv2d(1, 3, 3, bias=False),
            nn.ReLU(),
            nn.Conv2d(3, 4, 3, bias=False),
        ]
        if normalised:
            layers.insert(1, nn.BatchNorm2d(3))
            layers.append(nn.BatchNorm2d(4))
        model = SplitModel(
            nn.Sequential(*layers, nn.ReLU(), nn.Flatten()), nn.Linear(16, 3), feature_width=16
        )
    generator = torch.Generator().manual_seed(len(part))
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.normal_(0, 0.5, generator=generator)
            layer.running_var.uniform_(0.5, 2.0, generator=generator)
    return model


def server_of(model: SplitModel, **changes: Any) -> ServerModel:
    defaults = {"evaluation": {"batch_size": 7}}
    return ServerModel(
        model,
        experiment=tiny(**(defaults | changes)),
        backend=PlainBackend(Compute()),
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
    """What batch normalisation sees of images: means over batches, each image with the same weight,
    by hand.

    Inside a batch, the layer before normalises by that batch's own (biased) variance; what is
    averaged is unbiased.
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
        name: tensor * 3 + 1 if name.rpartition(".")[2] in STATISTICS else tensor
        for name, tensor in weights.items()
    }
    assert torch.equal(server.logits(weights), server.logits(other))
    assert not torch.allclose(server.logits(weights), evaluated(weights, PUBLIC), atol=0.01)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights.items())


def test_the_statistics_of_batches_are_those_of_training_mode() -> None:
    """As in the authors' released code: twenty-three images in batches of seven, the last one of
    two."""
    server = server_of(network(), batch_normalisation={"teachers": "batch", "server": "batch"})
    weights = snapshot(network(part="client"))
    assert torch.allclose(
        server.logits(weights), evaluated(weights, PUBLIC, training=True), atol=1e-5
    )
    assert torch.allclose(
        server.test_logits(weights), evaluated(weights, TEST, training=True), atol=1e-5
    )
    assert not torch.allclose(server.logits(weights), evaluated(weights, PUBLIC), atol=0.01)


def test_teachers_and_server_are_set_apart() -> None:
    weights = snapshot(network(part="client"))
    for teachers, server in OPTIONS:
        asked = server_of(network(), batch_normalisation={"teachers": teachers, "server": server})
        assert torch.allclose(
            asked.test_logits(weights),
            evaluated(weights, TEST, training=server == "batch"),
            atol=1e-5,
        )
        own = torch.allclose(asked.logits(weights), evaluated(weights, PUBLIC), atol=1e-3)
        assert own == (teachers == "client")


def test_models_without_batch_normalisation_do_not_look_at_it() -> None:
    weights = snapshot(network(normalised=False, part="client"))
    plain = server_of(network(normalised=False))
    for teachers, server in [*OPTIONS, ("auxiliary", "auxiliary")]:
        asked = server_of(
            network(normalised=False), batch_normalisation={"teachers": teachers, "server": server}
        )
        assert torch.equal(asked.logits(weights), plain.logits(weights))
        assert torch.equal(asked.test_logits(weights), plain.test_logits(weights))
        assert asked.with_public_statistics(weights) is weights


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


@pytest.mark.quickly("auxiliary")
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
    round, state, clients = simulated(tmp_path, clients_at_once=1, **changes)
    updates: list[tuple[Weights, int]] = []
    train = clients.train

    def watched(chosen: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for update in train(chosen, request):
            updates.append((copy.deepcopy(update.weights), update.num_examples))
            yield update

    monkeypatch.setattr(clients, "train", watched)
    after, row = round.play_round(state)
    found = after.models["p"]
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
        assert torch.allclose(found[name], tensor, atol=1e-4) or not tensor.is_floating_point(), (
            name
        )
    model.load_state_dict(found)
    images = round.task.test_images
    with torch.no_grad():
        model.train(server == "batch")
        logits = torch.cat([model(batch.float() / 255) for batch in images.split(50)])
    loss = float(functional.cross_entropy(logits, round.task.test_labels))
    assert row["loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("of", ["logits", "probabilities"])
def test_certainty_weighs_the_clients_logits(of: Mix) -> None:
    server = server_of(network())
    models = [snapshot(network(part=part)) for part in ("a", "bb", "ccc")]
    scores = torch.from_numpy(6 * RNG.normal(size=(3, 23)))
    members = [
        Member(client, "network", 1, weights, logits=server.logits(weights))
        for client, weights in enumerate(models)
    ]
    taught = mixture(members, score_weights(members, scores), of=of)
    weights = torch.softmax(scores, dim=0).float()
    logits = torch.stack([server.logits(model) for model in models])
    values = torch.softmax(logits, dim=2) if of == "probabilities" else logits
    total = (
        values[0] * weights[0, :, None]
        + values[1] * weights[1, :, None]
        + values[2] * weights[2, :, None]
    )
    assert torch.equal(taught, total if of == "probabilities" else torch.softmax(total, dim=1))
