from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedaux.config import Augmentation
from fedaux.data.augment import Views, _hue_rotation

STILL: dict[str, Any] = {
    "crop_scale": (1.0, 1.0),
    "crop_ratio": (1.0, 1.0),
    "flip": 0.0,
    "jitter": 0.0,
    "greyscale": 0.0,
}
LUMA = torch.tensor([0.299, 0.587, 0.114])


def augment(images: Tensor, *, policy: Augmentation, generator: torch.Generator) -> Tensor:
    views = Views(policy, channels=images.shape[1], device=images.device)
    return views(images, views.draw(len(images), generator=generator))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(channels: int, *, size: int = 16, height: int = 8, width: int = 8) -> Tensor:
    return torch.rand(size, channels, height, width, generator=seeded(99))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 12)])
def test_view_has_the_images_shape_and_range(channels: int, height: int, width: int) -> None:
    images = pictures(channels, height=height, width=width)
    views = augment(images, policy=Augmentation(rotation=10, shear=0.1), generator=seeded())
    assert views.shape == images.shape
    assert views.dtype == images.dtype
    assert views.min() >= 0
    assert views.max() <= 1
    assert (views != images).flatten(1).any(1).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_identity_policy_returns_the_input(channels: int) -> None:
    images = pictures(channels)
    torch.testing.assert_close(
        augment(images, policy=Augmentation(**STILL), generator=seeded()), images, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_zero_strengths_are_the_identity_even_when_jittered(channels: int) -> None:
    policy = Augmentation(**{**STILL, "jitter": 1.0}, brightness=0, contrast=0, saturation=0, hue=0)
    images = pictures(channels)
    torch.testing.assert_close(
        augment(images, policy=policy, generator=seeded()), images, atol=1e-5, rtol=0
    )


def test_flip_mirrors_left_and_right_only() -> None:
    images = pictures(3)
    views = augment(images, policy=Augmentation(**{**STILL, "flip": 1.0}), generator=seeded())
    torch.testing.assert_close(views, images.flip(3), atol=1e-5, rtol=0)


def test_flip_has_its_probability() -> None:
    images = pictures(1, size=4000)
    views = augment(images, policy=Augmentation(**{**STILL, "flip": 0.25}), generator=seeded())
    mirrored = (views - images.flip(3)).abs().flatten(1).amax(1) < 1e-4
    assert abs(float(mirrored.float().mean()) - 0.25) < 0.03


def test_crop_of_a_quarter_stays_inside_and_doubles_the_size() -> None:
    # A ramp from left to right: a crop of half the width, resized, has half the slope.
    ramp = torch.linspace(0, 1, 32).expand(64, 1, 32, 32).contiguous()
    views = augment(
        ramp, policy=Augmentation(**{**STILL, "crop_scale": (0.25, 0.25)}), generator=seeded()
    )
    slope = views[:, 0, :, 24] - views[:, 0, :, 8]
    torch.testing.assert_close(slope, torch.full_like(slope, 16 / 31 / 2), atol=1e-3, rtol=0)
    left = views[:, 0, 16, 1]
    assert left.min() < 0.15
    assert left.max() > 0.35
    assert left.max() < 0.6


def test_rotation_and_shear_keep_the_centre_and_move_the_rest() -> None:
    images = torch.zeros(50, 1, 9, 9)
    images[:, :, :, 4] = 1
    for change in ({"rotation": 40.0}, {"shear": 0.5}):
        views = augment(images, policy=Augmentation(**{**STILL, **change}), generator=seeded())
        torch.testing.assert_close(views[:, 0, 4, 4], torch.ones(50))
        assert (views[:, 0, 0, 4] < 0.9).float().mean() > 0.5


def test_one_channel_jitter_is_brightness_and_contrast() -> None:
    images = pictures(1) * 0.3 + 0.3
    policy = Augmentation(**{**STILL, "jitter": 1.0}, brightness=0.3, contrast=0)
    ratio = augment(images, policy=policy, generator=seeded()) / images
    torch.testing.assert_close(
        ratio.flatten(1), ratio.flatten(1)[:, :1].expand(16, 64), atol=1e-4, rtol=0
    )
    assert ratio.min() >= 0.699
    assert ratio.max() <= 1.301
    assert ratio.flatten(1)[:, 0].std() > 0.05

    policy = Augmentation(**{**STILL, "jitter": 1.0}, brightness=0, contrast=0.4)
    views = augment(images, policy=policy, generator=seeded())
    torch.testing.assert_close(views.mean((1, 2, 3)), images.mean((1, 2, 3)), atol=1e-4, rtol=0)
    spread = views.std((1, 2, 3)) / images.std((1, 2, 3))
    assert spread.min() >= 0.599
    assert spread.max() <= 1.401
    assert spread.std() > 0.05


def test_hue_and_saturation_keep_luma_and_greys() -> None:
    policy = Augmentation(
        **{**STILL, "jitter": 1.0}, brightness=0, contrast=0, saturation=0.3, hue=0.1
    )
    images = pictures(3) * 0.2 + 0.4
    views = augment(images, policy=policy, generator=seeded())
    luma = torch.einsum("nchw,c->nhw", images, LUMA)
    torch.testing.assert_close(torch.einsum("nchw,c->nhw", views, LUMA), luma, atol=1e-3, rtol=0)
    assert (views - images).abs().mean() > 0.005
    grey = images[:, :1].expand(-1, 3, -1, -1)
    torch.testing.assert_close(
        augment(grey, policy=policy, generator=seeded()), grey, atol=1e-3, rtol=0
    )


def test_a_third_of_a_turn_of_hue_makes_red_less_red_than_another_channel() -> None:
    red = torch.tensor([0.6, 0.2, 0.2]).view(1, 3, 1, 1).expand(64, 3, 4, 4).contiguous()
    policy = Augmentation(
        **{**STILL, "jitter": 1.0}, brightness=0, contrast=0, saturation=0, hue=0.34
    )
    strongest = augment(red, policy=policy, generator=seeded())[:, :, 0, 0].argmax(1)
    assert set(strongest.tolist()) == {0, 1, 2}


def test_greyscale_makes_the_channels_equal_to_luma() -> None:
    images = pictures(3)
    views = augment(images, policy=Augmentation(**{**STILL, "greyscale": 1.0}), generator=seeded())
    luma = torch.einsum("nchw,c->nhw", images, LUMA)[:, None].expand(-1, 3, -1, -1)
    torch.testing.assert_close(views, luma, atol=1e-5, rtol=0)


def test_views_are_a_function_of_the_generator_and_leave_the_global_one_alone() -> None:
    images, policy = pictures(3), Augmentation()
    before = torch.get_rng_state()
    first = augment(images, policy=policy, generator=seeded(1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, augment(images, policy=policy, generator=seeded(1)))
    assert not torch.equal(first, augment(images, policy=policy, generator=seeded(2)))


@pytest.mark.parametrize(
    "bad",
    [
        {"crop_scale": (0.0, 1.0)},
        {"crop_scale": (0.5, 1.5)},
        {"crop_ratio": (2.0, 1.0)},
        {"flip": 1.5},
        {"jitter": -0.1},
        {"hue": -0.1},
        {"rotation": float("nan")},
    ],
)
def test_impossible_policies_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Augmentation(**bad)


@pytest.mark.parametrize("channels", [1, 3])
def test_numbers_drawn_at_once_are_those_drawn_one_after_the_other(channels: int) -> None:
    views = Views(Augmentation(), channels=channels, device=torch.device("cpu"))
    first, second = seeded(4), seeded(4)
    at_once = views.draw(37, generator=first)
    assert torch.equal(
        at_once, torch.stack([torch.rand(37, generator=second) for _ in range(views.draws)])
    )
    assert torch.equal(first.get_state(), second.get_state())


def test_views_use_every_number_that_is_drawn() -> None:
    policy = Augmentation(rotation=20, shear=0.2, jitter=0.5)
    for channels in (1, 3):
        images = pictures(channels, size=64)
        views = Views(policy, channels=channels, device=torch.device("cpu"))
        numbers = views.draw(64, generator=seeded())
        whole = views(images, numbers)
        for row in range(views.draws):
            changed = numbers.clone()
            changed[row] = (changed[row] + 0.5) % 1
            assert not torch.equal(views(images, changed), whole), row


def test_hue_turns_the_plane_of_yiq() -> None:
    yiq = torch.tensor(
        [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]
    ).double()
    turn = torch.tensor([0.0, 0.1, -0.3, 0.5])
    for angle, matrix in zip(2 * math.pi * turn.double(), _hue_rotation(turn), strict=True):
        cosine, sine = float(torch.cos(angle)), float(torch.sin(angle))
        rotation = torch.tensor([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]]).double()
        torch.testing.assert_close(
            matrix.double(), yiq.inverse() @ rotation @ yiq, atol=1e-6, rtol=0
        )
