"""Convolutions of our models on a GPU in half precision, as matrix products or kernels of their
own.

`accelerate` gives the layers of a model these classes; its weights and their names stay the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.fast import depthwise
from fedaux.models.convolutional import (
    MATRIX_MULTIPLE,
    DepthwiseConvolution,
    ImageConvolution,
    PointwiseConvolution,
)


class FastImageConvolution(ImageConvolution):
    """The product of an image's patches with a matrix: the same sums.

    cuDNN's kernels for the matrix units do not take images of one or three channels.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, C', H', W']."""
        if not (in_half_precision(inputs) and has_patches(self)):
            return super().forward(inputs)
        rows, matrix = patches(self, inputs), image_matrix(self.weight)
        output: Tensor = functional.linear(rows, matrix, self.bias)
        return output.permute(0, 3, 1, 2)

    def _get_name(self) -> str:
        return ImageConvolution.__name__


class FastDepthwiseConvolution(DepthwiseConvolution):
    """A 3x3 convolution of each channel on its own, by kernels made for it."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, C, H', W']."""
        if not (in_half_precision(inputs) and depthwise.takes(inputs)):
            return super().forward(inputs)
        dtype = torch.get_autocast_dtype("cuda")
        weight = self.weight.to(dtype)
        output: Tensor = depthwise.depthwise(inputs.to(dtype), weight, self.stride[0])
        return output

    def _get_name(self) -> str:
        return DepthwiseConvolution.__name__


class FastPointwiseConvolution(PointwiseConvolution):
    """A product with a matrix that has the groups as blocks.

    The zeros between few groups cost less than cuDNN's kernels for groups of unsuitable sizes.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [N, C, H, W] to [N, C', H, W]."""
        if not in_half_precision(inputs):
            return super().forward(inputs)
        matrix = pointwise_matrix(self.weight, groups=self.groups)
        output: Tensor = functional.linear(inputs.permute(0, 2, 3, 1), matrix)
        return output.permute(0, 3, 1, 2)

    def _get_name(self) -> str:
        return PointwiseConvolution.__name__


FAST: dict[type[nn.Module], type[nn.Module]] = {
    ImageConvolution: FastImageConvolution,
    DepthwiseConvolution: FastDepthwiseConvolution,
    PointwiseConvolution: FastPointwiseConvolution,
}
PLAIN = {fast: plain for plain, fast in FAST.items()}


def accelerate(module: nn.Module, device: torch.device) -> None:
    """Let a module on a GPU compute its convolutions with the classes of this file, in place."""
    for part in module.modules():
        if isinstance(part, DepthwiseConvolution):
            depthwise.prepare(device)
        part.__class__ = FAST.get(type(part), type(part))


def make_plain(module: nn.Module) -> None:
    """Undo `accelerate`, in place."""
    for part in module.modules():
        part.__class__ = plain_type(part)


def plain_type(part: nn.Module) -> type[nn.Module]:
    """Return the class that a layer had before `accelerate`."""
    return PLAIN.get(type(part), type(part))


def in_half_precision(inputs: Tensor) -> bool:
    """Whether operations on these inputs are computed in half precision on a GPU."""
    return inputs.is_cuda and torch.is_autocast_enabled("cuda")


def has_patches(layer: nn.Conv2d) -> bool:
    """Whether `patches` covers a layer: no dilation or groups, padding in numbers and with
    zeros."""
    if layer.groups != 1 or layer.dilation != (1, 1):
        return False
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def patches(layer: nn.Conv2d, images: Tensor) -> Tensor:
    """Return what the kernel sees at each position, [N, H', W', C * kernel positions, padded]."""
    assert not isinstance(layer.padding, str)
    (down, across), (height, width) = layer.padding, layer.kernel_size
    padded = functional.pad(images, (across, across, down, down))
    windows = padded.unfold(2, height, layer.stride[0]).unfold(3, width, layer.stride[1])
    return _padded(windows.permute(0, 2, 3, 1, 4, 5).flatten(3))


def image_matrix(weight: Tensor) -> Tensor:
    """Return a weight [C', C, h, w] as the matrix that multiplies patches, [C', C h w, padded]."""
    return _padded(weight.flatten(1))


def pointwise_matrix(weight: Tensor, *, groups: int) -> Tensor:
    """Return a weight [C', C / groups, 1, 1] as the matrix [C', C] that does the same."""
    rows = weight.flatten(1)
    return rows if groups == 1 else torch.block_diag(*rows.chunk(groups))


def _padded(rows: Tensor) -> Tensor:
    """Return [..., K] with zeros up to the next multiple of 8."""
    missing = -rows.shape[-1] % MATRIX_MULTIPLE
    return functional.pad(rows, (0, missing)) if missing else rows
