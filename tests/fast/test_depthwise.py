"""The kernels of depthwise convolutions, in Triton's interpreter, which needs no GPU; on one:
test_gpu.py."""

from __future__ import annotations

import pytest
import torch
from helpers.interpreting import interpreted
from torch import nn

from fedaux.core.compute import Compute
from fedaux.fast import FastBackend, depthwise
from fedaux.models.convolutional import DepthwiseConvolution


@pytest.mark.kernels
def test_kernels_are_the_convolution_and_its_gradients() -> None:
    interpreted("compare_depthwise.py")


def test_without_a_gpu_nothing_is_compiled_and_torch_convolves() -> None:
    layer = DepthwiseConvolution(6, stride=2)
    assert FastBackend(Compute()).place(layer) is layer
    images = torch.rand(2, 6, 7, 7)
    assert not depthwise.takes(images)
    plain = nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6, bias=False)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(images), plain(images))
    assert layer(images[:0]).shape == (0, 6, 4, 4)
