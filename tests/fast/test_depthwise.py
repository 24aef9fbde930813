"""The kernels of depthwise convolutions, in Triton's interpreter, which needs no GPU; on one: test_gpu.py."""

from __future__ import annotations

import torch
from helpers.interpreting import interpreted, needs_triton
from torch import nn

from fedaux.core.compute import Compute
from fedaux.fast import depthwise
from fedaux.models.convolutional import DepthwiseConvolution

COMPARE = """
import torch
from torch.nn import functional
from fedaux.fast import depthwise

depthwise.POSITIONS, depthwise.PROGRAMS = 8, 6
torch.manual_seed(0)
for count, channels, height, width, stride in (
    (2, 5, 6, 7, 1), (3, 70, 5, 4, 2), (1, 64, 8, 8, 2), (2, 3, 1, 1, 1), (2, 1, 7, 7, 2), (4, 16, 1, 4, 2),
):
    for layout in (torch.channels_last, torch.contiguous_format):
        images = torch.randn(count, channels, height, width).contiguous(memory_format=layout).requires_grad_()
        weight = torch.randn(channels, 1, 3, 3).contiguous(memory_format=layout).requires_grad_()
        exact = functional.conv2d(images, weight, stride=stride, padding=1, groups=channels)
        found = depthwise.depthwise(images, weight, stride)
        gradient = torch.randn_like(exact)
        pairs = [(found, exact)] + list(zip(
            torch.autograd.grad(found, (images, weight), gradient),
            torch.autograd.grad(exact, (images, weight), gradient),
        ))
        bias = torch.randn(channels)
        with torch.no_grad():
            for most in (None, 6.0, float("inf")):
                right = exact + bias[:, None, None]
                right = right if most is None else right.clamp(0, most)
                pairs.append((depthwise.joined(images, weight, bias, stride=stride, most=most), right))
        for found, right in pairs:
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
print("compared")
"""


@needs_triton
def test_kernels_are_the_convolution_and_its_gradients() -> None:
    interpreted(COMPARE)


def test_without_a_gpu_nothing_is_compiled_and_torch_convolves() -> None:
    layer = DepthwiseConvolution(6, stride=2)
    assert Compute().place(layer) is layer
    images = torch.rand(2, 6, 7, 7)
    assert not depthwise.takes(images)
    plain = nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6, bias=False)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(images), plain(images))
    assert layer(images[:0]).shape == (0, 6, 4, 4)
