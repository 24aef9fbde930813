"""Features under h0 that are computed once, and heads that cost what a linear model costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.experiments import tiny
from torch import Tensor, nn

import fedaux
from fedaux import seeding
from fedaux.core.compute import Compute
from fedaux.core.messages import Weights
from fedaux.core.server_model import ServerModel
from fedaux.fast import FastBackend
from fedaux.fast import feature_cache as frozen
from fedaux.fast.feature_cache import COMPARED_EXAMPLES, PROCESSOR_BATCH, FeatureCache
from fedaux.fast.inference import FastPredictor
from fedaux.models import MODELS, SplitModel

pytestmark = pytest.mark.usefixtures("without_pages")

IMAGES = torch.randint(0, 256, (3 * PROCESSOR_BATCH + 5, 1, 6, 6), dtype=torch.uint8)


class Counting(nn.Module):
    """A network that counts the images it has seen, in all of its copies."""

    def __init__(self, seen: list[int], *, offset: float = 0.0) -> None:
        super().__init__()
        with seeding.initialisation(0, part="counting"):
            self.layers = nn.Sequential(
                nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()
            )
        self._seen = seen
        self._offset = offset

    def __deepcopy__(self, memo: dict[int, object]) -> Counting:
        twin = Counting(self._seen, offset=self._offset)
        twin.load_state_dict(self.state_dict())
        return twin.train(self.training)

    def forward(self, images: Tensor) -> Tensor:
        self._seen.append(len(images))
        features: Tensor = self.layers(images) + self._offset
        return features


def kept(folder: Path | None, **how: object) -> FeatureCache:
    return FeatureCache(Compute(**how), batch_size=7, folder=folder)  # type: ignore[arg-type]


def plain(module: nn.Module, weights: Weights, images: Tensor) -> Tensor:
    return FastPredictor(module, Compute())(weights, images)


@pytest.mark.parametrize("workers", [1, 2])
def test_long_work_reports_its_progress(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "IMAGES_A_REPORT", PROCESSOR_BATCH)
    module, reports = Counting([]), list[tuple[int, str]]()
    features = FeatureCache(
        Compute(workers=workers),
        batch_size=7,
        folder=None,
        report=lambda done, total: reports.append((done, total)),
    )
    expected = plain(module, module.state_dict(), IMAGES)
    assert torch.allclose(features(module, module.state_dict(), IMAGES), expected, atol=1e-6)
    at_once = workers * PROCESSOR_BATCH
    total = f"{len(IMAGES)} labelled examples"
    assert reports == [(done, total) for done in range(at_once, len(IMAGES), at_once)]
    assert features(module, module.state_dict(), IMAGES[:0]).shape == (0, *expected.shape[1:])


def test_features_are_the_networks_and_are_computed_once_for_all_parts() -> None:
    seen: list[int] = []
    module = Counting(seen)
    weights = module.state_dict()
    expected = plain(module, weights, IMAGES)
    seen.clear()
    features = kept(None, workers=2)
    rows = torch.tensor([5, 2, 90, 2])
    part = IMAGES[rows]
    features.tell(part, whole=IMAGES, rows=rows)
    assert torch.allclose(features(module, weights, part), expected[rows], atol=1e-6)
    assert torch.allclose(
        features(module, weights, part, rows=torch.tensor([3, 0])), expected[[2, 5]]
    )
    assert torch.allclose(features(module, weights, IMAGES), expected, atol=1e-6)
    assert torch.allclose(features(module, weights, IMAGES, rows=rows), expected[rows], atol=1e-6)
    assert sum(seen) == len(IMAGES)
    other = {name: tensor + 0.1 if "weight" in name else tensor for name, tensor in weights.items()}
    assert torch.allclose(features(module, other, IMAGES), plain(module, other, IMAGES))


def test_the_same_weights_pooled_in_two_ways_are_two_entries() -> None:
    mean, first = (
        MODELS["bert"]((8, 20), 3, layers=1, width=8, heads=2, intermediate=8, pooling=pooling)
        for pooling in ("mean", "cls")
    )
    weights, texts = mean.features.state_dict(), torch.randint(4, 20, (6, 8))
    features = kept(None)
    found = [features(module.features, weights, texts) for module in (mean, first, mean)]
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1], atol=1e-3)
    assert torch.allclose(found[1], plain(first.features, weights, texts), atol=1e-5)


@pytest.mark.usefixtures("bf16")
def test_features_that_took_long_are_kept_on_disk_for_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    module = Counting(seen)
    weights = module.state_dict()
    expected = kept(tmp_path)(module, weights, IMAGES)
    assert not list(tmp_path.iterdir())  # a moment's work is not worth a file
    monkeypatch.setattr(frozen, "WORTH_KEEPING", 0.0)
    kept(tmp_path)(module, weights, IMAGES)
    (file,) = tmp_path.iterdir()
    seen.clear()
    assert torch.equal(kept(tmp_path)(module, weights, IMAGES), expected)
    assert sum(seen) == COMPARED_EXAMPLES
    kept(tmp_path, precision=torch.bfloat16)(module, weights, IMAGES)
    assert len(list(tmp_path.iterdir())) == 2
    # The same weights in a network whose code has changed, and a damaged file: computed anew, and
    # put right.
    changed = Counting(seen, offset=1.0)
    assert torch.allclose(kept(tmp_path)(changed, weights, IMAGES), expected + 1.0)
    assert torch.allclose(kept(tmp_path)(changed, weights, IMAGES), expected + 1.0)
    file.write_bytes(b"damaged")
    assert torch.equal(kept(tmp_path)(module, weights, IMAGES), expected)


def test_runs_on_kept_features_come_out_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "WORTH_KEEPING", 0.0)
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))
    experiment = tiny(mode="linear", rounds=2, method=["fedaux", "feddf+p"], seeds=[0, 1])
    whole: list[int] = []
    computed = FeatureCache._computed

    def counted(
        self: FeatureCache, module: nn.Module, weights: Weights, examples: Tensor
    ) -> Tensor:
        if len(examples) > COMPARED_EXAMPLES:
            whole.append(len(examples))
        return computed(self, module, weights, examples)

    monkeypatch.setattr(FeatureCache, "_computed", counted)
    fedaux.run(experiment, out=tmp_path / "first")
    # Private, test and public images; h0 is another for every seed.
    assert len(whole) == 3 * len(experiment.seeds)
    fedaux.run(experiment, out=tmp_path / "again")
    assert len(whole) == 3 * len(experiment.seeds)
    first, again = (
        [
            {key: value for key, value in json.loads(line).items() if key != "seconds"}
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("first", "again")
    )
    assert first == again
    assert len(first) == 8


@pytest.mark.parametrize("bias", [True, False])
def test_the_logits_of_many_heads_are_one_product(bias: bool) -> None:
    heads = [
        SplitModel(nn.Identity(), nn.Linear(6, 3, bias=bias), feature_width=6) for _ in range(4)
    ]
    inputs = torch.randn(11, 6)
    student = ServerModel(
        heads[0],
        experiment=tiny(mode="linear"),
        backend=FastBackend(Compute()),
        architecture="head",
        distill_inputs=inputs,
        test_inputs=inputs,
    )
    for logits, head in zip(
        student.all_logits([head.state_dict() for head in heads]), heads, strict=True
    ):
        assert torch.allclose(logits, head(inputs), atol=1e-6)
        assert logits.is_contiguous()


def test_one_thread_is_for_what_is_inside() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with Compute().one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
