"""Standardised features: their scale, a head that takes the map in, and runs of older versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.experiments import tiny
from safetensors.torch import load_file
from torch import nn

import fedaux
from fedaux.data.tensor_files import save_checked, weights_digest
from fedaux.models import MODELS, SplitModel
from fedaux.models.standardised import (
    MAP,
    MOST_FEATURES,
    SQUARED_NORM,
    Standardised,
    has_map,
    public_map,
    standardise,
    standardised,
    whole,
    with_map,
    without_map,
)

torch.manual_seed(0)
PUBLIC = torch.randn(40, 6) @ torch.diag(torch.tensor([9.0, 4.0, 1.0, 0.3, 0.1, 0.0])) + 5.0


def test_public_features_have_one_scale_whatever_the_networks() -> None:
    mapped = standardise(PUBLIC, public_map(PUBLIC))
    assert mapped.mean(dim=0).abs().max() < 1e-4
    assert float(mapped.square().sum(dim=1).mean()) == pytest.approx(SQUARED_NORM, rel=1e-5)
    for other in (32.0 * PUBLIC, PUBLIC / 32.0, PUBLIC - 100.0):
        assert torch.allclose(standardise(other, public_map(other)), mapped, atol=2e-2)
    turned = torch.linalg.qr(torch.randn(6, 6)).Q
    again = standardise(PUBLIC @ turned, public_map(PUBLIC @ turned))
    assert torch.allclose(again, mapped @ turned, atol=1e-3)


def test_directions_keep_their_order_and_come_nearer() -> None:
    """So a whitening by principal components takes the same ones as without the map."""
    before, directions = torch.linalg.eigh(torch.cov(PUBLIC.double().T))
    mapped = standardise(PUBLIC, public_map(PUBLIC)).double()
    covariance = directions.T @ torch.cov(mapped.T) @ directions
    after = covariance.diagonal()
    assert torch.allclose(covariance, after.diag(), atol=1e-4)
    assert bool((after.diff() > 0).all())
    assert after[-1] / after[1] < 0.5 * before[-1] / before[1]


@pytest.mark.parametrize("public", [PUBLIC[:1], PUBLIC[:1].expand(9, 6), PUBLIC[:0]])
def test_features_that_do_not_vary_stay_as_they_are(public: torch.Tensor) -> None:
    assert torch.equal(standardise(PUBLIC, public_map(public)), PUBLIC)


def test_a_head_takes_the_map_in() -> None:
    model = standardised(MODELS["mlp"]((1, 4, 4), 3, width=6))
    assert isinstance(model.features, Standardised)
    model.features.load_state_dict(public_map(PUBLIC), strict=False)
    images = torch.rand(7, 1, 4, 4)
    plain = MODELS["mlp"]((1, 4, 4), 3, width=6)
    head = {f"head.{key}": own for key, own in reversed(model.head.state_dict().items())}
    plain.load_state_dict(whole(model.features.state_dict(), head))
    assert torch.allclose(plain(images), model(images), atol=1e-5)


def test_only_heads_that_can_take_the_map_in_learn_on_it() -> None:
    for head in (nn.Linear(6, 3, bias=False), nn.Sequential(nn.Linear(6, 3))):
        model = SplitModel(nn.Identity(), head, feature_width=6)
        assert standardised(model) is model
    wide = MODELS["linear"]((MOST_FEATURES + 1,), 2)
    assert standardised(wide) is wide


@pytest.mark.usefixtures("without_pages")
def test_a_run_of_an_older_version_continues_on_plain_features(tmp_path: Path) -> None:
    """Its frozen h0 has no map."""
    changes = {"mode": "linear", "method": ["fedavg+p"]}
    run = fedaux.run(tiny(**changes, rounds=1), out=tmp_path / "run").directory
    (file,) = (run / "frozen").iterdir()
    weights = load_file(file)
    assert has_map(weights)
    assert with_map(without_map(weights), {MAP: weights[MAP]}).keys() < weights.keys()
    older = without_map(weights)
    digest = weights_digest(older)
    file.unlink()
    save_checked(run / f"frozen/{digest}.safetensors", older)
    state = run / "cells/fedavg+p-seed0/state.json"
    header = json.loads(state.read_text())
    state.write_text(json.dumps(header | {"frozen": {"cnn": digest}}))
    result = fedaux.run(tiny(**changes, rounds=2), out=run, resume=True)
    assert [row["round"] for row in result.metrics()] == [1, 2]
    (kept,) = (run / "frozen").iterdir()
    assert not has_map(load_file(kept))
    model = load_file(run / "models/fedavg_p-seed0.safetensors")
    assert {f"features.{name}" for name in older} < model.keys()
