"""SimCLR's random views of a batch of images, on the device and without a loop over images."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from fedaux.config import Augmentation

LUMA = (0.299, 0.587, 0.114)
YIQ = (LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))
"""Red, green, blue to luma and the two axes of the colour plane."""
AFFINE_DRAWS = 7
JITTER_DRAWS = {1: 3, 3: 6}
"""Random numbers per image, by channels."""


class Views:
    """Random views: a pure function of images and random numbers, which can be compiled.

    Crop, resize, rotation, shear and flip are one affine map and one interpolation; brightness,
    contrast, saturation, hue and greyscale are one colour matrix and one offset, clamped to [0, 1]
    once, at the end. One-channel images have no saturation, hue or greyscale.
    """

    def __init__(self, policy: Augmentation, *, channels: int, device: torch.device) -> None:
        self.draws = AFFINE_DRAWS + JITTER_DRAWS[channels]
        """Random numbers per image."""
        self._policy = policy
        # Created here, because a CUDA graph must not copy from the host; torch.where with a number
        # would do so too.
        self._luma = torch.tensor(LUMA if channels == 3 else (1.0,), device=device)
        self._identity = torch.eye(3, device=device)

    def draw(self, size: int, *, generator: torch.Generator) -> Tensor:
        """Draw the random numbers for `size` images, uniform in [0, 1): [draws, size]."""
        return torch.rand(
            self.draws, size, generator=generator, device=self._luma.device, dtype=self._luma.dtype
        )

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Return one view per image, float [N, C, H, W] in [0, 1]; numbers: [draws, N]."""
        rows = iter(numbers.unbind())
        affine = _affine(images, rows, policy=self._policy)
        grid = functional.affine_grid(affine, list(images.shape), align_corners=False)
        views = functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
        return self._jitter(views, rows)

    def _jitter(self, images: Tensor, rows: Iterator[Tensor]) -> Tensor:
        """Apply x' = M x + o to every pixel, with M [N, C, C] and o [N, 1] per image."""
        policy, luma = self._policy, self._luma

        def factor(strength: float, *, where: Tensor) -> Tensor:
            return _between(next(rows), max(0.0, 1 - strength), 1 + strength).masked_fill(
                ~where, 1.0
            )

        jittered = next(rows) < policy.jitter
        brightness = factor(policy.brightness, where=jittered)
        contrast = factor(policy.contrast, where=jittered)
        grey_mean = torch.einsum("nchw,c->n", images, luma) / images[0, 0].numel()
        # The colour matrices below preserve grey, so they do not change this offset.
        offset = ((1 - contrast) * brightness * grey_mean)[:, None, None, None]
        gain = brightness * contrast
        if images.shape[1] == 1:
            return (images * gain[:, None, None, None] + offset).clamp(0, 1)

        saturation = factor(policy.saturation, where=jittered)
        turn = _between(next(rows), -policy.hue, policy.hue).masked_fill(~jittered, 0.0)
        saturation = saturation.masked_fill(next(rows) < policy.greyscale, 0.0)
        to_grey = luma.expand(3, 3)
        saturate = to_grey + saturation[:, None, None] * (self._identity - to_grey)
        matrix = gain[:, None, None] * saturate @ _hue_rotation(turn)
        return (torch.einsum("nij,njhw->nihw", matrix, images) + offset).clamp(0, 1)


def _between(numbers: Tensor, low: float, high: float) -> Tensor:
    """Stretch numbers in [0, 1) to [low, high)."""
    return low + (high - low) * numbers


def _affine(images: Tensor, rows: Iterator[Tensor], *, policy: Augmentation) -> Tensor:
    """Return maps from view to image coordinates in [-1, 1]^2, [N, 2, 3].

    A crop larger than the image is clipped; torchvision draws again.
    """
    height, width = images.shape[2:]
    area = _between(next(rows), *policy.crop_scale)
    ratio = torch.exp(
        _between(next(rows), math.log(policy.crop_ratio[0]), math.log(policy.crop_ratio[1]))
    )
    # The ratio is in pixels, the map in shares of the sides.
    share_x = torch.sqrt(area * ratio * height / width).clamp(max=1)
    share_y = torch.sqrt(area / ratio * width / height).clamp(max=1)
    centre_x = (1 - share_x) * _between(next(rows), -1, 1)
    centre_y = (1 - share_y) * _between(next(rows), -1, 1)
    angle = _between(next(rows), -math.radians(policy.rotation), math.radians(policy.rotation))
    shear = _between(next(rows), -policy.shear, policy.shear)
    mirror = 1 - 2 * (next(rows) < policy.flip).to(images.dtype)

    cosine, sine = torch.cos(angle), torch.sin(angle)
    row_x = torch.stack(
        [share_x * mirror * (cosine + shear * sine), share_x * (shear * cosine - sine), centre_x]
    )
    row_y = torch.stack([share_y * mirror * sine, share_y * cosine, centre_y])
    return torch.stack([row_x, row_y]).permute(2, 0, 1)


def _turning_plane() -> tuple[list[float], list[float], list[float]]:
    """Return A, B, C of T^-1 R(phi) T = A + B cos phi + C sin phi; T maps RGB to YIQ."""
    to_yiq = torch.tensor(YIQ, dtype=torch.float64)
    back = torch.linalg.inv(to_yiq)
    still, plane, across = torch.zeros(3, 3, 3, dtype=torch.float64).unbind()
    still[0, 0] = plane[1, 1] = plane[2, 2] = across[2, 1] = 1
    across[1, 2] = -1
    constant, cosine, sine = (
        (back @ part @ to_yiq).flatten().tolist() for part in (still, plane, across)
    )
    return constant, cosine, sine


TURNING_PLANE = _turning_plane()


def _hue_rotation(turn: Tensor) -> Tensor:
    """Return matrices T^-1 R(2 pi turn) T [N, 3, 3], which rotate hue and preserve luma."""
    cosine, sine = torch.cos(2 * math.pi * turn.double()), torch.sin(2 * math.pi * turn.double())
    entries = [a + b * cosine + c * sine for a, b, c in zip(*TURNING_PLANE, strict=True)]
    return torch.stack(entries, dim=1).view(-1, 3, 3).to(turn.dtype)
