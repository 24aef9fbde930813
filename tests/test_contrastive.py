from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import nt_xent_loop
from torch import Tensor, nn

from fedaux.config import Augmentation
from fedaux.pretrain.contrastive import ProjectionHead, nt_xent, pretrain_contrastive

GENTLE = Augmentation(crop_scale=(0.6, 1.0), flip=0.0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blobs(size: int = 64) -> Tensor:
    """Bright squares at random places: easy to tell apart."""
    images = torch.zeros(size, 1, 8, 8, dtype=torch.uint8)
    for index, place in enumerate(torch.randint(0, 6, (size, 2), generator=seeded(7)).tolist()):
        images[index, 0, place[0] : place[0] + 3, place[1] : place[1] + 3] = 255
    return images


def extractor() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 16))


def pretrain(features: nn.Module, images: Tensor, **changes: Any) -> list[float]:
    settings: dict[str, Any] = {
        "feature_width": 16,
        "epochs": 2,
        "batch_size": 32,
        "learning_rate": 1e-3,
        "temperature": 0.5,
        "projection_widths": (32, 16),
        "augmentation": GENTLE,
        "generator": seeded(),
    }
    return pretrain_contrastive(features, images, **{**settings, **changes})


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_nt_xent_equals_the_loop(pairs: int, temperature: float) -> None:
    projections = torch.randn(2 * pairs, 4, generator=seeded(), dtype=torch.float64)
    expected = nt_xent_loop(projections.tolist(), temperature=temperature)
    assert float(nt_xent(projections, temperature=temperature)) == pytest.approx(expected, abs=1e-12)


def test_nt_xent_gradient_equals_finite_differences() -> None:
    projections = torch.randn(6, 4, generator=seeded(), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda rows: nt_xent(rows, temperature=0.5), (projections,))


def test_nt_xent_ignores_length_and_prefers_true_pairs() -> None:
    views = torch.randn(5, 8, generator=seeded())
    lengths = torch.rand(10, 1, generator=seeded(1)) + 0.5
    paired = torch.cat([views, views])
    torch.testing.assert_close(
        nt_xent(paired * lengths, temperature=0.5), nt_xent(paired, temperature=0.5), atol=1e-5, rtol=0
    )
    wrong = torch.cat([views, views.roll(1, 0)])
    assert nt_xent(paired, temperature=0.5) < nt_xent(wrong, temperature=0.5)


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (4,)])
def test_nt_xent_refuses_what_is_not_two_views(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="two views"):
        nt_xent(torch.ones(shape), temperature=0.5)


def test_nt_xent_refuses_temperature_zero() -> None:
    with pytest.raises(ValueError, match="temperature"):
        nt_xent(torch.ones(2, 4), temperature=0.0)


def test_projection_head_has_its_widths_and_its_generator() -> None:
    before = torch.get_rng_state()
    head = ProjectionHead(16, generator=seeded(1))
    assert torch.equal(before, torch.get_rng_state())
    assert [tuple(parameter.shape) for parameter in head.parameters()] == [
        (512, 16),
        (512,),
        (128, 512),
        (128,),
    ]
    weight = next(head.parameters()).detach()
    assert weight.abs().max() <= 0.25
    assert float(weight.std()) == pytest.approx(0.25 / 3**0.5, rel=0.05)
    assert torch.equal(weight, next(ProjectionHead(16, generator=seeded(1)).parameters()))
    assert not torch.equal(weight, next(ProjectionHead(16, generator=seeded(2)).parameters()))
    assert ProjectionHead(16, widths=(5,), generator=seeded())(torch.ones(3, 16)).shape == (3, 5)
    with pytest.raises(ValueError, match="widths"):
        ProjectionHead(16, widths=(), generator=seeded())


def test_loss_goes_down_and_features_are_trained_in_place() -> None:
    features = extractor().eval()
    before = [parameter.detach().clone() for parameter in features.parameters()]
    seen: list[tuple[int, float]] = []
    losses = pretrain(features, blobs(), epochs=12, on_epoch=lambda epoch, loss: seen.append((epoch, loss)))
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.2
    assert seen == list(enumerate(losses))
    assert not features.training
    assert all((old != new).any() for old, new in zip(before, features.parameters(), strict=True))


def test_pretraining_is_a_function_of_the_generator_and_leaves_the_global_one_alone() -> None:
    state = torch.get_rng_state()
    runs = []
    for seed in (0, 0, 1):
        features = extractor()
        losses = pretrain(features, blobs(), generator=seeded(seed))
        runs.append((losses, next(features.parameters()).detach().clone()))
    assert torch.equal(state, torch.get_rng_state())
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]


@pytest.mark.parametrize(("size", "batch_size", "expected"), [(40, 16, [32, 32]), (10, 16, [20]), (32, 16, [32, 32])])
def test_incomplete_batch_is_left_out_unless_alone(size: int, batch_size: int, expected: list[int]) -> None:
    features = extractor()
    sizes: list[int] = []
    features.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    pretrain(features, blobs(size), batch_size=batch_size, epochs=1)
    assert sizes == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 1}, "batch_size"),
        ({"epochs": -1}, "epochs"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"temperature": -1.0}, "temperature"),
        ({"feature_width": 15}, r"got \[64, 16\]"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pretrain(extractor(), blobs(), **changes)


def test_too_few_or_wrong_images_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2, got 1"):
        pretrain(extractor(), blobs(1))
    with pytest.raises(ValueError, match="uint8"):
        pretrain(extractor(), blobs().float())
