"""Images that are mirrored at random: training on both versions is training on flipped batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.experiments import tiny
from helpers.federations import simulated
from torch import Tensor, nn
from torch.nn import functional

import fedaux
from fedaux import seeding
from fedaux.config import Distillation, Local
from fedaux.core.backend import ClientJob, TrainContext
from fedaux.core.compute import Compute
from fedaux.core.distillation import distill
from fedaux.core.local_training import train_locally
from fedaux.core.objectives import class_adjustment, local_loss
from fedaux.core.weights import snapshot

N, M, CLASSES = 7, 5, 3


def images(count: int, seed: int) -> Tensor:
    drawn = np.random.default_rng(seed).integers(0, 256, (count, 1, 4, 4), dtype=np.uint8)
    return torch.from_numpy(drawn)


def network() -> nn.Module:
    with seeding.initialisation(0, part="test"):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))


def flipped(batch: Tensor, flips: Tensor) -> Tensor:
    return torch.where(flips[:, None, None, None] == 1, batch.flip(-1), batch).float() / 255


def step(model: nn.Module, loss: Tensor, *, rate: float) -> None:
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        parameter.data -= rate * gradient


def test_training_on_both_versions_flips_half_of_each_batch() -> None:
    own, public = images(N, 0), images(M, 1)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    beliefs = torch.softmax(torch.randn(M, CLASSES, generator=torch.Generator().manual_seed(0)), 1)
    section = Local(batch_size=3, epochs=2, optimizer="sgd", learning_rate=0.5)
    model = network()
    context = TrainContext(
        model,
        torch.cat([own, own.flip(-1), public, public.flip(-1)]),
        labels.repeat(2),
        section,
        proximal=0.0,
        compute=Compute(),
        key="test",
        loss=local_loss(["rehearsal"], section, rehearsed=4),
        mirrored=True,
    )
    adjustment = class_adjustment(["rehearsal"], section, labels, num_classes=CLASSES)
    generator, both = np.random.default_rng(3), beliefs.repeat(2, 1)
    train_locally(context, ClientJob(0, torch.arange(N), generator, {}, adjustment, both))
    expected, generator, seen = network(), np.random.default_rng(3), []
    for _ in range(2):
        order = torch.from_numpy(generator.permutation(N))
        flips = torch.from_numpy(generator.integers(2, size=N))
        drawn = torch.from_numpy(generator.integers(2 * M, size=(3, 4)))
        for rows, turned, others in zip(order.split(3), flips.split(3), drawn, strict=True):
            seen += turned.tolist()
            mine = functional.cross_entropy(expected(flipped(own[rows], turned)), labels[rows])
            logits = expected(flipped(public[others % M], (others >= M).long()))
            theirs = functional.kl_div(
                logits.log_softmax(1), beliefs[others % M], reduction="batchmean"
            )
            step(expected, mine + theirs, rate=0.5)
    assert {0, 1} == set(seen)
    for found, right in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, right)


def test_distilling_on_both_versions_flips_half_of_each_batch() -> None:
    public = images(N, 0)
    targets = torch.softmax(torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(0)), 1)
    section = Distillation(batch_size=3, epochs=2, optimizer="sgd", learning_rate=0.5)
    start, both = snapshot(network()), torch.cat([public, public.flip(-1)])
    found = distill(
        network(), start, both, targets, section=section, generator=np.random.default_rng(3)
    )
    expected, generator = network(), np.random.default_rng(3)
    for _ in range(2):
        order = torch.from_numpy(generator.permutation(N))
        flips = torch.from_numpy(generator.integers(2, size=N))
        for rows, turned in zip(order.split(3), flips.split(3), strict=True):
            logits = expected(flipped(public[rows], turned))
            loss = functional.kl_div(logits.log_softmax(1), targets[rows], reduction="batchmean")
            step(expected, loss, rate=0.5)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.quickly("fedaux2-linear")
@pytest.mark.parametrize(
    ("method", "mode"), [("fedaux2", "full"), ("fedaux2", "linear"), ("fedntd", "full")]
)
def test_clients_side_by_side_see_the_same_mirrored_images(
    method: str, mode: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"method": method, "mode": mode, "data": {"mirror": True}}
    states = []
    for clients_at_once in (8, 1):
        server, state, _ = simulated(tmp_path, clients_at_once=clients_at_once, **settings)
        states.append(server.play_round(state)[0])
    settings["data"] = {"mirror": False}
    server, state, _ = simulated(tmp_path / "straight", clients_at_once=8, **settings)
    states.append(server.play_round(state)[0])
    fast, plain, straight = ([*state.models["cnn"].values()] for state in states)
    gaps = [float((one - other).abs().max()) for one, other in zip(fast, plain, strict=True)]
    assert max(gaps) < 1e-4
    gaps = [float((one - other).abs().max()) for one, other in zip(fast, straight, strict=True)]
    assert max(gaps) > 1e-4


def test_what_cannot_be_mirrored_is_named(tmp_path: Path) -> None:
    private = tiny(method="fedavg+p", data={"mirror": True}, local={"privacy": {}})
    with pytest.raises(fedaux.ConfigError, match=r"data\.mirror.*local\.privacy"):
        fedaux.run(private, out=tmp_path / "run")
