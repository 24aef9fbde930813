"""SimCLR's random views of a batch of images, on the device and without a loop over images."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from fedaux.config import Augmentation

LUMA = (0.299, 0.587, 0.114)


def augment(images: Tensor, *, policy: Augmentation, generator: torch.Generator) -> Tensor:
    """Return one random view of every image: float [N, C, H, W] in [0, 1] in and out.

    Crop, resize, rotation, shear and flip are one affine map and one interpolation; brightness, contrast,
    saturation, hue and greyscale are one colour matrix and one offset, clamped to [0, 1] once, at the end.
    One-channel images have no saturation, hue or greyscale.

    Raises:
        ValueError: `images` is not a floating-point [N, C, H, W] with one or three channels.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or not images.is_floating_point():
        raise ValueError(
            f"images must be floating point [N, C, H, W] with C = 1 or 3, got {images.dtype} {list(images.shape)}"
        )
    affine = _random_affine(images, policy=policy, generator=generator)
    grid = functional.affine_grid(affine, list(images.shape), align_corners=False)
    views = functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    return _jitter(views, policy=policy, generator=generator)


def _uniform(size: int, low: float, high: float, *, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw [size] numbers, uniform in [low, high), on the device and in the precision of `like`."""
    return low + (high - low) * torch.rand(size, generator=generator, device=like.device, dtype=like.dtype)


def _random_affine(images: Tensor, *, policy: Augmentation, generator: torch.Generator) -> Tensor:
    """Draw maps from view to image coordinates in [-1, 1]^2, [N, 2, 3]: flip, rotate, shear, shrink, move.

    Unlike torchvision, which draws again, a crop wider or taller than the image is cut to it.
    """
    size, _, height, width = images.shape

    def draw(low: float, high: float) -> Tensor:
        return _uniform(size, low, high, like=images, generator=generator)

    area = draw(*policy.crop_scale)
    ratio = torch.exp(draw(math.log(policy.crop_ratio[0]), math.log(policy.crop_ratio[1])))
    # The ratio is of pixels and the map of shares of the sides, so an oblong image changes it.
    share_x = torch.sqrt(area * ratio * height / width).clamp(max=1)
    share_y = torch.sqrt(area / ratio * width / height).clamp(max=1)
    centre_x = (1 - share_x) * draw(-1, 1)
    centre_y = (1 - share_y) * draw(-1, 1)
    angle = draw(-math.radians(policy.rotation), math.radians(policy.rotation))
    shear = draw(-policy.shear, policy.shear)
    mirror = torch.where(draw(0, 1) < policy.flip, -1.0, 1.0)

    cosine, sine = torch.cos(angle), torch.sin(angle)
    row_x = torch.stack([share_x * mirror * (cosine + shear * sine), share_x * (shear * cosine - sine), centre_x])
    row_y = torch.stack([share_y * mirror * sine, share_y * cosine, centre_y])
    return torch.stack([row_x, row_y]).permute(2, 0, 1)


def _jitter(images: Tensor, *, policy: Augmentation, generator: torch.Generator) -> Tensor:
    """Apply x' = M x + o to every pixel of an image, with M [N, C, C] and o [N, 1] drawn per image."""
    size, channels = images.shape[:2]

    def draw(low: float, high: float) -> Tensor:
        return _uniform(size, low, high, like=images, generator=generator)

    def factor(strength: float, *, where: Tensor) -> Tensor:
        return torch.where(where, draw(max(0.0, 1 - strength), 1 + strength), 1.0)

    jittered = draw(0, 1) < policy.jitter
    brightness = factor(policy.brightness, where=jittered)
    contrast = factor(policy.contrast, where=jittered)
    luma = torch.tensor(LUMA if channels == 3 else (1.0,), device=images.device, dtype=images.dtype)
    grey_mean = torch.einsum("nchw,c->n", images, luma) / images[0, 0].numel()
    # The colour matrices below keep greys, so the contrast's offset along grey passes through them unchanged.
    offset = ((1 - contrast) * brightness * grey_mean)[:, None, None, None]
    gain = brightness * contrast
    if channels == 1:
        return (images * gain[:, None, None, None] + offset).clamp(0, 1)

    saturation = factor(policy.saturation, where=jittered)
    turn = torch.where(jittered, draw(-policy.hue, policy.hue), 0.0)
    saturation = torch.where(draw(0, 1) < policy.greyscale, 0.0, saturation)
    identity = torch.eye(3, device=images.device, dtype=images.dtype)
    to_grey = luma.expand(3, 3)
    saturate = to_grey + saturation[:, None, None] * (identity - to_grey)
    matrix = gain[:, None, None] * saturate @ _hue_rotation(turn)
    return (torch.einsum("nij,njhw->nihw", matrix, images) + offset).clamp(0, 1)


def _hue_rotation(turn: Tensor) -> Tensor:
    """Return the matrices [N, 3, 3] that turn the colour plane of YIQ and keep luma: T^-1 R(2 pi turn) T."""
    to_yiq = torch.tensor(
        [LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)], device=turn.device, dtype=torch.float64
    )
    cosine, sine = torch.cos(2 * math.pi * turn.double()), torch.sin(2 * math.pi * turn.double())
    zero, one = torch.zeros_like(cosine), torch.ones_like(cosine)
    rotation = torch.stack([one, zero, zero, zero, cosine, -sine, zero, sine, cosine], dim=1).view(-1, 3, 3)
    matrices: Tensor = torch.linalg.inv(to_yiq) @ rotation @ to_yiq
    return matrices.to(turn.dtype)
