"""Each local objective against its paper's formula as loops, and batches that rehearse."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import written_out as plain
from helpers import oracles
from helpers.federations import Wrapped, federation, written_out
from torch import nn
from written_out import parts as plain_parts

from fedaux import seeding
from fedaux.config import Local
from fedaux.core.algorithms import asks_of
from fedaux.core.backend import ClientJob, TrainContext
from fedaux.core.compute import Compute
from fedaux.core.local_training import client_batches, train_locally
from fedaux.core.messages import TrainRequest, Update
from fedaux.core.objectives import (
    LocalLoss,
    class_adjustment,
    joined_targets,
    local_loss,
    log_joint_prior,
    strength_of,
    weighted_divergence,
)

RNG = np.random.default_rng(0)
LOGITS = 3 * RNG.normal(size=(5, 4))
LABELS = [0, 2, 2, 0, 1]
BELIEFS = [oracles.softmax_loop(row) for row in (2 * RNG.normal(size=(5, 4))).tolist()]
COUNTS = [7, 1, 0, 2]
VACANT = [7, 0, 3, 0]


def cross_entropy_loop(logits: list[list[float]]) -> float:
    losses = [
        -math.log(oracles.softmax_loop(row)[y]) for row, y in zip(logits, LABELS, strict=True)
    ]
    return sum(losses) / len(losses)


def loss_of(name: str, counts: list[int] = COUNTS, /, **strengths: float) -> float:
    """The loss of an objective, or of several joined by +."""
    names, local = name.split("+"), Local(strengths=strengths)
    loss = local_loss(names, local)
    held = torch.tensor([label for label, count in enumerate(counts) for _ in range(count)])
    adjustment = class_adjustment(names, local, held, num_classes=4).double()
    targets = joined_targets(torch.tensor(LABELS), torch.zeros(0, 4, dtype=torch.float64))
    targets[:, 1:] = torch.tensor(BELIEFS)
    return float(loss(torch.from_numpy(LOGITS), targets, adjustment))


@pytest.mark.parametrize("strength", [1.0, 0.3])
def test_logit_adjustment_adds_the_logarithm_of_the_prior(strength: float) -> None:
    """Menon et al. 2021, Eq. 10, with the client's own prior, at least 1e-3."""
    offsets = [strength * math.log(max(count / 10, 1e-3)) for count in COUNTS]
    adjusted = [[z + b for z, b in zip(row, offsets, strict=True)] for row in LOGITS.tolist()]
    found = loss_of("logit-adjusted", **{"logit-adjusted": strength})
    assert found == pytest.approx(cross_entropy_loop(adjusted), rel=1e-6)


def test_joint_adjustment_adds_the_logarithm_of_the_prior_of_all_that_is_trained_on() -> None:
    """Half of the weight of the loss is on public examples, which are of all classes."""
    offsets = [math.log(0.5 * count / 10 + 0.5 / 4) for count in COUNTS]
    adjusted = [[z + b for z, b in zip(row, offsets, strict=True)] for row in LOGITS.tolist()]
    assert loss_of("jointly-adjusted") == pytest.approx(cross_entropy_loop(adjusted), rel=1e-6)


def test_fedlc_calibrates_by_the_fourth_root_of_the_counts() -> None:
    """Zhang et al. 2022, Eq. 8: -log(exp(f_y - tau n_y^-1/4) / sum_c exp(f_c - tau n_c^-1/4))."""
    total = 0.0
    for row, y in zip(LOGITS.tolist(), LABELS, strict=True):
        odds = [math.exp(z - 0.5 * max(n, 1) ** -0.25) for z, n in zip(row, COUNTS, strict=True)]
        total -= math.log(odds[y] / sum(odds))
    assert loss_of("fedlc", fedlc=0.5) == pytest.approx(total / 5, rel=1e-6)


def test_fedrs_scales_the_logits_of_missing_classes() -> None:
    """Li & Zhan 2021, Eq. 4: alpha_c f_c, with alpha_c = 1 for classes that a client holds."""
    scaled = [
        [z if count else 0.5 * z for z, count in zip(row, COUNTS, strict=True)]
        for row in LOGITS.tolist()
    ]
    assert loss_of("fedrs") == pytest.approx(cross_entropy_loop(scaled), rel=1e-6)


