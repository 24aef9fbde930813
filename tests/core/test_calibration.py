"""CCVR: virtual features against their definition, and the last round against the algorithm written
out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import written_out as plain
from helpers.experiments import tiny
from helpers.federations import federation, same_weights, written_out

import fedaux
from fedaux.config import Certainty
from fedaux.core.algorithms.ccvr import virtual_features
from fedaux.privacy.classes import ClassEstimate, ClassSums
from fedaux.running.preflight import problems_of

pytestmark = pytest.mark.usefixtures("without_pages")


def test_virtual_features_have_the_released_means_and_the_public_covariance() -> None:
    """Luo et al. 2021, Algorithm 1: class c has a share N_c / N of features from N(mu_c, Sigma)."""
    rng = np.random.default_rng(0)
    negatives = torch.from_numpy(rng.normal(size=(400, 5)) @ rng.normal(size=(5, 5)) + 2).float()
    public = ClassSums(Certainty(components=3)).publish(negatives, num_classes=3)
    centre, shifts = torch.from_numpy(rng.normal(size=3)), torch.from_numpy(rng.normal(size=(3, 3)))
    prior = torch.tensor([0.5, 0.3, 0.2]).double()
    scale = public["bound"].double().square()
    estimate = ClassEstimate(centre, shifts, scale, torch.ones(1, 3), prior, 1.0)
    features, labels = virtual_features(estimate, public, negatives, generator=rng)
    assert torch.bincount(labels).tolist() == [1500, 900, 600]
    covariance = np.cov(negatives.double().numpy().T, bias=True)
    for label in range(3):
        own = features[labels == label].double()
        whitened = (own.mean(dim=0) - public["centre"]) @ public["whitening"].double()
        released = (centre + shifts[label]) * public["bound"]
        assert torch.allclose(whitened, released, atol=4 / len(own) ** 0.5)
        found = np.cov(own.numpy().T, bias=True)
        assert np.abs(found - covariance).max() < 0.2 * np.abs(covariance).max()


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("mode", ["full", "linear"])
def test_the_last_round_is_the_algorithm_written_out(mode: str, tmp_path: Path) -> None:
    server, state, clients, experiment = federation(
        tmp_path, method="ccvr+p", mode=mode, rounds=2, participation_rate=0.5
    )
    assert not clients.released
    middle, first = server.play_round(state)
    assert not middle.releases
    assert middle.final is middle.models
    after, last = server.play_round(middle)
    assert clients.released == [0, 1, 2, 3], "all clients release, once"
    assert {one.entry.epsilon for one in after.releases.values()} == {experiment.certainty.epsilon}
    assert last["bytes_up"] > first["bytes_up"]
    task, preparation, before = written_out(server, middle)
    expected = plain.play_round(task, preparation, before)[0].smoothed["cnn"]
    for name, tensor in after.final["cnn"].items():
        assert torch.allclose(tensor, expected[name], atol=5e-5), name
        changed = not torch.equal(tensor, after.models["cnn"][name])
        assert changed == name.startswith("head.")
    start = after.models["cnn"]["head.weight"]
    assert float((after.final["cnn"]["head.weight"] - start).abs().max()) > 0.05
    assert last["accuracy"] != first["accuracy"]


@pytest.mark.slow
def test_a_calibrated_run_is_paid_once(tmp_path: Path) -> None:
    done = fedaux.run(tiny(method=["ccvr+p", "fedavg+p"], rounds=2), out=tmp_path / "run")
    ledger = fedaux.files.read_json(tmp_path / "run" / "ledger.json")["entries"]
    assert [(one["method"], one["client"]) for one in ledger] == [("ccvr+p", n) for n in range(4)]
    assert len(done.summary["rows"]) == 2
    again = fedaux.run(tiny(method=["ccvr+p", "fedavg+p"], rounds=2), out=tmp_path / "b")
    assert again.summary["rows"][0]["accuracy_mean"] == done.summary["rows"][0]["accuracy_mean"]
    with pytest.raises(ValueError, match=r"method ccvr\+p: clients have released class sums"):
        fedaux.run(tiny(method=["ccvr+p", "fedavg+p"], rounds=3), out=tmp_path / "b", resume=True)


def test_calibration_changes_only_what_is_evaluated(tmp_path: Path) -> None:
    results = []
    for method in ("ccvr+p", "fedavg+p"):
        server, state, _, _ = federation(tmp_path / method, method=method, rounds=1)
        results.append(server.play_round(state)[0])
    assert same_weights(*results)


def test_federations_are_refused() -> None:
    found = problems_of(tiny(method=["ccvr"]), federated=True)
    assert any("'ccvr': its release after the last round is not supported" in one for one in found)
