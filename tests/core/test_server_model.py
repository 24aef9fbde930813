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
    )


def evaluated(weights: Weights, images: Tensor, *, training: bool = False) -> Tensor:
    """The logits of the network."""
    model = network().train(training)
    model.load_state_dict(weights)
    with torch.no_grad():
        return torch.cat([model(batch.float() / 255) for batch in images.split(7)])


def test_teachers_use_their_own_statistics() -> None:
    server, weights = server_of(network()), snapshot(network(part="client"))
    assert torch.allclose(server.logits(weights), evaluated(weights, PUBLIC), atol=1e-5)
    shifted = weights | {"features.1.running_mean": weights["features.1.running_mean"] + 1}
    assert not torch.allclose(server.logits(shifted), server.logits(weights), atol=0.01)


def test_asking_a_client_changes_nothing_for_the_next() -> None:
    server = server_of(network())
    first, second = snapshot(network(part="client")), snapshot(network(part="another"))
    before = server.logits(first)
    assert not torch.allclose(server.logits(second), before, atol=0.01)
    assert torch.equal(server.logits(first), before)


def test_distillation_at_the_server_is_distillation() -> None:
    section: dict[str, Any] = {"batch_size": 8, "learning_rate": 0.01, "epochs": 2}
    server, weights = server_of(network(), distillation=section), snapshot(network(part="client"))
    targets = torch.softmax(torch.from_numpy(RNG.normal(size=(23, 3))).float(), dim=1)
    found = server.distill(weights, targets, seeding.generator(0, "distillation"))
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


@pytest.mark.slow
def test_a_round_ends_with_the_mean_of_the_clients_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "method": "fedavg",
        "prototypes": [{"name": "p", "model": "mobilenetv2", "options": {"width": 0.1}}],
        "split": {"num_clients": 80, "alpha": 100.0},
        "auxiliary": {"size": 60},
        "participation_rate": 0.025,
        "evaluation": {"batch_size": 50},
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
    assert len(updates) == 2
    for name, tensor in mean.items():
        assert torch.allclose(found[name], tensor, atol=1e-4) or not tensor.is_floating_point(), (
            name
        )
    model.load_state_dict(found)
    images = round.task.test_images
    with torch.no_grad():
        model.eval()
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