def test_fedntd_distills_all_classes_but_the_true_one() -> None:
    """Lee et al. 2022, Eq. 6: L_CE + beta D_KL(server || client), both softmax over c != y."""
    total = 0.0
    for row, belief, y in zip(LOGITS.tolist(), BELIEFS, LABELS, strict=True):
        others = [c for c in range(4) if c != y]
        own = oracles.softmax_loop([row[c] for c in others])
        theirs = [belief[c] / sum(belief[d] for d in others) for c in others]
        total += sum(p * math.log(p / q) for p, q in zip(theirs, own, strict=True))
    expected = cross_entropy_loop(LOGITS.tolist()) + 0.7 * total / 5
    assert loss_of("not-true", **{"not-true": 0.7}) == pytest.approx(expected, rel=1e-6)


def test_fedvls_distills_vacant_classes_and_suppresses_other_logits() -> None:
    """Guo et al. 2025: L_CE(f + log P, y) + 0.1 D_KL over vacant classes + 0.005 L_LS, as in the
    authors' code, where a class's mean over the batch counts its own rows as exp(0)."""
    prior, vacant = [count / 10 for count in VACANT], [1, 3]
    offsets = [math.log(p + 1e-9) for p in prior]
    adjusted = [[z + b for z, b in zip(row, offsets, strict=True)] for row in LOGITS.tolist()]
    distilled = 0.0
    for row, belief in zip(LOGITS.tolist(), BELIEFS, strict=True):
        own = oracles.softmax_loop([row[c] for c in vacant])
        theirs = [belief[c] / sum(belief[d] for d in vacant) for c in vacant]
        distilled += sum(p * math.log(p / q) for p, q in zip(theirs, own, strict=True)) / 5
    suppressed = 0.0
    for c in (0, 2):
        odds = [
            1.0 if y == c else math.exp(row[c] - offsets[c] + math.log(1 / 4))
            for row, y in zip(LOGITS.tolist(), LABELS, strict=True)
        ]
        suppressed += prior[c] * math.log(sum(odds) / 5)
    expected = cross_entropy_loop(adjusted) + 0.1 * distilled + 0.005 * suppressed
    found = loss_of("+".join(asks_of("fedvls").objectives), VACANT)
    assert found == pytest.approx(expected, rel=1e-6)
    assert loss_of("vacant-class", [1] * 4) == pytest.approx(cross_entropy_loop(LOGITS.tolist()))


def test_rehearsal_adds_the_divergence_from_soft_labels() -> None:
    """The strength is a factor of the soft labels, and neither it nor their entropy is counted."""
    logits = torch.from_numpy(LOGITS)
    targets = joined_targets(torch.tensor(LABELS[:2]), 0.4 * torch.tensor(BELIEFS[2:]).double())
    assert targets[:, 0].tolist() == [0, 2, -1, -1, -1]
    adjustment = torch.tensor([[1.0] * 4, [0.0] * 4, [1.0] * 4]).double()
    found = float(LocalLoss(rehearsed=3)(logits, targets, adjustment))
    own = torch.nn.functional.cross_entropy(logits[:2], torch.tensor(LABELS[:2]))
    divergence = oracles.kl_divergence_loop(BELIEFS[2:], LOGITS[2:].tolist())
    assert found == pytest.approx(float(own) + 0.4 * divergence, rel=1e-6)
    rows = weighted_divergence(logits, torch.zeros(5, 4).double())
    assert rows.tolist() == [0.0] * 5, "strength 0 adds nothing, and no NaN"


def test_every_batch_ends_with_public_rows() -> None:
    rows = torch.tensor([3, 5, 6, 8, 9])
    context = TrainContext(
        nn.Identity(),
        torch.zeros(14, 1),
        torch.zeros(10),
        Local(batch_size=2, epochs=2),
        proximal=0.0,
        compute=Compute(),
        key="test",
        loss=LocalLoss(rehearsed=3),
    )
    job = ClientJob(0, rows, seeding.generator(0, "local"), state={})
    taken = list(client_batches(context, job))
    assert [len(batch) for batch in taken] == [5, 5, 4] * 2
    for epoch in (taken[:3], taken[3:]):
        own = torch.cat([batch[:-3] for batch in epoch])
        assert sorted(own.tolist()) == rows.tolist()
    drawn = torch.cat([batch[-3:] for batch in taken])
    assert int(drawn.min()) >= 10
    assert int(drawn.max()) < 14
    assert not torch.equal(taken[0], taken[3])


