"""What the convolutional networks share: what may normalise inside them, and how their weights start."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

MOST_GROUPS = 32
MATRIX_MULTIPLE = 8
"""Half-precision kernels for the matrix units of a GPU take rows of so many numbers, or a multiple."""

Normalisation = Callable[[int], nn.Module]
"""Makes the layer that normalises so many channels."""


class ImageConvolution(nn.Conv2d):
    """The first convolution of a network, whose input has one or three channels.

    On a GPU in half precision it is the product of the image's patches with a matrix: the same sums, but convolution
    kernels for the matrix units would not take three channels.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, C', H', W']."""
        if not (in_half_precision(inputs) and self.has_patches):
            return super().forward(inputs)
        output: Tensor = functional.linear(self.patches(inputs), self.matrix(self.weight), self.bias)
        return output.permute(0, 3, 1, 2)

    @property
    def has_patches(self) -> bool:
        """Whether patches are defined for it: not with holes, groups, padding by a name or by other than zeros."""
        if self.groups != 1 or self.dilation != (1, 1):
            return False
        return self.padding_mode == "zeros" and not isinstance(self.padding, str)

    def patches(self, images: Tensor) -> Tensor:
        """Return what the kernel sees at each position, [N, H', W', C * kernel positions filled up with zeros]."""
        assert not isinstance(self.padding, str)
        (down, across), (height, width) = self.padding, self.kernel_size
        padded = functional.pad(images, (across, across, down, down))
        windows = padded.unfold(2, height, self.stride[0]).unfold(3, width, self.stride[1])
        return _filled(windows.permute(0, 2, 3, 1, 4, 5).flatten(3))

    @staticmethod
    def matrix(weight: Tensor) -> Tensor:
        """Return a weight [C', C, h, w] as the matrix that patches are multiplied with, [C', C h w filled up]."""
        return _filled(weight.flatten(1))


class DepthwiseConvolution(nn.Conv2d):
    """A 3x3 convolution of each channel on its own; on a GPU in half precision by kernels made for it."""

    kernels: ClassVar[ModuleType | None] = None
    """Where these kernels are; `fedaux.fast.depthwise.prepare` sets it."""

    def __init__(self, channels: int, *, stride: int = 1) -> None:
        super().__init__(channels, channels, 3, stride=stride, padding=1, groups=channels, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, C, H', W']."""
        kernels = self.kernels
        if kernels is None or not (in_half_precision(inputs) and kernels.takes(inputs)):
            return super().forward(inputs)
        dtype = torch.get_autocast_dtype("cuda")
        output: Tensor = kernels.depthwise(inputs.to(dtype), self.weight.to(dtype), self.stride[0])
        return output


class PointwiseConvolution(nn.Conv2d):
    """A 1x1 convolution, in groups or not; on a GPU in half precision a product with a matrix that has them as blocks.

    The zeros between few groups cost less than what convolution kernels make of groups whose size they do not like.
    """

    def __init__(self, in_channels: int, out_channels: int, *, groups: int = 1) -> None:
        super().__init__(in_channels, out_channels, 1, groups=groups, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, C', H, W]."""
        if not in_half_precision(inputs):
            return super().forward(inputs)
        output: Tensor = functional.linear(inputs.permute(0, 2, 3, 1), self.matrix(self.weight, groups=self.groups))
        return output.permute(0, 3, 1, 2)

    @staticmethod
    def matrix(weight: Tensor, *, groups: int) -> Tensor:
        """Return a weight [C', C / groups, 1, 1] as the matrix [C', C] that does the same."""
        rows = weight.flatten(1)
        return rows if groups == 1 else torch.block_diag(*rows.chunk(groups))


def in_half_precision(inputs: Tensor) -> bool:
    """Whether operations on these inputs are computed in half precision on a GPU."""
    return inputs.is_cuda and torch.is_autocast_enabled("cuda")


def _filled(rows: Tensor) -> Tensor:
    """Return [..., K] with zeros up to the next multiple of 8."""
    missing = -rows.shape[-1] % MATRIX_MULTIPLE
    return functional.pad(rows, (0, missing)) if missing else rows


def group_norm(channels: int) -> nn.Module:
    """Normalise groups of channels of each image on its own, whatever else is in the batch (Wu & He, 2018).

    The number of groups is the largest divisor of the channels, at most 32, that leaves two channels to a group: a
    single channel would have no variance where a map has shrunk to one position.
    """
    most = max(1, min(MOST_GROUPS, channels // 2))
    groups = next(number for number in range(most, 0, -1) if channels % number == 0)
    return nn.GroupNorm(groups, channels)


def initialise_convolutions(module: nn.Module, *, nonlinearity: Literal["linear", "relu"]) -> None:
    """Draw the weights of all convolutions, grouped or not, from N(0, g / (inputs of a group * kernel positions)).

    g is 2 for "relu" and 1 for "linear" (He et al., 2015). Inputs are counted, not outputs, because that keeps
    depthwise layers in scale: features are then neither tiny nor huge while the running statistics of batch
    normalisation are young, as they are in the first rounds of a federation.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_in", nonlinearity=nonlinearity)
