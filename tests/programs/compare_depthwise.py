"""The kernels of depthwise convolutions against torch, in Triton's interpreter."""

from __future__ import annotations

import torch
from torch.nn import functional

from fedaux.fast import depthwise

depthwise.POSITIONS, depthwise.PROGRAMS = 8, 6
torch.manual_seed(0)
for count, channels, height, width, stride in (
    (2, 5, 6, 7, 1),
    (3, 70, 5, 4, 2),
    (1, 64, 8, 8, 2),
    (2, 3, 1, 1, 1),
    (2, 1, 7, 7, 2),
    (4, 16, 1, 4, 2),
):
    for layout in (torch.channels_last, torch.contiguous_format):
        images = (
            torch.randn(count, channels, height, width)
            .contiguous(memory_format=layout)
            .requires_grad_()
        )
        weight = torch.randn(channels, 1, 3, 3).contiguous(memory_format=layout).requires_grad_()
        exact = functional.conv2d(images, weight, stride=stride, padding=1, groups=channels)
        found = depthwise.depthwise(images, weight, stride)
        gradient = torch.randn_like(exact)
        pairs = [
            (found, exact),
            *zip(
                torch.autograd.grad(found, (images, weight), gradient),
                torch.autograd.grad(exact, (images, weight), gradient),
                strict=True,
            ),
        ]
        bias = torch.randn(channels)
        with torch.no_grad():
            for most in (None, 6.0, float("inf")):
                right = exact + bias[:, None, None]
                right = right if most is None else right.clamp(0, most)
                pairs.append(
                    (depthwise.joined(images, weight, bias, stride=stride, most=most), right)
                )
        for output, right in pairs:
            torch.testing.assert_close(output, right, rtol=1e-4, atol=1e-4)
print("compared")