REHEARSING: dict[str, Any] = {
    "local": {
        "objectives": ["logit-adjusted", "rehearsal", "proximal"],
        "strengths": {"rehearsal": 0.5},
        "batch_size": 8,
    },
    "rehearsal": {"batch_size": 12, "examples": 20},
}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.quickly("linear")
@pytest.mark.parametrize("mode", ["full", "linear"])
def test_a_rehearsing_round_is_the_algorithm_written_out(mode: str, tmp_path: Path) -> None:
    """Stacked clients, whose batches are padded, end where `plain` does."""
    server, state, _, _ = federation(tmp_path, method="feddf+p", mode=mode, **REHEARSING)
    after, row = server.play_round(state)
    expected, expected_row = plain.play_round(*written_out(server, state))
    assert expected_row["clients"] == row["clients_answered"]
    gap = max(
        float((tensor - expected.weights["cnn"][name]).abs().max())
        for name, tensor in after.models["cnn"].items()
    )
    assert gap < 5e-5
    assert row["seconds"]["beliefs"] > 0


@pytest.mark.parametrize("name", ["rehearsal", "not-true"])
def test_batch_normalisation_sees_private_and_public_rows(name: str) -> None:
    with seeding.initialisation(0, part="test"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    generator = np.random.default_rng(0)
    inputs = torch.from_numpy(generator.normal(size=(13, 3))).float()
    labels = torch.from_numpy(generator.integers(0, 4, 9))
    beliefs = torch.from_numpy(generator.dirichlet([1.0] * 4, 4)).float()
    section = Local(batch_size=4, epochs=2, optimizer="sgd", learning_rate=0.1)
    loss = local_loss([name], section, rehearsed=5)
    start = plain_parts.snapshot(model)
    adjustment = class_adjustment([name], section, labels, num_classes=4)
    public = beliefs if name == "rehearsal" else None
    inputs = inputs if name == "rehearsal" else inputs[:9]
    expected = plain_parts.train_client(
        model,
        start,
        inputs,
        labels,
        section=section,
        proximal=0.0,
        generator=seeding.generator(0, "local"),
        loss=loss,
        adjustment=adjustment,
        beliefs=public,
    )
    model.load_state_dict(start)
    context = TrainContext(model, inputs, labels, section, 0.0, Compute(), key="test", loss=loss)
    order = seeding.generator(0, "local")
    train_locally(context, ClientJob(0, torch.arange(9), order, {}, adjustment, public))
    for key, tensor in model.state_dict().items():
        assert torch.allclose(tensor, expected[key], atol=1e-5), key
    # Without public rows, the last batch of an epoch has one row, and no variance.
    counted = 6 if name == "rehearsal" else 4
    assert int(model[1].num_batches_tracked) == counted  # type: ignore[arg-type]
    assert not torch.allclose(model[1].running_mean, start["1.running_mean"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "batch_size", "expected"), [("full", 400, 1.0), ("full", 2, 1 / 9), ("linear", 2, 1.0)]
)
def test_many_local_steps_leave_missing_classes_of_networks_alone(
    mode: str, batch_size: int, expected: float, tmp_path: Path
) -> None:
    asked: list[TrainRequest] = []

    class Watched(Wrapped):
        def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
            asked.append(request)
            yield from super().train(clients, request)

    for local in ({}, {"strengths": {"jointly-adjusted": 0.5}}):
        server, state, _, _ = federation(
            tmp_path / str(len(asked)),
            kind=Watched,
            method="fedaux2",
            mode=mode,
            local={"batch_size": batch_size, **local},
            data={"size": 200},
        )
        server.play_round(state)
    found = [strength_of("jointly-adjusted", request.local) for request in asked]
    assert found == pytest.approx([expected, 0.5])


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_joint_class_shares_are_of_private_and_rehearsed_examples(weight: float) -> None:
    """A loop over the examples of both, of which rehearsed ones hold all classes alike."""
    counts = [6, 2, 0, 0]
    expected = [math.log(max(1e-3, (own / 8 + weight / 4) / (1 + weight))) for own in counts]
    _, offset = log_joint_prior(torch.tensor(counts).float(), weight)
    assert offset.tolist() == pytest.approx(expected, abs=1e-6)
